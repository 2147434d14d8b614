"""Runs the tests of ``second_device`` in processes of their own; a failure shows the cases by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).with_name("second_device")
FILES = sorted(path.name for path in HOME.glob("test_*.py"))


def _run(name: str, marked: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        str(HOME / name),
    ]
    done = subprocess.run(
        command, env=os.environ | {"SECOND_DEVICE": "1"}, cwd=HOME.parent.parent, capture_output=True, text=True
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: none are marked so


@pytest.mark.parametrize("name", FILES)
def test_on_a_second_device(name: str) -> None:
    _run(name, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
def test_slowly_on_a_second_device(name: str) -> None:
    _run(name, "slow")
