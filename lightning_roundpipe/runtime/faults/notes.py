"""What an exception says of where it happened: layer, phase, microbatch, slot and device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.errors import NEW_PROCESS, DeviceOutOfMemory, is_sticky, sizeof
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.runtime.threads.sync import Cancelled

_MARK = "roundpipe: "


class NumberedSlot(Protocol):
    """What a slot is called."""

    index: int
    phase: Phase
    worker: int


class FaultPlace(NamedTuple):
    """Somewhere in a step. ``what`` is a layer, or code between layers."""

    what: str
    phase: str
    microbatch: int
    slot: NumberedSlot | None
    device: Device | None

    def __str__(self) -> str:
        phase = f"{self.phase} pass" if self.phase in ("forward", "backward") else self.phase
        who = f"microbatch {self.microbatch}" if self.microbatch >= 0 else "whole batch"
        slot = f"slot {self.slot.index} ({self.slot.phase}), " if self.slot else ""
        return f"in {self.what}, {phase}, {who}, {slot}{_named(self.device)}"


class noted:
    """Add a note to an exception that passes, unless one closer to it has. ``place`` is asked for when there is one."""

    __slots__ = ("_place",)

    def __init__(self, place: Callable[[], FaultPlace]) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, Cancelled):
            add_note(error, self._place())


def add_note(error: BaseException, place: FaultPlace) -> None:
    if any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
        return
    error.add_note(f"{_MARK}{place}")
    # A device that counts for itself has said the same already.
    if isinstance(error, torch.OutOfMemoryError) and not isinstance(error, DeviceOutOfMemory) and place.device:
        resident = place.device.resident_by_purpose()
        held = ", ".join(f"{name} {sizeof(n)}" for name, n in sorted(resident.items(), key=lambda kv: -kv[1]))
        error.add_note(
            f"{_MARK}{_named(place.device)} held {held or 'nothing'}. Set a smaller microbatch_size (or more "
            "num_microbatches), or a smaller memory_budget, so that stages get smaller."
        )


@contextlib.contextmanager
def remedied() -> Iterator[None]:
    """Add a note to an exception that passes and after which the process cannot go on."""
    try:
        yield
    except BaseException as error:
        if is_sticky(error):
            add_remedy(error)
        raise


def add_remedy(error: BaseException) -> None:
    """Say of ``error`` that only a new process helps."""
    if (note := f"{_MARK}{NEW_PROCESS}") not in getattr(error, "__notes__", ()):
        error.add_note(note)


def add_waiting_note(error: BaseException, slots: Sequence[NumberedSlot]) -> None:
    """For an exception of the main thread, which only waits: what others were doing. ``slots`` are the open ones."""
    running = "; ".join(f"slot {s.index} ({s.phase}) on worker {s.worker}" for s in slots)
    doing = f"while these slots were running: {running}" if running else "while no slot was running"
    error.add_note(f"{_MARK}raised in the main thread, which waited for the training step, {doing}")


def _named(device: Device | None) -> str:
    return f"device {device.torch_device} (worker {device.index})" if device else "on the host"
