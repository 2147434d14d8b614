"""Lightning's callbacks, loggers and profilers do what they do in plain training: same values, same files, same stops.

What a callback looks at is in `trainer/test_hook_audit.py`; that hooks come in order is in `test_training.py`.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_same, ours, run
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.memory import is_oom_error
from torch.utils.data import DataLoader, TensorDataset

MLP = zoo.make_module("mlp")
BATCHES = zoo.make_batches("mlp", 3)
VALIDATION = zoo.make_batches("mlp", 2, seed=50)


def pair(make, batches=BATCHES, module=MLP, **options):
    """The same run plainly and with the strategy, each with what ``make`` gives it: a callback or several.

    Args:
        make: called with ``"plain"`` and ``"ours"``.
        options: of `harness.run`; what is callable is called with the same.
    """
    found = []
    for kind, strategy, devices in (("plain", "auto", 1), ("ours", ours(num_microbatches=3), 2)):
        made = make(kind)
        given = {name: value(kind) if callable(value) else value for name, value in options.items()}
        listed = made if isinstance(made, list) else [made]
        found.append((made, run(strategy, module, batches, devices=devices, callbacks=listed, **given)))
    return found


def files(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def assert_same_checkpoints(folder):
    """``folder/plain`` and ``folder/ours`` hold the same files, of the same steps and weights."""
    names = files(folder / "plain")
    assert names == files(folder / "ours")
    for name in names:
        plain, own = (torch.load(folder / kind / name, weights_only=True) for kind in ("plain", "ours"))
        assert (own["epoch"], own["global_step"]) == (plain["epoch"], plain["global_step"]), name
        harness.assert_tensors_same(plain["state_dict"], own["state_dict"], rtol=1e-4, atol=1e-5, what=name)
    return names


# ---------------------------------------------------------------------------------------------------- saving, stopping


def test_model_checkpoint_keeps_the_best(tmp_path):
    (plain, _), (own, _) = pair(
        lambda kind: ModelCheckpoint(
            tmp_path / kind, filename="{epoch}-{step}", monitor="val/loss", save_top_k=2, save_last=True
        ),
        val_batches=VALIDATION,
        max_epochs=3,
        enable_checkpointing=True,
    )
    assert len(assert_same_checkpoints(tmp_path)) == 3
    assert Path(own.best_model_path).name == Path(plain.best_model_path).name
    harness.assert_tensors_same(plain.best_model_score, own.best_model_score)


CALLBACKS = {
    "early stopping": (lambda: callbacks.EarlyStopping("val/loss", patience=1, min_delta=0.02), 12),
    "timer": (lambda: callbacks.Timer({"seconds": 5}, interval="step"), 3),
    "averaging": (lambda: callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2), 4),
    "rates": (lambda: callbacks.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True), 2),
}
"""Each with the most epochs that it trains."""


class Scheduled(zoo.PlainClassifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("name", CALLBACKS)
def test_what_callbacks_do(name, monkeypatch):
    """The same stops, weights and lines; the timer's clock goes on by a second whenever it is read."""
    make, epochs = CALLBACKS[name]

    def made(kind):
        monkeypatch.setattr(callbacks.timer, "time", SimpleNamespace(monotonic=itertools.count().__next__))
        return make()

    (_, plain), (_, result) = pair(made, module=Scheduled(MLP.model), val_batches=VALIDATION, max_epochs=epochs)
    assert_same(plain, result, rtol=1e-4, atol=1e-5)
    assert len(plain.losses) == len(result.losses) and (len(plain.losses) < 3 * epochs) == (epochs in (3, 12))


# -------------------------------------------------------------------------------------------------------------- tuning


class Tuned(zoo.PlainClassifier):
    """Has its own data, so that a batch size can be tried."""

    def __init__(self):
        super().__init__(zoo.make_module("mlp").model)
        self.batch_size, self.lr = 2, 0.05
        generator = torch.Generator().manual_seed(3)
        self.data = TensorDataset(torch.randn(96, 8, generator=generator), torch.arange(96) % 5)

    def train_dataloader(self):
        def collate(samples):
            x, y = zip(*samples, strict=True)
            return {"x": torch.stack(x), "y": torch.stack(y)}

        return DataLoader(self.data, batch_size=self.batch_size, collate_fn=collate)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ReadsGradients(pl.Callback):
    def __init__(self):
        self.norms = []

    def on_after_backward(self, trainer, pl_module):
        self.norms.append(torch.stack([p.grad.norm() for p in pl_module.parameters() if p.grad is not None]))


