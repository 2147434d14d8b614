"""A pytest plugin with which ordinary tests train on the device type, and as late as a GPU may be.

Nothing is done until the host waits for something. Then the streams go on as far as they can, the newest stream first.
What the host has not waited for, or what no event orders, shows in the numbers.

    SECOND_DEVICE=1 PYTHONPATH=tests python -m pytest -p second_device.lately tests/test_logging.py

Tests fail, too, that are about the CPU: code of theirs that calls ``numpy()``, or makes tensors on the host in layers.
"""

import pytest

from second_device import backend
from second_device.late import late
from second_device.play import trainers_on_devices

backend.register()  # before autograd first runs, as it counts devices then


@pytest.fixture(autouse=True)
def _lately(monkeypatch):
    trainers_on_devices(monkeypatch)
    with late("newest first"):
        yield
