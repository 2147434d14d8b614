"""The peak memory of a call on its worker, from which the planner sizes stages.

The first batch runs its microbatches one after another, so that all other memory on the worker was there before the
call. Emulated devices count the tensors that cross calls and those that autograd saves. A GPU counts all allocations,
including temporaries.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.estimates.crossing import storage_bytes

INPUTS = "inputs of the running call"
OUTPUTS = "outputs of calls"
GRADIENTS = "gradients between calls"


class PeakMemoryMeter:
    """Measures a call's peak from its construction on. The call's ``inputs`` are on the device already, and count."""

    def __init__(self, device: Device, inputs: Iterable[Tensor]) -> None:
        inputs = list(inputs)
        self._device = device
        # A copy stream holds what it copies. Freed during the call, that would hide as many bytes of the call's own.
        device.activations_down.synchronize()
        device.activations_up.synchronize()
        device.arrivals_up.synchronize()
        device.drop_finished()
        self._tracked = device.track(inputs, INPUTS)
        device.reset_peak()
        self._before = device.resident_bytes() - storage_bytes(inputs)

    def read(self) -> int:
        """Return the peak in bytes so far and stop tracking the inputs. Call once."""
        self._tracked.release()
        return self._device.peak_bytes() - self._before
