"""Who may compute at once, and with which random generator."""

import functools
import threading
import time

import pytest
import torch
from patience import PATIENCE_S, join, start

from lightning_roundpipe.devices import emulated_work, intraop_threads


def most_at_once(devices, work, expected):
    """How many of one thread per device were seen inside ``acquire_core`` at the same time.

    Each stays, with ``work``, until ``expected`` have been, and a little longer.
    """
    inside, most, lock = 0, 0, threading.Lock()

    def run(device):
        nonlocal inside, most
        with device.acquire_core():
            with lock:
                inside += 1
                most = max(most, inside)
            deadline = time.monotonic() + PATIENCE_S
            while most < expected and time.monotonic() < deadline:
                work(0.005)
            work(0.02)
            with lock:
                inside -= 1

    join(start(*(functools.partial(run, device) for device in devices)))
    return most


@pytest.mark.parametrize(("cores", "intra_op", "permits"), [(1, 2, 1), (4, 1, 4), (8, 8, 4)])
def test_layers_share_the_cores_of_all_devices(make_all, monkeypatch, cores, intra_op, permits):
    monkeypatch.setattr(intraop_threads, "cores", lambda: cores)
    torch.set_num_threads(intra_op)
    devices = make_all(4) + make_all(4)  # of two strategies, even
    assert most_at_once(devices, time.sleep, permits) == permits
    assert most_at_once(devices, emulated_work, 8) == 8


def test_pretended_work_takes_its_time_and_the_permit_is_back_afterwards(make_all):
    (device,) = make_all(1)
    started = time.monotonic()
    with device.acquire_core():
        emulated_work(0.05)
    emulated_work(0.05)  # outside of a layer too
    assert time.monotonic() - started >= 0.1
    assert most_at_once([device], time.sleep, 1) == 1
