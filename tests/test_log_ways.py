"""A name that is computed on other lines, or logged by others, from batch to batch has the rule of those that ran."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run
from test_parts_are_the_whole import Batch, Module, batches, cut_by, trained
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.runtime.batch.log_rules import Fitting, Way, settled, undecided, ways_of
from lightning_roundpipe.runtime.batch.logs import BY_ITS_COUNT, OPEN, LogRecorder
from lightning_roundpipe.runtime.batch.losses import ITSELF
from lightning_roundpipe.runtime.profile import scope

Step = Callable[[Any, Tensor, Batch], Any]
LATE = 4
"""The batch from which on something else is logged."""


def data(count: int = 9) -> list[Batch]:
    """Batches with two masks, of which each part has another number of samples."""
    found, generator = batches(count), torch.Generator().manual_seed(7)
    for batch in found:
        for name, always in (("m", [0, 3, 4, 7]), ("n", [1, 2, 3, 6])):
            batch[name] = (torch.rand(8, generator=generator) > 0.45).float()
            batch[name][always] = 1.0
    return found


def losses(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"], reduction="none")


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"])


def is_late(module: Any) -> bool:
    return bool(module.trainer.global_step >= LATE)


def is_odd(module: Any) -> bool:
    return bool(module.trainer.global_step % 2)


def no_longer_masked(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    value, each = logits.square().mean(), losses(logits, batch)
    if not is_late(module):
        value = (each * batch["m"]).sum() / batch["m"].sum()
    module.log("value", value)
    return (each * batch["n"]).sum() / batch["n"].sum()


def another_mask(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    each = losses(logits, batch)
    if is_late(module):
        value = (each * batch["m"]).sum() / batch["m"].sum()
    else:
        value = (each * batch["n"]).sum() / batch["n"].sum()
    module.log("value", value)
    return loss(logits, batch)


def another_mask_now_and_then(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    each = losses(logits, batch)
    if is_odd(module):
        value = (each * batch["m"]).sum() / batch["m"].sum()
    else:
        value = (each * batch["n"]).sum() / batch["n"].sum()
    module.log("value", value.item())
    return loss(logits, batch)


def either_sum_or_largest(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    each = losses(logits, batch).detach()
    if is_odd(module):
        value = each.sum().item()
    else:
        value = each.max().item()
    module.log("value", value, on_epoch=True)
    return loss(logits, batch)


def one_of_two(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """Both are computed in any batch: nothing is called for the first time."""
    each = losses(logits, batch)
    one, other = (each * batch["m"]).sum() / batch["m"].sum(), (each * batch["n"]).sum() / batch["n"].sum()
    module.log("value", one if is_odd(module) else other)
    return loss(logits, batch)


def logged_on_two_lines(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    each = losses(logits, batch)
    mean, total = (each * batch["m"]).sum() / batch["m"].sum(), each.detach().sum()
    if is_odd(module):
        module.log("value", mean)
    else:
        module.log("value", total)
    return loss(logits, batch)


def keys_that_change(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    each = losses(logits, batch).detach()
    if is_odd(module):
        module.log_dict({"value": each.sum(), "other": each.mean()})
    else:
        module.log_dict({"value": each.min()})
    return loss(logits, batch)


def returned_instead(module: Any, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    each = losses(logits, batch).detach()
    if is_odd(module):
        value = each.sum()
    else:
        value = (each * batch["m"]).sum() / batch["m"].sum()
    return {"loss": loss(logits, batch), "value": value}


def mean_of(each: Tensor, mask: Tensor) -> Tensor:
    return (each * mask).sum() / mask.sum()


def another_call_of_a_known_line(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """The second count that the line finds is the value's, and in some batches it is the first."""
    each = losses(logits, batch)
    mask = batch["n"]
    for _ in range(1 + (not is_odd(module))):
        value, mask = mean_of(each, mask), batch["m"]
    module.log("value", value.item())
    return loss(logits, batch)


STEPS: dict[Step, list[int]] = {
    no_longer_masked: [LATE],
    another_mask: [LATE],
    another_mask_now_and_then: [1],
    either_sum_or_largest: [1],
    one_of_two: [1],
    logged_on_two_lines: [1],
    keys_that_change: [1],
    returned_instead: [1],
    another_call_of_a_known_line: [1],
}
"""Steps, and the batches whose value is merged before it is known how."""


