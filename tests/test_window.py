"""The accumulation window: every script does what it does under plain Lightning with the same window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from harness import ours, quiet, trainer_of
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from plain_oracle import PLAIN, Record, assert_equal, assert_plain, differences, kept, on_devices, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

WINDOW = 4
DEVICES = on_devices(1, 3)


class Block(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(pl.LightningModule):
    """Logs in every way, sets attributes, and records the batches that pass the transfer hooks.

    Args:
        skipped: batches of which ``training_step`` returns None.
        fails: the call of ``training_step`` that raises.
        ends_epoch, stops: the batch whose start ends the epoch, and the one whose end stops training.
    """

    calls: list[Any]

    def __init__(
        self,
        adam: bool = False,
        norm: bool = False,
        dtype: torch.dtype = torch.float64,
        skipped: tuple[int, ...] = (),
        fails: int = 0,
        ends_epoch: int = -1,
        stops: int = -1,
    ) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*[Block(norm) for _ in range(4)]), nn.Linear(6, 3)
        self.mean, self.by_hand = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.to(dtype)
        self.adam, self.skipped, self.fails, self.ends_epoch, self.stops = adam, skipped, fails, ends_epoch, stops
        self.count, self.tag, self.moved = 0, -1, {}  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return sum((self.loss(part) for part in batch.values() if part is not None), torch.zeros(()))
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
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
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("sum", loss * 2, reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx in self.skipped:
            return None
        return {"loss": loss, "batch_idx": batch_idx, "twice": 2 * loss.detach(), "name": f"batch {batch_idx}"}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.log("started", float(batch_idx), on_step=True)
        return -1 if batch_idx == self.ends_epoch else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("ended", float(batch_idx), on_step=True, on_epoch=True)
        if batch_idx == self.stops:
            self.trainer.should_stop = True

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val", loss)
        return loss

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._passes("before", batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._passes("after", batch)

    def _passes(self, hook: str, batch: Any) -> Any:
        self.moved.setdefault(str(self.trainer.state.stage), []).append((hook, kept(batch)))
        return batch

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.adam:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Watching(Net):
    """Its hooks look at gradients, so that no layer is updated before all are."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append(("gradients zeroed", [p.grad is None for p in self.parameters()]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(("gradients", [kept(p.grad) for p in self.parameters()]))


