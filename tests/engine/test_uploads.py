"""Uploads of weights wait for whatever had their place before."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE_S

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import make_devices
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.sync import Baton, CancelScope, Runner
from lightning_roundpipe.engine.worker import Worker
from lightning_roundpipe.planning.memory import Reserved

KIB = 1024
pytestmark = pytest.mark.timeout(4 * PATIENCE_S)


def layer_of(index: int, nbytes: int) -> Any:
    bucket = SimpleNamespace(index=index, has=lambda version: True)
    return SimpleNamespace(index=index, name=str(index), nbytes=nbytes, bucket=bucket, upload=lambda *_: None)


def test_a_slot_that_nobody_enters_leaves_the_gradients_in_front_of_it_alone() -> None:
    """It closes before its weights have come, and while the slot in front of it still sends gradients."""
    [device] = make_devices("cpu", [torch.device("cpu")], Emulation())
    scope, baton, may_send = CancelScope(lambda: None), Baton(), threading.Event()
    worker = Worker(device, baton, prefetch=True)
    runner = Runner(scope)
    try:
        worker.reserve(Reserved(4 * KIB))
        sums: Any = SimpleNamespace(layout=SimpleNamespace(nbytes=2 * KIB, segments=[]), landing=None, present=[])
        first, second = (
            Slot(i, 0, "backward", [i], [layer_of(i, (i + 1) * KIB)], gradients, [0], 0, Recorder(), scope)
            for i, gradients in enumerate([{0: sums}, {}])
        )
        baton.acquire(runner)
        for slot in (first, second):
            worker.add(slot)
        worker.enter(first, 0, runner)
        worker.sender.submit(may_send.wait)
        for slot in (first, second):
            worker.turns.leave(slot, 0)
        assert not second.uploads[1].is_set
        may_send.set()
        second.uploads[1].wait(scope)
        baton.release()
    finally:
        may_send.set()
        worker.sender.stop()
        worker.sender.join()
        worker.close()
        device.close()
