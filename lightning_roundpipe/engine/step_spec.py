"""What is fixed when a step begins: what its slots and microbatches have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
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
        seed: numbers from which its random states derive.
        first: number of its first microbatch among those of all machines.
        overlaps: whether its backward may go on beside the next step.
        shares_state: whether its microbatches depend on state of the process that the main thread changes.
        undisturbed: whether no update was writing to masters when it began.
        updates: the optimizer's thread; None if gradients go to ``.grad``.
        measures: whether a plan is to be made from it.
        ahead: whether a stage is recomputed before the gradients of its last call are there.
        carry: calls whose products are carried, with these products' least FLOPs a byte.
        copies: copies on devices of masters that user code reads, until all microbatches have ended.
    """

    version: int
    thread_state: TorchThreadState
    scope: CancelScope
    loss_weights: LossWeights
    seed: tuple[int, ...] = ()
    first: int = 0
    several: bool = True
    overlaps: bool = False
    shares_state: bool = False
    undisturbed: bool = True
    updates: AsyncOptimizer | None = None
    measures: bool = False
    ahead: bool = False
    carry: Mapping[int, int] = field(default_factory=dict)
    recorder: Recorder = field(default_factory=Recorder)
    copies: Copies = field(default_factory=dict, compare=False)
