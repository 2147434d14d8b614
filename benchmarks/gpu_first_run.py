"""The first half hour on a GPU: what decides whether the rest is worth measuring, in pieces that stand alone.

    make gpu-first-run                                   the pieces that fit into nine minutes; again for the rest
    .venv/bin/python benchmarks/gpu_first_run.py --list  what they are
    ... gpu_first_run.py --only semantics --again        one group, measured anew
    ... gpu_first_run.py --device cpu                    the pieces that need no GPU, on emulated devices: to try it

Each piece is a process of its own: one that hangs, crashes or loses the GPU is a row with its reason, and the others go
on. ``results.json`` in the output folder holds every figure, ``table.md`` shows them; what the folder holds is not
measured again. Besides torch, lightning, transformers and peft nothing has to be installed; docs/gpu.md says what each
figure decides.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_pieces import PIECES, Piece
from gpu_rows import Record, answer, run_one

SCRIPT = Path(__file__).resolve()

NO_DEVICE = 2
"""The exit code without a GPU."""

WITHIN = 540
"""Seconds of one call: less than the ten minutes that shared machines often allow."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Code 2: there is no GPU.", allow_abbrev=False
    )
    parser.add_argument("--only", help="groups or pieces, between commas; default: all")
    parser.add_argument("--again", action="store_true", help="measure pieces anew that the folder has")
    parser.add_argument("--within", type=float, default=WITHIN, help="seconds; default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs") / "gpu-first-run", help="default %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="the pieces, and about how long each takes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    known = {*PIECES, *(piece.group for piece in PIECES.values())}
    options.only = options.only.split(",") if options.only else sorted(known)
    if wrong := [name for name in options.only if name not in known]:
        raise SystemExit(f"--only {','.join(wrong)}: there is no such one. Known: {', '.join(sorted(known))}.")
    return options


class Results:
    """What is known so far, by piece, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "results.json"
        self.known: dict[str, Record] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def add(self, piece: Piece, found: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known[piece.name] = found
        beside = self._path.with_suffix(".new")  # a call that is cut off leaves a whole file
        beside.write_text(json.dumps(self.known, indent=1) + "\n")
        beside.replace(self._path)
        (self.folder / "table.md").write_text(self.table())

    def table(self) -> str:
        """A row for each figure of each piece, in Markdown."""
        lines = ["| piece | figure | value |", "| --- | --- | ---: |"]
        for name, found in self.known.items():
            if "reason" in found:
                lines.append(f"| {name} | failed | {found['reason'].replace('|', '/')} |")
                continue
            for key, value in found.items():
                if not isinstance(value, (list, dict)):
                    lines.append(f"| {name} | {key} | {_shown(value)} |")
        return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(options: argparse.Namespace, results: Results) -> list[str]:
    """Run what is asked for and not yet known.

    Returns:
        The names of pieces for which there was no time.
    """
    end = time.monotonic() + options.within
    left_out = []
    for piece in PIECES.values():
        wanted = piece.name in options.only or piece.group in options.only
        if (
            not wanted
            or (piece.cuda and options.device != "cuda")
            or (piece.name in results.known and not options.again)
        ):
            continue
        left = end - time.monotonic()
        if piece.about_s > left:
            left_out.append(piece.name)
            continue
        print(f"{piece.name} (about {piece.about_s:.0f} s) ...", end=" ", flush=True)
        began = time.monotonic()
        what = json.dumps([piece.name, options.device, str(options.out.resolve())])
        limit = min(left, piece.limit_s)
        found = run_one(what, SCRIPT, options.out / piece.name, limit, piece.environment)
        if found.get("timed_out") and limit < piece.limit_s:
            left_out.append(piece.name)  # it had less time than it may take
            print("no time left")
            continue
        found["piece_s"] = time.monotonic() - began
        results.add(piece, found)
        print(f"{found['piece_s']:.0f} s" + (f": {found['reason']}" if "reason" in found else ""))
    return left_out


def measure(what: list[str]) -> Record:
    """What one process does."""
    name, device, folder = what
    torch.manual_seed(0)
    return PIECES[name].measure(device, Path(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.one is not None:
        answer(json.loads(options.one), options.into, measure)
        return 0
    if options.list:
        for piece in PIECES.values():
            print(f"{piece.name:28} {piece.about_s:4.0f} s  {piece.summary}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_first_run.py: torch sees no CUDA device, so nothing was measured. Run it where there is one, or try "
            "it with --device cpu.",
            file=sys.stderr,
        )
        return NO_DEVICE
    results = Results(options.out)
    left_out = run(options, results)
    print(f"\n{results.table()}\n{options.out / 'results.json'}")
    if left_out:
        print(f"No time was left for {', '.join(left_out)}: call it again.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
