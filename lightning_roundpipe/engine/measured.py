"""The memory of calls, as the first window shows it. Stages are sized from it.

Its microbatches run one after another, so that whatever else a worker holds was there before.

    a call ── its peak, from its inputs on, with its graph ── what it shares with earlier calls ── [1]
    the user code behind it ── its peak, and what it has made and still holds ── [2]
    the call's backward ── its peak, from the gradients of its outputs on ── what is held beside it ── [3]

Emulated devices count the tensors that cross calls and those that autograd saves, a GPU all that is allocated.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.engine.arguments import collect
from lightning_roundpipe.engine.caller_modes import without_caller_modes
from lightning_roundpipe.engine.executor import LayerCall
from lightning_roundpipe.engine.pool import Pool
from lightning_roundpipe.engine.trace import TracedCall
from lightning_roundpipe.estimates.crossing import Crossing, storage_bytes
from lightning_roundpipe.memory.peak_memory import PeakMemoryMeter


class MeasuredMemory:
    """Measures one microbatch."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._crossing = Crossing()
        self._made = 0
        """Bytes that user code has made on workers and holds."""
        self._section: tuple[PeakMemoryMeter, int, int] | None = None
        """Of the present section of user code: its meter, what is resident, and what of it are outputs of calls."""
        self._kept: list[torch.UntypedStorage] = []
        """What a fused stage's graphs keep during that section, so that none of it makes room for others."""
        self._warm: set[Device] = set()
        self._last: TracedCall | None = None
        """The last call."""

    def meter(self, device: Device | None) -> PeakMemoryMeter:
        """Return a meter that begins now, when nothing is in flight that could be freed later."""
        device = device or self._pool.devices[0]
        if device not in self._warm:  # what libraries keep for the thread is allocated before
            self._warm.add(device)
            with without_caller_modes():  # such as a checkpoint's, which counts what autograd saves
                device.warm_up()
        for worker in self._pool.workers:
            worker.in_flight.wait_until_idle()
            worker.device.activations_down.synchronize()
        return PeakMemoryMeter(device, ())

    def called(self, traced: TracedCall, inputs: Sequence[Tensor], result: Any, unchanged: Container[int]) -> None:
        """Note what a call shares with earlier ones [1]. User code has not gone on yet.

        ``unchanged``: positions of inputs that are outputs of earlier calls, not changed since.
        """
        outputs: list[Tensor] = []
        collect(result, set(), outputs)
        self._last = traced
        traced.memory.forward_bytes = traced.memory.kept_bytes
        as_returned = _strided(tensor for i, tensor in enumerate(inputs) if i in unchanged)
        mine = _strided(inputs)
        made = [tensor for tensor in mine if any(device.holds(tensor) for device in self._pool.devices)]
        traced.crossed = self._crossing.see(mine, _strided(outputs), self._made, made, as_returned)

    def enter(self, device: Device | None) -> None:
        """Begin a section of user code [2]."""
        self._section = self.meter(device), self._resident(), self._crossing.held_bytes()
        self._kept = self._crossing.alive()

    def exit(self) -> None:
        """End it, if there is one."""
        before = self._last
        if self._section is None:
            return
        (meter, resident, outputs), self._section = self._section, None
        peak = meter.read()
        self._kept = []
        if before is not None:
            held = outputs + self._made
            before.memory.behind_bytes = peak
            before.memory.activation_bytes = max(before.memory.activation_bytes, before.memory.kept_bytes + peak)
            before.memory.forward_bytes = max(before.memory.forward_bytes, held + peak - before.crossed.held_bytes)
        dropped = outputs - self._crossing.held_bytes()
        self._made = max(0, self._made + self._resident() - resident + dropped)

    def before_backward(self, call: LayerCall, others: Iterable[LayerCall]) -> None:
        """Note what is held on workers when the backward of ``call`` begins [3]; ``others`` may have got gradients."""
        own, waiting = _gradients([call]), _gradients([call, *others])
        if call.traced is not None:
            held = self._crossing.backward_held_bytes(call.index)
            call.traced.memory.backward_held_bytes = held + storage_bytes(waiting) - storage_bytes(own)
            call.traced.recomputable = self._crossing.recomputable(call.index)

    def _resident(self) -> int:
        """Return the bytes on all workers. Those of workers that share a GPU count once."""
        emulated = self._pool.accelerator is None
        known = {each.index if emulated else each.torch_device: each for each in self._pool.devices}
        return sum(device.resident_bytes() for device in known.values())


def _gradients(calls: Iterable[LayerCall]) -> list[Tensor]:
    return [part.tensor for call in calls for of_output in call.gradients.parts for part in of_output]


def _strided(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.layout is torch.strided]