def tune(kind, *given, folder):
    """Train with the module's own data, which `harness.run` does not."""
    strategy, devices = (ours(num_microbatches=2), 2) if kind == "ours" else ("auto", 1)
    options = {"default_root_dir": folder, "max_steps": 4, "limit_val_batches": 1}
    trainer, module = harness.trainer_of(strategy, devices=devices, callbacks=list(given), **options), Tuned()
    trainer.fit(module)
    assert not list(folder.glob("*.ckpt")), "what the tuner saved is still there"
    return SimpleNamespace(module=module, given=given, state=dict(module.state_dict()))


def test_batch_size_finder(tmp_path):
    """Trials run without the user's callbacks; the run behind them has these, and gives them what they need."""
    plain, own = (
        tune(kind, callbacks.BatchSizeFinder(steps_per_trial=1, max_trials=2), ReadsGradients(), folder=tmp_path)
        for kind in ("plain", "ours")
    )
    assert own.module.batch_size == plain.module.batch_size == 4
    harness.assert_tensors_same(plain.state, own.state)
    harness.assert_tensors_same(plain.given[1].norms, own.given[1].norms)


def test_a_batch_that_no_plan_fits_is_out_of_memory_to_the_tuner():
    with pytest.raises(ValueError, match=r"^memory_budget: workers may use 81,920 bytes") as raised:
        run(ours(num_microbatches=2, memory_budget=80 * 1024), MLP, zoo.make_batches("mlp", 1, 256), devices=2)
    assert is_oom_error(raised.value)


def test_learning_rate_finder(tmp_path):
    finders = [callbacks.LearningRateFinder(1e-3, 1.0, num_training_steps=15) for _ in range(2)]
    plain, own = (
        tune(kind, finder, ReadsGradients(), folder=tmp_path)
        for kind, finder in zip(("plain", "ours"), finders, strict=True)
    )
    curves = [finder.optimal_lr.results for finder in finders]
    harness.assert_tensors_same(*curves, rtol=1e-4, atol=1e-5)
    assert own.module.lr == plain.module.lr != 0.05
    harness.assert_tensors_same(plain.state, own.state, rtol=1e-4, atol=1e-5)
    harness.assert_tensors_same(plain.given[1].norms, own.given[1].norms, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- weights, gradients


def test_weight_averaging(tmp_path):
    """Weights and average change places for each validation; the checkpoint has both, and training goes on from it."""

    def make(folder):
        averaging = callbacks.EMAWeightAveraging(decay=0.5)
        return [averaging, ModelCheckpoint(tmp_path / folder, filename="{step}", save_top_k=-1)]

    options = {"val_batches": VALIDATION, "enable_checkpointing": True}
    (_, plain), (_, result) = pair(make, max_epochs=2, **options)
    assert_same(plain, result)
    assert assert_same_checkpoints(tmp_path) == ["step=3.ckpt", "step=6.ckpt"]
    resuming = {"fit": {"ckpt_path": tmp_path / "ours" / "step=3.ckpt"}}
    resumed = run(
        ours(num_microbatches=3), MLP, BATCHES, devices=2, callbacks=make("again"), max_epochs=2, **options, **resuming
    )
    harness.assert_tensors_same(result.state, resumed.state, rtol=0.0, atol=1e-30)


class Meddles(pl.Callback):
    """Reads and changes gradients and weights wherever that is possible."""

    def __init__(self):
        self.seen = []

    def on_after_backward(self, trainer, pl_module):
        self.seen.append(harness.gradients(pl_module))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5).add_(1e-3)

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.seen.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})


class ShrinksEachBatch(pl.Callback):
    """Changes the weights between steps."""

    def __init__(self):
        self.seen = []

    @torch.no_grad()
    def shrink(self, trainer, pl_module, *args):
        self.seen.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})
        for parameter in pl_module.parameters():
            parameter.mul_(0.9)

    on_train_batch_end = on_train_epoch_end = on_validation_start = shrink


