"""Which of Lightning's own tests pass under the strategy, of those that pass plainly.

Lightning's packages do not contain its tests, so this takes a checkout of Lightning of the installed version. Each file
runs twice. The second time, variables of the environment make the strategy the Trainer's default
(``PL_TRAINER_STRATEGY``), on two emulated devices; a test that chooses a strategy itself keeps its own.

    .venv/bin/python benchmarks/lightning_suite.py CHECKOUT/tests/tests_pytorch/trainer [more files or folders]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PLAINLY = {"PL_TRAINER_ACCELERATOR": "cpu", "PL_TRAINER_DEVICES": "1"}
UNDER_THE_STRATEGY = {**PLAINLY, "PL_TRAINER_STRATEGY": "roundpipe", "PL_TRAINER_DEVICES": "2"}
MOST_S = 60
"""Seconds after which a test counts as failed."""


def outcomes(paths: list[Path], settings: dict[str, str]) -> dict[str, str]:
    """Return the message of each test that ran; empty if it passed. Skipped tests are left out."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.xml"
        command = [sys.executable, "-m", "pytest", *map(str, paths), "-q", "-p", "no:cacheprovider"]
        command += [f"--timeout={MOST_S}", f"--junitxml={result}", f"--rootdir={paths[0].parent}"]
        subprocess.run(command, env={**os.environ, **settings}, cwd=folder, stdout=subprocess.DEVNULL, check=False)
        found = {}
        for case in ElementTree.parse(result).iter("testcase"):
            if case.find("skipped") is None:
                failed = [part.get("message", "") for part in case if part.tag in ("failure", "error")]
                found[f"{case.get('classname')}::{case.get('name')}"] = (failed[0] or "failed") if failed else ""
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders of a checkout's tests")
    paths = [path.resolve() for path in parser.parse_args().paths]
    plain, found = outcomes(paths, PLAINLY), outcomes(paths, UNDER_THE_STRATEGY)
    passed = [name for name, message in plain.items() if not message]
    differ = {name: found.get(name, "did not run") for name in passed if found.get(name, "did not run")}
    for name, message in differ.items():
        print(f"{name}\n    {message.splitlines()[0][:200]}")
    share = 100 * (len(passed) - len(differ)) / len(passed) if passed else 0.0
    print(
        f"{len(passed) - len(differ)} of {len(passed)} tests that pass plainly pass under the strategy: {share:.1f} %"
    )


if __name__ == "__main__":
    main()
