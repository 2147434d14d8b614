"""What ``training_step`` logs from several microbatches reaches loggers and callbacks as from one batch.

Batches are of uneven sizes and cut unevenly; plain training logs each of them whole.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import threading
import warnings
import weakref
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
import torchmetrics.classification as classification
import zoo
from harness import Result, assert_same, loader, ours, run, trainer_of
from lightning.pytorch.loggers.logger import DummyExperiment
from torch import Tensor, nn
from torchmetrics.wrappers import Running

from lightning_roundpipe.messages import RoundPipeWarning
from lightning_roundpipe.runtime.batch import logs
from lightning_roundpipe.runtime.batch.log_rules import Settled
from lightning_roundpipe.runtime.batch.metric_updates import MetricUpdates
from lightning_roundpipe.runtime.profile.comparison import Comparison, Shown

MLP = zoo.make_module("mlp")
LLAMA = zoo.make_module("llama")
UNEVEN = [
    batch for samples, seed in ((6, 1), (5, 2), (7, 3), (2, 4)) for batch in zoo.make_batches("mlp", 1, samples, seed)
]


class ConstantSizes(zoo.PlainClassifier):
    """Logs with a ``batch_size`` that is no count of the batch's samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=1)
        self.log("scale", logits.abs().mean(), on_step=True, on_epoch=True, batch_size=self.size())
        self.log_dict({"counted": loss.detach()}, on_epoch=True, batch_size=len(logits))
        return loss

    def size(self) -> int:
        return 4 if self.global_step < 2 else 3


def both(module: pl.LightningModule, batches: Any = UNEVEN, microbatches: int = 3, **options: Any) -> Any:
    plain = run("auto", module, batches, **options)
    return plain, run(ours(num_microbatches=microbatches), module, batches, devices=2, **options)


@pytest.mark.parametrize("options", [{"num_microbatches": 3}, {"microbatch_size": 2}])
def test_a_batch_size_that_is_constant_is_that_of_the_batch(options: dict[str, Any]) -> None:
    """Means over an epoch weigh batches by it, and these have different numbers of microbatches."""
    module = ConstantSizes(copy.deepcopy(MLP.model))
    batches = [*UNEVEN, *zoo.make_batches("mlp", 1, 1, 5)]
    plain = run("auto", module, batches)
    assert_same(plain, run(ours(**options), module, batches, devices=2))


@pytest.mark.parametrize(("of_whole", "fixed"), [([3], {("loss", 0)}), ([6], set()), ([None], set()), ([], set())])
def test_a_batch_size_is_constant_only_if_the_whole_batch_has_it(of_whole: list[int | None], fixed: set[Any]) -> None:
    """Parts of equal sizes count the same. What the whole batch has issued early is not known here."""

    def shown(sizes: list[int | None]) -> Shown:
        said = [logs.Saying(part, torch.ones(()), None, {"batch_size": size}) for part, size in enumerate(sizes)]
        return Shown(
            logged=[("loss", torch.ones(()))], logs=Settled(said={("loss", 0): said}), weights=[1.0] * len(sizes)
        )

    comparison = Comparison(1e-4, [3, 3])
    comparison.see_logs(shown(of_whole), shown([3, 3]))
    assert comparison.fixed_sizes == fixed


