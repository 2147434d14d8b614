"""`roundpipe-train` loses nothing: it is interrupted or fails, and the command that it prints goes on bit for bit."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_tensors_same
from patience import PATIENCE_S, until
from safetensors.torch import load_file

from lightning_roundpipe import train
from lightning_roundpipe.callbacks import Checkpoints
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.tasks import CausalLM
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

QUICK = ["experiment=random_tokens", "prompt=null", "data.batch_size=2"]  # steps of two microbatches


pytestmark = pytest.mark.usefixtures("working_folder")


def run(monkeypatch, *arguments):
    """``roundpipe-train`` in this process."""
    monkeypatch.setattr(sys, "argv", ["roundpipe-train", *arguments])
    train.main()


def checkpoint_of(folder):
    [file] = (folder / "checkpoints").iterdir()
    return torch.load(file, weights_only=False)


def assert_same_state(one, other):
    """Weights and the optimizer's state, to the bit."""
    for key in ("global_step", "state_dict", "optimizer_states"):
        assert one[key]
        assert_tensors_same(one[key], other[key], rtol=0.0, atol=0.0, what=key)


def command_in(said):
    """The command that goes on, which is the last line, alone."""
    *_, told, line = said.splitlines()
    assert told.startswith("The newest checkpoint is ") and told.endswith(" To go on from it:")
    return shlex.split(line)


# -- signals -----------------------------------------------------------------------------------------------------------

