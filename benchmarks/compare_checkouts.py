"""Whether two checkouts train the models of the tests' zoo to the same bits.

Compared are losses, gradients, weights, logged values and the state of random generators. Each checkout runs its own
package and its own zoo in a process of its own, on emulated devices. A restructuring must change nothing; what changes
on purpose shows here, and its reason belongs beside the change.

    git worktree add /tmp/before v0.1.0
    .venv/bin/python benchmarks/compare_checkouts.py /tmp/before [--only llama gpt2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

CASES = ((1, 1), (2, 3))
"""(devices, microbatches)"""

CHILD = """
import hashlib, json, os, sys, warnings
import torch, zoo, zoo_runs
import lightning_roundpipe
assert lightning_roundpipe.__file__.startswith(os.getcwd()), lightning_roundpipe.__file__
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

def feed(digest, value):
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            feed(digest, item)
    else:
        digest.update(repr(value).encode())

only, cases = json.loads(sys.argv[1])
for name, entry in zoo.ENTRIES.items():
    for lora in (False, True) if entry.lora else (False,):
        for devices, microbatches in cases:
            if only and name not in only:
                continue
            result = zoo_runs.trained(name, lora, devices, microbatches)
            found = {}
            for part in ("losses", "grads", "state", "logged", "rng"):
                digest = hashlib.sha256()
                feed(digest, getattr(result, part))
                found[part] = digest.hexdigest()
            title = f"{name}{'-lora' if lora else ''}, {devices} devices, {microbatches} microbatches"
            print("RESULT " + json.dumps([title, found]), flush=True)
"""


def results(checkout: Path, only: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Title and digests of each case, as they come."""
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, json.dumps([only, CASES])]
    child = subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("RESULT "):
            title, found = json.loads(line.removeprefix("RESULT "))
            yield title, found
    if child.wait():
        raise SystemExit(f"{checkout}: the zoo did not come to its end (exit status {child.returncode}).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout to compare this one with")
    parser.add_argument("--only", nargs="*", default=[], help="names of models")
    options = parser.parse_args()
    console, here = Console(), Path(__file__).resolve().parent.parent
    with Progress(console=console, transient=True) as progress:
        task, pair = progress.add_task("training", total=None), []
        for checkout in (options.other.resolve(), here):
            found = {}
            for title, digests in results(checkout, options.only):
                found[title] = digests
                progress.update(task, description=f"{checkout.name}: {title}")
            pair.append(found)
    before, now = pair
    table = Table(title=f"{len(before.keys() & now.keys())} cases in both checkouts")
    table.add_column("case")
    table.add_column("differs in")
    for title in sorted(before.keys() | now.keys()):
        if title not in before or title not in now:
            table.add_row(title, f"only in {'this one' if title in now else 'the other one'}")
        elif different := [part for part, digest in now[title].items() if before[title][part] != digest]:
            table.add_row(title, ", ".join(different))
    if table.row_count:
        console.print(table)
        raise SystemExit(1)
    console.print(
        f"{len(now)} cases: losses, gradients, weights, logged values and generators are the same to the bit."
    )


if __name__ == "__main__":
    main()
