"""Under autocast, which weights travel cast: those that autocast casts wherever they are used.

    first batch ── each use of a weight is seen ── [1]     a plan is made: from here on they are sent cast ── [2]
    a later batch uses one otherwise ── the worker fetches it as it was ── [3]     and all is learned anew

So nothing is computed from other numbers than where all weights travel as they are; see `model.rounded`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.engine import Engine


def is_watched(engine: Engine) -> bool:
    """Whether it is to be found out now what layers do with their weights [1]. Inside compiled ones nothing is seen."""
    if engine.options.compile_layers is not None:
        return False
    return engine.formats.mixed and engine.plans and engine.plan is None


def send_rounded(engine: Engine) -> bool:
    """Send weights cast from here on, as far as their uses allow [2].

    Returns:
        Whether layers have other sizes now, so that workers have given their arenas back.
    """
    rounding = {layer: formats for layer in engine.layers if (formats := layer.uses.only_cast())}
    for layer, formats in rounding.items():
        layer.round(formats)
    if rounding:
        for worker in engine.workers:
            worker.release()
    return bool(rounding)


def is_surprised(engine: Engine) -> bool:
    """Whether a weight that travels cast has been used otherwise meanwhile [3]."""
    return any(layer.rounded - layer.uses.only_cast().keys() for layer in engine.layers)
