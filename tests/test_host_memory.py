"""What loading, training adapters and saving take of the host's memory: nothing is there twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import large_runs
import pytest
from patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(20 * PATIENCE_S)]

LITTLE = 0.1
"""Of the weights."""
MUCH = 0.3
"""Of the weights: activations, threads and what else a run needs that is no copy."""


def measured(what, *arguments):
    """What a run in a process of its own says."""
    code = f"import large_runs; large_runs.main({', '.join(map(repr, [what, *map(str, arguments)]))})"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_loading_holds_the_weights_once(tmp_path):
    """From the files into masters of another format, and from there to where uploads read."""
    large_runs.write(tmp_path, "bfloat16")
    found = measured("loading", tmp_path)
    assert found["weights"] > 180e6
    assert found["peak"] < (1 + MUCH) * found["weights"], found


def test_a_frozen_base_takes_no_memory(tmp_path):
    """Neither during training, but for what emulated devices have of the host's memory, nor afterwards."""
    size = large_runs.write(tmp_path, "float32")
    found = measured("adapters", tmp_path, "32-true", "")
    assert found["weights"] == size > 90e6
    assert found["after"] < MUCH * size, found
    assert found["peak"] - found["devices"] < MUCH * size, found
    found = measured("adapters", tmp_path, "32-true", "copied")
    assert found["after"] > (1 - LITTLE) * size, "this would not be seen"


def test_saving_takes_no_memory(tmp_path):
    found = measured("saving", tmp_path)
    assert found["file"] > 3 * found["weights"] > 540e6
    assert found["peak"] < LITTLE * found["weights"], found
