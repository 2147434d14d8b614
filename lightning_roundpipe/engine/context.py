"""What steps use and what outlives them: the engine makes it once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from threading import local

from lightning_roundpipe.config import Options
from lightning_roundpipe.engine.executor import Executor
from lightning_roundpipe.engine.layer_attributes import LayerAttributes
from lightning_roundpipe.engine.main_thread import MainThread
from lightning_roundpipe.engine.pool import Pool
from lightning_roundpipe.engine.randomness import Randomness
from lightning_roundpipe.engine.trace import Trace
from lightning_roundpipe.memory.grad_buffers import GradientMemory
from lightning_roundpipe.memory.host_model import HostModel
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.updates.gradient_exchange import GradientExchange
from lightning_roundpipe.user_code.module_state import SharedAttributes
from lightning_roundpipe.user_code.thread_state import TorchThreadState


@dataclass
class Learned:
    """What the first window has shown.

    Attributes:
        plan: the stages that windows run in; None while there is none.
        costs: what the plan was made from.
        trace: the calls that the plan is of.
        read_by_user_code: buckets that user code reads.
        logs_in_backward: whether user code logs in backward.
        calls_in_backward: whether user code calls layers in backward, as checkpoints around them do.
        in_order: whether microbatches run one after another, without a plan, as what they do depends on their order.
    """

    plan: Plan | None = None
    costs: Costs | None = None
    trace: Trace | None = None
    read_by_user_code: frozenset[ParamBucket] = frozenset()
    logs_in_backward: bool = False
    calls_in_backward: bool = False
    in_order: bool = False


@dataclass(frozen=True)
class Context:
    """The parts of the engine that outlive a step.

    Attributes:
        main: the main thread beside a step in flight.
        learned: what the first window has shown.
        thread_locals: thread-local objects of user code, whose values microbatches' threads take over.
        exchange: sums gradients over several machines; None if there is only one.
    """

    options: Options
    model: HostModel
    pool: Pool
    main: MainThread
    executors: list[Executor]
    gradients: GradientMemory
    attributes: LayerAttributes
    shared: SharedAttributes
    randomness: Randomness
    learned: Learned
    thread_locals: tuple[local, ...]
    exchange: GradientExchange | None = None
    slots: itertools.count[int] = field(default_factory=itertools.count)

    def align_slots(self, every: int) -> None:
        """Skip slots until the next one's index is a multiple of ``every``.

        Stages that are cut for one of unequal workers come to it in all steps then; slots of evaluation and of other
        calls would shift them.
        """
        for _ in range(-(next(self.slots) + 1) % every):
            next(self.slots)

    def thread_state(self) -> TorchThreadState:
        """Capture the calling thread's torch modes."""
        return TorchThreadState.capture(self.pool.device_types, self.thread_locals)
