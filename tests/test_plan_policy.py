"""``plan="static"``: the same plan in every run, from shapes, and the numbers of plain training."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import zoo
from harness import Result, assert_identical, assert_same, ours, run
from torch import Tensor, nn
from zoo_runs import expected, module

from lightning_roundpipe.config import Options
from lightning_roundpipe.planning.nominal import EMULATED, GPU, nominal
from lightning_roundpipe.planning.profile import read_hardware
from lightning_roundpipe.planning.schedule import Plan

HARDWARE = Path(__file__).parent.parent / "conf" / "hardware"


def trained(name: str, lora: bool = False, devices: int = 2, precision: str = "32-true", **options: Any) -> Result:
    entry, given = zoo.ENTRIES[name], module(name, lora)
    options = {"layers": entry.layers, "num_microbatches": 3, "plan": "static", "loss_weight": given.weighs} | options
    return run(ours(**options), given, zoo.make_batches(name), devices=devices, precision=precision)


@pytest.fixture
def busy() -> Iterator[None]:
    """Threads that compute all the time, beside the training."""
    end = threading.Event()

    def burn() -> None:
        while not end.is_set():
            square = torch.ones(64, 64, dtype=torch.float32)  # training sets the default for all threads
            square.mm(square)

    threads = [threading.Thread(target=burn) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield
    end.set()
    for thread in threads:
        thread.join()


def planned(result: Result) -> tuple[str, Any]:
    assert result.report is not None
    assert not result.report["profiled"]
    return result.report["plan"], result.report["costs"]


SEVERAL: list[Any] = [
    pytest.param("llama", {"lora": True}, marks=pytest.mark.slow),
    ("llama", {"precision": "bf16-mixed", "memory_budget": "200KB"}),
    pytest.param("gpt_oss", {"precision": "bf16-true"}, marks=pytest.mark.slow),
    ("qwen3_moe", {}),
    pytest.param("t5", {"staleness": 1}, marks=pytest.mark.slow),
    pytest.param("batch_norm", {"compile_layers": {"backend": "aot_eager"}}, marks=pytest.mark.slow),
    ("layer_drop", {}),
    pytest.param("recurrent", {"round_microbatches": 1}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SEVERAL, ids=lambda case: case if isinstance(case, str) else "")
def test_two_runs_have_one_plan_whatever_the_machine_does(name: str, options: dict[str, Any], busy: None) -> None:
    """Their times and bytes are equal, too: all that a plan is made from."""
    one = trained(name, **options)
    other = trained(name, **options, emulation={"delay_seed": 5})
    assert planned(one) == planned(other)
    assert one.report is not None and one.report["plan_policy"] == "static"


@pytest.mark.parametrize(("name", "lora"), [("llama", True), ("gpt_oss", False), ("batch_norm", False), ("t5", False)])
def test_the_numbers_are_those_of_plain_training(name: str, lora: bool) -> None:
    """And to the bit those of a plan from measured times: to count operations changes none of them."""
    static = trained(name, lora)
    assert_same(expected(name, lora, 3), static)
    assert_identical(static, trained(name, lora, plan="measured"))


@pytest.mark.slow
def test_counting_changes_nothing_that_is_compiled() -> None:
    """The layer that runs as it is written, to be counted, leaves its running statistics and dropout as they were."""
    options = {"compile_layers": {"backend": "aot_eager"}}
    assert_identical(trained("batch_norm", **options), trained("batch_norm", plan="measured", **options))


def test_what_is_compiled_costs_what_it_costs_as_it_is_written() -> None:
    (_, written), (_, compiled) = (
        planned(trained("mlp")),
        planned(trained("mlp", compile_layers={"backend": "aot_eager"})),
    )
    for one, other in zip(written["calls"], compiled["calls"], strict=True):
        assert other["forward_s"] == pytest.approx(one["forward_s"])
        assert other["backward_s"] == pytest.approx(one["backward_s"], abs=2 * EMULATED.kernel_s)  # sums are elsewhere


class Products(nn.Module):
    """A layer of so many products of equal size."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(256))
        self.products = products

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.products):
            x = x @ self.weight
        return x


class Uneven(pl.LightningModule):
    def __init__(self, *products: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Products, products))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@functools.cache
def uneven(plan: str) -> tuple[Plan, list[float]]:
    strategy = ours(num_microbatches=4, layers=["Products"], plan=plan)
    result = run(strategy, Uneven(1, 1, 64, 1, 1, 1, 1, 1), [torch.ones(1024, 256)] * 2, devices=2, watch=False)
    text, costs = planned(result)
    return Plan.parse(text), [call["forward_s"] + call["backward_s"] for call in costs["calls"]]


def test_static_and_measured_plans_agree_on_what_is_long() -> None:
    """By the measured times, the longest stage of either plan is the layer that has 64 products, with little else."""
    (static, counted), (measured, times) = uneven("static"), uneven("measured")
    assert counted[2] / counted[1] == pytest.approx(64, rel=0.05)
    for plan in (static, measured):
        longest = max(sum(times[stage.first : stage.last + 1]) for stage in plan.stages() if stage.phase != "forward")
        assert longest < 2 * times[2]


class Unseen(torch.autograd.Function):
    """Computes past torch, which counts nothing then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wrapped(x.numpy() @ weight.numpy())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return wrapped(grads[0].numpy() @ weight.numpy().T), wrapped(x.numpy().T @ grads[0].numpy())


def wrapped(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array)


class UnseenLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64, width))
        self.back = nn.Parameter(torch.eye(width, 64))

    def forward(self, x: Tensor) -> Tensor:
        return Unseen.apply(Unseen.apply(x, self.weight), self.back)  # type: ignore[no-untyped-call, no-any-return]


class UnseenLayers(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(UnseenLayer(width) for width in (64, 64, 1024, 64))


def test_a_layer_without_countable_operations_takes_its_time_from_bytes() -> None:
    strategy = ours(num_microbatches=2, layers=["UnseenLayer"], plan="static")
    _, costs = planned(run(strategy, UnseenLayers(), [torch.ones(8, 64)] * 2, devices=2, watch=False))
    small, _, large, _ = costs["calls"]
    assert EMULATED.kernel_s < small["forward_s"] < large["forward_s"] / 4
    assert small["backward_s"] > small["forward_s"]


@pytest.mark.parametrize(("rates", "title"), [(EMULATED, "emulated devices"), (GPU, "RTX 4090")])
def test_the_rates_are_those_of_the_shipped_hardware(rates: Any, title: str) -> None:
    machines = [read_hardware(path) for path in sorted(HARDWARE.glob("*.yaml"))]
    [like] = {m.title: m for m in machines if m.title.endswith(title)}.values()
    same = ("flops", "memory_bandwidth", "matmul_efficiency", "memory_efficiency", "kernel_s")
    known = dataclasses.asdict(like)
    assert {key: known[key] for key in same} == {key: dataclasses.asdict(rates)[key] for key in same}
    assert nominal("cpu") is EMULATED and nominal("cuda") is GPU


@pytest.mark.parametrize(
    ("given", "plan", "policy", "text"),
    [
        (None, "measured", "measured", None),
        ("measured", "measured", "measured", None),
        ("static", "static", "static", None),
        ("fused 0", "fused 0", "text", "fused 0"),
    ],
)
def test_what_plan_takes(given: str | None, plan: str, policy: str, text: str | None) -> None:
    options = Options(plan=given)
    assert (options.plan, options.plan_policy, options.plan_text) == (plan, policy, text)
    assert ours().options.plan == "measured"