@pytest.mark.parametrize("kind", [Meddles, ShrinksEachBatch])
def test_users_callbacks_read_and_change(kind, said):
    (plain, expected), (own, result) = pair(
        lambda _: kind(), max_epochs=2, val_batches=VALIDATION, blocking=kind is Meddles
    )
    waits = sum("callback ShrinksEachBatch has on_train_batch_end, which may read" in text for text in said)
    assert waits == (kind is ShrinksEachBatch)
    assert len(own.seen) == len(plain.seen) > 3
    harness.assert_tensors_same(plain.seen, own.seen)
    assert_same(expected, result)


# --------------------------------------------------------------------------------------------------- what is displayed


class Shown(zoo.PlainClassifier):
    def training_step(self, batch, batch_idx):
        loss, _ = self.loss_and_logits(batch)
        self.log("shown", loss, prog_bar=True)
        return loss


class ReadsTheBar(pl.Callback):
    """What the progress bar shows after each batch."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.shown = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        bar = trainer.progress_bar_callback
        assert bar is not None
        self.shown.append(bar.get_metrics(trainer, pl_module))


@pytest.mark.parametrize("bar", [RichProgressBar, callbacks.TQDMProgressBar])
def test_progress_bars(bar, capsys):
    (plain, expected), (own, result) = pair(
        lambda kind: [bar(leave=True), ReadsTheBar()], module=Shown(MLP.model), enable_progress_bar=True
    )
    assert_same(expected, result)
    assert len(own[1].shown) == 3 and "shown" in own[1].shown[0]
    harness.assert_tensors_same(plain[1].shown, own[1].shown)
    assert capsys.readouterr().out.count("Epoch 0") >= 2


# ------------------------------------------------------------------------------------------------------------- loggers


class OwnLogger(Logger):
    """A user's: notes everything that it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    name = "own"
    version = 0

    def log_metrics(self, metrics, step=None):
        self.told.append(("metrics", step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.told.append(("hyperparameters", dict(params)))

    def log_graph(self, model, input_array=None):
        self.told.append(("graph", type(model).__name__))

    def after_save_checkpoint(self, checkpoint_callback):
        self.told.append(("saved", checkpoint_callback.best_model_path.rsplit("/", 1)[-1]))

    def save(self):
        self.told.append(("save",))

    def finalize(self, status):
        self.told.append(("finalize", status))


class WithHyperparameters(zoo.PlainClassifier):
    def __init__(self, width=3):
        super().__init__(zoo.make_module("mlp").model)
        self.save_hyperparameters()


def test_a_users_logger_is_told_the_same(tmp_path):
    loggers = []

    def logger(kind):
        loggers.append(OwnLogger())
        return loggers[-1]

    pair(
        lambda kind: ModelCheckpoint(tmp_path / kind, filename="{step}", every_n_train_steps=2),
        module=WithHyperparameters(),
        logger=logger,
        enable_checkpointing=True,
    )
    plain, own = (logger.told for logger in loggers)
    assert {"metrics", "hyperparameters", "graph", "saved", "save", "finalize"} == {what for what, *_ in plain}
    harness.assert_tensors_same(plain, own)


# ------------------------------------------------------------------------------------------------------------ profilers


def test_pytorch_profiler_sees_the_workers(tmp_path):
    """Layers run on threads of their own, of which torch's profiler knows nothing by itself."""
    profiler = PyTorchProfiler(tmp_path, filename="profile", row_limit=-1, export_to_chrome=False)
    run(ours(num_microbatches=3), MLP, BATCHES * 2, devices=2, profiler=profiler, watch=False)
    [file] = tmp_path.iterdir()
    rows = {line.strip().split("  ")[0]: line.split()[-1] for line in file.read_text().splitlines() if line.strip()}
    assert {"[pl][profile][Strategy]RoundPipeStrategy.backward", "aten::addmm"} <= rows.keys()
    forwards = 3 * 3  # steps that are recorded, each of 3 microbatches
    assert int(rows["[pl][module]zoo.plain.MLP: model"]) == forwards
    assert int(rows["aten::addmm"]) >= forwards * 10, "MLP has 10 linear layers, and some run twice"
