"""What an exception says of where it happened: layer, phase, microbatch, slot and device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.slots import Slot

_MARK = "roundpipe: "


def describe(what: str, phase: str, microbatch: int, slot: Slot | None, device: Device | None) -> str:
    where = f"slot {slot.index} ({slot.phase})" if slot else "slot none yet"
    on = f"device {device.torch_device} (worker {device.index})" if device else "device none (host)"
    return f"{_MARK}{what}, phase {phase}, microbatch {microbatch}, {where}, {on}"


@contextlib.contextmanager
def noted(what: str, phase: str, microbatch: int, slot: Slot | None, device: Device | None) -> Iterator[None]:
    """Add a note to an exception that passes, unless one closer to it has."""
    try:
        yield
    except Exception as error:
        if not any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
            error.add_note(describe(what, phase, microbatch, slot, device))
        raise
