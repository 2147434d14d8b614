"""Errors of CUDA after which a process cannot use the GPU any more: each call fails, in every thread."""

import fake_cuda
import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import ours, trainer_of

from lightning_roundpipe.devices.errors import StreamError, is_sticky

REMEDY = "start a new process"


class Fails(pl.Callback):
    """A layer of the second batch fails."""

    roundpipe_passive_hooks = True
    armed = False

    def __init__(self, number, *, dies, shown=None):
        self.number, self.dies = number, dies
        self.shown = shown or fake_cuda.accelerator_error(number)

    def follow(self, patch):
        real = zoo.ResidualBlock.forward

        def forward(block, h):
            if self.armed:
                self.armed = False
                if self.dies:
                    fake_cuda.DEAD.append(self.number)
                raise self.shown
            return real(block, h)

        patch.setattr(zoo.ResidualBlock, "forward", forward)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.armed = self.armed or batch_idx == 1

    def on_validation_batch_start(self, *args):
        self.armed = True


def fit(fails, patch, *, validates=False):
    fails.follow(patch)
    used = ours(num_microbatches=2, layers=["Linear", "ResidualBlock"])
    trainer = trainer_of(used, devices=2, callbacks=[fails])
    batches = harness.loader(zoo.make_batches("mlp", 3))
    with pytest.raises(RuntimeError) as caught:
        if validates:
            trainer.validate(zoo.make_module("mlp"), batches, verbose=False)
        else:
            trainer.fit(zoo.make_module("mlp"), batches)
    assert harness.roundpipe_threads() == []
    return caught.value


def remedies(error):
    return [note for note in getattr(error, "__notes__", ()) if REMEDY in note]


@pytest.mark.parametrize("validates", [False, True])
def test_only_a_new_process_helps(validates, gpus, monkeypatch):
    """The error that is raised is the first one, with a place and a remedy; nothing is left behind.

    Another thread that asks the GPU at that moment may be the first to be told.
    """
    fails = Fails(700, dies=True)
    error = fit(fails, monkeypatch, validates=validates)
    assert isinstance(error, torch.AcceleratorError)
    assert len(remedies(error)) == 1
    assert validates or error is not fails.shown or any("layer 'model.blocks.0'" in note for note in error.__notes__)
    assert not any("could not be reset" in note for note in error.__notes__)


def test_what_comes_of_it_under_another_name(gpus, monkeypatch):
    """Libraries raise errors of their own. Afterwards, the GPU says which it was, perhaps to another thread first."""
    shown = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`")
    error = fit(Fails(719, dies=True, shown=shown), monkeypatch)
    assert error is shown or isinstance(error, torch.AcceleratorError)
    assert len(remedies(error)) == 1


def test_after_other_errors_the_process_goes_on(gpus, monkeypatch):
    """Such as a kernel that asks for too many resources (701)."""
    error = fit(Fails(701, dies=False), monkeypatch)
    assert remedies(error) == []
    harness.run(ours(num_microbatches=2), zoo.make_module("mlp"), zoo.make_batches("mlp", 2), devices=2, watch=False)


def test_causes_are_looked_at():
    try:
        try:
            raise fake_cuda.accelerator_error(716)
        except RuntimeError as cause:
            raise StreamError("weights_up failed") from cause
    except StreamError as error:
        assert is_sticky(error)
    assert not is_sticky(fake_cuda.accelerator_error(2))
    assert not is_sticky(RuntimeError("700"))
    assert not is_sticky(None)
