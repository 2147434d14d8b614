"""On a GPU: the tests that need one, one table of speed and memory beside other systems, the longest sequence, a trace.

    make bench-gpu                                    what fits into seven minutes; a second call does the rest
    python benchmarks/bench_gpu.py --only ours,plain  some pieces; --again measures them anew, --list names them
    python benchmarks/bench_gpu.py --device cpu       tiny models on the CPU and on emulated devices: to try it

Each piece is a process of its own: a piece that hangs, crashes or runs out of memory is a result with its reason. The
output folder has ``results.json``, ``table.md``, each piece's log and the trace. A piece that ``results.json`` has is
not run again. Pieces need torch, transformers, lightning, PEFT and the packages of PyPI that their rows name; hydra and
datasets are not imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_rows import GIB, ON_GPU, ROWS, TINY, longest, measure, trace

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[1]
NO_DEVICE = 3
"""Exit code where torch sees no GPU."""
WITHIN_S = 420
"""Seconds of a call: two calls fit into a quarter of an hour, with the start of the machine."""
PIECE_S = {"tests": 100, "ordinary_tests": 60, "longest_ours": 90, "longest_plain": 45}
"""Longest time of a piece, in seconds; 75 of all others. A piece is not begun with less than a third of it left."""
TESTS: dict[str, tuple[str, ...]] = {
    "tests": ("-m", "gpu"),
    "ordinary_tests": (
        "-m", "not slow and not gpu", "tests/test_logging.py", "tests/test_gradients_between_steps.py",
        "tests/test_hooks.py",
    ),
}  # fmt: skip
"""Pieces that run tests. Those of the second piece are about any device that is not the host."""
LONGEST = ("longest_ours", "longest_plain")
_LAST = ("fsdp2", "plain_24gib", "ordinary_tests")
"""What is left out first, if time is short."""
PIECES = (*(name for name in ("tests", *ROWS, "trace", *LONGEST) if name not in _LAST), *_LAST)

SLOWER = 6
"""How many times as long a piece may take on the CPU, which may have other things to do."""

Found = dict[str, Any]


def run_tests(arguments: Sequence[str], device: str) -> Found:
    """Counts and failures of tests, on the GPU where ``device`` is ``"cuda"``."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "ROUNDPIPE_TEST_DEVICE": device}
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)  # the log has it, if the piece takes too long
            lines.append(line.rstrip())
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"exit_code": child.returncode, "summary": lines[-1] if lines else "", "failed": failed}


def run_piece(name: str, device: str, folder: Path) -> Found:
    """What one process does."""
    sizes = ON_GPU if device == "cuda" else TINY
    if name in TESTS:
        return run_tests(TESTS[name] if device == "cuda" else ("tests/test_gpu.py",), device)
    if name == "trace":
        return trace(sizes, folder / "trace.json.gz")
    if name in LONGEST:
        path = folder / f"{name}.json"
        return longest(sizes, lambda found: write(path, found), ours=name == "longest_ours")
    return measure(ROWS[name], sizes)


def answer(name: str, device: str, folder: Path) -> None:
    """Write what the piece found, or the reason why it found nothing."""
    try:
        found = run_piece(name, device, folder)
    except BaseException as error:
        traceback.print_exc()
        found = {"reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    write(folder / f"{name}.json", found)


def write(path: Path, found: Found) -> None:
    """Write what a piece has found, in one move: the piece may be killed at any time."""
    beside = path.with_suffix(".unfinished")
    beside.write_text(json.dumps(found))
    beside.replace(path)


def run_apart(name: str, device: str, folder: Path, seconds: float) -> Found:
    """Run a piece in a process group of its own, which ends after ``seconds``; its output goes to a log."""
    found = folder / f"{name}.json"
    command = [sys.executable, str(SCRIPT), "--one", name, "--device", device, "--out", str(folder.resolve())]
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0)
        try:
            why = f"ended with code {child.wait(seconds)}; see {name}.log"
        except subprocess.TimeoutExpired:
            why = f"not done after {seconds:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if not found.exists():
        return {"reason": why}
    result: Found = json.loads(found.read_text())
    found.unlink()
    return result | ({"stopped": why} if child.returncode else {})


