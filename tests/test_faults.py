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
from lightning.pytorch.utilities.exceptions import MisconfigurationException
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


# ---------------------------------------------------------------------------------------------------------- bad options

TWO = {"num_microbatches": 2}
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    # what is wrong, options of the strategy, options of the Trainer, what the message says (ignoring case)
    ("both sizes", {"num_microbatches": 2, "microbatch_size": 2}, {}, ["num_microbatches", "microbatch_size", "both"]),
    ("no microbatches", {"num_microbatches": 0}, {}, ["num_microbatches=0", "at least 1"]),
    ("negative", {"num_microbatches": -2}, {}, ["num_microbatches=-2", "at least 1"]),
    ("not a number", {"num_microbatches": "2"}, {}, ["num_microbatches='2'", "whole number"]),
    ("empty microbatch", {"microbatch_size": 0}, {}, ["microbatch_size=0", "at least 1"]),
    ("empty round", {"round_microbatches": 0}, {}, ["round_microbatches=0", "at least 1"]),
    ("unknown layer", {"layers": ["NoSuchLayer"]}, {}, ["layers", "NoSuchLayer"]),
    ("one unknown layer", {"layers": ["ResidualBlock", "blocks.17"]}, {}, ["layers", "blocks.17"]),
    ("no layers", {"layers": []}, {}, ["layers"]),
    ("layers as text", {"layers": "ResidualBlock"}, {}, ["layers", "list"]),
    ("plan misses", {"plan": "forward 0-1; fused 3-5; backward 0-2; round 2"}, {}, ["plan", "call 2", "missed"]),
    ("plan misses back", {"plan": "forward 0-2; fused 3-5; backward 1-2; round 2"}, {}, ["plan", "call 0", "missed"]),
    ("plan repeats", {"plan": "forward 0-2; fused 2-5; backward 0-1; round 2"}, {}, ["plan", "call 2", "repeats"]),
    ("plan reorders", {"plan": "forward 2-3 0-1; fused 4-5; backward 2-3 0-1; round 2"}, {}, ["plan", "reordered"]),
    ("plan too long", {"plan": "forward 0-3; fused 4-9; backward 0-3; round 2"}, {}, ["plan", "out of range"]),
    ("plan too short", {"plan": "forward 0-1; fused 2-4; backward 0-1; round 2"}, {}, ["plan", "call 5"]),
    ("plan unreadable", {"plan": "first this, then that"}, {}, ["plan", "forward 0-3"]),
    ("plan not text", {"plan": 3}, {}, ["plan=3", "text"]),
    ("staleness", {"staleness": 1}, {}, ["staleness=1", "not built"]),
    ("prefetch", {"prefetch": 2}, {}, ["prefetch=2", "not built"]),
    ("scope", {"microbatch_scope": "epoch"}, {}, ["microbatch_scope", "not built"]),
    ("budget unreadable", {"memory_budget": "plenty"}, {}, ["memory_budget='plenty'", "20GiB"]),
    ("no budget", {"memory_budget": 0}, {}, ["memory_budget=0"]),
    ("budget below a layer", {"memory_budget": "2KB"}, {}, ["memory_budget"]),
    ("pinning", {"pin_memory": "maybe"}, {}, ["pin_memory='maybe'", "auto"]),
    ("watchdog", {"watchdog_timeout": 0}, {}, ["watchdog_timeout=0"]),
    ("loss weight", {"loss_weight": 3}, {}, ["loss_weight=3", "function"]),
    ("emulation", {"emulation": {"speed": 3}}, {}, ["emulation", "speed"]),
    ("emulated memory", {"emulation": {"memory": "much"}}, {}, ["emulation.memory", "much"]),
    ("emulated latency", {"emulation": {"latency": -1}}, {}, ["emulation.latency"]),
    ("unknown option", {"microbatches": 3}, {}, ["microbatches"]),
    ("16-true", TWO, {"precision": "16-true"}, ["precision", "16-true"]),
    ("bf16-true", TWO, {"precision": "bf16-true"}, ["precision", "bf16-true"]),
    ("64-true", TWO, {"precision": "64-true"}, ["precision", "64-true"]),
    ("several machines", TWO, {"num_nodes": 2}, ["node"]),
]