WAYS = {
    signal.SIGINT: ["lora=all_linear", "lora.lora_dropout=0.2"],  # adapters and dropout; in a folder with spaces
    signal.SIGTERM: ["step_samples=8", "scheduler=cosine"],
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", list(WAYS), ids=lambda number: signal.Signals(number).name)
def test_what_a_signal_ends_goes_on(number, working_folder):
    """The signal comes in the middle of an epoch; what is pasted back ends as the run that nothing interrupted."""
    place = working_folder / "it's my work (1)"
    place.mkdir()
    steps = 15
    program = [sys.executable, "-m", "lightning_roundpipe.train"]
    arguments = [*QUICK, *WAYS[number], f"trainer.max_steps={steps}", "data.sequences=44"]  # 11 steps of 4 an epoch
    subprocess.run([*program, *arguments, "hydra.run.dir=whole"], cwd=place, check=True, timeout=6 * PATIENCE_S)

    with subprocess.Popen(
        [*program, *arguments, "strategy.emulation.latency=0.02"],  # some 15 s are left when the third step is over
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what is in the background ignores it
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Training") and " 3/" in line:
                os.kill(process.pid, number)
                break
        _, err = process.communicate(timeout=6 * PATIENCE_S)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    [interrupted] = (place / "runs").iterdir()
    [file] = (interrupted / "checkpoints").iterdir()
    assert 3 <= int(file.stem.removeprefix("step-")) < steps
    assert (interrupted / "adapters" / "adapter_model.safetensors").is_file() == (number == signal.SIGINT)
    assert json.loads((interrupted / "summary.json").read_text()) == {"error": "interrupted"}

    command = command_in(err)
    assert command[-1].startswith("ckpt_path=") and str(file) in err
    subprocess.run(err.splitlines()[-1], shell=True, cwd=place, check=True, timeout=6 * PATIENCE_S)
    [resumed] = [folder for folder in (place / "runs").iterdir() if folder != interrupted]
    assert_same_state(checkpoint_of(place / "whole"), checkpoint_of(resumed))
    if number == signal.SIGINT:
        both = [load_file(folder / "adapters" / "adapter_model.safetensors") for folder in (place / "whole", resumed)]
        assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())


def test_a_second_signal_does_not_wait(
    monkeypatch, capfd, working_folder,
    request,
):  # fmt: skip
    """Then nothing more is written, and what was written before is named."""
    step = CausalLM.training_step

    def interrupted(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: self.trainer.checkpoint_callback.interrupted_by is not None)  # two at once are one to Python
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(CausalLM, "training_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    handlers = [signal.getsignal(number) for number in WAYS]
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, *QUICK, "callbacks.checkpoint.every_n_train_steps=2")
    signal.signal(signal.SIGINT, handlers[0])  # which Lightning ignores from here on
    assert exit_.value.code == 130
    assert [signal.getsignal(number) for number in WAYS] == handlers
    [folder] = (working_folder / "runs").iterdir()
    assert [file.name for file in (folder / "checkpoints").iterdir()] == ["step-2.ckpt"]
    err = capfd.readouterr().err
    assert f"ckpt_path={folder}/checkpoints/step-2.ckpt" in " ".join(command_in(err))


# -- failures ----------------------------------------------------------------------------------------------------------


def failing_at(number):
    """A training step that fails in the second microbatch of the optimizer step of that number."""
    step = CausalLM.training_step

    def failing(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        if self.trainer.global_step == number and batch_idx % 2:
            raise RuntimeError("the weather")
        return loss

    return failing


@pytest.mark.slow
def test_what_an_error_ends_goes_on(working_folder, monkeypatch, capfd):
    """Step 5 of 4 an epoch fails."""
    options = [*QUICK, "step_samples=8", "lora=all_linear", "trainer.max_steps=6"]
    run(monkeypatch, *options, "hydra.run.dir=whole")
    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "training_step", failing_at(5))
        with pytest.raises(SystemExit) as exit_:
            run(monkeypatch, *options)
    assert exit_.value.code == 1
    err = capfd.readouterr().err
    assert "RuntimeError: the weather" in err
    [failed] = (working_folder / "runs").iterdir()
    assert [file.name for file in (failed / "checkpoints").iterdir()] == ["step-5.ckpt"]
    program, *arguments = command_in(err)
    assert program == "roundpipe-train"
    run(monkeypatch, *arguments, "hydra.run.dir=resumed")
    assert_same_state(checkpoint_of(working_folder / "whole"), checkpoint_of(working_folder / "resumed"))


def test_a_torn_step_is_not_saved(working_folder, monkeypatch, capfd):
    """The optimizer fails after some layers: the last good checkpoint stays, and the strategy writes no other."""
    apply, calls = BucketStepper._apply, [0]
    refused = []

    def torn(self, step, gathered):
        calls[0] += 1
        if step.number == 4 and calls[0] > 1:
            raise RuntimeError("out of something")
        calls[0] = 0 if step.number != 4 else calls[0]
        apply(self, step, gathered)

    class Saves(pl.Callback):
        def on_exception(self, trainer, *_):
            with pytest.raises(RoundPipeError, match=r"mine\.ckpt is not written: the last optimizer step"):
                trainer.save_checkpoint("mine.ckpt")
            refused.append(trainer.strategy.whole)

    monkeypatch.setattr(BucketStepper, "_apply", torn)
    monkeypatch.setattr("lightning_roundpipe.updates.bucket_stepper.PIECE", 1)  # a layer at a time
    monkeypatch.setattr("lightning_roundpipe.callbacks.RunFolder.on_exception", Saves.on_exception)
    with pytest.raises(SystemExit):
        run(monkeypatch, *QUICK, "callbacks.checkpoint.every_n_train_steps=2")
    err = capfd.readouterr().err
    assert "out of something" in err and refused == [False]
    [folder] = (working_folder / "runs").iterdir()
    assert [file.name for file in (folder / "checkpoints").iterdir()] == ["step-2.ckpt"]
    assert "step-2.ckpt" in command_in(err)[-1]
    assert not Path("mine.ckpt").exists()


def test_a_disk_that_is_full_does_not_hide_the_error(monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CausalLM, "training_step", failing_at(2))
    monkeypatch.setattr(Checkpoints, "_save_checkpoint", full)
    with pytest.raises(SystemExit):
        run(monkeypatch, *QUICK)
    err = capfd.readouterr().err
    assert "RuntimeError: the weather" in err
    assert "No checkpoint could be written after this: OSError: [Errno 28] No space left on device" in err
    assert err.splitlines()[-1] == "No checkpoint was written."


@pytest.mark.slow
def test_a_terminal_that_closes_loses_nothing(working_folder):
    """As when a connection breaks. The run ended at once, without a checkpoint; prints fail from then on."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which tests may run, ignores it for them
        arguments = [*QUICK, "trainer.max_steps=3000", "hydra.run.dir=run"]
        os.execv(sys.executable, [sys.executable, "-m", "lightning_roundpipe.train", *arguments])
    shown = b""
    while b"tokens_per_s" not in shown:
        shown += os.read(terminal, 65536)
    os.close(terminal)
    statuses = []

    def has_ended():
        found, status = os.waitpid(pid, os.WNOHANG)
        statuses.extend([os.waitstatus_to_exitcode(status)] if found else [])
        return bool(found)

    until(has_ended)
    assert statuses == [128 + signal.SIGHUP]
    [file] = (working_folder / "run" / "checkpoints").iterdir()
    assert torch.load(file, weights_only=False)["global_step"] < 3000
    assert json.loads((working_folder / "run" / "summary.json").read_text()) == {"error": "interrupted"}