def table(known: dict[str, Found]) -> str:
    """The results in Markdown: the rows, then the other pieces' figures."""
    lines = ["| | tokens/s | s a step | GPU (GiB) | host (GiB) | first and last loss |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
    for name, row in ROWS.items():
        found = known.get(name, {"reason": "not yet measured"})
        if "reason" in found:
            lines.append(f"| {row.title} | – | – | – | – | {found['reason'].replace('|', '/')} |")
            continue
        device = f"{found['device_bytes'] / GIB:.1f}" if "device_bytes" in found else "–"
        losses = f"{found['losses'][0]:.4f}, {found['losses'][-1]:.4f}"
        figures = f"{found['tokens_per_s']:,.0f} | {found['step_s']:.2f} | {device} | {found['host_bytes'] / GIB:.1f}"
        lines.append(f"| {row.title} | {figures} | {losses} |")
    for name in (*TESTS, "trace", *LONGEST):
        found = known.get(name, {"reason": "not yet run"})
        lines += ["", f"{name}: " + _listed(found)]
        lines += ["", *(f"- {_listed(one)}" for value in found.values() if isinstance(value, list) for one in value)]
    return "\n".join(lines) + "\n"


def _listed(found: Found | str) -> str:
    if isinstance(found, str):
        return found
    shown = {key: value for key, value in found.items() if not isinstance(value, list) and value is not None}
    return ", ".join(f"{key} {f'{value:.3g}' if isinstance(value, float) else value}" for key, value in shown.items())


def run(options: argparse.Namespace) -> tuple[dict[str, Found], list[str]]:
    """Run the pieces that are wanted and not known. Return all results, and the pieces for which no time was left."""
    options.out.mkdir(parents=True, exist_ok=True)
    results, end, left_out = options.out / "results.json", time.monotonic() + options.within, []
    known: dict[str, Found] = json.loads(results.read_text()) if results.exists() else {}
    for name in options.only:
        if name in known and not options.again:
            continue
        needs = ROWS[name].needs if name in ROWS else None
        most, left = PIECE_S.get(name, 75), end - time.monotonic()
        most *= 1 if options.device == "cuda" else SLOWER
        if needs is not None and importlib.util.find_spec(needs) is None:
            found = {"reason": f"not installed: pip install {needs}"}
        elif left < most / 3:
            left_out.append(name)
            continue
        else:
            began = time.monotonic()
            print(f"{name} ...", end=" ", flush=True)
            found = run_apart(name, options.device, options.out, min(most, left))
            found["piece_s"] = round(time.monotonic() - began, 1)
            print(f"{found['piece_s']:.0f} s {found.get('reason', '')}")
        known[name] = found
        results.write_text(json.dumps(known, indent=1) + "\n")
        (options.out / "table.md").write_text(table(known))
    return known, left_out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Code 3: there is no GPU.")
    parser.add_argument("--only", help="pieces, between commas; default: all")
    parser.add_argument("--again", action="store_true", help="run pieces anew that the folder has")
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds; default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs") / "bench-gpu", help="default %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="name the pieces")
    parser.add_argument("--one", choices=PIECES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.only = options.only.split(",") if options.only else list(PIECES)
    if wrong := [name for name in options.only if name not in PIECES]:
        raise SystemExit(f"--only {','.join(wrong)}: there is no such piece. Known: {', '.join(PIECES)}.")
    if options.list:
        print("\n".join(PIECES))
        return 0
    if options.one:
        answer(options.one, options.device, options.out)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_gpu.py: torch sees no CUDA device. Try it without one: --device cpu.", file=sys.stderr)
        return NO_DEVICE
    known, left_out = run(options)
    print(f"\n{table(known)}\n{options.out / 'results.json'}")
    if left_out:
        print(f"No time was left for {', '.join(left_out)}: call it again.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
