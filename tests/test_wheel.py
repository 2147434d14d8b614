"""The wheel is what users get: built, installed into a fresh environment, and used from outside the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_installed_wheel_runs_the_main_job(tmp_path):
    """Two steps of it, through the console command; `.ci/smoke.py` has the checks."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    subprocess.run(build, check=True, env=environment, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    done = subprocess.run([ROOT / ".ci" / "smoke", wheel], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("ok:") == 5, done.stdout
