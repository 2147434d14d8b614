"""Under autocast, which weights travel cast: those that autocast casts wherever they are used.

    first batch ── each use of a weight is seen ── [1]     a plan is made: from here on they are sent cast ── [2]
    a later batch uses one otherwise ── the worker fetches it as it was ── [3]     and all is learned anew

So nothing is computed from other numbers than where all weights travel as they are; see `model.rounded`.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_roundpipe.config import Options
from lightning_roundpipe.runtime.core.learned import Learned
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.memory.dtypes import Formats
from lightning_roundpipe.runtime.memory.host_layer import HostLayer


def is_watched(options: Options, formats: Formats, learned: Learned) -> bool:
    """Whether it is to be found out now what layers do with their weights [1]. Inside compiled ones nothing is seen."""
    if options.compile_layers is not None:
        return False
    return formats.mixed and learned.plans and learned.plan is None


def send_rounded(layers: Iterable[HostLayer], workers: Iterable[Worker]) -> bool:
    """Send weights cast from here on, as far as their uses allow [2].

    Returns:
        Whether layers have other sizes now, so that workers have given their arenas back.
    """
    rounding = {layer: formats for layer in layers if (formats := layer.uses.only_cast())}
    for layer, formats in rounding.items():
        layer.round(formats)
    if rounding:
        for worker in workers:
            worker.release()
    return bool(rounding)


def is_surprised(layers: Iterable[HostLayer]) -> bool:
    """Whether a weight that travels cast has been used otherwise meanwhile [3]."""
    return any(layer.rounded - layer.uses.only_cast().keys() for layer in layers)
