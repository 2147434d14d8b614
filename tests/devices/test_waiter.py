"""A wake is not missed, whenever it comes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from patience import PATIENCE_S

from lightning_roundpipe.devices.waiter import Waiter


def wait_twice(waiter: Waiter, seconds: float | None) -> None:
    for _ in range(2):  # it stays woken
        if seconds is None:
            waiter.wait()
        else:
            assert waiter.wait_for(seconds)


@pytest.mark.parametrize("seconds", [None, PATIENCE_S])
@pytest.mark.parametrize("wakes", [1, 2, 3])
def test_wakes_and_waits_in_any_order(wakes: int, seconds: float | None) -> None:
    for _ in range(200):
        waiter = Waiter()
        threads = [threading.Thread(target=wait_twice, args=(waiter, seconds), daemon=True)]
        threads += [threading.Thread(target=waiter.wake) for _ in range(wakes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


class WokenBeforeItParks(list[Any]):
    """What a waiter has parked. The waker comes behind the waiting thread's first look, and before that is there."""

    def __init__(self, waiter: Waiter) -> None:
        super().__init__()
        self.waiter = waiter

    def append(self, bell: Any) -> None:
        self.waiter.wake()
        super().append(bell)


@pytest.mark.parametrize("seconds", [None, PATIENCE_S])
def test_a_wake_just_before_the_waiter_has_parked(seconds: float | None) -> None:
    waiter = Waiter()
    waiter._parked = WokenBeforeItParks(waiter)
    thread = threading.Thread(target=wait_twice, args=(waiter, seconds), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
