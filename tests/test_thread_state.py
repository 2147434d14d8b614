"""Context variables and thread-local values that are set around a model hold in its layers, on any thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import pytest
import torch
import traps
import zoo
from harness import assert_same, ours, run, seeded
from torch import Tensor

SCALE: ContextVar[float] = ContextVar("scale", default=1.0)
LOCAL = threading.local()


class Block(traps.Block):
    def forward(self, x: Tensor) -> Tensor:
        scale = SCALE.get() * getattr(LOCAL, "scale", 1.0)
        return super().forward(x) * scale


@contextlib.contextmanager
def variable(value: float) -> Iterator[None]:
    token = SCALE.set(value)
    try:
        yield
    finally:
        SCALE.reset(token)


@contextlib.contextmanager
def of_thread(value: float) -> Iterator[None]:
    LOCAL.scale = value
    LOCAL.kept = torch.full((2,), value)  # which does not compare to one truth value
    try:
        yield
    finally:
        del LOCAL.scale, LOCAL.kept


WAYS: dict[str, Callable[[float], Any]] = {"variable": variable, "thread": of_thread}


class Around(zoo.PlainClassifier):
    """Another value in each batch, set before the step, within it around the model, or for good."""

    way: ClassVar[str]
    place: ClassVar[str]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.place == "before":
            self.entered = contextlib.ExitStack()
            self.entered.enter_context(WAYS[self.way](0.5 + 0.25 * batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == "before":
            self.entered.close()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.place == "within":
            with WAYS[self.way](0.5 + 0.25 * batch_idx):
                return super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


def build(way: str, place: str) -> Around:
    with seeded(5):
        return type("Around", (Around,), {"way": way, "place": place})(traps.Net(Block))


@pytest.mark.parametrize("place", ["before", "within", "outside"])
@pytest.mark.parametrize("way", WAYS)
def test_it_holds_in_layers(way: str, place: str) -> None:
    around = WAYS[way](1.5) if place == "outside" else contextlib.nullcontext()
    with around:
        plain = run("auto", build(way, place), zoo.make_batches("mlp"))
        strategy = ours(num_microbatches=2, layers=["Linear", "Block"])
        assert_same(plain, run(strategy, build(way, place), zoo.make_batches("mlp"), devices=2))
