"""A worker's device as a place where parameters are stepped, beside the layers that run there.

    copy the parameter, its gradient and its state up ── [1]
    the optimizer's step, in a stream of its own ── [2]
    copy what it has changed down ── [3]        the host waits for that before it begins the next one here, or publishes

The optimizer's thread gives work to several devices in turn, so they compute at the same time. A device holds one
parameter at a time. Its memory is that of the stream of [2], which nothing else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_roundpipe.devices import Device, Event, TrackedTensors
from lightning_roundpipe.optim.partial_optimizer import Change

_PURPOSE = "optimizer steps"


class WorkerPlace:
    """See above."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._end: Event | None = None
        self._held: list[TrackedTensors] = []

    def run(self, sources: Sequence[Tensor], step: Callable[[list[Tensor]], list[Change]]) -> list[Tensor]:
        """See `Place`."""
        self.finish()
        device, copying, computing = self._device, self._device.updates_copy, self._device.updates
        try:
            copies = [device.device_like(tensor, computing, lent=True) for tensor in sources]
            self._held.append(device.track(copies, _PURPOSE))
            copying.wait(computing.record())
            for there, here in zip(copies, sources, strict=True):  # [1]
                copying.copy(there, here)
            computing.wait(copying.record())
            with computing.running():  # [2]
                changes = step(copies)
            self._held.append(device.track([value for value, _ in changes], _PURPOSE))
            copying.wait(computing.record())
            held = [device.host_like(value) if here is None else here for value, here in changes]
            for (there, _), here in zip(changes, held, strict=True):  # [3]
                copying.copy(here, there)
        except BaseException as error:
            error.add_note("roundpipe: with optimizer_device='cpu', the host makes this step, in its own memory.")
            raise
        finally:
            self._end = copying.record()
        return held

    def finish(self) -> None:
        """See `Place`."""
        end, self._end = self._end, None
        held, self._held = self._held, []
        if end is not None:
            end.wait()
            self._device.drop_finished()
        for tracked in held:
            tracked.release()
