"""What a step is given: `EngineContext` by the engine, once for all steps, and `StepSpec` when it begins."""

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
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.reporting.hints import Hints
from lightning_roundpipe.runtime.threads.sync import CancelScope, UserLock
from lightning_roundpipe.runtime.user_code.module_state import ModuleStateIsolation
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


@dataclass(frozen=True)
class EngineContext:
    """What outlives a step.

    Attributes:
        model: the user's, in host memory.
        executors: one per worker, which run calls of layers.
        gradients: host memory for those of calls.
        learned: what earlier batches have shown.
        thread_locals: of the user's code, which its threads take over.
        next_step: the number of the next step.
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

    def thread_state(self) -> TorchThreadState:
        """The calling thread's modes, as other threads of the step take them over."""
        return TorchThreadState.capture(self.worker_pool.device_types, self.thread_locals)


@dataclass(frozen=True)
class StepSpec:
    """What of a step is fixed when it begins.

    Attributes:
        number: in the order of steps.
        seed: of its batch.
        version: of the weights that it computes with.
        cut: whether what it runs is cut into microbatches.
        overlaps: whether its backward may go on when its outputs have been given out.
        undisturbed: whether no optimizer wrote to masters when it began.
        updates: the optimizer's thread; None where gradients are handed to ``.grad``.
        thread_state: modes of the thread that it began in.
        module_state: what its microbatches keep on modules; None where nobody else could find it.
    """

    number: int
    seed: tuple[int, ...]
    version: int
    cut: bool
    overlaps: bool
    undisturbed: bool
    updates: AsyncOptimizer | None
    thread_state: TorchThreadState
    module_state: ModuleStateIsolation | None
    recorder: Recorder
    cancel_scope: CancelScope
