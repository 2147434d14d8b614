"""A wake is not missed, whenever it comes."""

import threading

import pytest
from patience import PATIENCE_S

from lightning_roundpipe.devices.waiter import Waiter


def wait_twice(waiter, seconds):
    for _ in range(2):  # it stays woken
        if seconds is None:
            waiter.wait()
        else:
            assert waiter.wait_for(seconds)


@pytest.mark.parametrize("seconds", [None, PATIENCE_S])
@pytest.mark.parametrize("wakes", [1, 2, 3])
def test_wakes_and_waits_in_any_order(wakes, seconds):
    for _ in range(200):
        waiter = Waiter()
        threads = [threading.Thread(target=wait_twice, args=(waiter, seconds), daemon=True)]
        threads += [threading.Thread(target=waiter.wake) for _ in range(wakes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