class CountedSizes(zoo.PlainClassifier):
    """Logs a mean over the samples that a mask selects and their number as ``batch_size``, at least one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits({"x": batch["x"], "y": batch["y"]})
        mask, value = batch["mask"], logits.detach().square().mean(-1)
        mean = (value * mask).sum() / mask.sum().clamp(min=1)
        self.log("masked", mean, on_step=False, on_epoch=True, batch_size=max(1, int(mask.sum())))
        self.log("all", value.mean(), on_step=False, on_epoch=True, batch_size=len(mask))
        return loss


@pytest.mark.parametrize(("microbatches", "first_hidden"), [(2, 0), (2, 1), (2, 3), (4, 1), (4, 2)])
def test_a_part_that_counts_nothing_adds_nothing_to_the_batch_size(microbatches: int, first_hidden: int) -> None:
    """Its ``batch_size`` is at least one, as that of the whole batch."""
    module, batches = CountedSizes(copy.deepcopy(MLP.model)), masked(first_hidden)
    plain = run("auto", module, batches)
    assert_same(plain, run(ours(num_microbatches=microbatches), module, batches, devices=2))


def test_it_is_said_where_samples_and_what_they_count_are_one() -> None:
    """Parts of one sample give a ``batch_size`` of one, whether they count it or not. No tensor of the batch is the
    mask, so that nothing shows when samples begin to differ.
    """

    class Hiding(CountedSizes):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step({**batch, "mask": (batch["mask"] > 1).float()}, batch_idx)

    module, batches = Hiding(copy.deepcopy(MLP.model)), [{**b, "mask": b["mask"] + 1} for b in masked(0)]
    with pytest.warns(RoundPipeWarning, match="batch_size of the logged 'masked' in parts of a batch may not add up"):
        run(ours(num_microbatches=4), module, batches, devices=2)


def masked(first_hidden: int) -> list[Any]:
    batches = []
    for number, hidden in enumerate((first_hidden, 2, 4, 0)):
        [batch] = zoo.make_batches("mlp", 1, 4, number)
        batches.append({**batch, "mask": (torch.arange(4) >= hidden).float()})
    return batches


def test_it_is_said_where_batch_sizes_do_not_add_up() -> None:
    class Odd(zoo.PlainClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits = self.loss_and_logits(batch)
            self.log("odd", loss, on_epoch=True, batch_size=len(logits) ** 2)
            return loss

    with pytest.warns(RoundPipeWarning, match="batch_size of the logged 'odd' in parts of a batch may not add up"):
        run(ours(num_microbatches=2), Odd(copy.deepcopy(MLP.model)), UNEVEN[:1], devices=2)


class BatchesAndSamples(torchmetrics.Metric):
    """Has sums that count updates beside sums that count samples."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "samples"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("batches", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, value: Tensor, samples: int) -> None:
        self.total += value
        self.samples += samples
        self.batches = self.batches + 1

    def compute(self) -> Tensor:
        return self.total / self.batches + self.samples / 100


class Spread(torchmetrics.CatMetric):
    def compute(self) -> Tensor:
        return torch.as_tensor(super().compute()).std()


class Fed(zoo.PlainClassifier):
    """Feeds ``metric`` with what ``feed`` makes of logits, targets and loss. Batches may have targets to ignore."""

    def __init__(self, model: nn.Module, metric: Any, feed: Any, *, called: bool) -> None:
        super().__init__(model)
        self.metrics, self.feed, self.called = nn.ModuleDict({"inner": metric}), feed, called

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits(batch)
        metric: Any = self.metrics["inner"]
        given = self.feed(logits.detach(), batch["y"], loss.detach())
        metric(*given) if self.called else metric.update(*given)
        if isinstance(metric, torchmetrics.MetricCollection):
            self.log_dict(metric, on_step=self.called, on_epoch=True)
        else:
            self.log("metric", metric, on_step=self.called, on_epoch=True)
        return loss


def _collection() -> torchmetrics.MetricCollection:
    return torchmetrics.MetricCollection({"one": torchmetrics.MeanMetric(), "two": torchmetrics.MeanMetric()})


OTHER_NUMBERS = [zoo.make_batches("mlp", 1, samples, seed)[0] for samples, seed in ((6, 1), (1, 5), (7, 3), (2, 4))]


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize(
    ("make", "feed"),
    [
        (torchmetrics.MeanMetric, lambda logits, y, loss: (loss,)),
        (torchmetrics.MeanMetric, lambda logits, y, loss: (loss.item(),)),
        (_collection, lambda logits, y, loss: (loss,)),
        (BatchesAndSamples, lambda logits, y, loss: (loss, len(y))),
    ],
)
def test_metrics_that_count_updates(make: Any, feed: Any, called: bool) -> None:
    """Batches have other numbers of parts, of unequal sizes; each batch counts once, as in plain training."""
    module = Fed(copy.deepcopy(MLP.model), make(), feed, called=called)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        plain, other = both(module, OTHER_NUMBERS)
    assert_same(plain, other)


def test_a_metric_counts_updates_behind_parts_without_targets() -> None:
    """A part without targets has nothing to add, so that the first comparison does not show what the metric counts."""
    batches = zoo.make_batches("mlp", 3, 4)
    batches[0]["y"][:3] = -100
    batches.append(zoo.make_batches("mlp", 1, 2)[0])
    module = Fed(copy.deepcopy(MLP.model), torchmetrics.MeanMetric(), lambda logits, y, loss: (loss,), called=True)
    assert_same(*both(module, batches, 4))


