"""Runs the tests of ``second_device`` in processes of their own; a failure shows the cases by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).with_name("second_device")
FILES = sorted(path.name for path in HOME.glob("test_*.py"))
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, for a part of the device")


ORDINARY = {
    "test_logging.py": "",
    "test_manual.py": "",
    "test_gradients_between_steps.py": "",
    "test_evaluation.py": "not are_busy and not at_once",
    "test_hooks.py": "",
    "test_evaluation_gradients.py": "",
    "test_recipes.py": "4-3",
}
"""Files of ordinary tests, and which of their tests are for devices that are not the host.

The others count what copies refer to that have not ended, and whose Python runs at once: a device computes behind it.
"""


def _run(where: Path, marked: str, *options: str, **settings: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marked, str(where)]
    environment = os.environ | {"SECOND_DEVICE": "1"} | settings
    command += options
    done = subprocess.run(command, env=environment, cwd=HOME.parent.parent, capture_output=True, text=True)
    nothing = 5
    assert done.returncode in (0, nothing), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_a_second_device() -> None:
    _run(HOME, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", FILES)
def test_at_length_on_a_second_device(name: str) -> None:
    _run(HOME / name, "slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_tests_as_late_as_may_be(name: str) -> None:
    """What is not in the order of events, or not waited for, shows in the numbers; see ``second_device.lately``."""
    found = os.pathsep.join([str(HOME.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["-p", "second_device.lately", "-k", ORDINARY[name]]
    _run(HOME.parent / name, "not slow", *options, PYTHONPATH=found)
