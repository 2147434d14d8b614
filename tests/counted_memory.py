"""What an allocator of a GPU would count, where GPUs are played: every storage that an operation on one makes.

Emulated devices count what they are told of. This counts what there is, so that memory which something holds on to, and
of which nobody knows, shows as it would in ``torch.cuda.max_memory_allocated``. What an operation allocates and frees
inside itself is not seen.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import fake_cuda
import pytest
from happens_before import HappensBefore, tell_apart

from lightning_roundpipe.devices import cuda
from lightning_roundpipe.devices.cuda import CudaDevice


class Counted(HappensBefore):
    """Attributes: ``live`` and ``peak``, bytes by number of the device, since `CudaDevice.reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super().operation(func, args, kwargs, result)
        self.count()

    def count(self) -> None:
        with self._lock:
            self._look_for_freed()
            self.live = Counter()
            for memory in self._memory.values():
                if memory.owner.startswith("roundpipe-dev"):
                    number = memory.owner.removeprefix("roundpipe-dev").split("-")[0]
                    self.live[int(number)] += memory.end - memory.start
            self.peak |= self.live


@contextlib.contextmanager
def counted(*, lead: int = 0) -> Iterator[Counted]:
    """Trainers get a fake GPU for each worker, and these know what lies on them.

    Args:
        lead: bytes that calls in flight may hold. With as many as usual, all of a small step may be in flight.
    """
    with pytest.MonkeyPatch.context() as patch:
        fake_cuda.trainers_on_gpus(patch)
        patch.setattr(cuda, "LEAD_BYTES", lead)
        with Counted() as found:
            tell_apart(found, patch)

            def resident(self: CudaDevice) -> int:
                found.count()
                return found.live[self.index]

            def reset(self: CudaDevice) -> None:
                found.peak[self.index] = resident(self)

            patch.setattr(CudaDevice, "resident_bytes", resident)
            patch.setattr(CudaDevice, "peak_bytes", lambda self: found.peak[self.index])
            patch.setattr(CudaDevice, "reset_peak", reset)
            yield found