@pytest.mark.parametrize("called", [True, False])
def test_it_is_said_that_a_window_holds_parts(called: bool) -> None:
    module = Fed(copy.deepcopy(MLP.model), torchmetrics.RunningMean(3), lambda logits, y, loss: (loss,), called=called)
    with pytest.warns(RoundPipeWarning, match=r"'mean_value_0' of the metric 'metrics.inner'.* counts updates"):
        run(ours(num_microbatches=3), module, UNEVEN[:2], devices=2)


class Window(zoo.PlainClassifier):
    """Logs a window of batches within ``training_step``, and the last batch's value."""

    def __init__(self, model: nn.Module, make: Any, *, reads: bool) -> None:
        super().__init__(model)
        self.window, self.reads = make(), reads

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        value = self.window(loss.detach())
        if self.reads:
            self.log("last", value)
            self.log("window", self.window.compute())
        else:
            self.log("window", self.window)
        return loss


class Doubled(torchmetrics.Metric):
    """Keeps the last value, twice, with the help of a metric that adds up in place and that ``reset`` leaves out."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.helper = torchmetrics.SumMetric()
        self.add_state("last", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.helper.sum_value += value
        self.last = 2 * self.helper.sum_value
        self.helper.reset()

    def forward(self, value: Tensor) -> Tensor:
        self.update(value)
        return self.last

    def compute(self) -> Tensor:
        return self.last + self.helper.sum_value


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torchmetrics.RunningMean(2),
        lambda: torchmetrics.RunningSum(3),
        lambda: Running(torchmetrics.MeanMetric(nan_strategy="ignore"), 4),
        Doubled,
    ],
)
def test_metrics_whose_calls_keep_no_value(make: Any, reads: bool) -> None:
    """The value of the whole batch was added to the metric inside, and was logged, which plain training does not do."""
    module = Window(copy.deepcopy(MLP.model), make, reads=reads)
    options: dict[str, Any] = {"num_microbatches": 3, "microbatch_scope": "model"}
    plain = run("auto", module, UNEVEN)
    assert_same(plain, run(ours(**options), module, UNEVEN, devices=2))


class Late(Fed):
    """Updates its metric from some batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        metric: Any = self.metrics["inner"]
        if batch_idx:
            metric(loss.detach())
        self.log("metric", metric, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [0, 4, 2, 1, 3]])
