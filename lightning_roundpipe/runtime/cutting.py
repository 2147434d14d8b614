"""How the engine's options cut a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.runtime import microbatch
from lightning_roundpipe.runtime.interrupts import allowed
from lightning_roundpipe.runtime.samples import batch_size

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.engine import Engine


def sizes_for(engine: Engine, batch: Any) -> list[int]:
    """How many samples each microbatch of ``batch`` gets."""
    count, size = engine.options.num_microbatches, engine.options.microbatch_size
    if count == 1:
        try:
            return [batch_size(batch)]
        except ValueError:
            return [1]
    return microbatch.sizes_of(batch_size(batch), count, size, len(engine.workers))


def given_weights_of(engine: Engine, parts: Sequence[Any]) -> list[float] | None:
    """What the user says that each microbatch counts in the loss; None if that is to be found out."""
    function = engine.options.loss_weight or getattr(engine.module, "loss_weight", None)
    if not callable(function) or len(parts) == 1:
        return None
    with allowed():
        return microbatch.given_weights(function, parts)
