"""Whether a model is ever slower here than under data parallelism on the same machine: small and large models, planned.

For each model, tokens a second of `roundpipe-plan`'s plan, of the paper's plan in the same engine, and of data
parallelism as DistributedDataParallel has it: weights, gradients (fp32) and AdamW's state on every GPU, nothing
recomputed, steps of as many sequences as ours. That is counted in its favour, see `planning.data_parallel`.

The host has 1 TiB.

    .venv/bin/python benchmarks/bench_data_parallel.py [--hardware rtx4090x4] [--microbatches 8] [--staleness 1]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from common import parser_of, show

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.commands.plan_model import look_at, shape_of, total
from lightning_roundpipe.commands.wish import Wish
from lightning_roundpipe.planning.memory import host_items
from lightning_roundpipe.planning.pipeline import Staleness, run_steps
from lightning_roundpipe.planning.search import paper_plan

SIZES = (8, 4, 2, 1)
STEPS = 8
SMALL: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("smollm2_135m", ()),
    ("qwen3_1_7b", (("num_hidden_layers", "1"), ("vocab_size", "32000"))),
    ("qwen3_1_7b", (("num_hidden_layers", "3"), ("vocab_size", "32000"))),
    ("qwen3_1_7b", (("num_hidden_layers", "8"), ("vocab_size", "32000"))),
    ("qwen3_1_7b", (("num_hidden_layers", "16"), ("vocab_size", "32000"))),
)
LARGE = ("qwen3_1_7b", "llama3_1_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_a22b")


@dataclass(frozen=True)
class Rates:
    """Tokens a second; None where it does not fit."""

    ours: float | None
    paper: float | None
    data_parallel: float | None
    plan: str


def rates(
    model: str, settings: tuple[tuple[str, str], ...], hardware: str, microbatches: int, lora: str, staleness: Staleness
) -> Rates:
    """All three, each with the microbatch that is best for it."""
    machine = replace(read_machine(hardware), host_memory=2**40)
    wish = Wish(
        model=model, hardware=hardware, lora=lora, precision="bf16-mixed", sequence_length=2048, microbatch_size=None,
        microbatches=microbatches, workers=None, staleness=staleness, memory=None, model_settings=settings,
    )  # fmt: skip
    shape = shape_of(wish, machine)
    found = look_at(shape, wish, longest=False)
    best: list[float] = []
    for size in SIZES:
        costs, tokens = shape.costs(size, 2048), microbatches * size * 2048
        limits = look_at(shape, replace(wish, microbatch_size=size, search_seconds=1e-9), longest=False).limits
        try:
            plan = paper_plan(costs, machine.workers, microbatches, limits)
        except ValueError:  # a layer does not fit
            continue
        if total(host_items(plan, costs, shape.parameters, machine.workers, microbatches)) <= machine.host_memory:
            run = run_steps(plan, costs, machine.workers, microbatches, found.rules, 2 * STEPS)
            best.append(tokens / run.period_s(STEPS))
    ours = found.tokens_per_s if found.run is not None else None
    stages = "side by side" if found.side_by_side else f"{len(found.plan.forward)}+1+{len(found.plan.backward)}"
    return Rates(ours, max(best, default=None), found.data_parallel_tokens_per_s, f"{found.microbatch_size}, {stages}")


def rows(options: Any) -> Iterator[tuple[str, ...]]:
    for model, settings in (*SMALL, *((model, ()) for model in LARGE)):
        lora = "attention" if model == "qwen3_235b_a22b" else "none"
        found = rates(model, settings, options.hardware, options.microbatches, lora, 1 if options.staleness else 0)
        cells = [f"{rate:,.0f}" if rate else "-" for rate in (found.ours, found.paper, found.data_parallel)]
        others = max(found.paper or 0.0, found.data_parallel or 0.0)
        ratio = f"{found.ours / others:.2f}" if found.ours and others else "-"
        yield " ".join((model, *("=".join(pair) for pair in settings))), *cells, ratio, found.plan


def main() -> None:
    parser = parser_of(__doc__, microbatches=8, staleness=0)
    parser.add_argument("--hardware", default="rtx4090x4")
    options = parser.parse_args()
    title = f"Tokens a second, {options.hardware}, {options.microbatches} microbatches, staleness {options.staleness}"
    show(title, ("model", "ours", "paper's plan", "data parallel", "ratio", "sequences, stages"), rows(options))


if __name__ == "__main__":
    main()