def said_by(step: Step, found: list[Batch], microbatches: int = 4, **attributes: Any) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RoundPipeWarning)
        result = trained(Module(step, **attributes), found, microbatches, 2)
    return result, "\n".join(str(w.message) for w in caught if issubclass(w.category, RoundPipeWarning))


def values_of(result: Any, name: str = "value") -> list[float]:
    """The value of each batch, as it is returned or logged."""
    if result.outputs and isinstance(result.outputs[0], dict) and name in result.outputs[0]:
        return [float(one[name]) for one in result.outputs]
    return [line[key] for _, line in result.logged for key in (name, f"{name}_step") if key in line]


def differ(step: Step, found: list[Batch], result: Any, name: str = "value") -> list[int]:
    """The batches whose value is not that of plain training."""
    plain, ours = values_of(run("auto", Module(step), found), name), values_of(result, name)
    assert len(plain) == len(ours) >= len(found) - LATE
    return [i for i, (x, y) in enumerate(zip(plain, ours, strict=True)) if x != pytest.approx(y, rel=1e-4)]


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("step", STEPS)
def test_the_lines_that_ran_decide(step: Step, microbatches: int) -> None:
    result, said = said_by(step, data(), microbatches)
    assert cut_by(result) == "step"
    wrong = differ(step, data(), result)
    assert set(wrong) <= set(STEPS[step])
    assert bool(wrong) == ("value' is another function of the batch than before" in said.replace('"', ""))
    if microbatches == 4:
        assert wrong == STEPS[step]