@pytest.mark.parametrize(
    ("options", "trainer_options", "fragments"),
    [pytest.param(*case[1:], id=case[0].replace(" ", "-")) for case in REFUSALS],
)
def test_refused_by_name(options: dict[str, Any], trainer_options: dict[str, Any], fragments: list[str]) -> None:
    """The message names the setting and the remedy, and not a single step was made."""
    module, batches = zoo.make_module("mlp"), zoo.make_batches("mlp")
    if "layers" not in options:
        options = options | {"layers": ["Linear", "ResidualBlock"]}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises((ValueError, TypeError, MisconfigurationException)) as caught:
        trainer = trainer_of(ours(**options), devices=2, **trainer_options)
        trainer.fit(module, loader(batches))
    for fragment in fragments:
        assert fragment.lower() in str(caught.value).lower()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert harness.roundpipe_threads() == []


class Manual(zoo.PlainClassifier):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss, _ = self.loss_and_logits(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


def test_manual_optimization_with_microbatches_is_refused() -> None:
    with pytest.raises((ValueError, MisconfigurationException, RuntimeError), match=r"(?i)manual") as caught:
        run(ours(num_microbatches=2), Manual(zoo.make_module("mlp").model), BATCHES, devices=2, watch=False)
    assert "num_microbatches" in str(caught.value)


def test_manual_optimization_is_right_or_refused() -> None:
    module = Manual(zoo.make_module("mlp").model)
    try:
        result = run(ours(), module, BATCHES, devices=2, watch=False)
    except (ValueError, MisconfigurationException, NotImplementedError, RuntimeError) as error:
        assert "manual" in str(error).lower()
    else:
        assert_same(run("auto", module, BATCHES, watch=False), result)


def test_a_batch_without_size_is_refused() -> None:
    class Sizeless(zoo.PlainClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch["scale"] * torch.ones(4, 8)).square().mean()

    module = Sizeless(zoo.make_module("mlp").model)
    batches = [{"scale": torch.tensor(0.5)}] * 3
    with pytest.raises((ValueError, MisconfigurationException), match=r"(?i)batch") as caught:
        run(ours(num_microbatches=2), module, batches, devices=2)
    assert "num_microbatches" in str(caught.value)


# ---------------------------------------------------------------------------------- a trace that is not always the same


class Wandering(zoo.PlainClassifier):
    """Calls its blocks in the order that the batch says: 0 as they stand, 1 two exchanged, 2 one left out."""

    def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
        order = {0: (0, 1, 2, 3), 1: (0, 2, 1, 3), 2: (0, 1, 3)}[int(batch["order"].max())]
        h = self.model.stem(batch["x"])
        for i in order:
            h = self.model.blocks[i](h)
        logits = self.model.head(h)
        return F.cross_entropy(logits, batch["y"]), logits


WANDERING = Wandering(zoo.make_module("mlp").model)
WANDERING_LAYERS = ["Linear", "ResidualBlock"]


def _ordered(*orders: list[int]) -> list[zoo.Batch]:
    batches = zoo.make_batches("mlp", len(orders))
    return [batch | {"order": torch.tensor(order)} for batch, order in zip(batches, orders, strict=True)]


@pytest.mark.parametrize("step", [0, 2])
def test_another_order_of_layers_is_refused_by_name(step: int) -> None:
    """In one microbatch of the first step, and of a pipelined one."""
    orders = [[0] * 6 for _ in range(4)]
    orders[step] = [0, 0, 1, 1, 0, 0]
    with pytest.raises(Exception, match=r"blocks\.1") as caught:
        run(ours(num_microbatches=3, layers=WANDERING_LAYERS), WANDERING, _ordered(*orders), devices=2)
    said = f"{caught.value} {notes(caught.value)}"
    assert "blocks.2" in said
    assert re.search(r"(?i)expect", said), said
    assert re.search(r"(?i)call", said), said
    assert harness.roundpipe_threads() == []


def test_with_one_microbatch_any_control_flow_works() -> None:
    batches = _ordered([0] * 6, [1] * 6, [2] * 6, [0] * 6, [1] * 6)
    result = run(ours(num_microbatches=1, layers=WANDERING_LAYERS), WANDERING, batches, devices=2)
    assert_same(run("auto", WANDERING, batches), result)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_layer_may_be_left_out(devices: int) -> None:
    """Layer drop: a microbatch makes a part of the trace, in its order; the others are not held up."""
    batches = _ordered([0] * 6, [0] * 6, [0, 0, 2, 2, 0, 0], [2, 2, 2, 2, 0, 0], [2] * 6, [0] * 6)
    hand = harness.by_hand(WANDERING, batches, 3)
    assert_same(hand, run(ours(num_microbatches=3, layers=WANDERING_LAYERS), WANDERING, batches, devices=devices))
