"""On a GPU: ours, the paper's library, plain Lightning, FSDP and DeepSpeed with offload, on the same device in one run.

Full fine-tuning in the shape of Qwen3-1.7B and LoRA in that of Llama-3.1-8B, with random weights and tokens, under a
cap of 24 GiB and without. Each row of a table is a process of its own, and one that fails is a row with its reason.
First every row at the shortest length of sequences, then each with twice the length, until it fails.

    .venv/bin/python benchmarks/bench_gpu.py                                         all of it: hours
    ... bench_gpu.py --rows ours,plain --model qwen3_1_7b --cap none --longest 0 --within 560 --out FOLDER
    ... bench_gpu.py --device cpu --tiny --rows ours,plain --cap none                to try it without a GPU

The output folder gets ``results.json`` and ``table.md`` after each row, and the rows' own output as logs. With the
folder of an earlier call, rows that it holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
from gpu_rows import Record, Records, answer, run_apart
from gpu_systems import SYSTEMS, measure
from gpu_table import goals, table, under
from gpu_task import MODELS, PRECISIONS, Job

from lightning_roundpipe.config import parse_bytes

SCRIPT = Path(__file__).resolve()

NO_DEVICE = 3
"""The exit code without a GPU. 2 is argparse's, 1: nothing could be measured."""

LENGTHS = 1024
"""Longest sequences are found to this many tokens, or to an eighth of their length."""

SIZES_OF = {
    "sequence": "tokens of the shortest",
    "longest": "tokens of a sequence where growing ends, 0: no growing",
    "tokens": "of a step, of at least two microbatches",
    "microbatch": "its tokens, at least a sequence",
    "steps": "that are timed; of longer sequences a third as many",
    "warmup": "steps before them",
}
WARMUP = 4
"""Ours compares the fourth batch with its parts, which takes as long as a step or two, and the 16th and 64th."""
SIZES = {"sequence": 2048, "longest": 2**18, "tokens": 65536, "microbatch": 8192, "steps": 6, "warmup": WARMUP}
TINY = {"sequence": 32, "longest": 0, "tokens": 256, "microbatch": 64, "steps": 3, "warmup": 2}


def several(text: str, known: Sequence[str], name: str) -> list[str]:
    """Names between commas.

    Raises:
        SystemExit: one of them is not known.
    """
    names = text.split(",")
    if wrong := [one for one in names if one not in known]:
        raise SystemExit(f"{name} {','.join(wrong)}: there is no such one. Known: {','.join(known)}.")
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Code 3: there is no GPU.", allow_abbrev=False
    )
    parser.add_argument("--rows", default=",".join(SYSTEMS), help="default: all, %(default)s")
    parser.add_argument("--model", default=",".join(MODELS), help="default: both, %(default)s")
    parser.add_argument("--cap", default="24GiB,none", help="of device memory, or none; default %(default)s")
    for name, meaning in SIZES_OF.items():
        parser.add_argument(f"--{name}", type=int, help=f"{meaning}; default {SIZES[name]}, --tiny: {TINY[name]}")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    parser.add_argument("--workers", type=int, default=1, help="of ours, all on the same GPU")
    parser.add_argument("--seconds", type=float, default=1200, help="that a row may take; default %(default)s")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"bench_gpu-{datetime.now():%Y%m%d-%H%M%S}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a fifth of a million weights")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, size in (TINY if options.tiny else SIZES).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    options.rows = several(options.rows, list(SYSTEMS), "--rows")
    options.model = several(options.model, list(MODELS), "--model")
    options.cap = [None if cap == "none" else int(parse_bytes(cap, "--cap")) for cap in options.cap.split(",")]
    return options


