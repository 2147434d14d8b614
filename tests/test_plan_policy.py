"""``plan="static"``: the same plan in every run, from shapes, and the numbers of plain training."""

import dataclasses
from pathlib import Path

import pytest
import zoo
from harness import assert_identical, assert_same, ours, run
from zoo_runs import expected, module

from lightning_roundpipe.estimates.nominal import EMULATED, GPU, nominal
from lightning_roundpipe.planning.profile import read_hardware

HARDWARE = Path(__file__).parent.parent / "conf" / "hardware"


def trained(name, lora=False, devices=2, precision="32-true", **options):
    given = module(name, lora)
    options = {"num_microbatches": 3, "plan": "static", "loss_weight": given.weighs} | options
    return run(ours(**options), given, zoo.make_batches(name), devices=devices, precision=precision)


def planned(result):
    assert not result.report["profiled"]
    return result.report["plan"], result.report["costs"]


SEVERAL = [
    ("llama", {"precision": "bf16-mixed", "memory_budget": "200KB"}),
    pytest.param("t5", {"staleness": 1}, marks=pytest.mark.slow),
    pytest.param("batch_norm", {"compile_layers": {"backend": "aot_eager"}}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SEVERAL, ids=lambda case: case if isinstance(case, str) else "")
def test_two_runs_have_one_plan_whatever_the_machine_does(name, options):
    """Their times and bytes are equal, too: all that a plan is made from."""
    one = trained(name, **options)
    other = trained(name, **options, emulation={"delay_seed": 5})
    assert planned(one) == planned(other)
    assert one.report is not None and one.report["plan_policy"] == "static"


@pytest.mark.parametrize(("name", "lora"), [("llama", True), ("batch_norm", False)])
def test_the_numbers_are_those_of_plain_training(name, lora):
    """And to the bit those of a plan from measured times: to count operations changes none of them."""
    static = trained(name, lora)
    assert_same(expected(name, lora, 3), static)
    assert_identical(static, trained(name, lora, plan="measured"))


@pytest.mark.parametrize(("rates", "title"), [(EMULATED, "emulated devices"), (GPU, "RTX 4090")])
def test_the_rates_are_those_of_the_shipped_hardware(rates, title):
    machines = [read_hardware(path) for path in sorted(HARDWARE.glob("*.yaml"))]
    [like] = {m.title: m for m in machines if m.title.endswith(title)}.values()
    same = ("flops", "memory_bandwidth", "matmul_efficiency", "memory_efficiency", "kernel_s")
    known = dataclasses.asdict(like)
    assert {key: known[key] for key in same} == {key: dataclasses.asdict(rates)[key] for key in same}
    assert nominal("cpu") is EMULATED and nominal("cuda") is GPU
