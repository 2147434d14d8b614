"""The accumulation window: every script does what it does under plain Lightning with the same window."""

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from harness import ours, quiet, trainer_of
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from plain_oracle import PLAIN, assert_equal, assert_plain, differences, kept, on_devices, train
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

WINDOW = 4
DEVICES = on_devices(3)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(pl.LightningModule):
    """Logs in every way, sets attributes, and records the batches that pass the transfer hooks.

    Args:
        skipped: batches of which ``training_step`` returns None.
        fails: the call of ``training_step`` that raises.
        stops: the batch whose end stops training.
    """

    def __init__(self, adam=False, norm=False, skipped=(), fails=0, stops=-1):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*[Block(norm) for _ in range(4)]), nn.Linear(6, 3)
        self.mean, self.by_hand = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.to(torch.float64)
        self.adam, self.skipped, self.fails, self.stops = adam, skipped, fails, stops
        self.count, self.tag, self.moved = 0, -1, {}

    def forward(self, x):
        return self.head(self.blocks(x))

    def loss(self, batch):
        if isinstance(batch[0], (list, tuple, type(None))):  # of several loaders
            return sum((self.loss(part) for part in batch if part is not None), torch.zeros(()))
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.tag = batch_idx
        if self.count == self.fails:
            raise ZeroDivisionError
        loss = self.loss(batch)
        self.last_loss = loss.detach()
        self.mean(loss)
        self.by_hand.update(loss)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"count": float(self.count), "own_tag": float(self.tag == batch_idx)})
        progress, last = self.trainer.fit_loop.epoch_loop, float(self.trainer.is_last_batch)
        self.log_dict({"last": last, "of_epoch": float(progress.batch_idx), "of_all": float(progress.total_batch_idx)})
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("sum", loss * 2, reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx in self.skipped:
            return None
        return {"loss": loss, "batch_idx": batch_idx, "twice": 2 * loss.detach(), "name": f"batch {batch_idx}"}

    def on_train_batch_start(self, batch, batch_idx):
        self.log("started", float(batch_idx), on_step=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("ended", float(batch_idx), on_step=True, on_epoch=True)
        if batch_idx == self.stops:
            self.trainer.should_stop = True

    def on_train_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val", loss)
        return loss

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return self._passes("before", batch)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self._passes("after", batch)

    def _passes(self, hook, batch):
        self.moved.setdefault(str(self.trainer.state.stage), []).append((hook, kept(batch)))
        return batch

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.adam:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Watching(Net):
    """Its hooks look at gradients, so that no layer is updated before all are."""

    def on_before_zero_grad(self, optimizer):
        self.calls.append(("gradients zeroed", [p.grad is None for p in self.parameters()]))

    def on_before_optimizer_step(self, optimizer):
        self.calls.append(("gradients", [kept(p.grad) for p in self.parameters()]))


def rows(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def loader(count=13, batch_size=1, **options):
    return DataLoader(rows(count), batch_size=batch_size, **options)


def validation():
    return DataLoader(rows(5, seed=2), batch_size=2)


def assert_window(devices, make=Net, **script):
    """Two epochs in windows of four, with validation, compared with plain Lightning; the batches' transfers, too."""
    script = {"loader": loader, "val": validation, "max_epochs": 2, "accumulate_grad_batches": WINDOW} | script
    plain, other = assert_plain(devices, make, **script)
    # Batches that were taken ahead of the end of training have been moved.
    for stage, moved in plain.module.moved.items():
        assert_equal(moved, other.module.moved[stage][: len(moved)], f"moved while {stage}")
    return plain, other


# ---------------------------------------------------------------------------------------------- the oracle's own checks


def test_record_shows_another_window():
    """The comparison sees what a wrong window changes, in calls, lines and weights."""
    runs = [train(PLAIN, Net, loader, max_epochs=1, accumulate_grad_batches=window) for window in (3, 4)]
    for part in ("calls", "lines", "final"):
        assert list(differences(getattr(runs[0], part), getattr(runs[1], part), part))


# ------------------------------------------------------------------------------------------------------- hooks and logs


@on_devices(1, 3)
@pytest.mark.parametrize(("kind", "adam"), [(Net, False), (Watching, True)])
def test_hooks_logs_and_weights(devices, kind, adam):
    """Hooks come in the same order and find the same, whether or not they look at gradients."""
    plain, other = assert_window(devices, lambda: kind(adam=adam), watch=kind is Watching)
    assert len(plain.of("on_train_batch_end")) == 26
    assert {key: len(moved) for key, moved in plain.module.moved.items()} == {
        key: len(moved) for key, moved in other.module.moved.items()
    }


class EachBatch(Net):
    """Changes the gradients of each batch, those of the batches in front of it included."""

    def on_after_backward(self):
        self.calls.append(("gradients so far", [kept(p.grad) for p in self.parameters()]))
        for parameter in self.head.parameters():
            parameter.grad *= 0.5


@DEVICES
def test_gradients_of_each_batch(devices, caplog):
    """With ``on_after_backward``, the batches of a window run one at a time, and a message says so."""
    with caplog.at_level("INFO"):
        assert_window(devices, EachBatch)
    assert "the batches of a window run one at a time, on one device: EachBatch overrides" in caplog.text
    assert "busy at a time" not in caplog.text


class Lbfgs(Net):
    """Its optimizer calls ``training_step`` again, for the last batch of the window alone."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


@pytest.mark.parametrize(("kind", "window", "times"), [(Net, 1, 1), (Net, WINDOW, 0), (Lbfgs, 2, 0)])
def test_windows_of_one_batch_are_pointed_out(kind, window, times, caplog):
    """Once, with both remedies. Not a short one at the end of an epoch: ``accumulate_grad_batches`` is set."""
    with caplog.at_level("INFO"), quiet():
        trainer_of(ours(), devices=2, max_epochs=1, accumulate_grad_batches=window).fit(kind(), loader(5))
    said = [text for text in caplog.messages if "a step has one microbatch" in text]
    assert len(said) == times
    assert all("accumulate_grad_batches" in text and "num_microbatches" in text for text in said)


class Alternating(Net):
    """Trains the head in every other batch, as adapters are trained that ``training_step`` switches."""

    def on_train_batch_start(self, batch, batch_idx):
        self.requires_grad_(True)
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, batch, batch_idx):
        self.head.requires_grad_(batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)


@DEVICES
def test_parameters_switched_off_by_a_later_batch(devices):
    """The gradient of an earlier batch of the window counts."""
    assert_window(devices, Alternating)


@DEVICES
def test_logger_called_in_training_step(devices):
    """What ``training_step`` gives the logger itself arrives, in order."""

    class Direct(Net):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            self.logger.log_metrics({"direct": float(output["loss"].detach())}, step=1000 + self.count)
            return output

    runs = [train(d, Direct, loader, accumulate_grad_batches=WINDOW) for d in (PLAIN, devices)]
    direct = [[line for line in run.lines if "direct" in line[1]] for run in runs]
    assert_equal(direct[0], direct[1], "direct")
    assert len(direct[0]) == 13


class Sets(Net):
    """What a hook sets stays for later hooks; ``training_step`` sees it from the next window on."""

    seen, hooked = -1, -1

    def training_step(self, batch, batch_idx):
        self.seen = self.hooked if batch_idx % WINDOW == 0 else self.seen
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hooked = batch_idx


# ------------------------------------------------------------------------------------------------ lengths and intervals


@DEVICES
@pytest.mark.parametrize("make", [Net, Watching])
def test_validation_inside_a_window(devices, make):
    """It runs after the same batch, with the same weights."""
    plain, _ = assert_window(devices, make, val_check_interval=6)
    assert len(plain.of("on_validation_start")) == 2 * (13 // 6)


class Stream(IterableDataset[Any]):
    """Has no length, and loses its place if it is read twice."""

    def __init__(self, count):
        self.items, self.at = list(rows(count)), 0

    def __iter__(self):
        self.at %= len(self.items)
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]


@DEVICES
def test_accumulation_scheduler(devices):
    """The size of the window may change from epoch to epoch."""
    schedule = {0: 2, 1: 4, 3: 3}
    callbacks = lambda: [GradientAccumulationScheduler(schedule)]  # noqa: E731
    assert_window(devices, accumulate_grad_batches=1, max_epochs=4, callbacks=callbacks)


@DEVICES
def test_stop_inside_a_window(devices):
    """``should_stop`` ends training after the same batch, though later ones were begun."""
    plain, other = assert_window(devices, lambda: Net(stops=5))
    assert len(plain.of("on_train_batch_end")) == len(other.of("on_train_batch_end")) == 6


# -------------------------------------------------------------------------------------------------------------- loaders


class Episodes(IterableDataset[Any]):
    """Runs a model on each sample, in a mode that is left after the last."""

    def __init__(self, model, seen, read):
        self.model, self.seen, self.read = model, seen, read

    @torch.no_grad()
    def __iter__(self):
        with torch.device("cpu"):
            for inputs, target in rows(5):
                self.seen += [self.model(inputs[None]).sum(), torch.stack(list(self.model[1].parameters())[:1])]
                self.read.set()
                yield inputs, target


class Late(torch.optim.SGD):
    """On another thread, it steps a layer after the data set has read weights, unless that waits for the step."""

    independent_parameters = True
    read = threading.Event()

    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            self.read.clear()
            self.read.wait(0.1)
        return super().step(closure)


@pytest.mark.parametrize("window", [1, 2])
def test_data_set_runs_the_model(window):
    """It finds whole updates, also where no hook looks at weights, and that of validation before hooks are called."""

    class Player(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model, self.seen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), ([], [])

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return Late(self.parameters(), lr=0.5)

    found = []
    for strategy in ("auto", ours()):
        player = Player()
        loaders = [DataLoader(Episodes(player.model, seen, Late.read), batch_size=1) for seen in player.seen]
        options = {"val_check_interval": 2, "accumulate_grad_batches": window}
        with quiet():
            trainer_of(strategy, **options).fit(player, *loaders)
        found.append(player.seen)
    assert torch._C._len_torch_function_stack() == 0
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1])


@DEVICES
def test_shuffling_by_the_default_generator(devices):
    """Nothing draws from the generator of which the loader draws the order of its samples."""

    def seeded():
        pl.seed_everything(3, verbose=False)
        return Net()

    assert_window(devices, seeded, loader=lambda: loader(shuffle=True), max_epochs=3, val_check_interval=6)


class Gaps(Dataset[Any]):
    """Some of its batches are None."""

    def __init__(self, gaps):
        self.gaps, self.rows = gaps, rows(12)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return None if index in self.gaps else tuple(value[None] for value in self.rows[index])


class Tolerant(Net):
    """Takes what a loader gives, None included."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch

    on_after_batch_transfer = on_before_batch_transfer


class Refusing(Block):
    refuses = False

    def forward(self, x):
        if self.refuses:
            raise ArithmeticError
        return super().forward(x)


class Catching(Net):
    """Goes on without the batches that a layer refuses."""

    def __init__(self):
        super().__init__()
        self.blocks[2] = Refusing(norm=False).double()

    def training_step(self, batch, batch_idx):
        self.blocks[2].refuses = batch_idx in (1, 6)
        try:
            return super().training_step(batch, batch_idx)
        except ArithmeticError:
            return None


def streamed(count):
    return lambda: DataLoader(Stream(count), batch_size=1)


def with_gaps(*gaps):
    return lambda: DataLoader(Gaps(gaps), batch_size=None)


SCRIPTS = {
    "a short window at the end of a stream": {"loader": streamed(21)},
    "a stream of full windows": {"loader": streamed(20)},
    "an epoch of a short window": {"loader": streamed(3)},
    "an epoch of a batch": {"loader": lambda: loader(1)},
    # Lightning learns that such an epoch is over behind its last batch, and so makes no step of a short window.
    "a stream that ends at its limit but one": {"loader": streamed(6), "limit_train_batches": 7},
    "a stream that ends before its limit": {"loader": streamed(6), "limit_train_batches": 9},
    "a limit within a window": {"loader": streamed(6), "limit_train_batches": 5},
    "steps without epochs": {
        "max_steps": 5, "max_epochs": -1, "check_val_every_n_epoch": None, "val_check_interval": 5,
    },
    "reloaded": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "sanity": {"num_sanity_val_steps": 2},
    "a window as long as two epochs": {"accumulate_grad_batches": 26},
    "two loaders, the shorter one again": {"loader": lambda: CombinedLoader([loader(), loader(6)], "max_size_cycle")},
    "two loaders, until the shorter one ends": {"loader": lambda: CombinedLoader([loader(), loader(6)], "min_size")},
    "None from a loader": {"make": Tolerant, "loader": with_gaps(0, 3)},
    "a window of None from a loader": {"make": Tolerant, "loader": with_gaps(4, 5, 6, 7)},
    # It has no gradients, and is divided by the window's size all the same.
    "None from training_step": {"make": lambda: Net(skipped=(0, 3, 12))},
    "a window of None from training_step": {"make": lambda: Net(skipped=(4, 5, 6, 7))},
    "errors of layers that training_step catches": {"make": Catching},
    "attributes that hooks set": {"make": Sets},
}  # fmt: skip


@DEVICES
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_script(devices, script):
    assert_window(devices, **script)


# ------------------------------------------------------------------------------------------------------------- failures


class Untransferable(Net):
    """Batches do not pass the transfer hook from the seventh on."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if len(self.moved.get("RunningStage.TRAINING", [])) == 12:
            raise ZeroDivisionError
        return super().on_before_batch_transfer(batch, dataloader_idx)


FAILURES = {"step 1": lambda: Net(fails=1), "step 7": lambda: Net(fails=7), "transfer": Untransferable}


@DEVICES
@pytest.mark.parametrize("make", FAILURES.values(), ids=FAILURES)
def test_exception_of_user_code(devices, make):
    """It is raised when Lightning comes to that batch: all before it is as always, and modules are as it left them."""
    script = {"accumulate_grad_batches": WINDOW, "max_epochs": 2, "error": ZeroDivisionError}
    plain, other = (train(d, make, loader, **script) for d in (PLAIN, devices))
    assert_equal(plain.calls, other.calls, "calls")
    assert_equal(plain.lines, other.lines, "logged")
    assert_equal(plain.final["weights"], other.final["weights"], "weights")
