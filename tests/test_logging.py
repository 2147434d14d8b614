"""What ``training_step`` logs in a window, in each way that Lightning has, and what callbacks find of it."""

import itertools

import torch
import torchmetrics
import torchmetrics.classification as classification
import zoo
from harness import loader
from plain_oracle import assert_plain, on_devices
from torchmetrics.wrappers import Running

DEVICES = on_devices(3)
SIZES = (6, 5, 7, 2, 3)


class Logs(zoo.PlainClassifier):
    """Each subclass logs in ``step``, which gets the loss, the logits and the batch."""

    def __init__(self):
        super().__init__(zoo.make_module("mlp").model)
        self.double()

    def training_step(self, batch, batch_idx):
        loss, logits = self.loss_and_logits(batch)
        self.step(loss, logits.detach(), batch, batch_idx)
        return loss


def batches():
    found = [zoo.make_batches("mlp", 1, samples, seed)[0] for seed, samples in enumerate(SIZES)]
    return loader([{"x": batch["x"].double(), "y": batch["y"]} for batch in found])


class Everything(Logs):
    """Logs with each combination of on_step, on_epoch, prog_bar, logger, reduce_fx and a given batch size."""

    def step(self, loss, logits, batch, batch_idx):
        x = batch["x"]
        values = {"mean": x.mean(), "sum": x.sum(), "max": logits.max(), "min": x.min()}
        reductions = {"mean": ["mean", torch.mean], "sum": ["sum", torch.sum]}
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


@DEVICES
def test_every_combination(devices):
    """Callbacks, progress bars and loggers find the same after each batch."""
    plain, _ = assert_plain(devices, Everything, batches, accumulate_grad_batches=2, max_epochs=2)
    assert len(plain.final["metrics"]) > 150


class Metrics(Logs):
    """Metric objects that gather lists, hold another metric, keep a window of values, or are reset by the user."""

    def __init__(self):
        super().__init__()
        self.area, self.updated = classification.MulticlassAUROC(5), classification.MulticlassAUROC(5)
        self.total = torchmetrics.SumMetric()
        self.largest = torchmetrics.MaxMetric()
        self.gathered = torchmetrics.CatMetric()
        self.range = torchmetrics.MinMaxMetric(classification.MulticlassAccuracy(5))
        self.running = Running(torchmetrics.MeanMetric(nan_strategy="ignore"), 2)
        self.restarted = torchmetrics.MeanMetric() + torchmetrics.MeanMetric()
        self.scores = torchmetrics.MetricCollection([classification.MulticlassAccuracy(5)], prefix="called/")
        self.fed = self.scores.clone(prefix="fed/")
        self.unregistered = {"scores": self.scores.clone(prefix="unregistered/")}

    def step(self, loss, logits, batch, batch_idx):
        x, y = batch["x"], batch["y"]
        self.area(logits, y)
        self.log("area", self.area, on_step=True, on_epoch=True)
        self.updated.update(logits, y)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.total(x)
        self.log("total", self.total)
        self.total(-x / 2)
        self.log("total of two calls", self.total, on_step=True)
        self.largest(value=x)
        self.log("largest", self.largest, on_step=True, on_epoch=True, prog_bar=True)
        self.range(logits, y)
        self.gathered(x.mean(dim=1))
        self.log("last", self.running(loss.detach()))
        self.log("running", self.running.compute())
        if batch_idx == 2:
            self.restarted.reset()
        self.restarted.update(loss.detach(), len(y))
        self.scores(logits, y)
        self.log_dict(self.scores, on_step=True, on_epoch=True)
        self.fed.update(logits, y)
        self.log_dict(self.fed, on_step=False, on_epoch=True)
        self.unregistered["scores"].update(logits, y)

    def on_train_epoch_end(self):
        self.log("range", self.range.compute()["raw"])
        self.log("gathered", self.gathered.compute().std())
        self.log("restarted", self.restarted.compute())
        self.log_dict(self.unregistered["scores"].compute())
        for metric in (self.range, self.gathered, self.restarted, self.unregistered["scores"]):
            metric.reset()


@DEVICES
def test_metric_objects(devices):
    """Each batch updates them once, in order. A step's value is that of its batch."""
    assert_plain(devices, Metrics, batches, accumulate_grad_batches=2, max_epochs=2)
