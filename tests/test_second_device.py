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


def _run(where: Path, marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marked, str(where)]
    environment = os.environ | {"SECOND_DEVICE": "1"}
    done = subprocess.run(command, env=environment, cwd=HOME.parent.parent, capture_output=True, text=True)
    nothing = 5
    assert done.returncode in (0, nothing), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_a_second_device() -> None:
    _run(HOME, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
def test_at_length_on_a_second_device(name: str) -> None:
    _run(HOME / name, "slow")
