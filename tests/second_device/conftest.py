"""The device type, in processes that are there for it; elsewhere these tests do not exist."""

import os

import pytest

collect_ignore_glob = ["test_*.py"]

if os.environ.get("SECOND_DEVICE") == "1":
    collect_ignore_glob = []
    from second_device import backend

    backend.register()  # before autograd first runs, as it counts devices then


@pytest.fixture
def devices(monkeypatch):
    """What Trainers run on: each worker has a device of its own. Those that were made last."""
    from second_device.play import trainers_on_devices

    return trainers_on_devices(monkeypatch)


@pytest.fixture
def queues(request):
    """What is enqueued is done later: at random, or as a test says by its parameter."""
    from second_device.late import late

    with late(getattr(request, "param", "random")) as made:
        yield made
