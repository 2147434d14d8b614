"""Evaluation that looks ahead: validate, test and predict do what they do under plain Lightning."""

import pytest
import torch
import torchmetrics
from harness import Learner, MemoryLogger, ours, quiet, trainer_of
from plain_oracle import PLAIN, Recorder, assert_equal, assert_plain, kept, on_devices, train
from test_window import Net, Stream, loader, rows
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICES = on_devices(3)
KINDS = pytest.mark.parametrize("kind", ["validate", "test", "predict"])


class Spread(torchmetrics.CatMetric):
    """A list of tensors, which Lightning copies when it logs the metric for the second time."""

    def compute(self):
        return super().compute().std()


class Evaluated(Net):
    """Sets attributes, writes to buffers, logs in every way, and returns a dict of its own."""

    fails_at = -1

    def __init__(self):
        super().__init__(norm=True)
        self.metric = torchmetrics.MeanMetric()
        self.order, self.spread = torchmetrics.CatMetric(), Spread()
        self.index, self.seen = -1, 0
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("added", torch.zeros(()))

    def _evaluate(self, batch, batch_idx, dataloader_idx=0):
        self.index = batch_idx
        self.seen += 1
        self.total += 1
        self.added.add_(1)
        if batch_idx == self.fails_at:
            raise ZeroDivisionError
        loss = self.loss(batch)
        self.metric(loss)
        self.order.update(batch[0][:, 0])
        if not dataloader_idx:
            self.spread.update(batch[0][:, 0])
            self.log("spread", self.spread)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("own", float(self.index == batch_idx))
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.log(f"most of {dataloader_idx}", loss, reduce_fx="max", add_dataloader_idx=False)
        return {"loss": loss, "index": batch_idx, "loader": dataloader_idx, "rows": batch[0]}

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.index = batch_idx
        if batch_idx == self.fails_at:
            raise ZeroDivisionError
        return {"scores": self(batch[0]), "index": batch_idx, "loader": dataloader_idx}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self._evaluate(batch, batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return self._evaluate(batch, batch_idx, dataloader_idx)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("so far", self.total + 100 * self.added))

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self):
        self.calls.append(("order", self.order.compute()))
        self.log("at the end", self.order.compute().mean())
        self.order.reset()

    on_test_epoch_end = on_validation_epoch_end


class Fails(Evaluated):
    fails_at = 3


def several():
    """Loaders of different lengths, one of them a stream."""
    return [loader(11, batch_size=2), DataLoader(Stream(7), batch_size=3), loader(1)]


def one():
    return loader(13, batch_size=2)


def training():
    return loader(26, batch_size=2)


def stream():
    return DataLoader(Stream(9), batch_size=2)


def evaluate(devices, kind, loaders, make=Evaluated, error=None, overlap=True, **options):
    """Evaluate twice with one trainer; what hooks have found, what was logged and returned."""
    torch.manual_seed(1)
    module, memory = make(), MemoryLogger()
    module.calls = []
    strategy = "auto" if devices == PLAIN else ours(overlap=overlap)
    options = {"callbacks": [Recorder(module.calls)], "logger": memory} | options
    trainer = trainer_of(strategy, devices=max(devices, 1), **options)
    given = {} if kind == "predict" else {"verbose": False}
    returned = []
    with quiet():
        if error is not None:
            with pytest.raises(error):
                getattr(trainer, kind)(module, loaders(), **given)
            return module.calls, memory.lines, kept(module.state_dict()), module.seen, module.index
        returned = [kept(getattr(trainer, kind)(module, loaders(), **given)) for _ in range(2)]
    left = kept(module.state_dict()), kept(trainer.callback_metrics), module.seen, module.index
    return module.calls, memory.lines, returned, module.moved, left


@DEVICES
@pytest.mark.parametrize("loaders", [stream, several])
@KINDS
def test_evaluation(devices, kind, loaders):
    """Hooks in order, with what each batch's step has left; logs; outputs and predictions in order."""
    plain = evaluate(PLAIN, kind, loaders)
    assert_equal(plain, evaluate(devices, kind, loaders))
    assert any(name == f"on_{kind.replace('validate', 'validation')}_batch_end" for name, *_ in plain[0])