def rows(count: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def loader(count: int = 13, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=batch_size, **options)


def validation() -> DataLoader[Any]:
    return DataLoader(rows(5, seed=2), batch_size=2)


def assert_window(devices: int, make: Callable[[], Net] = Net, **script: Any) -> tuple[Record, Record]:
    """Two epochs in windows of four, with validation, compared with plain Lightning; the batches' transfers, too."""
    script = {"loader": loader, "val": validation, "max_epochs": 2, "accumulate_grad_batches": WINDOW} | script
    plain, other = assert_plain(devices, make, **script)
    # Batches that were taken ahead of the end of training have been moved.
    for stage, moved in plain.module.moved.items():
        assert_equal(moved, other.module.moved[stage][: len(moved)], f"moved while {stage}")
    return plain, other


# ---------------------------------------------------------------------------------------------- the oracle's own checks


def test_record_shows_another_window() -> None:
    """The comparison sees what a wrong window changes, in calls, lines and weights."""
    runs = [train(PLAIN, Net, loader, max_epochs=1, accumulate_grad_batches=window) for window in (3, 4)]
    for part in ("calls", "lines", "final"):
        assert list(differences(getattr(runs[0], part), getattr(runs[1], part), part))


def test_record_shows_the_order_of_calls() -> None:
    """Two calls that change places are found, and named."""
    record = train(PLAIN, Net, loader, max_epochs=1)
    swapped = record.calls[:7] + record.calls[8:9] + record.calls[7:8] + record.calls[9:]
    assert any("calls[7]" in found for found in differences(record.calls, swapped, "calls"))


# ------------------------------------------------------------------------------------------------------- hooks and logs


@DEVICES
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
@pytest.mark.parametrize("kind", [Net, Watching])
def test_hooks_logs_and_weights(devices: int, kind: type[Net], adam: bool) -> None:
    """Hooks come in the same order and find the same, whether or not they look at gradients."""
    plain, other = assert_window(devices, lambda: kind(adam=adam), watch=kind is Watching)
    assert len(plain.of("on_train_batch_end")) == 26
    assert {key: len(moved) for key, moved in plain.module.moved.items()} == {
        key: len(moved) for key, moved in other.module.moved.items()
    }


@DEVICES
def test_gradients_after_backward_of_the_last_batch(devices: int) -> None:
    """``on_after_backward`` of a window's last batch finds the sums of the window."""

    class Looks(Net):
        def on_after_backward(self) -> None:
            if (self.tag + 1) % WINDOW == 0:
                self.calls.append(("after backward", [kept(p.grad) for p in self.parameters()]))

    assert_window(devices, Looks)


@DEVICES
def test_logger_called_in_training_step(devices: int) -> None:
    """What ``training_step`` gives the logger itself arrives, in order."""

    class Direct(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            self.logger.log_metrics({"direct": float(output["loss"].detach())}, step=1000 + self.count)  # type: ignore[union-attr]
            return output

    runs = [train(d, Direct, loader, accumulate_grad_batches=WINDOW) for d in (PLAIN, devices)]
    direct = [[line for line in run.lines if "direct" in line[1]] for run in runs]
    assert_equal(direct[0], direct[1], "direct")
    assert len(direct[0]) == 13


@DEVICES
def test_hook_calls_layers(devices: int) -> None:
    """A hook inside a window calls layers, and finds the weights and attributes that it would find."""

    class Calls(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.calls.append(("called", self(batch[0]).clone(), self.tag, self.count))

    assert_window(devices, Calls)


@DEVICES
def test_attributes_set_by_hooks(devices: int) -> None:
    """What a hook sets stays for later hooks; ``training_step`` sees it from the next window on."""

    class Sets(Net):
        seen, hooked = -1, -1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = self.hooked if batch_idx % WINDOW == 0 else self.seen
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.hooked = batch_idx

    assert_window(devices, Sets)


# ------------------------------------------------------------------------------------------------ lengths and intervals


@DEVICES
@pytest.mark.parametrize("make", [Net, Watching])
@pytest.mark.parametrize("interval", [1, 6])
def test_validation_inside_a_window(devices: int, make: Callable[[], Net], interval: int) -> None:
    """It runs after the same batch, with the same weights."""
    plain, _ = assert_window(devices, make, val_check_interval=interval)
    assert len(plain.of("on_validation_start")) == 2 * (13 // interval)


@DEVICES
@pytest.mark.parametrize("count", [20, 21, 3, 1])
@pytest.mark.parametrize("streamed", [False, True])
def test_length_of_an_epoch(devices: int, count: int, streamed: bool) -> None:
    """A short window at an epoch's end is divided by the full one's size, of a stream, too."""
    assert_window(devices, loader=lambda: DataLoader(Stream(count), batch_size=1) if streamed else loader(count))


class Stream(IterableDataset[Any]):
    """Has no length, and loses its place if it is read twice."""

    def __init__(self, count: int) -> None:
        self.items, self.at = list(rows(count)), 0

    def __iter__(self) -> Iterator[Any]:
        self.at %= len(self.items)
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]


INTERVALS: dict[str, dict[str, Any]] = {
    "limited": {"limit_train_batches": 9, "val_check_interval": 3},
    "steps": {"max_steps": 5, "max_epochs": 9},
    "steps without epochs": {
        "max_steps": 5,
        "max_epochs": -1,
        "check_val_every_n_epoch": None,
        "val_check_interval": 5,
    },
    "reloaded": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "logged rarely": {"log_every_n_steps": 2},
    "sanity": {"num_sanity_val_steps": 2},
    "a window as long as two epochs": {"accumulate_grad_batches": 26},
}


@DEVICES
@pytest.mark.parametrize("options", INTERVALS.values(), ids=INTERVALS)
def test_intervals_of_the_trainer(devices: int, options: dict[str, Any]) -> None:
    """Batches, steps and epochs count as always."""
    assert_window(devices, **options)


@DEVICES
def test_accumulation_scheduler(devices: int) -> None:
    """The size of the window may change from epoch to epoch."""
    schedule = {0: 2, 1: 4, 3: 3}
    callbacks = lambda: [GradientAccumulationScheduler(schedule)]  # noqa: E731
    assert_window(devices, accumulate_grad_batches=1, max_epochs=4, callbacks=callbacks)


@DEVICES
@pytest.mark.parametrize("min_epochs", [None, 2])
def test_stop_inside_a_window(devices: int, min_epochs: int | None) -> None:
    """``should_stop`` ends training after the same batch, though later ones were begun."""
    plain, other = assert_window(devices, lambda: Net(stops=5), min_epochs=min_epochs)
    assert len(plain.of("on_train_batch_end")) == len(other.of("on_train_batch_end")) == (26 if min_epochs else 6)


def test_batch_skipped_inside_a_window() -> None:
    """``on_train_batch_start`` cannot end an epoch inside a window, whose batches have begun; the error says so."""
    record = train(PLAIN, lambda: Net(ends_epoch=5), loader, accumulate_grad_batches=WINDOW)
    assert len(record.of("on_train_batch_end")) == 5
    trainer = trainer_of(ours(), devices=2, accumulate_grad_batches=WINDOW)
    with quiet(), pytest.raises(RuntimeError, match="on_train_batch_start"):
        trainer.fit(Net(ends_epoch=5), loader())


@DEVICES
def test_epoch_ended_before_a_window(devices: int) -> None:
    """``on_train_batch_start`` ends the epoch at a window's first batch, as always."""
    assert_window(devices, lambda: Net(ends_epoch=8))


# -------------------------------------------------------------------------------------------------------------- loaders


def _shuffled(workers: int) -> DataLoader[Any]:
    return loader(shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3))


@DEVICES
@pytest.mark.parametrize("workers", [0, 1])
def test_shuffling(devices: int, workers: int) -> None:
    """Batches come in the same order."""
    assert_window(devices, loader=lambda: _shuffled(workers))


@DEVICES
def test_shuffling_by_the_default_generator(devices: int) -> None:
    """Nothing draws from the generator of which the loader draws the order of its samples."""

    def seeded() -> Net:
        pl.seed_everything(3, verbose=False)
        return Net()

    assert_window(devices, seeded, loader=lambda: loader(shuffle=True), max_epochs=3, val_check_interval=6)


@DEVICES
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_two_loaders(devices: int, mode: Any) -> None:
    """A batch of several loaders is one batch."""
    assert_window(devices, loader=lambda: CombinedLoader({"a": loader(), "b": loader(6)}, mode))


class Gaps(Dataset[Any]):
    """Some of its batches are None."""

    def __init__(self, gaps: tuple[int, ...]) -> None:
        self.gaps, self.rows = gaps, rows(12)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return None if index in self.gaps else tuple(value[None] for value in self.rows[index])


class Tolerant(Net):
    """Takes what a loader gives, None included."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    on_after_batch_transfer = on_before_batch_transfer


@DEVICES
@pytest.mark.parametrize("gaps", [(1, 4, 7), (0,), (4, 5, 6, 7)], ids=str)
def test_none_from_a_loader(devices: int, gaps: tuple[int, ...]) -> None:
    """Lightning passes by a batch that is None, and counts it."""
    assert_window(devices, Tolerant, loader=lambda: DataLoader(Gaps(gaps), batch_size=None))


@DEVICES
@pytest.mark.parametrize("skipped", [(0,), (2,), (3,), (4, 5, 6, 7), (12,)], ids=str)
def test_none_from_training_step(devices: int, skipped: tuple[int, ...]) -> None:
    """A batch without a loss has no gradients, and is divided by the window's size all the same."""
    assert_window(devices, lambda: Net(skipped=skipped))


class Stateful(DataLoader[Any]):
    """Knows how many batches it has given, and goes on from there."""

    at = resumed = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resumed = self.resumed, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= self.at:
                self.at = i + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = state["at"]


# ------------------------------------------------------------------------------------------------------------- failures


@DEVICES
@pytest.mark.parametrize("call", [1, 3, 7])
def test_exception_in_training_step(devices: int, call: int) -> None:
    """It is raised when Lightning comes to that batch: all before it is as always."""
    plain, other = (
        train(d, lambda: Net(fails=call), loader, error=ZeroDivisionError, **FAILING) for d in (PLAIN, devices)
    )
    assert_equal(without_attributes(plain), without_attributes(other), "calls")
    assert_equal(plain.lines, other.lines, "logged")
    assert_equal(plain.final["weights"], other.final["weights"], "weights")


FAILING: dict[str, Any] = {"accumulate_grad_batches": WINDOW, "max_epochs": 2}


def without_attributes(record: Record) -> list[Any]:
    """After an error, attributes may be those of batches that were begun."""
    return [(name, {k: v for k, v in found.items() if k != "module"}) for name, found in record.calls]


@DEVICES
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("batch", [0, 5, 7])
def test_exception_in_a_callback(devices: int, hook: str, batch: int) -> None:
    """It ends training with the weights that plain Lightning leaves."""

    class Raises(pl.Callback):
        def at(self, index: int) -> None:
            if index == batch:
                raise ZeroDivisionError

    if hook == "on_train_batch_start":
        Raises.on_train_batch_start = lambda self, trainer, module, b, i: self.at(i)  # type: ignore[method-assign]
    else:
        Raises.on_train_batch_end = lambda self, trainer, module, o, b, i: self.at(i)  # type: ignore[method-assign]
    script = {"callbacks": lambda: [Raises()], "error": ZeroDivisionError, **FAILING}
    plain, other = (train(d, Net, loader, **script) for d in (PLAIN, devices))
    assert_equal(without_attributes(plain), without_attributes(other), "calls")
    assert_equal(plain.final["weights"], other.final["weights"], "weights")


# ---------------------------------------------------------------------------------------------------------- checkpoints

SAVING: dict[str, dict[str, Any]] = {
    "every two steps": {"save": {"every_n_train_steps": 2}},
    "inside a window": {"save": {}, "val_check_interval": 6},
}
STORED = ("epoch", "global_step", "state_dict", "loops", "optimizer_states", "lr_schedulers")


@DEVICES
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("saving", SAVING.values(), ids=SAVING)
def test_checkpoint_and_resume(devices: int, saving: dict[str, Any], stateful: bool, tmp_path: Path) -> None:
    """Checkpoints hold the same, places of loaders included, and training goes on from each as in plain Lightning."""
    make_loader = (lambda: Stateful(rows(13), batch_size=1)) if stateful else loader
    files = [_saved(d, make_loader, tmp_path / str(i), **saving) for i, d in enumerate((PLAIN, devices))]
    assert [file.name for file in files[0]] == [file.name for file in files[1]] != []
    for mine, other in zip(*files, strict=True):
        stored = [torch.load(file, weights_only=False) for file in (mine, other)]
        assert_equal(*[{key: kept(one[key]) for key in STORED} for one in stored], what=mine.name)
    script = {"val": validation, "accumulate_grad_batches": WINDOW, "max_epochs": 3}
    plain = train(PLAIN, Net, make_loader, ckpt_path=files[0][0], **script)
    resumed = train(devices, Net, make_loader, ckpt_path=files[1][0], **script)
    assert_equal(plain.calls, resumed.calls, "calls after resuming")
    assert_equal(plain.final, resumed.final, "final")


def _saved(devices: int, make_loader: Any, folder: Path, *, save: dict[str, Any], **options: Any) -> list[Path]:
    callbacks = lambda: [ModelCheckpoint(folder, filename="{step}-{epoch}-{count:.0f}", save_top_k=-1, **save)]  # noqa: E731
    script = {"val": validation, "accumulate_grad_batches": WINDOW, "max_epochs": 2, **options}
    train(devices, Net, make_loader, callbacks=callbacks, enable_checkpointing=True, **script)
    return sorted(folder.iterdir())


# ----------------------------------------------------------------------------------------- precision, optimizers, norms


@DEVICES
@pytest.mark.parametrize(
    ("precision", "dtype", "rtol"),
    [
        ("bf16-mixed", torch.float32, 2e-2),
        ("64-true", torch.float32, 1e-6),
        ("32-true", torch.float32, 2e-4),
    ],
)
def test_precision(devices: int, precision: Any, dtype: torch.dtype, rtol: float) -> None:
    """Any precision gives the numbers of that precision."""
    script = of_dtype(dtype) | {"precision": precision, "rtol": rtol}
    assert_window(devices, lambda: Net(dtype=dtype), **script)


def of_dtype(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "loader": lambda: DataLoader(rows(13, dtype=dtype), batch_size=1),
        "val": lambda: DataLoader(rows(5, seed=2, dtype=dtype), batch_size=2),
    }


@DEVICES
def test_true_bf16(devices: int) -> None:
    """With fp32 masters, which plain Lightning lacks: the same calls and lines, and values within the precision."""
    script = of_dtype(torch.float32) | {"precision": "bf16-true", "accumulate_grad_batches": WINDOW}
    plain, other = (train(d, lambda: Net(dtype=torch.float32), **script) for d in (PLAIN, devices))
    assert [call[0] for call in plain.calls] == [call[0] for call in other.calls]
    assert_equal(plain.lines, other.lines, "logged", rtol=0.05)
    weights = [{n: v.float() for n, v in run.final["weights"].items() if n[:4] != "mean"} for run in (plain, other)]
    assert_equal(*weights, what="weights", rtol=0.05)


@DEVICES
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("make", [Net, Watching])
def test_clipping(devices: int, make: Callable[[], Net], algorithm: str) -> None:
    """Gradients are clipped as sums of the window, behind ``on_before_optimizer_step``."""
    assert_window(devices, make, gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)


@DEVICES
def test_batch_norm(devices: int) -> None:
    """Statistics are of each microbatch, and running averages are carried on in order."""
    script = {"loader": lambda: loader(26, batch_size=2), "val_check_interval": 6}
    assert_window(devices, lambda: Net(norm=True), **script)


@DEVICES
def test_weight_averaging(devices: int) -> None:
    """The pass that collects statistics for the averaged weights is one window as long as an epoch."""
    callbacks = lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)]  # noqa: E731
    script = {"loader": lambda: loader(26, batch_size=2), "callbacks": callbacks, "max_epochs": 3}
    assert_window(devices, lambda: Net(norm=True), **script)


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@DEVICES
def test_optimizer_that_asks_again(devices: int) -> None:
    """LBFGS calls its closure several times a step."""
    script = {"loader": lambda: loader(8, batch_size=2), "accumulate_grad_batches": 1}
    assert_window(devices, Lbfgs, **script)


