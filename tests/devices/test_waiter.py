"""A wake is not missed, whenever it comes."""

import pytest
from patience import PATIENCE_S, join, start

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
        join(start(lambda waiter=waiter: wait_twice(waiter, seconds), *[waiter.wake] * wakes))
