"""What goes wrong reaches the caller: with its own type and traceback, saying where, and leaving nothing behind.

A fault is planted in user code by arming ``BOMB``, which is global because workers run copies of the layers. With a cut
at every call, only the last layer is fused, so a block's call without gradients is its forward and one with gradients
its recomputation.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, loader, ours, run, trainer_of
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(60)


class Boom(Exception):
    """Nobody else raises this."""


class Bomb:
    """Raises ``error`` at the ``after``-th time that user code passes the armed place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.disarm()

    def arm(self, where: str, after: int = 0, error: type[BaseException] = Boom) -> None:
        self.where, self.left, self.error = where, after, error

    def disarm(self) -> None:
        self.where, self.left, self.error = "", 0, Boom

    def __call__(self, *places: str) -> None:
        if self.where not in places:
            return
        with self._lock:
            self.left -= 1
            if self.left >= 0:
                return
        explode(self.error)


BOMB = Bomb()


def explode(error: type[BaseException]) -> None:
    raise error("planted")


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    BOMB.disarm()
    yield
    BOMB.disarm()


class Trip(torch.autograd.Function):
    """Passes its input on; its backward passes ``BOMB``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        BOMB(f"{ctx.name} backward")
        return grad, None


class FaultyBlock(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = f"block {index}"
        self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        BOMB(self.name, f"{self.name} recomputation" if torch.is_grad_enabled() else f"{self.name} forward")
        return x + Trip.apply(torch.tanh(self.inner(x)), self.name)


class FaultyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.blocks = nn.ModuleList(FaultyBlock(i) for i in range(4))
        self.head = nn.Linear(zoo.WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for i, block in enumerate(self.blocks):
            h = block(h)
            BOMB(f"between {i}")
        return self.head(h)


class FaultyOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        BOMB("optimizer")
        return loss


class FaultyModule(zoo.PlainClassifier):
    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        BOMB("training_step")
        logits = self.model(batch["x"])
        BOMB("loss")
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: zoo.Batch, batch_idx: int) -> None:
        BOMB("validation")
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return FaultyOptimizer(self.parameters(), lr=0.1)


class ArmAt(pl.Callback):
    """Arms ``BOMB`` when batch ``batch`` starts."""

    def __init__(self, batch: int, where: str, after: int = 0, error: type[BaseException] = Boom) -> None:
        self.batch, self.bomb = batch, (where, after, error)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            BOMB.arm(*self.bomb)

    def on_train_batch_end(self, *args: Any) -> None:
        BOMB("callback")


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(4)
    MODULE = FaultyModule(FaultyNet())
BATCHES = zoo.make_batches("mlp", 4)
LAYERS = ["Linear", "FaultyBlock"]
CUT = harness.per_call(6)


def strategy(**options: Any) -> Any:
    return ours(**({"num_microbatches": 3, "layers": LAYERS, "plan": CUT} | options))


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def assert_trains() -> None:
    """Nothing is left of the fault: no thread, and the next training has plain training's numbers."""
    assert harness.roundpipe_threads() == []
    BOMB.disarm()
    assert_same(run("auto", MODULE, BATCHES), run(strategy(), MODULE, BATCHES, devices=2))


def fail(batch: int, where: str, after: int = 0, error: type[BaseException] = Boom, **options: Any) -> Any:
    """Train into the fault; returns the exception."""
    with pytest.raises(error) as caught:
        run(strategy(**options), MODULE, BATCHES, devices=2, callbacks=[ArmAt(batch, where, after, error)])
    assert "explode" in frames(caught.value), "the traceback does not reach the line that raised"
    assert str(caught.value) == "planted"
    return caught.value


# --------------------------------------------------------------------------------------------------- planted exceptions


@pytest.mark.parametrize(
    ("where", "after", "layer", "phase", "microbatch"),
    [
        ("block 1 forward", 0, r"blocks\.1", "forward", 0),
        ("block 1 forward", 2, r"blocks\.1", "forward", 2),
        ("block 3 forward", 1, r"blocks\.3", "forward", 1),
        ("block 2 recomputation", 1, r"blocks\.2", "recomput", 1),
        ("block 0 recomputation", 2, r"blocks\.0", "recomput", 2),
        ("block 2 backward", 1, r"blocks\.2", "backward", 1),
        ("block 0 backward", 0, r"blocks\.0", "backward", 0),
        ("training_step", 0, None, "glue", 0),
        ("training_step", 2, None, "glue", 2),
        ("between 1", 1, None, "glue", 1),
        ("loss", 0, None, "glue|loss", 0),
        ("loss", 2, None, "glue|loss", 2),
    ],
)
def test_exception_in_a_pipelined_step(where: str, after: int, layer: str, phase: str, microbatch: int) -> None:
    error = fail(2, where, after)
    said = notes(error)
    for expected in (layer or "", rf"(?i){phase}", rf"microbatch {microbatch}\b", r"slot \w+", r"device \w+"):
        assert re.search(expected, said), f"{expected!r} is not in {said!r}"
    assert_trains()


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("where", ["block 1", "block 2 recomputation", "block 2 backward", "between 1", "loss"])
def test_exception_in_the_first_step(where: str, after: int) -> None:
    """The first step runs one microbatch after another, layers several times, and finds the trace."""
    error = fail(0, where, after)
    said = notes(error)
    assert re.search(rf"microbatch {after if where in ('between 1', 'loss') else '[01]'}\b", said), said
    assert re.search(r"device", said), said
    if where.startswith("block"):
        assert f"blocks.{where.split()[1]}" in said
    assert_trains()


