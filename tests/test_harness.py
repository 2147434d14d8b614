"""Comparisons with plain training hang neither on the last bits of a processor's kernels nor let a fault pass.

`Kinked` is the worst case: each of its ReLUs has an input that is zero but for rounding, so plain training itself takes
another way when the last bits of its weights change. The models of the zoo beside it have ReLUs, max pooling or experts
that are chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import zoo
from harness import Result, assert_same, by_hand, ours, run
from torch import Tensor, nn

SAMPLES, MICROBATCHES = 5, 3  # 2, 2 and 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu())


class Kinked(zoo.PlainClassifier):
    """Its biases cancel what the stem makes of one sample of the first batch."""

    def __init__(self, x: Tensor) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            super().__init__(Net())
        stem = self.model.stem
        with torch.no_grad():
            sums = x.double() @ stem.weight.double().T
            stem.bias.copy_(-sums[torch.arange(64) % len(x), torch.arange(64)])


@functools.cache
def made(name: str) -> tuple[zoo.ZooModule, list[zoo.Batch]]:
    if name != "kinked":
        return zoo.make_module(name), zoo.make_batches(name, samples=SAMPLES)
    batches = zoo.make_batches("mlp", samples=SAMPLES)
    return Kinked(batches[0]["x"]), batches


@functools.cache
def plainly(name: str) -> Result:
    return run("auto", *made(name))


def strict(result: Result) -> Result:
    """Without asking what the model makes of rounding."""
    return dataclasses.replace(result, again=None)


def test_what_a_model_makes_of_rounding_is_no_difference() -> None:
    """The other run is of no seed that the comparison tries itself."""
    module, batches = made("kinked")
    plain, other = plainly("kinked"), run("auto", harness.nudged(module, 100), batches)
    with pytest.raises(AssertionError, match=r"step 0: gradient of model\.stem\.weight"):
        assert_same(strict(plain), other)
    assert_same(plain, other)


def test_the_strategy_equals_plain_training_beside_kinks() -> None:
    assert_same(plainly("kinked"), run(ours(num_microbatches=MICROBATCHES), *made("kinked"), devices=2))


def test_other_kinds_of_difference_are_never_rounding() -> None:
    """A gradient that is missing, a NaN and a step too few."""
    plain, module, batches = plainly("kinked"), *made("kinked")
    missing, broken, short = (run("auto", module, batches) for _ in range(3))
    missing.grads[0]["model.stem.weight"] = None
    broken.grads[0]["model.stem.weight"][3, 3] = float("nan")  # type: ignore[index]
    short.losses.pop()
    for result in (missing, broken, short):
        with pytest.raises(AssertionError):
            assert_same(plain, result)


# ------------------------------------------------------------------------------------------------ faults that must show


class Late(torch.optim.SGD):
    """Takes each gradient a step late."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        [group] = self.param_groups
        for p in group["params"]:
            before = self.state[p].get("late", torch.zeros_like(p))
            self.state[p]["late"], p.grad = p.grad, before
        super().step(closure)


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer], name: str) -> Result:
    module, batches = made(name)
    was = module.make_optimizer
    module.make_optimizer = make
    try:
        return by_hand(module, batches, MICROBATCHES)
    finally:
        module.make_optimizer = was


def a_microbatch_lost(name: str) -> Result:
    """Its loss is counted, its gradient is not."""
    module, batches = made(name)
    step, calls = module.training_step, iter(range(1000))

    def loses(batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss = step(batch, batch_idx)
        return loss.detach() + 0 * loss if next(calls) % MICROBATCHES == 1 else loss

    lossy = type(module).__new__(type(module))
    lossy.__dict__.update(module.__dict__)
    lossy.training_step = loses  # type: ignore[method-assign]
    return by_hand(lossy, batches, MICROBATCHES)


FAULTS: dict[str, Callable[[str], Result]] = {
    "a microbatch lost": a_microbatch_lost,
    "microbatches weigh the same": lambda name: by_hand(*made(name), MICROBATCHES, weight=lambda batch: 1.0),
    "the strategy's weigh the same": lambda name: run(
        ours(num_microbatches=MICROBATCHES, loss_weight=lambda batch: 1.0), *made(name), devices=2
    ),
    "a step late": lambda name: with_optimizer(lambda p: Late(p, lr=0.1, momentum=0.9), name),
    "rate off by a hundredth": lambda name: with_optimizer(lambda p: torch.optim.SGD(p, lr=0.101, momentum=0.9), name),
}


@pytest.mark.parametrize(("name", "fault"), [*(("kinked", fault) for fault in FAULTS), ("unet", "a step late")])
def test_faults_are_seen_beside_kinks(name: str, fault: str) -> None:
    with pytest.raises(AssertionError, match="differences, the worst"):
        assert_same(plainly(name), FAULTS[fault](name))


@pytest.mark.parametrize("name", ["kinked", "experts_in_user_code"])
def test_without_a_fault_there_is_none(name: str) -> None:
    assert_same(plainly(name), by_hand(*made(name), MICROBATCHES))


def test_the_tests_that_are_listed_as_slow_exist() -> None:
    """A renamed test would be fast again."""
    for listed in Path(__file__).with_name("slow_tests.txt").read_text().splitlines():
        file, *_, name = listed.partition("[")[0].split("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), listed