def job_of(
    options: argparse.Namespace, model: str, cap: int | None, row: str, sequence: int, microbatch: int | None = None
) -> Job:
    """A row at a length: the same number of tokens a step as far as possible, cut into microbatches.

    Args:
        microbatch: its tokens. Default: ``--microbatch``, or the whole batch for a system that likes it best.
    """
    size = max(1, options.microbatch // sequence)
    batch = size * max(2, options.tokens // (size * sequence))
    if microbatch is not None or SYSTEMS[row].whole:
        size = min(batch, max(1, (microbatch or batch * sequence) // sequence))
    steps = options.steps if sequence == options.sequence else max(1, options.steps // 3)
    return Job(
        row, model, cap, sequence, batch // size, size, steps, options.warmup,
        options.precision, options.device, options.tiny, options.workers,
    )  # fmt: skip


def smaller(job: Job) -> Job | None:
    """About the same step in microbatches of half the size; None: they are of one sequence already."""
    if job.microbatch_size == 1:
        return None
    size = job.microbatch_size // 2
    return replace(job, microbatches=job.microbatches * job.microbatch_size // size, microbatch_size=size)


def lengths_after(records: Records, row: tuple[str, int | None, str], most: int) -> Iterator[int]:
    """Twice the length as long as that runs, then halves of the interval in which it stops to.

    Args:
        row: model, cap and row.
        most: no length beyond it.
    """
    while True:
        found = records.of(*row)
        ran = max((n for n, record in found.items() if "reason" not in record), default=None)
        if ran is None:
            return
        failed = min((n for n in found if n > ran), default=None)
        if failed is not None and (failed - ran <= max(LENGTHS, ran // 8) or not found[failed].get("out_of_memory")):
            return
        length = 2 * ran if failed is None else (ran + failed) // 2
        if length > most or length in found:
            return
        yield length


class Bench:
    """The rows of one call.

    Args:
        options: of the command.
        records: where they go.
    """

    def __init__(self, options: argparse.Namespace, records: Records) -> None:
        self._options, self._records = options, records
        self._end = time.monotonic() + options.within

    def run(self) -> None:
        """All rows at the shortest length, and then each at longer ones."""
        options = self._options
        rows = [(model, cap, row) for model in options.model for cap in options.cap for row in options.rows]
        for row in rows:
            self._measure(job_of(options, *row, options.sequence))
        for row in rows:
            for length in lengths_after(self._records, row, options.longest):
                if (first := self._records.of(*row).get(options.sequence)) is None:
                    break  # there was no time for it, and the folder has other lengths only
                shortest = first["job"]
                fits = shortest["microbatch_size"] * shortest["sequence"]
                if not self._measure(job_of(options, *row, length, fits)):
                    break

    def measured(self) -> bool:
        """Whether there is a figure in any row."""
        return any("reason" not in record for record in self._records.rows.values())

    def _measure(self, job: Job) -> bool:
        """Measures a job, in smaller microbatches if it does not fit. False: there was no time left for it."""
        known = self._records.of(job.model, job.cap, job.row).get(job.sequence)
        if known is not None and "missing" not in known:
            self._refuse_others(job, Job(**known["job"]))
            return True
        if reason := SYSTEMS[job.row].missing(job.device):
            self._keep(job, {"reason": reason, "missing": True})
            return True
        while True:
            left = self._end - time.monotonic()
            if left <= 0:
                return False
            print(
                f"{job.model}, {under(job.cap)}, {job.row}: {job.microbatches} x {job.microbatch_size} x {job.sequence}"
            )
            found = run_apart(job, SCRIPT, self._records.folder, min(self._options.seconds, left))
            if found.get("timed_out") and left < self._options.seconds:
                return False
            less = smaller(job) if found.get("out_of_memory") else None
            if less is None:
                self._keep(job, found)
                return True
            job = less

    def _refuse_others(self, job: Job, known: Job) -> None:
        """What was measured with other settings would be shown as what was asked for now."""
        for name in ("precision", "device", "tiny", "workers", "steps", "warmup", "tokens"):
            now, then = getattr(job, name), getattr(known, name)
            if now != then:
                raise SystemExit(
                    f"--out {self._records.folder}: {job.row} of {job.model} at {job.sequence} was measured there with "
                    f"{name}={then}, and {name}={now} is asked for now. Choose another folder."
                )

    def _keep(self, job: Job, found: Record) -> None:
        self._records.add(job, found)
        (self._records.folder / "table.md").write_text(self.tables())

    def tables(self) -> str:
        """As they are now, in Markdown."""
        rows = [(row, SYSTEMS[row].title) for row in self._options.rows]
        lines = []
        for model in self._options.model:
            for cap in self._options.cap:
                how = "LoRA" if MODELS[model] else "full fine-tuning"
                lines += [f"### {model}, {how}, {under(cap)}", ""]
                for part in (table, goals):
                    lines += [*part(self._records, model, cap, rows, self._options.sequence), ""]
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.one is not None:
        answer(Job(**json.loads(options.one)), options.into, measure)
        return 0
    bench = Bench(options, Records(options.out))
    if options.device == "cuda" and not torch.cuda.is_available():
        print(bench.tables())
        print(
            "bench_gpu.py: torch sees no CUDA device, so nothing was measured. Run it where there is one, or try it "
            "with --device cpu --tiny --cap none.",
            file=sys.stderr,
        )
        return NO_DEVICE
    bench.run()
    print(f"{bench.tables()}\n{options.out / 'table.md'}")
    return 0 if bench.measured() else 1


if __name__ == "__main__":
    sys.exit(main())
