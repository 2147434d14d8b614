"""Runs the tests of ``second_device`` in processes of their own; a failure shows the cases by name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).with_name("second_device")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, for a part of the device"),
]
ORDINARY = [
    "test_logging.py", "test_manual.py", "test_gradients_between_steps.py", "test_evaluation.py", "test_hooks.py",
    "test_evaluation_gradients.py", "test_recipes.py",
]  # fmt: skip
"""Files of ordinary tests for devices that are not the host."""
CHOSEN = "not are_busy and not at_once and (not test_recipes or 4-3)"
"""Of their tests, those that do not count calls that run at once: Python runs ahead of what a device computes."""


def _run(where, marked, *options, **settings):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marked]
    environment = os.environ | {"SECOND_DEVICE": "1"} | settings
    command += [*options, *map(str, where)]
    done = subprocess.run(command, env=environment, cwd=HOME.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("marked", ["not slow", "slow"])
def test_on_a_second_device(marked):
    _run([HOME], marked)


def test_ordinary_tests_as_late_as_may_be():
    """What is not in the order of events, or not waited for, shows in the numbers; see ``second_device.lately``."""
    found = os.pathsep.join([str(HOME.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["-p", "second_device.lately", "-k", CHOSEN]
    _run([HOME.parent / name for name in ORDINARY], "not slow", *options, PYTHONPATH=found)
