"""What the planning tests plan for: small traces, and the paper's models; and the scripts that write figures."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.outlook import ModelShape
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.planning import CallCost, Costs, Plan


def call(
    layer,
    forward=1.0,
    backward=2.0,
    *,
    weights=100,
    gradients=40,
    activations=10,
    needs_backward=True,
    waiting=0,
    returning=0,
    **others,
):
    return CallCost(
        layer, forward, backward, weights, gradients, 5, activations, needs_backward, waiting_bytes=waiting,
        returning_bytes=returning, **others,
    )  # fmt: skip


def even(n):
    return Costs(tuple(call(f"layers.{number}") for number in range(n)))


def timed(forward, backward):
    pairs = zip(forward, backward, strict=True)
    return Costs(tuple(call(f"layers.{number}", f, b) for number, (f, b) in enumerate(pairs)))


def keeps(problem, plan):
    """Whether the plan is within the limits, counted apart from the search that has to keep to them."""
    whole = plan == Plan.single(len(problem.costs), 1)
    is_beside = problem.memory is not None and problem.side_by_side and whole
    most = problem.max_round or plan.round_microbatches
    is_cut_so = problem.min_round <= plan.round_microbatches <= most and len(plan.fused) <= problem.max_fused + 1
    return (is_beside or is_cut_so) and problem.fits(plan)


ROOT = Path(__file__).parents[2]
MODELS = {  # the paper's, with adapters
    "qwen3_1_7b": "none",
    "llama3_1_8b": "none",
    "gpt_oss_20b": "none",
    "qwen3_32b": "none",
    "qwen3_235b_a22b": "attention",
}


def script(path):
    """A script of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def shape(model):
    return ModelShape(PlanRequest(model, lora=MODELS[model], precision="16-mixed"), read_machine("rtx4090x8"))


@cache
def estimated_costs(model):
    return shape(model).costs(4, 2048)
