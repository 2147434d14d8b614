"""Notes that tell where in a step an exception was raised: layer, phase, microbatch, slot and device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.errors import NEW_PROCESS, SMALLER, DeviceOutOfMemory, DoesNotFit, is_sticky
from lightning_roundpipe.messages import gib
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.threads.cancel_scope import Cancelled

_MARK = "roundpipe: "
_ELSEWHERE = "tensors to be on the same device"
"""What torch says if the operands of an operation are on several devices."""


class NumberedSlot(Protocol):
    """The fields of a `Slot` that notes name."""

    index: int
    phase: Phase
    worker: int


class FaultPlace(NamedTuple):
    """A place in a step.

    Attributes:
        what: names a layer, or code between layers.
        phase: "forward", "backward" or "evaluation".
        microbatch: number of the microbatch; -1 is the whole batch.
        slot, device: where it runs; None if they are not known. A slot that one call got has a number below 0.
    """

    what: str
    phase: str
    microbatch: int
    slot: NumberedSlot | None
    device: Device | None

    def __str__(self) -> str:
        phase = f"{self.phase} pass" if self.phase in ("forward", "backward") else self.phase
        who = f"microbatch {self.microbatch}" if self.microbatch >= 0 else "whole batch"
        slot = f"slot {self.slot.index} ({self.slot.phase}), " if self.slot and self.slot.index >= 0 else ""
        return f"in {self.what}, {phase}, {who}, {slot}{_named(self.device)}"


class noted:
    """Context manager that adds a note to an exception, unless an inner one has.

    Args:
        place: returns the place to name; called only if there is an exception.
    """

    __slots__ = ("_place",)

    def __init__(self, place: Callable[[], FaultPlace]) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            add_note(error, self._place())


def add_note(error: BaseException, place: FaultPlace) -> None:
    """Add the note that names ``place``, unless an inner context has added one."""
    placed = any(note.startswith(_MARK) for note in getattr(error, "__notes__", ()))
    if placed or isinstance(error, Cancelled):
        return
    error.add_note(f"{_MARK}{place}")
    if place.device:
        add_memory_note(error, place.device)
    on_gpu = place.device is not None and place.device.torch_device.type != "cpu"
    if on_gpu and _ELSEWHERE in str(error) and "cpu" in str(error):
        error.add_note(
            f"{_MARK}a tensor was left on the host. Code between layers gets copies of parameters, buffers and batches "
            "on the GPU where torch functions show them. Code that hides them (torch.utils.checkpoint, a hand-written "
            "backward, TorchScript, another thread) has to move them itself, as in weight.to(x.device), or to be in a "
            "layer. Tensors that a module keeps are buffers: self.register_buffer."
        )


def add_memory_note(error: BaseException, device: Device | None = None) -> None:
    """Add a note to an out-of-memory error, once: what the device holds and which settings help.

    Args:
        error: any exception. Work on a stream fails with another one, whose cause is the error.
        device: where it was raised, if known.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, torch.OutOfMemoryError):
        found = found.__cause__
    # `DeviceOutOfMemory`, of a device that keeps its own accounts, and `DoesNotFit` say the same in their messages.
    if found is None or isinstance(found, (DeviceOutOfMemory, DoesNotFit)):
        return
    if any(SMALLER in note for note in getattr(error, "__notes__", ())):
        return
    holds = ""
    if device is not None:
        resident = sorted(device.resident_by_purpose().items(), key=lambda kv: -kv[1])
        held = ", ".join(f"{name} {gib(n)}" for name, n in resident)
        holds = f"{_named(device)} held {held or 'nothing'}. "
    error.add_note(f"{_MARK}{holds}{SMALLER}.")


@contextlib.contextmanager
def remedied() -> Iterator[None]:
    """Add notes to exceptions wherever they were raised: out of memory, and after which only a new process helps."""
    try:
        yield
    except BaseException as error:
        add_memory_note(error)
        if is_sticky(error):
            add_remedy(error)
        raise


def add_remedy(error: BaseException) -> None:
    """Add the note that only a new process helps, once."""
    if (note := f"{_MARK}{NEW_PROCESS}") not in getattr(error, "__notes__", ()):
        error.add_note(note)


def add_waiting_note(error: BaseException, slots: Sequence[NumberedSlot]) -> None:
    """Add a note to an exception of the waiting main thread: which slots were running.

    Args:
        error: the exception.
        slots: the open slots.
    """
    running = "; ".join(f"slot {s.index} ({s.phase}) on worker {s.worker}" for s in slots)
    doing = f"while these slots were running: {running}" if running else "while no slot was running"
    error.add_note(f"{_MARK}raised in the main thread, which waited for the training step, {doing}")


def _named(device: Device | None) -> str:
    return f"device {device.torch_device} (worker {device.index})" if device else "on the host"
