"""`Arena`: a device buffer for the weights, or the gradients, of one stage after another."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_roundpipe.devices import Device, Event


class Arena:
    """A device buffer that slots reuse.

    Attributes:
        buffer: the memory, as bytes; None before it is allocated.
        address: address of the memory; 0 before it is allocated.
        last_use: the end of the last work on the buffer, which the next user's streams must wait for.
    """

    def __init__(self, device: Device, purpose: str) -> None:
        self._device = device
        self._purpose = purpose
        self.buffer: Tensor | None = None
        self.address = 0
        self.last_use: Event | None = None

    def has(self, nbytes: int) -> bool:
        """Return whether the buffer holds at least ``nbytes``."""
        return self.buffer is not None and self.buffer.numel() >= nbytes

    def make(self, nbytes: int) -> None:
        assert self.buffer is None, f"{self._purpose} made twice"
        self.buffer = self._device.allocate(nbytes, self._purpose)
        self.address = address_of(self.buffer)

    def grow(self, nbytes: int) -> None:
        """Replace the memory by one of ``nbytes``. No replica may refer to it.

        Raises:
            DeviceOutOfMemory: it does not fit.
        """
        self.release()
        self.make(nbytes)

    def release(self) -> None:
        """Free the memory once the work enqueued on it is done: a gradient may still be downloading."""
        if self.last_use is not None:
            self.last_use.wait()
        if self.buffer is not None:
            self._device.free(self.buffer)
        self.buffer = None
        self.address = 0
        self.last_use = None

    def cut(self, sizes: Iterable[int]) -> list[Tensor]:
        assert self.buffer is not None, f"{self._purpose} used before it was allocated"
        parts, start = [], 0
        for size in sizes:
            parts.append(self.buffer[start : start + size])
            start += size
        assert start <= self.buffer.numel(), f"{start} bytes do not fit the {self._purpose}"
        return parts


def address_of(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, which all views of it share; 0 without memory."""
    return tensor.untyped_storage().data_ptr()