@DEVICES
@pytest.mark.parametrize("scheduler", ["per epoch", "plateau"])
def test_learning_rate_schedules(devices: int, scheduler: str) -> None:
    """Schedulers step after the same batches, with the same metrics."""

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            if scheduler == "per epoch":
                return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
            return [optimizer], [{"scheduler": plateau, "interval": "step", "frequency": 3, "monitor": "loss_step"}]

    assert_window(devices, Scheduled)


# -------------------------------------------------------------------------------------------------------------- metrics


class Measured(Net):
    """Metric objects as attributes, in a collection, logged by object, by value, and reset by the user."""

    def __init__(self) -> None:
        super().__init__()
        accuracy, recall = (kind(3) for kind in (MulticlassAccuracy, MulticlassRecall))
        self.scores = torchmetrics.MetricCollection({"accuracy": accuracy}, prefix="step_")
        self.epoch = torchmetrics.MetricCollection({"recall": recall}, prefix="epoch_")
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log_dict(self.scores(logits, batch[1]), on_step=True)
        self.seen.update(logits[:, 0])
        loss = F.cross_entropy(logits, batch[1])
        self.epoch.update(logits, batch[1])
        self.log_dict(self.epoch, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.calls.append(("seen", kept(self.seen.compute())))
        self.seen.reset()


@DEVICES
def test_metrics(devices: int) -> None:
    """Metric objects are updated by each microbatch, in order."""
    assert_window(devices, Measured, loader=lambda: loader(26, batch_size=2), val=None)


@DEVICES
def test_another_fit(devices: int) -> None:
    """A second ``fit`` of the same trainer goes on, with another window."""

    def twice(number: int) -> Record:
        record = train(number, Net, loader, accumulate_grad_batches=WINDOW)
        record.trainer.fit_loop.max_epochs, record.trainer.accumulate_grad_batches = 2, 3
        with quiet():
            record.trainer.fit(record.module, loader())
        return record

    plain, other = twice(PLAIN), twice(devices)
    assert_equal(plain.calls, other.calls, "calls")
    assert_equal(kept(plain.module.state_dict()), kept(other.module.state_dict()), "weights")