def accuracy(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    if is_late(module):
        module.log("value", (logits.argmax(-1) == batch["y"]).float().mean())
        module.log("number", logits.max(-1).values.mean().item())
        module.log("loss", loss(logits * 2, batch), on_epoch=True)
    return loss(logits, batch)


def over_the_mask_of_the_loss(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    if is_late(module):
        module.log("value", (logits.max(-1).values * batch["m"]).sum() / batch["m"].sum())
    return (losses(logits, batch) * batch["m"]).sum() / batch["m"].sum()


def of_a_class_or_zero(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """Zero in the samples of some comparisons, which say nothing of another way then."""
    each, of = losses(logits, batch).detach(), batch["y"] == 1
    total = torch.zeros(())
    for label in range(5):
        if (batch["y"] == label).any():
            total = total + each[batch["y"] == label].sum()
    module.log("total", total)
    module.log("value", each[of].mean() if of.any() else 0.0)
    return loss(logits, batch)


@pytest.mark.parametrize("step", [accuracy, over_the_mask_of_the_loss, of_a_class_or_zero])
def test_a_new_mean_that_is_merged_as_it_should_be_is_not_warned_of(step: Step) -> None:
    result, said = said_by(step, data())
    assert not said
    assert differ(step, data(), result) == []


def over_another_mask(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    if is_late(module):
        module.log("value", (logits.max(-1).values * batch["n"]).sum() / batch["n"].sum())
    return (losses(logits, batch) * batch["m"]).sum() / batch["m"].sum()


def test_a_new_mean_by_counts_that_nobody_has_counted_is_warned_of() -> None:
    result, said = said_by(over_another_mask, data())
    assert "'value' was logged for the first time" in said and "(mean by its own count)" in said
    assert differ(over_another_mask, data(), result) == [0]


COUNTED = """
def step(module, logits, batch):
    module.log("value", float(batch["y"].numel()), reduce_fx="sum")
    return loss(logits, batch)


class Of(Module):
    def training_step(self, batch, batch_idx):
        return self.step(self, self.model(batch["x"]), batch)
"""


@pytest.mark.parametrize("package", ["lightning_roundpipe/tasks", "lightning_roundpipe/model", "lightning/pytorch"])
def test_a_module_of_a_package_calls_the_same_wherever_it_runs(package: str) -> None:
    """A rehearsal runs below the user's script, and a worker's thread below nothing: neither is what the step calls."""
    found = importlib.util.find_spec(package.partition("/")[0])
    assert found is not None and found.origin is not None
    file = Path(found.origin).parent.joinpath(*package.split("/")[1:], "of_a_test.py")
    names: dict[str, Any] = {"Module": Module, "loss": loss, "__name__": "of_a_test"}
    exec(compile(COUNTED, file, "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trained(names["Of"](names["step"]), data(), 4, devices=2)
    assert [str(one.message) for one in caught if issubclass(one.category, RoundPipeWarning)] == []
    assert values_of(result) == values_of(run("auto", names["Of"](names["step"]), data()))


def test_what_is_computed_in_another_way_where_nothing_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and the rule of another way is not taken."""
    monkeypatch.setattr(scope, "MOST_FIRST_TIMES", 1)

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        if module.trainer.global_step == 3:
            module.log("first", logits.detach().mean())
        return no_longer_masked(module, logits, batch)

    result, said = said_by(step, data(12))
    assert {*range(LATE, 8)} <= {*differ(step, data(12), result)} <= {*range(LATE, 12)}
    assert "the logged 'value' was zero or the same" in said


def of_metrics(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    each = losses(logits, batch).detach()
    if is_odd(module):
        module.mean.update(each)
        module.log("value", module.mean.compute())
        module.mean.reset()
    else:
        module.total.update(each)
        module.log("value", module.total.compute())
        module.total.reset()
    return loss(logits, batch)


def test_what_metrics_compute_on_two_lines() -> None:
    result, said = said_by(of_metrics, data(), mean=MeanMetric(), total=SumMetric())
    plain = run("auto", Module(of_metrics, mean=MeanMetric(), total=SumMetric()), data())
    ours = [x == pytest.approx(y, rel=1e-4) for x, y in zip(values_of(plain), values_of(result), strict=True)]
    assert ours.count(False) <= 1 and all(ours[2:])
    assert all(ours) or "'value'" in said


def recorders_of(*values: float) -> list[LogRecorder]:
    found = [LogRecorder() for _ in values]
    for recorder, value in zip(found, values, strict=True):
        recorder.log("x", value)
    return found


def test_which_way_was_taken() -> None:
    key = ("x", 0)
    total, largest = Fitting(("sum",), frozenset({"sum"})), Fitting(("largest",), frozenset({"largest"}))
    ways = ways_of({(key, frozenset({1, 2}), None): total, (key, frozenset({1, 2, 3}), None): largest})

    def rule(*ran: int) -> str:
        return settled(recorders_of(1.0, 2.0), ways, frozenset(ran)).rules[key]

    assert rule(1, 2, 9) == "sum"
    assert rule(1, 2, 3) == "largest"
    assert rule(1, 3) == OPEN
    how = settled(recorders_of(1.0, 2.0), ways, frozenset({1, 3}))
    assert undecided(how, ways, [1, 1], [1, 1], 1e-4) == {"x": 0}
    assert undecided(how, ways, [2, 1], [2, 1], 1e-4, [1.0, 2.0]) == {}  # it is the loss
    assert undecided(how, ways, [1, 1], [1, 1], 1e-4, [1.0, 2.0]) == {"x": 0}  # or the largest of a sample
    same = settled(recorders_of(0.0, 0.0), ways, frozenset({1, 3}))
    assert undecided(same, ways, [1, 1], [1, 1], 1e-4) == {}


def test_ways_with_the_same_rule_are_one() -> None:
    key, total = ("x", 0), Fitting(("sum",), frozenset({"sum"}))
    [way] = ways_of({(key, frozenset({1, 2}), None): total, (key, frozenset({1, 3}), None): total})[key]
    assert way == Way(frozenset({1}), None, "sum", total)
    guess, other = Fitting(("sum", "largest")), Fitting(("smallest", "largest"))
    found = ways_of({(key, frozenset({n}), None): fitting for n, fitting in enumerate((guess, total, other))})
    assert [way.rule for way in found[key]] == ["sum", OPEN]


def test_a_count_that_no_part_has_found() -> None:
    ways = {("x", 0): [Way(frozenset(), ITSELF, BY_ITS_COUNT)]}
    how = settled(recorders_of(1.0, 2.0), ways, None)
    assert how.astray == {("x", 0)} and how.rules == {("x", 0): OPEN}
    assert undecided(how, ways, [1, 1], [1, 1], 1e-4) == {"x": 0}