@DEVICES
@KINDS
def test_limited(devices, kind):
    """No more batches are evaluated than Lightning asks for."""
    options = {f"limit_{'val' if kind == 'validate' else kind}_batches": 2}
    assert_equal(evaluate(PLAIN, kind, several, **options)[:3], evaluate(devices, kind, several, **options)[:3])


@DEVICES
@KINDS
def test_exception_in_a_later_batch(devices, kind):
    """It is raised when Lightning comes to that batch; all before it is as always."""
    plain, other = (evaluate(d, kind, one, make=Fails, error=ZeroDivisionError) for d in (PLAIN, devices))
    assert_equal(plain, other)


@DEVICES
def test_evaluation_inside_fit(devices):
    """Validation finds the weights and running averages of its place in training, and leaves the module as it was."""
    script = {"val": several, "accumulate_grad_batches": 4, "max_epochs": 2, "val_check_interval": 6}
    assert_plain(devices, Evaluated, training, **script, num_sanity_val_steps=1)


class Reading(Stream):
    """Notes how far it has been read."""

    furthest = 0

    def __iter__(self):
        for i, item in enumerate(rows(40)):
            Reading.furthest = max(Reading.furthest, i + 1)
            yield item


@DEVICES
def test_looking_ahead_is_bounded(devices):
    """A few batches for each device are read before Lightning asks for them, of a long stream, too."""
    ahead = []

    class Watches(Evaluated):
        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
            ahead.append(Reading.furthest - batch_idx)

    Reading.furthest = 0
    train(devices, Watches, training, val=lambda: DataLoader(Reading(40), batch_size=1), limit_train_batches=1)
    assert len(ahead) == 40
    assert max(ahead) <= 2 * devices + 2


class Told(Evaluated):
    """A hook in front of each batch and one behind it say what the step computes with."""

    factor = 1.0

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.factor *= 1 + batch_idx

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.factor /= 2 + batch_idx

    def loss(self, batch):
        return super().loss(batch) * self.factor


@DEVICES
def test_steps_that_depend_on_hooks_between_batches(devices):
    """``overlap=False`` runs a batch between its hooks."""
    plain, other = (evaluate(d, "validate", several, make=Told, overlap=False) for d in (PLAIN, devices))
    assert_equal(plain, other)


class Samples(Dataset):
    """Computes with torch's default dtype and with a weight of ``net``."""

    def __init__(self, net):
        self.net = net

    def __len__(self):
        return 7

    @torch.no_grad()
    def __getitem__(self, index):
        return torch.full((6,), 1 / (index + 3)) @ torch.eye(6), self.net[1].weight.sum().float()


class FromSamples(Learner):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def loss(self, batch):
        return self.net(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.loss(batch)
        self.log_dict({"made": batch[0].double().mean(), "weight": batch[1].double().mean()}, on_step=True)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
def test_data_sets_run_between_steps(precision):
    """A batch that is taken ahead is made outside of the precision's context, and from whole weights."""
    found = []
    for strategy, devices in (("auto", 1), (ours(), 3)):
        module, logger = FromSamples(), MemoryLogger()
        loaders = DataLoader(torch.ones(6, 1, 6), batch_size=1), DataLoader(Samples(module.net), batch_size=1)
        with quiet():
            options = {"precision": precision, "val_check_interval": 2, "logger": logger, "devices": devices}
            trainer_of(strategy, **options).fit(module, *loaders)
        found.append([{k: v for k, v in line.items() if k != "loss"} for _, line in logger.lines])
    for plain, our in zip(*found, strict=True):
        assert our.keys() == plain.keys()
        for name, value in plain.items():
            rounding = (0.02 if "bf16" in precision else 1e-6) if "weight" in name else 0
            assert our[name] == pytest.approx(float(value), rel=rounding, abs=0), name
