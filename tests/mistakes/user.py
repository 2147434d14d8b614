"""Who makes the mistakes: what they train, where their files are, and how far they got."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import loader, ours, quiet, trainer_of
from torch import Tensor

BLOCKS = ["Linear", "ResidualBlock"]
"""What the zoo's ``mlp`` is cut into: six calls, from ``model.stem`` over ``model.blocks.0`` to ``model.head``."""


class CommandError(Exception):
    """``roundpipe-train`` refused; the text is what it said."""


class User:
    """Trains the zoo's ``mlp`` on two emulated devices, unless something else is asked for.

    Attributes:
        folder: an empty one.
        finished: training batches that were finished.
    """

    def __init__(self, folder, monkeypatch, capfd):
        self.folder, self.monkeypatch, self._capfd = folder, monkeypatch, capfd
        self.finished = 0
        self._module = None
        self._before = {}

    def fit(self, module=None, batches=None, *, devices=2, ckpt_path=None, trainer=None, **options):
        """Train with these options of the strategy, and ``trainer``'s of the Trainer."""
        self._module = module = zoo.make_module("mlp") if module is None else module
        self._before = _weights(module)
        if isinstance(getattr(module, "model", None), zoo.MLP):
            options = {"layers": BLOCKS} | options
        settings = dict(trainer or {})
        callbacks = [_Count(self), *settings.pop("callbacks", [])]
        made = trainer_of(ours(**options), devices=devices, callbacks=callbacks, **settings)
        with quiet():
            made.fit(module, loader(zoo.make_batches("mlp", 4) if batches is None else batches), ckpt_path=ckpt_path)

    def is_untouched(self):
        """Whether the weights are what they were before ``fit``."""
        now = {} if self._module is None else _weights(self._module)
        return now.keys() == self._before.keys() and all(torch.equal(now[name], self._before[name]) for name in now)

    def checkpoint(self, module=None, batches=None):
        """What plain Lightning leaves after a batch, but with the weights from before: loading those is no training."""
        path, module = self.folder / "good.ckpt", zoo.make_module("mlp") if module is None else module
        before = _weights(module)
        trainer = trainer_of("auto", max_steps=1)
        with quiet():
            trainer.fit(module, loader(zoo.make_batches("mlp", 1) if batches is None else batches))
        module.load_state_dict(before)
        trainer.save_checkpoint(path)
        return path

    def command(self, *arguments):
        """``roundpipe-train experiment=random_tokens`` with these arguments, or of another experiment.

        That it exits with 2 and says one line is part of any refusal.
        """
        from lightning_roundpipe import train

        self.monkeypatch.chdir(self.folder)
        chosen = any(argument.startswith("experiment=") for argument in arguments)
        arguments = arguments if chosen or not arguments else ("experiment=random_tokens", *arguments)
        self.monkeypatch.setattr(sys, "argv", ["roundpipe-train", *arguments])
        with pytest.raises(SystemExit) as exit_:
            train.main()
        # Lightning's own lines come here or not, after what other tests have run.
        lines = self._capfd.readouterr().err.splitlines(keepends=True)
        said = "".join(line for line in lines if not line.startswith("INFO: "))
        assert exit_.value.code == 2, said
        assert said.count("\n") == 1, said
        raise CommandError(said)


@dataclass(frozen=True)
class Mistake:
    """A row of the page of ``docs/errors.md``.

    Attributes:
        section: the heading that its table is under.
        what: was wrong.
        says: how the message begins. "…" stands for what varies.
        remedy: what it goes on to advise, in its own words.
        ways: to make the mistake; each has to get that message.
        finished: training batches before it can show.
    """

    section: str
    what: str
    says: str
    remedy: str
    ways: tuple[Callable[[User], Any], ...]
    finished: int = 0


def options(**given):
    """The mistake of giving the strategy these options."""
    return lambda user: user.fit(**given)


def trainer(**given):
    """The mistake of giving the Trainer these options."""
    return lambda user: user.fit(trainer=given)


class _Count(pl.Callback):
    roundpipe_passive_hooks = True

    def __init__(self, user):
        self.user = user

    def on_train_batch_end(self, *args):
        self.user.finished += 1


def _weights(module):
    values = {name: value for name, value in module.state_dict().items() if type(value) is Tensor}
    return {name: value.clone() for name, value in values.items() if value.device.type == "cpu"}
