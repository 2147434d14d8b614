"""Batches that are cut on request: the script is the one whose loader gives the parts, in windows of all parts.

Losses that are means over samples also equal those of the whole batch, which is the oracle where parts are unequal.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from harness import Learner
from harness import loader as list_loader
from plain_oracle import PLAIN, assert_equal, on_devices, train
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_roundpipe import Microbatches

DEVICES = on_devices(3)
VOCABULARY = 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(Learner, lr=0.1, momentum=0.9):
    """The mean over the samples of ``x``; ``read`` takes it out of a batch."""

    def __init__(self, read=lambda batch: batch):
        super().__init__()
        self.read = read
        self.net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(6, 2)).double()
        self.mean, self.order = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self.steps = []

    def loss(self, x):
        return self.net(x).square().mean()

    def training_step(self, batch, batch_idx):
        x = self.read(batch)
        self.steps.append((type(batch).__name__, len(x), batch_idx))
        loss = self.loss(x)
        self.mean(loss, weight=len(x))
        self.order.update(x[:, 0])
        size = None if isinstance(batch, Tensor) else len(x)  # Lightning knows the size of a tensor
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("mean", self.mean, on_step=False, on_epoch=True, batch_size=size)
        return {"loss": loss, "rows": x[:, 0].detach(), "table": x.detach(), "last": x[-1].detach(), "name": "last"}

    def on_train_epoch_end(self):
        self.calls.append(("order", self.order.compute()))


class Watching(Net):
    def on_before_optimizer_step(self, optimizer):
        self.calls.append(("gradients", [p.grad.clone() for p in self.parameters()]))


def samples(count, seed=1):
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batches(sizes, wrap=lambda x: x):
    """A loader of batches of these sizes."""
    return lambda: list_loader([wrap(x) for x in samples(sum(sizes)).split(sizes)])


def weights(record):
    return record.final["weights"]


# ---------------------------------------------------------------------------------------------------------------- parts


@DEVICES
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("make", "options"), [(Net, {"num_microbatches": 3}), (Watching, {"microbatch_size": 2})], ids=str
)
def test_loader_of_the_parts(devices, make, options, window):
    """Weights are those of plain Lightning whose loader gives the parts, in windows of K times P."""
    plain = train(PLAIN, make, batches([2] * 12), accumulate_grad_batches=3 * window)
    cut = train(devices, make, batches([6] * 4), accumulate_grad_batches=window, options=options)
    assert_equal(weights(plain), weights(cut), "weights")
    assert_equal(plain.final["optimizers"], cut.final["optimizers"], "optimizers")
    assert_equal(plain.of("gradients"), cut.of("gradients"), "gradients")
    assert_equal(plain.of("order"), cut.of("order"), "order of updates")


@DEVICES
@pytest.mark.parametrize(("window", "options"), [(1, {"num_microbatches": 3}), (3, {"microbatch_size": 2})], ids=str)
def test_unequal_parts(devices, options, window):
    """Losses, logs, outputs and hooks are those of the whole batches: parts weigh by their samples, and log once."""
    script = {"loader": batches([7, 7, 4, 2, 1]), "accumulate_grad_batches": window, "max_epochs": 2}
    plain, cut = train(PLAIN, Net, **script), train(devices, Net, options=options, **script)
    assert_equal(plain.calls, cut.calls, "calls")
    assert_equal(plain.lines, cut.lines, "logged")
    assert_equal(plain.final, cut.final, "final")


@DEVICES
def test_logs_of_parts(devices):
    """What parts log is averaged by samples and logged once; an epoch's mean is over all samples."""

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("size", float(len(batch)))
            self.log_dict({"first": batch[0, 0], "index": batch_idx})
            self.log("sized", batch.mean(), on_step=False, on_epoch=True, batch_size=len(batch))
            return self.loss(batch)

    record = train(devices, Logs, batches([7, 2]), options={"num_microbatches": 3})
    x = samples(9)
    lines = [line for _, line in record.lines if "size" in line]
    assert [sorted(line) for line in lines] == [["epoch", "first", "index", "size"]] * 2
    assert [line["size"] for line in lines] == pytest.approx([(9 + 4 + 4) / 7, 1.0])
    first = [(3 * x[0, 0] + 2 * x[3, 0] + 2 * x[5, 0]) / 7, (x[7, 0] + x[8, 0]) / 2]
    assert [line["first"] for line in lines] == pytest.approx([float(v) for v in first])
    assert [line["index"] for line in lines] == [0.0, 1.0]
    assert float(record.final["metrics"]["sized"]) == pytest.approx(float(x.mean()))


