"""How the engine's options cut a batch, or leave that to the calls of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.loss_weights import Weights
from lightning_roundpipe.runtime.batch.samples import NoSamples, batch_size
from lightning_roundpipe.runtime.core.step import Step
from lightning_roundpipe.runtime.faults.interrupts import allowed
from lightning_roundpipe.runtime.modes.model_step import ModelStep

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.engine import Engine


@dataclass(frozen=True)
class Cut:
    """What training_step is called with.

    Attributes:
        parts: of the batch; the batch itself where only the model's calls are cut.
        sizes: samples of each; None where only the model's calls are cut.
        weights: what the user says of how their losses make up that of the batch; None if that is to be found out.
    """

    parts: list[Any]
    sizes: list[int] | None
    weights: Weights = None

    @property
    def several(self) -> bool:
        """Whether there may be several microbatches."""
        return self.sizes is None or len(self.sizes) > 1

    def step(self, engine: Engine, seed: tuple[int, ...], before: Step | None) -> Step:
        """The step that runs them."""
        if self.sizes is None:
            return ModelStep(engine, seed, before)
        return Step(engine, seed, self.sizes, self.weights, before)


def cut_batch(engine: Engine, batch: Any) -> Cut:
    """``batch`` as the options say."""
    options = engine.options
    if engine.scope.cuts_calls and options.num_microbatches != 1:
        return Cut([batch], None)
    sizes = sizes_for(engine, batch)
    parts = engine.columns.split(batch, sizes)
    return Cut(parts, sizes, given_weights_of(engine, parts))


def sizes_for(engine: Engine, batch: Any) -> list[int]:
    """How many samples each microbatch of ``batch`` gets."""
    count, size = engine.options.num_microbatches, engine.options.microbatch_size
    if count == 1:
        try:
            return [batch_size(batch)]
        except ValueError:
            return [1]
    try:
        samples = batch_size(batch)
    except ValueError as error:
        if not engine.options.asks_for_parts:
            if not isinstance(error, NoSamples):
                engine.hints.of_a_whole_batch(str(error))
            return [1]
        raise
    return microbatches.sizes_of(samples, count, size, len(engine.workers), engine.fewest_samples)


def given_weights_of(engine: Engine, parts: Sequence[Any]) -> Weights:
    """What the user says of how the losses of ``parts`` make up that of the batch."""
    if engine.options.loss_weight == "sum":
        return "sum"
    function = engine.options.loss_weight or getattr(engine.module, "loss_weight", None)
    if not callable(function) or len(parts) == 1:
        return None
    with allowed():
        return microbatches.given_weights(function, parts)
