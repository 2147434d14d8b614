"""What is fixed when a step begins: what its slots and microbatches have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.engine.randomness import Seed
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.user_code.stand_ins import Copies
from lightning_roundpipe.user_code.thread_state import TorchThreadState


@dataclass(frozen=True)
class StepSpec:
    """What is fixed when a step begins.

    Attributes:
        version: version of the weights that it computes with.
        thread_state: torch's modes of the thread that began it.
        scope: carries its first error to all its threads.
        loss_weights: how much the microbatches count; also says how many there are.
        plan: the plan that it runs under; None if each call has a slot of its own.
        measures: whether a plan is to be made from it.
        seed: numbers from which its random states derive.
        first: number of its first microbatch among those of all machines.
        overlaps: whether its backward may go on beside the next step.
        shares_state: whether its microbatches depend on state of the process that the main thread changes.
        undisturbed: whether no update was writing to masters when it began.
        updates: the optimizer's thread; None if gradients go to ``.grad``.
        readiness: is told of uploads and gradients; None if there are no gradients.
        copies: copies on devices of masters that user code reads, until all microbatches have ended.
    """

    version: int
    thread_state: TorchThreadState
    scope: CancelScope
    loss_weights: LossWeights
    plan: Plan | None = None
    measures: bool = False
    seed: tuple[int, ...] = ()
    first: int = 0
    overlaps: bool = False
    shares_state: bool = False
    undisturbed: bool = True
    updates: AsyncOptimizer | None = None
    readiness: GradReadiness | None = None
    recorder: Recorder = field(default_factory=Recorder)
    copies: Copies = field(default_factory=dict, compare=False)

    @property
    def several(self) -> bool:
        """Whether there are several microbatches."""
        return self.loss_weights.count > 1

    @property
    def recomputes_ahead(self) -> bool:
        """Whether a stage is recomputed before the gradients of its last call are there."""
        return self.plan is not None and self.plan.recompute_ahead

    def seed_of(self, microbatch: int, *what: int) -> Seed:
        """Return the seed of something that a microbatch does; equal numbers give equal seeds."""
        return (*self.seed, self.first + microbatch, *what)