def test_a_metric_that_is_updated_later_counts_updates(order: list[int]) -> None:
    """The batch that shows it has been trained on."""
    module = Late(copy.deepcopy(MLP.model), torchmetrics.MeanMetric(), None, called=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        assert_same(*both(module, [UNEVEN[number % len(UNEVEN)] for number in order]))


class Feeding(Fed):
    """Updates its metric as ``feed`` says, by the batch's number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits(batch)
        self.feed(self.metrics["inner"], batch_idx, logits.detach(), batch["y"], loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        metric: Any = self.metrics["inner"]
        found = metric.compute()
        self.log_dict(found if isinstance(found, dict) else {"found": found})


def feeding(make: Any, feed: Any) -> Feeding:
    return Feeding(copy.deepcopy(MLP.model), make(), feed, called=False)


def assert_silent(module: pl.LightningModule, batches: Any, microbatches: int = 3, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        assert_same(*both(module, batches, microbatches, **options))


def test_it_is_said_when_a_later_batch_shows_that_a_metric_counts_updates() -> None:
    """Before, it has counted samples."""

    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        metric(loss, (len(y), 1)[batch_idx > 8])

    module = feeding(torchmetrics.MeanMetric, feed)
    with pytest.warns(RoundPipeWarning, match="the metric 'metrics.inner' counts updates, which the first batch"):
        run(ours(num_microbatches=3), module, zoo.make_batches("mlp", 17, 6), devices=2)


@pytest.mark.parametrize("called", [True, False])
def test_a_metric_counts_updates_behind_batches_that_add_nothing(called: bool) -> None:
    """The first batch that adds something to it is compared."""

    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        value = loss * (float("nan"), 1.0)[batch_idx > 4]
        metric(value) if called else metric.update(value)

    numbers = [6, 5, 7, 6, 5, 7, 2, 6, 5]
    batches = [zoo.make_batches("mlp", 1, samples, seed)[0] for seed, samples in enumerate(numbers)]
    assert_silent(feeding(lambda: torchmetrics.MeanMetric(nan_strategy="ignore"), feed), batches)


def _of_a_step(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
    if batch_idx == 2:
        metric.reset()
    metric.update(loss)


def _of_samples(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
    if batch_idx == 2:
        metric.reset()
    metric(loss, len(y))


def _until(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
    metric.update(loss)
    if batch_idx == 2:
        metric.reset()


@pytest.mark.parametrize("feed", [_of_a_step, _of_samples, _until])
@pytest.mark.parametrize(
    "make", [torchmetrics.MeanMetric, lambda: torchmetrics.MeanMetric() + torchmetrics.MeanMetric()]
)
def test_metrics_that_training_step_resets(make: Any, feed: Any) -> None:
    """Each part resets them, which would drop what others have added."""
    assert_silent(feeding(make, feed), [UNEVEN[number % len(UNEVEN)] for number in range(5)])


def test_it_is_said_that_a_reset_between_updates_drops_those_of_other_parts() -> None:
    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        metric.update(loss)
        if batch_idx == 2:
            metric.reset()
            metric.update(loss)

    with pytest.warns(RoundPipeWarning, match="training_step resets the metric 'metrics.inner' between updates"):
        run(ours(num_microbatches=3), feeding(torchmetrics.MeanMetric, feed), UNEVEN, devices=2)


class Unreduced(torchmetrics.Metric):
    """Counts updates in states without a reduction, which is the default."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0))
        self.add_state("updates", torch.tensor(0))

    def update(self, value: Tensor) -> None:
        self.total += value
        self.updates += 1

    def compute(self) -> Tensor:
        return self.total / self.updates


class Beside(torchmetrics.SumMetric):
    """Counts updates in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def update(self, value: Any) -> None:
        super().update(value)
        self.updates += 1

    def compute(self) -> Tensor:
        return super().compute() / max(self.updates, 1)


class Averaged(torchmetrics.Metric):
    """Is averaged over calls."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: Tensor) -> None:
        self.mean = value.clone()

    def compute(self) -> Tensor:
        return torch.as_tensor(self.mean)


def test_metrics_that_count_updates_without_a_reduction() -> None:
    module = Fed(copy.deepcopy(MLP.model), Unreduced(), lambda logits, y, loss: (loss,), called=False)
    assert_silent(module, OTHER_NUMBERS)


@pytest.mark.parametrize(("make", "state"), [(Beside, "updates"), (Averaged, "mean")])
def test_it_is_said_that_a_metric_counts_updates_elsewhere(make: Any, state: str) -> None:
    """Its value shows nothing in the first batch."""

    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        metric(loss * 0 + (make is Averaged))

    with pytest.warns(RoundPipeWarning, match=f"'{state}' of the metric 'metrics.inner'.* counts updates"):
        run(ours(num_microbatches=3), feeding(make, feed), UNEVEN[:1], devices=2)


@pytest.mark.parametrize("copied", [True, False])
def test_collections_that_count_updates(copied: bool) -> None:
    """A collection hands out copies of the states that its metrics share."""

    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        metric.update(value=loss.item())
        assert not copied or [*metric.values()]

    batches = [zoo.make_batches("mlp", 1, samples, seed)[0] for seed, samples in enumerate((6, 5, 7, 2))]
    assert_silent(feeding(_collection, feed), batches, 2)


def test_metrics_within_others_count_updates() -> None:
    """The outer one resets the inner one in each call."""

    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        metric(y.float().mean() * 0 + 1.0 + batch_idx)

    batches = [zoo.make_batches("mlp", 1, samples, seed)[0] for seed, samples in enumerate((6, 1, 7, 2))]
    assert_silent(feeding(lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()), feed), batches)


def test_a_copy_of_a_metric_is_one_of_its_own() -> None:
    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        metric.update(loss, len(y))
        other = metric.clone()
        other.update(loss + 5)
        other.reset()

    assert_silent(feeding(torchmetrics.MeanMetric, feed), UNEVEN)


