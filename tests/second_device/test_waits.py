"""Nobody who drives a device waits for it, once the first batches have taught the engine what there is to know.

A thread that waits while it holds the lock of user code keeps all microbatches' user code waiting, too. The main thread
may wait, for the loss that Lightning asks for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import ours, run
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe.runtime.control import UserLock
from lightning_roundpipe.tasks.causal_lm import CausalLM
from second_device import backend
from second_device.backend import Wait

STEADY = 4
"""The batch from which on nothing is new."""


class Listens(pl.Callback):
    """Notes waits from batch ``STEADY`` on, and those who hold the lock meanwhile."""

    roundpipe_looks_away = True

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waits: list[Wait] = []
        self.holding: list[Wait] = []
        self._listening = False
        self._mine = threading.local()
        self._follow(patch)

    def _follow(self, patch: pytest.MonkeyPatch) -> None:
        acquire, release = UserLock.acquire, UserLock.release

        def acquired(lock: UserLock, *args: Any) -> None:
            acquire(lock, *args)
            self._mine.held = True

        def released(lock: UserLock) -> None:
            self._mine.held = False
            release(lock)

        patch.setattr(UserLock, "acquire", acquired)
        patch.setattr(UserLock, "release", released)

    def hear(self, wait: Wait) -> None:
        if self._listening and wait.thread != "MainThread":
            self.waits.append(wait)
            if getattr(self._mine, "held", False):
                self.holding.append(wait)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._listening = batch_idx >= STEADY

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._listening = False


def _tokens(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 64, (count, 4, 12), generator=generator)
    return [{"input_ids": batch, "labels": batch} for batch in words]


def _task(count: int) -> tuple[Any, list[Any]]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return CausalLM(LlamaForCausalLM(config), functools.partial(torch.optim.SGD, lr=0.1)), _tokens(count)


def _masked_task(count: int) -> tuple[Any, list[Any]]:
    module, batches = _task(count)
    return module, [batch | {"attention_mask": (torch.arange(12) < 9).long().expand(4, 12)} for batch in batches]


def _of_zoo(name: str, count: int) -> tuple[Any, list[Any]]:
    return zoo.make_module(name), zoo.make_batches(name, count)


class Quiet(zoo.PlainClassifier):
    """Logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        return loss


TASKS: dict[str, Callable[[int], tuple[Any, list[Any]]]] = {
    "packaged task": _task,
    "packaged task with masks": _masked_task,
    "mlp": functools.partial(_of_zoo, "mlp"),
    "mlp without logging": lambda count: (Quiet(zoo.MLP()), zoo.make_batches("mlp", count)),
}


def _heard(name: str, patch: pytest.MonkeyPatch) -> Listens:
    torch.manual_seed(0)
    module, batches = TASKS[name](STEADY + 3)
    listens = Listens(patch)
    with backend.listening(listens.hear):
        run(ours(num_microbatches=2), module, batches, devices=2, callbacks=[listens], watch=False)
    return listens


def _told(waits: list[Wait]) -> str:
    return "\n".join(sorted({str(wait)[:600] for wait in waits}))


def test_a_wait_of_user_code_is_heard(devices: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests below would test nothing."""
    real = Quiet.training_step

    def training_step(self: Quiet, batch: Any, batch_idx: int) -> Tensor:
        loss = real(self, batch, batch_idx)
        loss.item()
        return loss

    monkeypatch.setattr(Quiet, "training_step", training_step)
    heard = _heard("mlp without logging", monkeypatch)
    assert any(wait.what == "_local_scalar_dense" for wait in heard.holding)
    assert all(wait in heard.waits for wait in heard.holding)


WAITING = {
    "packaged task": "Hugging Face's masks and rotary tables wait for the device",
    "packaged task with masks": "Hugging Face's masks and rotary tables wait",
}


def _cases() -> Iterator[Any]:
    for name in TASKS:
        marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=WAITING[name])] if name in WAITING else []
        yield pytest.param(name, marks=marks if name == "packaged task" else [*marks, pytest.mark.slow])


@pytest.mark.parametrize("name", _cases())
def test_nobody_waits(name: str, devices: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heard = _heard(name, monkeypatch)
    assert heard.holding == [], _told(heard.holding)
    assert heard.waits == [], _told(heard.waits)
