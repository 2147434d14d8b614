"""Context variables and thread-local values that are set around a model hold in its layers, on any thread."""

import contextlib
import threading
from contextvars import ContextVar

import pytest
import torch
import traps
import zoo
from harness import assert_plain, seeded

SCALE = ContextVar("scale", default=1.0)
LOCAL = threading.local()


class Block(traps.Block):
    def forward(self, x):
        scale = SCALE.get() * getattr(LOCAL, "scale", 1.0)
        return super().forward(x) * scale


@contextlib.contextmanager
def variable(value):
    token = SCALE.set(value)
    try:
        yield
    finally:
        SCALE.reset(token)


@contextlib.contextmanager
def of_thread(value):
    LOCAL.scale = value
    LOCAL.kept = torch.full((2,), value)  # which does not compare to one truth value
    try:
        yield
    finally:
        del LOCAL.scale, LOCAL.kept


WAYS = {"variable": variable, "thread": of_thread}


class Around(zoo.PlainClassifier):
    """Another value in each batch, set before the step, within it around the model, or for good."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.place == "before":
            self.entered = contextlib.ExitStack()
            self.entered.enter_context(WAYS[self.way](0.5 + 0.25 * batch_idx))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.place == "before":
            self.entered.close()

    def training_step(self, batch, batch_idx):
        if self.place == "within":
            with WAYS[self.way](0.5 + 0.25 * batch_idx):
                return super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


def build(way, place):
    with seeded(5):
        return type("Around", (Around,), {"way": way, "place": place})(traps.Net(Block))


@pytest.mark.parametrize("place", ["before", "within", "outside"])
@pytest.mark.parametrize("way", WAYS)
def test_it_holds_in_layers(way, place):
    around = WAYS[way](1.5) if place == "outside" else contextlib.nullcontext()
    with around:
        options = {"num_microbatches": 2, "layers": ["Linear", "Block"]}
        assert_plain(build(way, place), zoo.make_batches("mlp"), options)
