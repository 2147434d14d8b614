"""The inputs of a step: `EngineContext`, which the engine makes once for all steps, and `StepSpec`, made per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import local

from lightning_roundpipe.config import Options
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.core.learned import Learned
from lightning_roundpipe.runtime.core.worker_pool import WorkerPool
from lightning_roundpipe.runtime.memory.grad_buffers import GradientMemory
from lightning_roundpipe.runtime.memory.host_model import HostModel
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.optimizer.gradient_exchange import GradientExchange
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.reporting.hints import Hints
from lightning_roundpipe.runtime.threads.sync import CancelScope, UserLock
from lightning_roundpipe.runtime.user_code.module_state import SharedAttributes
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


@dataclass(frozen=True)
class EngineContext:
    """The parts of the engine that steps use and that outlive them.

    Attributes:
        options: the strategy's options.
        model: the user's model in host memory.
        worker_pool: workers, their slot queues, and the threads of microbatches.
        executors: the layer executor of each worker.
        gradients: host memory for the gradients of calls.
        learned: knowledge about the model and user code from earlier batches.
        hints: shows messages to the user, each once.
        user_lock: lock that a thread holds while it runs user code.
        thread_locals: thread-local objects of user code, whose values the step's threads take over.
        next_step: function that returns the number of the next step.
        exchange: sums gradients over several machines; None if there is only one.
    """

    options: Options
    model: HostModel
    worker_pool: WorkerPool
    executors: list[LayerExecutor]
    gradients: GradientMemory
    learned: Learned
    hints: Hints
    user_lock: UserLock
    thread_locals: tuple[local, ...]
    next_step: Callable[[], int]
    exchange: GradientExchange | None = None

    def thread_state(self) -> TorchThreadState:
        """Capture the calling thread's torch modes, for the step's other threads to enter."""
        return TorchThreadState.capture(self.worker_pool.device_types, self.thread_locals)


@dataclass(frozen=True)
class StepSpec:
    """The properties of a step that are fixed when it begins.

    Attributes:
        number: position in the order of steps.
        seed: numbers from which the random states of its batch are derived. The last one is the number of microbatches
            of all machines, if each has as many as this one: machines that have other numbers draw from other streams.
        version: version of the weights that it computes with.
        several: whether it has several microbatches.
        overlaps: whether its backward may continue after its outputs were returned.
        undisturbed: whether no update was writing to masters when it began.
        updates: the optimizer's thread; None if gradients go to ``.grad``.
        thread_state: torch modes of the thread that began it.
        module_state: keeps apart what microbatches set on modules.
        recorder: records calls and copies.
        cancel_scope: carries the step's first error to all its threads.
        first: number of its first microbatch among those of all machines; random states derive from it.
    """

    number: int
    seed: tuple[int, ...]
    version: int
    several: bool
    overlaps: bool
    undisturbed: bool
    updates: AsyncOptimizer | None
    thread_state: TorchThreadState
    module_state: SharedAttributes
    recorder: Recorder
    cancel_scope: CancelScope
    first: int = 0