@DEVICES
@pytest.mark.parametrize("skipped", ["first", "all"])
def test_parts_without_a_loss(devices, skipped):
    """A part whose ``training_step`` returns None has no gradients, and counts as Lightning counts such a batch."""

    class Skips(Net):
        def training_step(self, batch, batch_idx):
            is_first = bool(batch[0, 0] == samples(12)[0, 0])
            return None if skipped == "all" or is_first else self.loss(batch)

    plain = train(PLAIN, Skips, batches([2] * 6), accumulate_grad_batches=3)
    cut = train(devices, Skips, batches([6] * 2), options={"num_microbatches": 3})
    assert_equal(weights(plain), weights(cut), "weights")


# ------------------------------------------------------------------------------------------------------ what may be cut


@dataclasses.dataclass
class Rows:
    x: Tensor
    y: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class OwnMapping(collections.UserDict[str, Any]):
    """A mapping that is no dict, as those of data libraries are."""


CUTTABLE = {
    "dict": (lambda x: {"x": x, "y": x[:, 0]}, lambda batch: batch["x"] + 0 * batch["y"][:, None]),
    "mapping": (lambda x: OwnMapping(x=x), lambda batch: batch["x"]),
    "namedtuple": (lambda x: Pair(x, x), lambda batch: batch.x + 0 * batch.y),
    "dataclass": (lambda x: Rows(x, x), lambda batch: batch.x + 0 * batch.y),
    "BatchEncoding": (lambda x: BatchEncoding({"x": x}), lambda batch: batch["x"] + 0 * batch.x),
    "nested": (lambda x: {"a": (x, {"b": x})}, lambda batch: batch["a"][1]["b"] + 0 * batch["a"][0]),
}


@DEVICES
@pytest.mark.parametrize("kind", CUTTABLE)
def test_what_may_be_cut(devices, kind):
    """Collections of tensors with the same first dimension; parts are of the same type."""
    wrap, read = CUTTABLE[kind]
    plain = train(PLAIN, lambda: Net(read), batches([2] * 6, wrap), accumulate_grad_batches=3)
    cut = train(devices, lambda: Net(read), batches([6] * 2, wrap), options={"num_microbatches": 3})
    assert_equal(weights(plain), weights(cut), "weights")
    assert [step[:2] for step in plain.module.steps] == [step[:2] for step in cut.module.steps]


class Graphs:
    """A batch of the user's own class."""

    def __init__(self, x):
        self.x = x


UNCUT = {
    "entries disagree": (lambda x: {"x": x, "patches": x[:5]}, lambda batch: batch["x"]),
    "a class": (Graphs, lambda batch: batch.x),
    "a list of samples": (list, torch.stack),
    "packed": (lambda x: pack_sequence([x, x[:2]]), lambda batch: batch.data),
}


@DEVICES
@pytest.mark.parametrize("kind", UNCUT)
def test_uncut_batches_of_any_type(devices, kind):
    """What cannot be cut trains as it is."""
    wrap, read = UNCUT[kind]
    runs = [train(d, lambda: Net(read), batches([6] * 5, wrap), accumulate_grad_batches=2) for d in (PLAIN, devices)]
    assert_equal(weights(runs[0]), weights(runs[1]), "weights")


# ------------------------------------------------------------------------------------- microbatches that a loader gives

ELEMENTS = {
    "strings": (lambda x: [str(row.tolist()) for row in x], lambda part: torch.tensor([eval(row) for row in part])),
    "a class": (Graphs, lambda part: part.x),
}


@DEVICES
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", ELEMENTS)
def test_microbatches_from_collate(devices, kind, window):
    """Elements of a ``Microbatches`` are the microbatches, whatever they are; hooks see the list."""
    element, read = ELEMENTS[kind]
    read_double = lambda part: read(part).double()  # noqa: E731
    plain = train(PLAIN, lambda: Net(read_double), batches([2] * 12, element), accumulate_grad_batches=3 * window)
    function = lambda rows: Microbatches([element(part) for part in torch.stack(rows).split(2)])  # noqa: E731
    loader = lambda: DataLoader(list(samples(24)), batch_size=6, collate_fn=function)  # noqa: E731
    given = train(devices, lambda: Net(read_double), loader, accumulate_grad_batches=window)
    assert_equal(weights(plain), weights(given), "weights", rtol=1e-5)
    ends = given.of("on_train_batch_end")
    assert [len(end[1]["args"][1]) for end in ends] == [3] * 4
    assert [end[1]["args"][2] for end in ends] == [0, 1, 2, 3]


