"""Chooses the weights to upload in low precision under autocast: those that autocast casts at every use.

    first batch ── every use of a weight is recorded ── [1]     the plan is made, and uploads become casts ── [2]
    a later batch uses one otherwise ── the worker fetches the full-precision value ── [3]   the engine learns anew

So a step computes with the same numbers as if all weights were uploaded in full precision; see `model.rounded`.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_roundpipe.config import Options
from lightning_roundpipe.runtime.core.learned import Learned
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.memory.dtypes import Formats
from lightning_roundpipe.runtime.memory.host_layer import HostLayer


def is_watched(options: Options, formats: Formats, learned: Learned) -> bool:
    """Return whether to record the uses of weights in this step [1]. Uses inside compiled layers cannot be seen."""
    if options.compile_layers is not None:
        return False
    return formats.mixed and learned.plans and learned.plan is None


def send_rounded(layers: Iterable[HostLayer], workers: Iterable[Worker]) -> bool:
    """From here on, upload weights in low precision where their uses allow it [2].

    Returns:
        Whether the size of a layer has changed. Then the workers have released their arenas.
    """
    rounding = {layer: formats for layer in layers if (formats := layer.uses.only_cast())}
    for layer, formats in rounding.items():
        layer.round(formats)
    if rounding:
        for worker in workers:
            worker.release()
    return bool(rounding)


def is_surprised(layers: Iterable[HostLayer]) -> bool:
    """Return whether a weight that is uploaded in low precision has been used otherwise since [3]."""
    return any(layer.rounded - layer.uses.only_cast().keys() for layer in layers)
