"""Benchmarks, examples and scripts of pages use the package as it is. Most are run by hand, seldom."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path for folder in ("benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_is_imported_is_there(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning_roundpipe":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "lightning_roundpipe":
                    importlib.import_module(name.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "bench_engine.py --layers 2 --microbatches 2 --steps 1 --repeat 1",
        "bench_memory.py --hidden 64 --layers 2 --tokens 16 --steps 1",
        "bench_optimizer.py --only SmolLM2-135M --repeat 2",
        "bench_planning.py --search-seconds 0.01",
        "bench_quantized.py --quick",
        "bench_schedule.py --scale 0.01 --steps 1",
        "convergence.py --steps 4 --validations 2 --smoothing 1 --seeds 1 --lr 0.001 --picture PICTURE",
    ],
)
def test_a_benchmark_ends(command, tmp_path):
    script, *options = command.replace("PICTURE", str(tmp_path / "picture.png")).split()
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}  # or torch's threads wait for cores that other tests have
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *options],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "│" in run.stdout or "picture.png" in run.stdout