# -------------------------------------------------------------------------------------------------------------- weights


class Tokens(Learner, optimizer=torch.optim.AdamW, lr=0.01):
    """A language model's loss: a mean over the labels that are not -100."""

    def __init__(self, several=1):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 6), Block(), Block(), nn.Linear(6, VOCABULARY)).double()
        self.several = several

    def loss(self, batch):
        logits = self.net(batch["ids"]).flatten(0, 1)
        return sum(F.cross_entropy(logits * (i + 1), batch["labels"].flatten()) for i in range(self.several))


def tokens(sizes):
    """Rows of eight tokens, of which the labels of one to eight count."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (sum(sizes), 8), generator=generator)
    padded = torch.arange(8) >= torch.randint(1, 9, (sum(sizes), 1), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(padded, -100)
    found = [{"ids": i, "labels": y} for i, y in zip(ids.split(sizes), labels.split(sizes), strict=True)]
    return lambda: list_loader(found)


@DEVICES
@pytest.mark.parametrize(("window", "parts", "several"), [(1, 3, 1), (2, None, 1), (2, 3, 2)])
def test_targets(devices, window, parts, several):
    """``"targets"``: a step's loss is the mean over all targets of the window, however it is divided."""
    make = lambda: Tokens(several)  # noqa: E731
    whole = train(PLAIN, make, tokens([6 * window] * 2))
    options = {"loss_weight": "targets", "num_microbatches": parts}
    ours_ = train(devices, make, tokens([6] * 2 * window), accumulate_grad_batches=window, options=options)
    assert_equal(weights(whole), weights(ours_), "weights")


@DEVICES
@pytest.mark.parametrize("window", [1, 2])
def test_sum(devices, window):
    """``"sum"``: losses of parts add up; Lightning divides by the window's size, as always."""

    class Summed(Net):
        def loss(self, x):
            return 0.01 * self.net(x).square().sum()

    script = {"loader": batches([7, 7, 4, 2]), "accumulate_grad_batches": window}
    plain = train(PLAIN, Summed, **script)
    cut = train(devices, Summed, options={"num_microbatches": 3, "loss_weight": "sum"}, **script)
    assert_equal(weights(plain), weights(cut), "weights")
    losses = [[end[1]["args"][0]["loss"] for end in run.of("on_train_batch_end")] for run in (plain, cut)]
    assert_equal(losses[0], losses[1], "losses")


class Masked(Net):
    """A mean over the rows that a mask leaves."""

    def training_step(self, batch, batch_idx):
        rows = self.net(batch["x"]).square().mean(1)
        return (rows * batch["mask"]).sum() / batch["mask"].sum()


class Weighing(Masked):
    def loss_weight(self, batch):
        return batch["mask"].sum()


def masked(x):
    return {"x": x, "mask": (x[:, 0] > -0.5).double() + 0.25}


@DEVICES
@pytest.mark.parametrize(("window", "parts", "way"), [(1, 2, "function"), (2, 2, "method"), (2, None, "method")])
def test_own_weights(devices, way, window, parts):
    """A function of the part, or the module's method ``loss_weight``, weighs over the whole window."""
    whole = train(PLAIN, Masked, batches([6 * window] * 2, masked))
    options = {"num_microbatches": parts}
    if way == "function":
        options["loss_weight"] = lambda part: float(part["mask"].sum())
    script = {"loader": batches([6] * 2 * window, masked), "accumulate_grad_batches": window}
    weighed = train(devices, Weighing if way == "method" else Masked, options=options, **script)
    assert_equal(weights(whole), weights(weighed), "weights")


@pytest.mark.parametrize("window", [1, 2])
def test_batches_of_fewer_samples_than_parts_are_warned_of_once(window, recwarn):
    """The usual loader of large models, with batches of one sample, was not cut, without a word. The last batch of an
    epoch may be short.
    """
    train(2, Net, batches([1] * 4), options={"num_microbatches": 4}, accumulate_grad_batches=window)
    train(2, Net, batches([4, 4, 4, 2]), options={"num_microbatches": 4}, accumulate_grad_batches=window)
    said = [
        str(w.message) for w in recwarn if "num_microbatches=4 cuts a batch of 1 sample into 1 part." in str(w.message)
    ]
    assert len(said) == 1 and "accumulate_grad_batches=4" in said[0]
    assert not [w for w in recwarn if "into 2 parts" in str(w.message)]
