"""How a logged value follows from those of parts is never guessed from a few of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, run
from test_parts_are_the_whole import Batch, Module, batches, cut_by, trained
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.functional import accuracy
from torchmetrics.functional import mean_squared_error as squares

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.runtime.batch.log_rules import Fitting, chosen, fitting_of, in_both, is_guessed
from lightning_roundpipe.runtime.batch.logs import LINEAR, OPEN, RULES, USUAL, ruled

LABELS = torch.tensor([0, 1, 0, 3, 4, 4, 3, 2])
IN_ONE_PART = torch.tensor([0, 1, 3, 3, 4, 4, 0, 2])
"""A class of which neighbouring parts never have both."""
Logs = Callable[[Any, Tensor, Batch], None]


def data(labels: Tensor = LABELS, count: int = 4) -> list[Batch]:
    found = batches(count)
    for batch in found:
        batch["y"] = labels.clone()
    return found


def logging(logs: Logs, **attributes: Any) -> Module:
    """A module whose head prefers a class at first, so that what it predicts is trivial."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        logits = logits + module.favours
        logs(module, logits, batch)
        return F.cross_entropy(logits, batch["y"])

    favours = nn.Parameter(torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0]))
    return Module(step, favours=favours, **attributes)


def losses(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"], reduction="none")


def or_zero(module: Any, logits: Tensor, batch: Batch) -> None:
    high = batch["y"] > 2
    module.log("tensor", losses(logits, batch)[high].mean() if high.any() else torch.zeros(()), on_epoch=True)
    module.log("number", losses(logits, batch)[~high].mean() if (~high).any() else 0.0, on_epoch=True)


def behind_a_guard(module: Any, logits: Tensor, batch: Batch) -> None:
    high = batch["y"] > 2
    if high.any():
        module.log("high", losses(logits, batch)[high].mean(), on_epoch=True)
    if (~high).any():
        module.log("low", losses(logits, batch)[~high].mean(), on_epoch=True)


def extremes(module: Any, logits: Tensor, batch: Batch) -> None:
    right = logits.argmax(-1) == batch["y"]
    module.log_dict({"any": right.any().float(), "all": right.all().float()})
    module.log_dict({"most": batch["y"].max().float(), "least": float(batch["y"].min()), "count": float(right.sum())})
    module.log("half", logits.detach().abs().max() / 2)


def perplexity(module: Any, logits: Tensor, batch: Batch) -> None:
    high = batch["y"] > 2
    module.log("all", F.cross_entropy(logits, batch["y"]).detach().exp())
    module.log("root", F.mse_loss(logits[:, 0], batch["x"][:, 0]).sqrt())
    module.log("high", torch.where(high, losses(logits, batch), 0.0).sum().div(high.sum().clamp(min=1)).exp())


def of_metrics(module: Any, logits: Tensor, batch: Batch) -> None:
    module.log("accuracy", accuracy(logits, batch["y"], task="multiclass", num_classes=5))
    module.log("squares", squares(logits[:, 0].contiguous(), batch["x"][:, 0].contiguous()))
    module.log("rate", module.optimizers().param_groups[0]["lr"])
    module.log("norm", torch.stack([p.detach().norm() for p in module.parameters()]).norm())
    module.log("sure", logits.softmax(-1).max(-1).values.mean())


STEP: dict[str, Logs] = {
    "or zero": or_zero,
    "behind a guard": behind_a_guard,
    "extremes": extremes,
    "perplexity": perplexity,
    "of metrics": of_metrics,
}


def counts(module: Any, logits: Tensor, batch: Batch) -> None:
    right, high = logits.argmax(-1) == batch["y"], batch["y"] > 2
    module.log("right", right.sum().item())
    module.log("whole", int(right.sum()))
    module.log_dict({"high": float((right & high).sum()), "low": float((right & ~high).sum().item())})


STEP["counts"] = counts


def each_class(module: Any, logits: Tensor, batch: Batch) -> None:
    for label in range(5):
        if (batch["y"] == label).any():
            module.log(f"class {label}", losses(logits, batch)[batch["y"] == label].mean().item())


def recall(module: Any, logits: Tensor, batch: Batch) -> None:
    found, label = logits.argmax(-1), int(module.label)
    of = (batch["y"] == label).sum()
    module.log("recall", ((found == label) & (batch["y"] == label)).sum().item() / max(of.item(), 1))


def recall_of_numpy(module: Any, logits: Tensor, batch: Batch) -> None:
    found, labels = batch.get("found", logits.detach().argmax(-1)).numpy(), batch["y"].numpy()
    label = int(module.label)
    module.log("recall", float(((found == label) & (labels == label)).sum() / np.maximum((labels == label).sum(), 1)))


def running(module: Any, logits: Tensor, batch: Batch) -> None:
    module.metric.update(F.cross_entropy(logits, batch["y"]).detach())
    module.log("average", module.metric.compute())


def running_by_python(module: Any, logits: Tensor, batch: Batch) -> None:
    module.total += F.cross_entropy(logits, batch["y"]).item() * len(logits)
    module.seen += len(logits)
    module.log("average", module.total / module.seen)


def perplexity_of_codes(module: Any, logits: Tensor, batch: Batch) -> None:
    share = F.one_hot(logits.argmax(-1), 5).float().mean(0)
    module.log("perplexity", torch.exp(-(share * (share + 1e-10).log()).sum()))


CUT: dict[str, Logs] = {
    "each class": each_class,
    "recall": recall,
    "recall of numpy": recall_of_numpy,
    "running": running,
    "running by Python": running_by_python,
    "the first": lambda m, x, b: m.log("first", x[0, 0]),
    "perplexity of codes": perplexity_of_codes,
    "codes": lambda m, x, b: m.log("codes", float(x.argmax(-1).unique().numel())),
    "share of codes": lambda m, x, b: m.log("share", (x.argmax(-1).bincount(minlength=5) > 0).float().mean()),
    "calibration": lambda m, x, b: m.log(
        "gap", (x.softmax(-1).amax(-1).mean() - (x.argmax(-1) == b["y"]).float().mean()).abs()
    ),
}


def attributes() -> dict[str, Any]:
    return {"metric": MeanMetric(), "total": 0.0, "seen": 0, "label": 0}


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("name", STEP)
def test_what_operations_show(name: str, microbatches: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(logging(STEP[name]), data(), microbatches, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", logging(STEP[name]), data()), result)


@pytest.mark.parametrize("name", CUT)
def test_what_nothing_shows_is_taken_from_the_whole(name: str) -> None:
    batches = data(IN_ONE_PART if "recall" in name else LABELS)
    result = trained(logging(CUT[name], **attributes()), batches, 4, 2)
    assert cut_by(result) == "model"
    assert_same(run("auto", logging(CUT[name], **attributes()), batches), result)


def test_it_is_said_where_parts_are_to_be_cut() -> None:
    with pytest.warns(RoundPipeWarning, match=r"the logged 'first' may differ .*microbatch_scope='model'"):
        trained(logging(CUT["the first"]), data(), 2, 2, microbatch_scope="step")
    with pytest.warns(RoundPipeWarning, match="the logged 'recall' may differ"):
        trained(logging(recall_of_numpy, label=0), data(IN_ONE_PART), 4, 2, microbatch_scope="step")


def test_a_value_that_is_no_longer_zero_is_compared() -> None:
    """No batch of the first three shows it."""
    labels = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])
    found = [*data(labels, 4), *data(torch.tensor([0, 0, 0, 1, 1, 2, 3, 4]), 3)]
    for batch in found:
        batch["found"] = torch.tensor([0, 1, 0, 1, 2, 3, 4, 2])
    module = logging(recall_of_numpy, label=0)
    with pytest.warns(RoundPipeWarning, match="'recall' was logged with a value that no comparison has shown"):
        result = trained(module, found, 4, 2)
    assert cut_by(result) == "model"
    plain = run("auto", logging(recall_of_numpy, label=0), found)
    assert float(result.metrics["recall"]) == pytest.approx(float(plain.metrics["recall"]))


def of_the_loss(function: Callable[[float], Any]) -> Logs:
    return lambda m, x, b: m.log("value", function(F.cross_entropy(x, b["y"]).item()))


FUNCTIONS: dict[str, Logs] = {
    "exp": of_the_loss(math.exp),
    "exp of at most": of_the_loss(lambda x: math.exp(min(x, 20))),
    "exp of numpy": lambda m, x, b: m.log("value", np.exp(F.cross_entropy(x, b["y"]).detach().numpy())),
    "power of 2": of_the_loss(lambda x: 2 ** (x / math.log(2))),
    "reciprocal": of_the_loss(lambda x: 1 / x),
    "logarithm": of_the_loss(math.log),
    "bits": of_the_loss(lambda x: x / math.log(2)),
    "decibels": of_the_loss(lambda x: -10 * math.log10(x)),
    "decibels of a tensor": lambda m, x, b: m.log("value", 10 * torch.log10(1 / F.cross_entropy(x, b["y"]))),
    "logarithm of a root": lambda m, x, b: m.log("value", -F.mse_loss(x[:, 0], b["x"][:, 0]).sqrt().log2()),
}


def nearly_alike(count: int) -> list[Batch]:
    """Batches of which the first have nearly the same loss in each part."""
    found = data(count=count)
    for number, batch in enumerate(found):
        batch["scale"] = torch.full((8, 1), 1e-2 if number < 3 else 2.0)
    return found


def scaled(logs: Logs, **attributes: Any) -> Module:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        logits = logits * batch["scale"]
        logs(module, logits, batch)
        return F.cross_entropy(logits, batch["y"])

    return Module(step, **attributes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_means_that_are_nearly_alike_at_first(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(scaled(FUNCTIONS[name]), nearly_alike(5), 4, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", scaled(FUNCTIONS[name]), nearly_alike(5)), result)


def test_what_is_nearly_alike_at_first_and_no_mean_is_compared_later() -> None:
    square = of_the_loss(lambda x: x**2)
    with pytest.warns(RoundPipeWarning, match="'value' was logged with a value that no comparison has shown, and"):
        result = trained(scaled(square), nearly_alike(6), 4, 2)
    assert cut_by(result) == "model"
    plain = run("auto", scaled(square), nearly_alike(6))
    for (_, values), (_, others) in list(zip(plain.logged, result.logged, strict=True))[4:]:
        assert others["value"] == pytest.approx(values["value"], rel=1e-4)


OF_ONE_SAMPLE: dict[str, Callable[[Tensor], Any]] = {
    "the largest": lambda each: each.max(),
    "the smallest": lambda each: each.min(),
    "the sum": lambda each: each.sum(),
    "the mean times their number": lambda each: each.mean().item() * len(each),
}


@pytest.mark.parametrize("name", OF_ONE_SAMPLE)
@pytest.mark.parametrize("first", [2, 8])
def test_what_is_the_loss_in_microbatches_of_one_sample(first: int, name: str) -> None:
    """Nor is it merged as the loss where earlier batches have larger microbatches."""

    def logs(module: Any, logits: Tensor, batch: Batch) -> None:
        module.log("value", OF_ONE_SAMPLE[name](losses(logits, batch).detach()))

    found = [
        {key: value[:size] for key, value in batch.items()}
        for batch, size in zip(data(), [first, 8, 2, 2], strict=False)
    ]
    result = trained(logging(logs), found, 2, 2)
    assert_same(run("auto", logging(logs), found), result)


def mean_by_numpy(module: Any, logits: Tensor, batch: Batch) -> None:
    of = batch["y"].numpy() < 2
    module.log("mean", float(losses(logits, batch).detach().numpy()[of].mean()) if of.any() else 0.0)


def test_what_python_computes_of_samples_is_compared_in_several_batches() -> None:
    found = [*data(torch.tensor([0, 1] * 4), 1), *data(LABELS, 3)]
    result = trained(logging(mean_by_numpy), found, 4, 2)
    assert cut_by(result) == "model"
    assert_same(run("auto", logging(mean_by_numpy), found), result)


def unlike_later(module: Any, logits: Tensor, batch: Batch) -> None:
    module.log("rate", module.optimizers().param_groups[0]["lr"])
    module.log("batch", float(module.trainer.global_step))
    module.log("size", float(logits.shape[1]))
    module.log("accuracy", (logits.argmax(-1) == batch["y"]).float().numpy().mean())


def test_what_is_the_same_in_all_parts_needs_no_rule() -> None:
    """A mean that numpy computes is so, too, until the fourth batch."""
    found = [*data(torch.zeros(8, dtype=torch.long), 3), *data(LABELS, 3)]
    for number, batch in enumerate(found):
        batch["shift"] = torch.full((8, 1), 0.0 if number > 2 else 5.0) * torch.tensor([1.0, 0, 0, 0, 0])

    def logs(module: Any, logits: Tensor, batch: Batch) -> None:
        unlike_later(module, logits + batch["shift"], batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(logging(logs), found, 4, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", logging(logs), found), result)


def seen(whole: float, *values: float, known: tuple[str, ...] = ()) -> Fitting:
    """What a comparison shows in which each part counts as much."""
    alike = [1.0] * len(values)
    merged = {USUAL: sum(values) / len(values)} | {rule: float(ruled(rule, values, alike, alike)) for rule in RULES}
    return fitting_of([rule for rule, value in merged.items() if abs(value - whole) < 1e-4], values, known)


def test_rules_that_fit_by_chance() -> None:
    assert is_guessed(seen(1, 1, 0)) and is_guessed(seen(3, 3, 1))
    assert chosen(seen(1, 1, 0, known=("sum",))) == "sum"
    assert chosen(seen(3, 1, 2)) == "sum"
    assert chosen(seen(0, 0, 0)) == chosen(seen(2, 2)) == chosen(seen(2, 2, 2)) == chosen(seen(5.005, 5, 5.01)) == OPEN
    assert chosen(seen(2, 1, 3)) == chosen(seen(2, 2, 2, known=tuple(LINEAR))) == USUAL
    assert chosen(seen(3, 3, 1, known=("largest", "smallest"))) == "largest"


def test_a_second_comparison() -> None:
    first = {("x", 0): seen(3, 3, 1)}
    assert chosen(in_both(first, {("x", 0): seen(4, 2, 4)})["x", 0]) == "largest"
    assert is_guessed(in_both(first, {("x", 0): seen(5, 5, 2)})["x", 0])
    assert is_guessed(in_both(first, {("x", 0): seen(1, 1, 3)})["x", 0])


def returning(module: Any, logits: Tensor, batch: Batch) -> dict[str, Any]:
    loss, right = F.cross_entropy(logits * batch["scale"], batch["y"]), logits.argmax(-1) == batch["y"]
    return {
        "loss": loss, "perplexity": math.exp(loss.item()), "exp": loss.detach().exp(), "count": len(logits),
        "right": right.sum(), "share": right.float().mean(), "most": logits.detach().max().item(), "name": "a step",
    }  # fmt: skip


def test_numbers_that_it_returns_have_the_rules_of_logged_ones() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(Module(returning), nearly_alike(5), 4, 2)
    assert cut_by(result) == "step"
    plain = run("auto", Module(returning), nearly_alike(5))
    for whole, parts in zip(plain.outputs, result.outputs, strict=True):
        assert {key: type(value) for key, value in parts.items()} == {key: type(value) for key, value in whole.items()}
        for key in whole.keys() - {"name"}:
            assert float(parts[key]) == pytest.approx(float(whole[key]), rel=1e-4), key


def without_a_graph(module: Any, logits: Tensor, batch: Batch) -> None:
    high = batch["y"] > 2
    some = batch["y"].masked_fill(high, -100)
    with torch.no_grad():
        module.log("some", F.cross_entropy(logits, some).nan_to_num())
        module.log("weighted", F.cross_entropy(logits, batch["y"], weight=torch.arange(1.0, 6.0)))
        if high.any():
            module.log("high", F.nll_loss(logits.log_softmax(-1)[high], batch["y"][high]))
            module.log("number", F.cross_entropy(logits[high], batch["y"][high]).item())
    module.log("detached", F.cross_entropy(logits.detach(), some), on_epoch=True)


@pytest.mark.parametrize("squared", [False, True])
def test_targets_are_counted_without_a_graph(squared: bool) -> None:
    """Only losses that a gradient flows into were counted; others were means over samples."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        without_a_graph(module, logits, batch)
        return F.mse_loss(logits[:, 0], batch["x"][:, 0]) if squared else F.cross_entropy(logits, batch["y"])

    found = batches(4)
    for batch, labels in zip(
        found, [LABELS, IN_ONE_PART, LABELS.flip(0), torch.tensor([0, 0, 1, 1, 3, 4, 2, 1])], strict=True
    ):
        batch["y"] = labels.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(Module(step), found, 2, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", Module(step), found), result)


def logs_what_it_returns(module: Any, logits: Tensor, batch: Batch) -> dict[str, Any]:
    loss = F.cross_entropy(logits, batch["y"])
    module.log("returned items", float(len(logits)), reduce_fx="sum")
    module.log("returned scores", logits.detach().mean())
    return {"loss": loss, "items": len(logits)}


def test_a_log_that_is_called_as_something_returned() -> None:
    data = batches(3)
    assert_same(run("auto", Module(logs_what_it_returns), data), trained(Module(logs_what_it_returns), data, 4, 2))


def gains_a_term(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = F.cross_entropy(logits, batch["y"])
    if module.global_step >= 2:
        loss = loss + 0.01 * sum(p.square().mean() for p in module.parameters())
    module.log("loss", loss)
    return loss


def test_a_loss_that_gains_a_term_beside_a_part_without_targets() -> None:
    """The part's loss is no number and weighs nothing, and so is what it logs."""
    data = batches(4)
    for batch in data:
        batch["y"][2:4] = -100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundPipeWarning)
        result = trained(Module(gains_a_term), data, 4, 2)
    assert_same(run("auto", Module(gains_a_term), data), result)
