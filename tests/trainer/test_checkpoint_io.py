"""Checkpoint files are whole or not there, whatever happens while one is written."""

import copy
import errno
import os
import resource
import signal
from pathlib import Path
from unittest import mock

import faulty
import harness
import pytest
import torch
from faulty import BATCHES, MODULE
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_roundpipe.trainer.checkpoint_io import UNFINISHED, WholeCheckpointIO

SIZE = 300_000
SAME = [BATCHES[0]] * 4
"""One batch again and again: Lightning does not bring a data loader back to where it was."""


class Falls:
    """Something that is asked how it is to be saved, and raises."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def numbered(number):
    """A checkpoint of which each part says its number."""
    return {"number": number, "weights": torch.full((SIZE,), float(number)), "end": number}


def number_of(path):
    """The number of the whole checkpoint at ``path``."""
    loaded = torch.load(path, weights_only=True)
    number = loaded["number"]
    assert loaded["end"] == number and loaded["weights"].shape == (SIZE,)
    assert bool((loaded["weights"] == number).all())
    return int(number)


@pytest.fixture
def path(tmp_path):
    """Where a checkpoint is already."""
    WholeCheckpointIO().save_checkpoint(numbered(1), tmp_path / "some.ckpt")
    return tmp_path / "some.ckpt"


def files(path):
    return sorted(file.name for file in path.parent.iterdir())


# ------------------------------------------------------------------------------------------------------- one checkpoint


def test_it_is_written_and_replaced(path):
    assert number_of(path) == 1
    WholeCheckpointIO().save_checkpoint(numbered(2), str(path))
    assert number_of(path) == 2
    assert files(path) == ["some.ckpt"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt()])
def test_an_exception_while_it_is_written(path, error):
    with pytest.raises(type(error)):
        WholeCheckpointIO().save_checkpoint(numbered(2) | {"falls": Falls(error)}, path)
    assert number_of(path) == 1
    assert files(path) == ["some.ckpt"]


@pytest.fixture
def little_room():
    """No file may become larger than this, as on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(path, little_room):
    """torch's error for one large tensor is that its file has an unexpected length."""
    many = {"weights": [torch.ones(1000) for _ in range(SIZE // 1000)]}
    for checkpoint in (numbered(2), many):
        with pytest.raises(OSError, match=r"could not be written: File too large.*dirpath=") as raised:
            WholeCheckpointIO().save_checkpoint(checkpoint, path)
        assert str(path) in str(raised.value) and raised.value.errno == errno.EFBIG
        assert number_of(path) == 1
        assert files(path) == ["some.ckpt"]


def test_it_goes_to_the_disk_before_its_name_does(path, monkeypatch):
    """Or the machine may fail with the new name and without what belongs there."""
    done = []
    real_sync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def replace(a, b):
        done.append("replace")
        assert a.parent == b.parent, "another folder may be another disk, where a name is not changed but copied"
        real_replace(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    WholeCheckpointIO().save_checkpoint(numbered(2), path)
    assert done == ["some.ckpt" + UNFINISHED, "replace", path.parent.name]


def test_a_requeued_job_goes_on_from_a_whole_one(tmp_path, monkeypatch):
    """SLURM kills what is still saving. Lightning then looked for the checkpoint whose unfinished file was there."""
    trainer = trainer_of(max_steps=2, default_root_dir=tmp_path)
    trainer.fit(copy.deepcopy(MODULE), harness.loader(SAME))
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(side_effect=OSError("killed")))
        patch.setattr(Path, "unlink", mock.Mock(side_effect=OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            trainer.save_checkpoint(tmp_path / "hpc_ckpt_2.ckpt")
    assert len(list(tmp_path.iterdir())) == 2
    module = copy.deepcopy(MODULE)
    again = trainer_of(max_steps=3, max_epochs=-1, default_root_dir=tmp_path)
    again.fit(module, harness.loader(SAME), ckpt_path="hpc")
    assert_same_weights(whole_run(3), module)


def test_other_places_are_lightnings():
    import fsspec

    WholeCheckpointIO().save_checkpoint(numbered(3), "memory://somewhere/some.ckpt")
    with fsspec.open("memory://somewhere/some.ckpt") as file:
        assert torch.load(file, weights_only=True)["number"] == 3
    with pytest.raises(TypeError, match="storage_options"):
        WholeCheckpointIO().save_checkpoint(numbered(3), "memory://somewhere/some.ckpt", storage_options={})


# ---------------------------------------------------------------------------------------------------------- in training


def trainer_of(*callbacks, **options):
    checkpointing = any(isinstance(c, Checkpoint) for c in callbacks)
    options = {"enable_checkpointing": checkpointing, "callbacks": list(callbacks)} | options
    return harness.trainer_of(faulty.strategy(), devices=2, **options)


@pytest.mark.parametrize("where", ["loss backward", "optimizer"])
def test_saving_when_something_failed(tmp_path, where, monkeypatch):
    """Lightning's callback for that: the weights are those before the batch that failed, as in plain training.

    Or those after the step, if it is the optimizer's that raises when it is done: stepped layer by layer, it would be
    done with the first ones only.
    """
    if where == "optimizer":
        monkeypatch.setattr(faulty.FaultyOptimizer, "independent_parameters", False)
    saved = []
    for kind in ("plain", "ours"):
        keep = OnExceptionCheckpoint(tmp_path, kind)
        plant = faulty.PlantAt(2, where, 0)
        trainer = trainer_of(keep, plant)
        if kind == "plain":
            trainer = harness.trainer_of(callbacks=[keep, plant], enable_checkpointing=True)
        with pytest.raises(faulty.Boom):
            trainer.fit(copy.deepcopy(MODULE), harness.loader(SAME))
        faulty.PLANTED.clear()
        saved.append(torch.load(keep.ckpt_path, weights_only=True))
    assert saved[0]["global_step"] == saved[1]["global_step"]
    harness.assert_tensors_same(saved[0]["state_dict"], saved[1]["state_dict"])


def whole_run(steps):
    """What training for so many steps gives that nobody disturbs."""
    module = copy.deepcopy(MODULE)
    trainer_of(max_epochs=-1, max_steps=steps).fit(module, harness.loader(SAME))
    return module


def assert_same_weights(a, b):
    harness.assert_tensors_same(dict(a.state_dict()), dict(b.state_dict()), rtol=0.0, atol=1e-30)


class Own(TorchCheckpointIO):
    """A user's."""


class Recording(AsyncCheckpointIO):
    pass


def test_what_the_user_chose_is_used():
    def io_of(**options):
        return harness.trainer_of(
            faulty.ours(**options.pop("strategy", {})), devices=2, **options
        ).strategy.checkpoint_io

    assert type(io_of()) is WholeCheckpointIO
    assert type(io_of(plugins=[Own()])) is Own
    assert type(io_of(strategy={"checkpoint_io": Own()})) is Own
    wrapped = io_of(plugins=[AsyncCheckpointIO()])
    assert type(wrapped) is AsyncCheckpointIO and type(wrapped.checkpoint_io) is WholeCheckpointIO
    wrapped = io_of(plugins=[AsyncCheckpointIO(Own())])
    assert type(wrapped) is AsyncCheckpointIO and type(wrapped.checkpoint_io) is Own
    twice = io_of(plugins=[Recording(AsyncCheckpointIO())])
    assert type(twice.checkpoint_io) is AsyncCheckpointIO
    assert type(twice.checkpoint_io.checkpoint_io) is WholeCheckpointIO


@pytest.mark.parametrize("falls", [False, True])
def test_saving_on_another_thread(tmp_path, falls):
    """What goes wrong there is raised when training ends, at the latest; engine and threads are gone all the same."""
    module = copy.deepcopy(MODULE)
    if falls:
        module.on_save_checkpoint = lambda checkpoint: checkpoint.update(falls=Falls(faulty.Boom("planted")))
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = trainer_of(checkpoints, plugins=[AsyncCheckpointIO()])
    if falls:
        with pytest.raises(faulty.Boom):
            trainer.fit(module, harness.loader(SAME))
        assert list(tmp_path.iterdir()) == []
    else:
        trainer.fit(module, harness.loader(SAME))
        assert len(list(tmp_path.iterdir())) == 4
        last = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
        harness.assert_tensors_same(dict(whole_run(4).state_dict()), last["state_dict"])
    faulty.assert_nothing_left(module)