@pytest.mark.parametrize("where", ["block 1 recomputation", "block 3 backward", "loss"])
def test_exception_in_a_fused_stage(where: str) -> None:
    """With everything fused, the call with gradients is the forward."""
    error = fail(2, where, 1, plan=harness.single(6))
    assert re.search(r"microbatch 1\b", notes(error)), notes(error)
    assert_trains()


@pytest.mark.parametrize("where", ["optimizer", "callback"])
def test_exception_outside_the_pipeline(where: str) -> None:
    fail(1, where)
    assert_trains()


def test_exception_in_validation() -> None:
    BOMB.arm("validation", 1)
    with pytest.raises(Boom) as caught:
        run(strategy(), MODULE, BATCHES, devices=2, val_batches=BATCHES)
    assert "explode" in frames(caught.value)
    assert_trains()


def test_exception_with_accumulation() -> None:
    """In the second of two accumulated batches; nothing of the first is left in the gradients afterwards."""
    arm = ArmAt(3, "block 1 backward", 1)
    with pytest.raises(Boom):
        run(strategy(), MODULE, BATCHES, devices=2, accumulate_grad_batches=2, callbacks=[arm])
    assert_trains()


@pytest.mark.parametrize("where", ["block 1 forward", "block 2 backward", "loss"])
def test_the_same_trainer_goes_on(where: str) -> None:
    """A second fit of a Trainer whose first one failed, with the same strategy, as it goes with plain training."""
    states = []
    for chosen in ("auto", strategy()):
        module = copy.deepcopy(MODULE)
        # Plainly there is one forward only, which has gradients, and one microbatch.
        place, after = (where.replace(" forward", " recomputation"), 0) if chosen == "auto" else (where, 1)
        arm = ArmAt(2, place, after)
        trainer = trainer_of(chosen, devices=1 if chosen == "auto" else 2, callbacks=[arm])
        with pytest.raises(Boom):
            trainer.fit(module, loader(BATCHES))
        BOMB.disarm()
        arm.batch = -1
        trainer.fit(module, loader(BATCHES))
        states.append(dict(module.state_dict()))
    harness.assert_tensors_same(*states)


def test_an_exception_is_quick() -> None:
    start = time.monotonic()
    fail(2, "block 0 backward", 2)
    assert time.monotonic() - start < 5  # the whole run, its setup included


def test_no_note_is_added_twice() -> None:
    error = fail(2, "block 1 forward", 1)
    assert len([note for note in error.__notes__ if "microbatch" in note]) == 1


@pytest.mark.parametrize("error", [StopIteration, ZeroDivisionError, AssertionError, SystemExit])
def test_exceptions_that_could_be_taken_for_something_else(error: type[BaseException]) -> None:
    """Python gives some of these a meaning of their own in loops, generators and threads."""
    if error is StopIteration:  # a data fetcher's end, for Lightning: plain training just stops
        run(strategy(), MODULE, BATCHES, devices=2, callbacks=[ArmAt(2, "loss", 1, error)], watch=False)
        assert_trains()
        return
    fail(2, "block 1 forward", 1, error)
    assert_trains()


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


@contextlib.contextmanager
def _interrupts_restored() -> Iterator[None]:
    """Lightning ignores further interrupts while it shuts down, and leaves it at that."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("where", ["block 1 forward", "block 2 backward", "loss"])
def test_keyboard_interrupt_raised_in_user_code(where: str) -> None:
    """Lightning turns a KeyboardInterrupt into an exit."""
    with _interrupts_restored(), pytest.raises((SystemExit, KeyboardInterrupt)):
        run(strategy(), MODULE, BATCHES, devices=2, callbacks=[ArmAt(2, where, 1, KeyboardInterrupt)])
    assert_trains()


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return self.inner(x)


class PressCtrlC(pl.Callback):
    """Sends the signal while the ``batch``-th step runs."""

    def __init__(self, batch: int, after_s: float) -> None:
        self.batch, self.after_s, self.sent = batch, after_s, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            threading.Timer(self.after_s, self._press).start()

    def _press(self) -> None:
        self.sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("batch", [0, 2])
def test_ctrl_c(batch: int) -> None:
    """The main thread waits for others when the signal comes; it must not wait for the end of training."""
    slow = zoo.PlainClassifier(nn.Sequential(*(Slow() for _ in range(4)), nn.Linear(8, 5)))
    press = PressCtrlC(batch, 0.1)
    chosen = ours(num_microbatches=3, layers=["Slow", "Linear"])
    with _interrupts_restored(), pytest.raises((SystemExit, KeyboardInterrupt)):
        run(chosen, slow, zoo.make_batches("mlp", 60), devices=2, callbacks=[press])
    assert time.monotonic() - press.sent < 3
    assert_trains()


def test_a_stuck_layer_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """Instead of a silent hang: the stacks of all threads, and the setting."""
    release = STUCK["release"] = threading.Event()

    class Unstick(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                STUCK["armed"] = True
                threading.Timer(6.0, release.set).start()

        def on_exception(self, *args: Any) -> None:
            release.set()

    said = ""
    try:
        module = zoo.PlainClassifier(nn.Sequential(nn.Linear(8, 8), Stuck(), nn.Linear(8, 5)))
        chosen = ours(num_microbatches=3, layers=["Linear", "Stuck"], watchdog_timeout=1.0)
        run(chosen, module, BATCHES, devices=2, callbacks=[Unstick()])
    except Exception as error:
        said = f"{error} {notes(error)}"
    finally:
        release.set()
        STUCK.clear()
    out = capfd.readouterr()
    said += out.err + out.out
    assert "watchdog_timeout" in said
    assert "stuck_here" in said, "no stack shows where it hangs"


STUCK: dict[str, Any] = {}


class Stuck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if STUCK.pop("armed", False):
            stuck_here()
        return self.inner(x)


def stuck_here() -> None:
    STUCK["release"].wait(20)
