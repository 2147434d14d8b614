"""Ways in which Lightning's own users use a Trainer: what works with a plain strategy works with this one."""

import copy
import io
import pickle

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_plain, loader, ours, seeded, trainer_of
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeMonitor, RoundPipeStrategy


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_a_trainer_can_be_pickled_and_copied(precision):
    trainer = trainer_of(ours(num_microbatches=2), precision=precision)
    for again in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert isinstance(again.strategy, RoundPipeStrategy)
        assert again.strategy.options == trainer.strategy.options
        again.fit(zoo.make_module("mlp"), loader(zoo.make_batches("mlp")))
        assert again.global_step == len(zoo.make_batches("mlp"))


class Copied(pl.Callback):
    """Copies and pickles whatever belongs to a run, wherever a callback might."""

    def __init__(self):
        self.seen = []

    def copy_all(self, where, trainer, module):
        self.seen.append(where)
        things = (trainer, trainer.callbacks, trainer.strategy, trainer.optimizers, trainer.precision_plugin, module)
        for thing in things:
            copy.deepcopy(thing)
            pickle.loads(pickle.dumps(thing))
        torch.save(trainer, io.BytesIO())
        again = pickle.loads(pickle.dumps(module))
        assert all(map(torch.equal, again.state_dict().values(), module.state_dict().values()))

    def on_fit_start(self, trainer, pl_module):
        self.copy_all("fit", trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.copy_all("batch", trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self.copy_all("end", trainer, pl_module)


def test_everything_of_a_run_can_be_copied_and_pickled_in_it():
    """The engine's hooks hung on callbacks, module and accelerator, and held its threads and locks."""
    copied = Copied()
    trainer = trainer_of(ours(num_microbatches=2), callbacks=[copied, RoundPipeMonitor(every_n_steps=1)], max_steps=2)
    module = BoringModel()
    trainer.fit(module)
    copied.copy_all("after", trainer, module)
    assert copied.seen == ["fit", "batch", "batch", "end", "after"]


def test_a_slurm_plugin_in_one_process():
    """On a laptop, and in a job that is not started by srun, its variables are not set."""
    for plugin in (SLURMEnvironment(), SLURMEnvironment(auto_requeue=False)):
        trainer = trainer_of(ours(num_microbatches=2), plugins=[plugin])
        trainer.fit(zoo.make_module("mlp"), loader(zoo.make_batches("mlp")))
        assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (1, 0, 0, 0)


def test_steps_outside_of_a_run_are_those_of_a_plain_module():
    # Code that drives Lightning's loops by hand, before setup or after teardown, met an assertion of ours.
    module, batch = BoringModel(), torch.ones(2, 32)
    trainer = trainer_of(ours(num_microbatches=2), devices=2, limit_train_batches=1, limit_val_batches=0)
    trainer.strategy.connect(module)

    def steps_are_plain():
        for step, key in (("training_step", "loss"), ("validation_step", "x"), ("test_step", "y")):
            outputs = getattr(trainer.strategy, step)(batch, 0), getattr(module, step)(batch, 0)
            assert torch.equal(outputs[0][key], outputs[1][key])
        assert torch.equal(trainer.strategy.predict_step(batch, 0), module.predict_step(batch, 0))

    steps_are_plain()
    trainer.fit(module)
    steps_are_plain()


class GoesByDefault(nn.Module):
    """Makes a tensor in torch's default format."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        return torch.tanh(self.inner(x)) * torch.full((1,), 1 / 3)


class Double(zoo.PlainClassifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        assert loss.dtype is torch.float64 and torch.get_default_dtype() is torch.float64
        return loss


def double():
    with seeded(5):
        blocks = [GoesByDefault() for _ in range(3)]
        return Double(nn.Sequential(nn.Linear(8, zoo.WIDTH), *blocks, nn.Linear(zoo.WIDTH, 5)))


@pytest.mark.parametrize(("microbatches", "devices", "accumulate"), [(1, 1, 1), (2, 2, 2)])
def test_double_precision(microbatches, devices, accumulate):
    options = {"num_microbatches": microbatches, "layers": ["Linear", "GoesByDefault"]}
    script = {"devices": devices, "precision": "64-true", "accumulate_grad_batches": accumulate}
    _, other = assert_plain(double(), zoo.make_batches("mlp", count=4), options, **script)
    assert all(t.dtype is torch.float64 for t in other.state.values())


class TakesFromIterator(zoo.PlainClassifier):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        loss, _ = self.loss_and_logits(batch)
        return loss


class MakesItsOwn(zoo.PlainClassifier):
    """Its batches are numbers."""

    def training_step(self, batch, batch_idx):
        made = torch.Generator().manual_seed(int(batch))
        x = torch.randn(4, 8, generator=made)
        return self.model(x).square().mean()


@pytest.mark.parametrize("kind", [TakesFromIterator, MakesItsOwn])
def test_batches_without_samples_are_one_microbatch_by_default(kind):
    def build():
        with seeded(5):
            return kind(nn.Sequential(nn.Linear(8, zoo.WIDTH), nn.Tanh(), nn.Linear(zoo.WIDTH, 5)))

    batches = loader(zoo.make_batches("mlp", count=3)) if kind is TakesFromIterator else [1, 2, 3]
    modules = [build(), build()]
    for strategy, module in zip(("auto", ours()), modules, strict=True):
        trainer_of(strategy, accumulate_grad_batches=2).fit(module, batches)
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
    message = "num_microbatches=2 cuts" if kind is MakesItsOwn else "takes dataloader_iter.*leave out num_microbatches"
    with pytest.raises(ValueError, match=message):
        trainer_of(ours(num_microbatches=2)).fit(build(), batches)


class Bare(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(3.0))

    def validation_step(self, batch, batch_idx):
        self.log("total", (batch * self.scale).sum())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch * self.scale


class Empty(Bare):
    def __init__(self):
        super().__init__()
        del self.scale
        self.scale = 2.0


@pytest.mark.parametrize("kind", [Bare, Empty])
def test_a_module_without_layers_is_evaluated(kind):
    data = DataLoader(torch.ones(4, 3), batch_size=2)
    plain, other = trainer_of("auto"), trainer_of(ours(), devices=2)
    for found, expected in zip(other.predict(kind(), data) or (), plain.predict(kind(), data) or (), strict=True):
        assert torch.equal(found, expected)
    assert other.validate(kind(), data, verbose=False) == plain.validate(kind(), data, verbose=False)
    assert other.test(kind(), data, verbose=False) == plain.test(kind(), data, verbose=False)
