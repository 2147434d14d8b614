"""What a call takes on its worker at its worst: the numbers that stages are filled by.

Measured while the first batch runs its microbatches one after another, so that whatever the worker holds meanwhile is
the call's or was there before. On emulated devices that counts what crosses calls and what autograd saves; on a GPU all
that is allocated, with what is in between.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.planning.crossing import storage_bytes

INPUTS = "inputs of the running call"


class PeakMemoryMeter:
    """Measures from now on.

    Args:
        device: where.
        given: what the call starts from. It lies there, and counts.
    """

    def __init__(self, device: Device, given: Iterable[Tensor]) -> None:
        given = list(given)
        self._device = device
        # A download keeps what it copies. Freed during the call, that would hide as many bytes of the call's own.
        device.activations_down.synchronize()
        self._tracked = device.track(given, INPUTS)
        device.reset_peak()
        self._before = device.resident_bytes() - storage_bytes(given)

    def read(self) -> int:
        """The most bytes so far. Called once."""
        self._tracked.release()
        return self._device.peak_bytes() - self._before