def test_metrics_of_values_over_samples_count_updates() -> None:
    """The loss is a mean over targets. The first batches ignore none, so that either mean fits."""

    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        metric.update(logits.square().mean().item())

    batches = zoo.make_batches("mlp", 4, 6)
    batches[2]["y"][:3] = batches[3]["y"][4:] = -100
    assert_silent(feeding(torchmetrics.MeanMetric, feed), batches)


def test_it_is_said_that_only_some_parts_update_a_metric() -> None:
    def feed(metric: Any, batch_idx: int, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        if batch_idx < 2 or y[0] == 0:
            metric.update(loss)

    batches = zoo.make_batches("mlp", 3, 6)
    batches[2]["y"] = torch.tensor([0, 1, 1, 1, 1, 1])
    with pytest.warns(RoundPipeWarning, match="nothing has shown how much the value of each part of a batch counts"):
        run(ours(num_microbatches=3), feeding(torchmetrics.MeanMetric, feed), batches, devices=2)


def test_metrics_that_are_not_registered() -> None:
    """A rehearsal leaves nothing in them."""

    class Hidden(zoo.PlainClassifier):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            accuracy = classification.MulticlassAccuracy(5, average="micro")
            self.held = {"train": torchmetrics.MetricCollection({"a": accuracy, "b": accuracy.clone()})}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits = self.loss_and_logits(batch)
            self.held["train"].update(logits.argmax(1) % 5, batch["y"] % 5)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("seen", self.held["train"]["a"].metric_state["fn"].sum().float())
            self.log_dict(self.held["train"].compute())

    assert_same(*both(Hidden(copy.deepcopy(MLP.model)), UNEVEN))


def test_values_of_one_element_and_of_none_are_merged() -> None:
    class Shapes(zoo.PlainClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits = self.loss_and_logits(batch)
            rows = logits.detach().square().mean(1)
            self.log("rows", rows.mean() if len(rows) > 1 else rows, on_epoch=True)
            return loss

    assert_silent(Shapes(copy.deepcopy(MLP.model)), OTHER_NUMBERS, 2)


@pytest.mark.parametrize(
    ("make", "feed"),
    [
        (torchmetrics.MeanMetric, lambda logits, y, loss: (loss, len(y))),
        (Spread, lambda logits, y, loss: (logits[:, 0],)),
        (torchmetrics.MaxMetric, lambda logits, y, loss: (logits,)),
        (torchmetrics.PearsonCorrCoef, lambda logits, y, loss: (logits[:, 0], logits[:, 1])),
        (lambda: classification.BinaryAUROC(), lambda logits, y, loss: (logits[:, 0].sigmoid(), y % 2)),
    ],
)
def test_metrics_that_count_samples_are_left_alone(make: Any, feed: Any) -> None:
    module = Fed(copy.deepcopy(MLP.model), make(), feed, called=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        assert_same(*both(module, UNEVEN))


class Everything(zoo.PlainClassifier):
    """Logs with each combination of on_step, on_epoch, prog_bar, logger, reduce_fx and a given batch size."""

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits(batch)
        x = batch["x"]
        values = {"mean": x.mean(), "sum": x.sum(), "max": logits.detach().max(), "min": x.min()}
        reductions: dict[str, list[Any]] = {"mean": ["mean", torch.mean], "sum": ["sum", torch.sum]}
        reductions |= {"max": ["max", torch.max], "min": ["min", torch.min]}
        flags, levels = (True, False), ((True, True), (True, False), (False, True))
        combinations = itertools.product(levels, flags, flags, (None, len(x)), values)
        for number, ((on_step, on_epoch), prog_bar, logger, size, kind) in enumerate(combinations):
            self.log(
                f"{number} {kind}",
                values[kind],
                prog_bar=prog_bar,
                logger=logger,
                on_step=on_step,
                on_epoch=on_epoch,
                reduce_fx=reductions[kind][number % 2],
                batch_size=size,
            )
        self.log("defaults", loss)
        self.log("positional", x.mean(), True, True, True, True, "mean", False, False, None, True, len(x))
        self.log("number", 2, on_step=True, on_epoch=True)
        self.log("whole", batch["y"].sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("one element", x.mean().reshape(1), on_epoch=True)
        self.log_dict({"a": x[:, 0].mean(), "b": x[:, 1].mean()}, on_step=True, on_epoch=True, batch_size=len(x))
        self.log_dict({"low": x.min(), "lower": x.min() - 1}, reduce_fx="min", prog_bar=True)
        if batch_idx % 2:
            self.log("now and then", x.mean(), on_step=True, on_epoch=True)
        return loss


class Displayed(pl.Callback):
    """What a progress bar, a callback and the loggers would find after each batch."""

    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        sources = (trainer.progress_bar_metrics, trainer.callback_metrics, trainer.logged_metrics)
        self.found.append([{name: torch.as_tensor(v).clone() for name, v in source.items()} for source in sources])


@pytest.mark.slow
def test_every_combination() -> None:
    found = []
    results = []
    for strategy in ("auto", ours(num_microbatches=3)):
        displayed = Displayed()
        devices = 1 if strategy == "auto" else 2
        results.append(
            run(strategy, Everything(MLP.model), UNEVEN, devices=devices, callbacks=[displayed], max_epochs=2)
        )
        found.append(Result(outputs=displayed.found))
    assert len(results[0].metrics) > 150
    assert_same(*results)
    assert_same(*found, outputs=True)


class LogsNumbers(zoo.PlainClassifier):
    """Logs numbers that are no floating-point tensors."""

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        self.log("number", 0.01, on_step=True, on_epoch=True)
        self.log("whole", torch.tensor(batch_idx + 3), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_numbers_have_the_dtype_of_plain_training() -> None:
    """In double precision, a microbatch's number became float32 before it was merged."""
    plain, other = both(LogsNumbers(MLP.model), precision="64-true")
    assert_same(plain, other, rtol=1e-9, atol=1e-9)
    assert {name: v.dtype for name, v in other.metrics.items()} == {name: v.dtype for name, v in plain.metrics.items()}


def test_positional_arguments_have_lightnings_names() -> None:
    names = list(inspect.signature(pl.LightningModule.log).parameters)
    assert (*names[3:],) == logs._POSITIONAL


class Metrics(zoo.PlainClassifier):
    """Metric objects whose value for a batch is no mean of its microbatches' values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.macro = classification.MulticlassF1Score(5, average="macro")
        self.area = classification.MulticlassAUROC(5)  # gathers in lists
        self.total = torchmetrics.SumMetric()
        self.largest = torchmetrics.MaxMetric()
        self.gathered = torchmetrics.CatMetric()  # logged by what is computed from it
        self.range = torchmetrics.MinMaxMetric(classification.MulticlassAccuracy(5))  # a metric that holds another
        self.updated = torchmetrics.MeanMetric()
        scores = [classification.MulticlassAccuracy(5), classification.MulticlassPrecision(5, average="macro")]
        self.called = torchmetrics.MetricCollection(scores, prefix="called/")
        self.fed = self.called.clone(prefix="fed/")

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits(batch)
        logits, x, y = logits.detach(), batch["x"], batch["y"]
        for name, metric in (("macro", self.macro), ("area", self.area)):
            metric(logits, y)
            self.log(name, metric, on_step=True, on_epoch=True)
        self.total(x)
        self.log("total", self.total)
        self.largest(value=x)
        self.log("largest", self.largest, on_step=True, on_epoch=True, prog_bar=True)
        self.range(logits, y)
        self.updated.update(x.std(dim=1))
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.called(logits, y)
        self.log_dict(self.called, on_step=True, on_epoch=True)
        self.fed.update(logits, y)
        self.log_dict(self.fed, on_step=False, on_epoch=True)
        self.gathered(x.mean(dim=1))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("range", self.range.compute()["raw"])
        self.log("gathered", self.gathered.compute().std())
        self.range.reset()
        self.gathered.reset()


def test_metric_objects() -> None:
    """A step's value is that of the whole batch, an epoch's of all that was seen; each microbatch is seen once."""
    plain, result = both(Metrics(MLP.model), max_epochs=2)
    expected = {"macro_step", "area_epoch", "total", "largest_epoch", "updated", "gathered", "range"}
    assert expected | {"called/MulticlassPrecision_step", "fed/MulticlassPrecision"} <= plain.metrics.keys()
    assert_same(plain, result)


def test_means_of_targets_are_weighed_as_the_loss() -> None:
    class Sized(zoo.CausalLM):
        """The number of samples is for the epoch's mean; a step's value is still the mean over its targets."""

        def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
            loss, _ = self.loss_and_logits(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["labels"]))
            return loss

    assert_same(*both(Sized(LLAMA.model), zoo.make_batches("llama")))


class ReadsBack(zoo.PlainClassifier):
    """Looks for what it has logged within the step, and after it."""

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        self.log("loss", loss)
        print("val_loss" in self.trainer.callback_metrics)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(self.trainer.callback_metrics["loss"], outputs["loss"])


def test_callback_metrics_have_a_steps_values_after_it(caplog: pytest.LogCaptureFixture) -> None:
    """Within the step they do not yet, which is said: values of microbatches are merged when all of them are known."""
    trainer = trainer_of(ours(num_microbatches=2), devices=2)
    with caplog.at_level(logging.INFO):
        trainer.fit(ReadsBack(MLP.model), loader(zoo.make_batches("mlp", 2)))
    assert caplog.text.count("training_step reads logged values") == 1


class ReadsAllBack(zoo.PlainClassifier):
    """Uses what it has logged, by each way there is, in its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.read: list[Any] = []

    def log_again(self, name: str, value: Tensor) -> None:
        self.log(name, value, on_step=True, on_epoch=True, prog_bar=True)

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        of_callbacks = self.trainer.callback_metrics["loss_step"]
        self.log_again("twice", 2 * of_callbacks)
        self.log_dict({"a": loss.detach() + 1, "b": 2.5})
        self.read += [of_callbacks, self.trainer.progress_bar_metrics["twice_step"], self.trainer.logged_metrics["a"]]
        results = self.trainer._results
        assert results is not None and "training_step.a" in results and results.get("training_step.c") is None
        self.read += [results["training_step.b"].value, len(results), sorted(results), len(results.items())]
        return loss * (1 + float(of_callbacks))


@pytest.mark.parametrize(
    "options",
    [
        {"num_microbatches": 1},
        {"num_microbatches": 1, "staleness": 1},
        {"num_microbatches": 2},
        {"num_microbatches": 3, "microbatch_scope": "model"},
    ],
)
def test_a_training_step_that_runs_once_reads_back_what_it_logs(options: dict[str, Any]) -> None:
    """So it does where parts would need each other's values, as the first batch shows."""
    read = []
    for strategy in ("auto", ours(**options)):
        module = ReadsAllBack(zoo.make_module("mlp").model)
        trainer = trainer_of(strategy, devices=1 if strategy == "auto" else 2)
        trainer.fit(module, loader(zoo.make_batches("mlp", 3)))
        read.append([module.read, dict(trainer.callback_metrics)])
    if "staleness" in options:  # weights differ from the second batch on
        read = [values[0][:7] for values in read]
    harness.assert_tensors_same(*read)


class ReadsSometimes(zoo.PlainClassifier):
    """Reads back the mean over the epoch after every other batch; meanwhile, a thread reads as well, and copies."""

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx % 2:
            assert self.trainer.callback_metrics["loss_step"] == loss
            copied = copy.deepcopy(self.trainer._results)
            assert type(copied).__module__.startswith("lightning.") and copied is not None
            self.trainer.copied = copied  # type: ignore[attr-defined]
        return loss


@pytest.mark.parametrize("options", [{"microbatch_scope": "model"}, {"num_microbatches": 1}])
def test_means_over_an_epoch_whenever_they_are_read(options: dict[str, Any]) -> None:
    """Batches are of unequal sizes; where calls of the model are cut, the parts' sizes do not count."""
    found = []
    for strategy in ("auto", ours(**{"num_microbatches": 3, **options})):
        module = ReadsSometimes(zoo.make_module("mlp").model)
        trainer = trainer_of(strategy, devices=1 if strategy == "auto" else 2)
        over = threading.Event()

        def poll(trainer: Any = trainer, over: threading.Event = over) -> None:
            while not over.wait(0.001):
                with contextlib.suppress(RuntimeError, AssertionError):  # of a dict that changes; outside of loops
                    len(trainer._results or ())

        reader = threading.Thread(target=poll)
        reader.start()
        try:
            trainer.fit(module, loader(UNEVEN))
        finally:
            over.set()
            reader.join()
        assert len(trainer.copied) == 1  # type: ignore[attr-defined]
        found.append(dict(trainer.callback_metrics))
    harness.assert_tensors_same(*found)


def test_logging_in_hooks() -> None:
    class Hooked(zoo.PlainClassifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("before", float(batch_idx))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("after", outputs["loss"])

        def on_train_epoch_end(self) -> None:
            self.log("end", 1.0)

    assert_same(*both(Hooked(MLP.model), zoo.make_batches("mlp")))


CALLS: dict[str, Any] = {
    "metrics": lambda module, x: module.logger.log_metrics({"own": x.mean().item()}),
    "an experiment": lambda module, x: module.logger.experiment.add_scalar("own", x.mean().item()),
    "a method of its own": lambda module, x: module.logger.log_image("own", [x]),
    "one of several": lambda module, x: module.trainer.loggers[0].log_metrics({"own": 1.0}),
    "its folder": lambda module, x: module.logger.log_dir,
    "its name": lambda module, x: f"{module.logger.name} {module.logger.version} {module.logger.save_dir}",
}


class CallsLogger(zoo.PlainClassifier):
    def __init__(self, model: nn.Module, call: Any) -> None:
        super().__init__(model)
        self.call = call

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        self.call(self, batch["x"])
        return loss


class AnyLogger(harness.MemoryLogger):
    """Has the methods that loggers of services have."""

    log_dir = "folder"

    @property
    def experiment(self) -> Any:
        return DummyExperiment()

    def log_image(self, key: str, images: list[Any]) -> None:
        pass


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "options", [{}, {"microbatch_scope": "model"}, {"num_microbatches": 1}], ids=["parts", "calls", "whole"]
)
def test_a_logger_that_each_microbatch_calls_is_said(name: str, options: dict[str, Any]) -> None:
    module = CallsLogger(zoo.make_module("mlp").model, CALLS[name])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(ours(**{"num_microbatches": 3, **options}), module, UNEVEN, devices=2, logger=AnyLogger())
    said = [str(w.message) for w in seen if "calls a logger itself" in str(w.message)]
    assert len(said) == (not options and not name.startswith("its"))


def _over_a_mask(metric: Any, losses: Tensor, k: Tensor) -> None:
    metric.update((losses * k).sum() / k.sum())


def _of_the_masked(metric: Any, losses: Tensor, k: Tensor) -> None:
    metric(losses[k > 0].mean())


def _at_least_one(metric: Any, losses: Tensor, k: Tensor) -> None:
    metric.update((losses * k).sum() / k.sum().clamp(min=1))


class GivenMeans(zoo.PlainClassifier):
    """Its metric is given a mean by a count that the loss is no mean by."""

    def __init__(self, give: Any) -> None:
        super().__init__(copy.deepcopy(MLP.model))
        self.give, self.metric = give, torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = nn.functional.cross_entropy(self.model(batch["x"]), batch["y"], reduction="none")
        self.give(self.metric, losses.detach(), batch["k"])
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        self.log("found", self.metric.compute())


@pytest.mark.parametrize("give", [_over_a_mask, _of_the_masked, _at_least_one])
def test_a_metric_is_given_means_by_a_count_that_the_first_batches_do_not_show(give: Any) -> None:
    """As long as nothing is masked, they are means over samples."""
    batches = zoo.make_batches("mlp", 6, 6)
    for number, batch in enumerate(batches):
        batch["k"] = torch.ones(6)
        if number > 2:
            batch["k"][[1, 2, 5][: number - 2]] = 0
    assert_silent(GivenMeans(give), batches, 3)


def test_log_refuses_more_arguments_than_lightning_has() -> None:
    """By position, as Lightning's own does, and names how many there may be."""

    class Logs(zoo.make_module("mlp").__class__):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1.0, *[None] * 40)

    module = zoo.make_module("mlp")
    module.__class__ = Logs
    with pytest.raises(TypeError, match=r"log\(\) takes \d+ positional arguments, 42 were given"):
        run(ours(num_microbatches=2), module, zoo.make_batches("mlp", 1))


def test_updates_of_metrics_keep_no_part_that_has_ended() -> None:
    """Recorders and updates refer to each other, and parts hold memory of devices until a garbage collection."""
    updates = MetricUpdates({}, every=True)

    def ended() -> weakref.ref[Any]:
        part = nn.Module()
        with updates.recorded({"mean": torchmetrics.MeanMetric()}, lambda: part):
            pass
        return weakref.ref(part)

    assert ended()() is None
