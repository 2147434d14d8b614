"""Layers that begin to do something else after some steps, and what the thread that runs them has set.

In the first steps, a layer only returns tensors of its own. From `LATE` on it does something else, of which nothing
tells the engine.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_same, assert_tensors_same, halves, loader, ours, quiet, run, trainer_of
from torch import Tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from traps import Block, Net

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.sync import Runner

STEPS, LATE = 7, 5
CALLS = 5
MICROBATCHES = 3


class Clock:
    """The number of the step, which layers read without the engine's knowledge."""

    step = 0
    batch: ContextVar[int] = ContextVar("batch")
    """In evaluation, where several batches are in flight."""

    @classmethod
    def is_late(cls) -> bool:
        return cls.batch.get(cls.step) >= LATE


class Steps(zoo.PlainClassifier):
    """Its hook may look at weights, so that a step ends before the clock moves on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Clock.step = batch_idx


class Turning(Block):
    """A block that turns into something else."""

    late: Callable[[Any, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return type(self).late(self, x) if Clock.is_late() else super().forward(x)


def module_of(late: Callable[[Any, Tensor], Tensor]) -> Steps:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Steps(Net(type("Turning", (Turning,), {"late": late})))


def usual(block: Any, x: Tensor) -> Tensor:
    return Block.forward(block, x)


def sets_an_attribute(block: Any, x: Tensor) -> Tensor:
    block.aux = x.detach().mean()
    return usual(block, x)


def fills_a_list(block: Any, x: Tensor) -> Tensor:
    block.flag = [*(block.flag if isinstance(block.flag, list) else []), 1.0]
    return usual(block, x)


def returns_its_input(block: Any, x: Tensor) -> Tensor:
    return x


def returns_a_view_of_its_input(block: Any, x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def returns_a_view_of_its_weight(block: Any, x: Tensor) -> Tensor:
    return block.other.bias.expand_as(x)


def caches_parametrizations(block: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return usual(block, x)


def writes_to_its_argument(block: Any, x: Tensor) -> Tensor:
    return usual(block, x.add_(1.0))


def keeps_a_graph(block: Any, x: Tensor) -> Tensor:
    block.aux = block.other(x)
    return usual(block, x)


def ran(module: Steps, plan: str = "", steps: int = STEPS) -> Any:
    strategy = ours(num_microbatches=MICROBATCHES, plan=plan or halves(CALLS))
    return run(strategy, module, zoo.make_batches("mlp")[0], steps=steps, devices=2)


@pytest.mark.parametrize(
    "late",
    [
        sets_an_attribute, fills_a_list, returns_its_input, returns_a_view_of_its_input, returns_a_view_of_its_weight,
        caches_parametrizations, writes_to_its_argument, keeps_a_graph,
    ],
)  # fmt: skip
def test_what_a_layer_does_later_equals_plain_training(late: Callable[[Any, Tensor], Tensor]) -> None:
    module = module_of(late)
    assert_same(run("auto", module, zoo.make_batches("mlp")[0], steps=STEPS), ran(module))


def test_an_attribute_set_later_reaches_the_users_layer() -> None:
    trained = ran(module_of(sets_an_attribute)).module.model
    assert all(isinstance(block.aux, Tensor) for block in trained.blocks)


def writes_to_its_weight(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.inner.weight.add_(1.0)
    return usual(block, x)


def hides_a_tensor(block: Any, x: Tensor) -> Any:
    return lambda: x  # a function with a closure


@pytest.mark.parametrize(
    ("late", "error"),
    [
        (writes_to_its_weight, "writes to its own parameters while it runs"),
        (hides_a_tensor, "returns a function, in which tensors would pass the boundary"),
    ],
)
def test_what_a_layer_may_not_do_later_is_refused(late: Callable[[Any, Tensor], Tensor], error: str) -> None:
    with pytest.raises(RoundPipeError, match=error):
        ran(module_of(late))


def of_the_same_values(block: Any) -> None:
    with torch.no_grad():
        block.inner.weight.mul_(0.5 if Clock.is_late() else 1.0)


def of_the_same_data(block: Any) -> None:
    block.inner.weight.data.mul_(0.5 if Clock.is_late() else 1.0)


def of_data_that_it_only_read(block: Any) -> None:
    data = block.inner.weight.data
    if Clock.is_late():
        data.mul_(0.5)


@pytest.mark.parametrize("write", [of_the_same_values, of_the_same_data, of_data_that_it_only_read])
def test_a_write_to_weights_that_begins_to_change_them_is_refused(write: Callable[[Any], None]) -> None:
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            write(self)
            return super().forward(x)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = Steps(Net(Writing))
    with pytest.raises(RoundPipeError, match="writes to its own parameters while it runs"):
        ran(module, steps=3 * LATE)  # the weights are compared when the number of writes is a power of two


def test_user_code_may_not_write_to_an_input_that_a_layer_returns_later() -> None:
    class Net2(Net):
        def body(self, h: Tensor) -> Tensor:
            for block in self.blocks:
                h = block(h)
                if Clock.is_late():
                    h += 1.0
            return h

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = Steps(Net2(type("Turning", (Turning,), {"late": returns_a_view_of_its_input})))
    with pytest.raises(RoundPipeError, match="returned tensors that share memory"):
        ran(module)


def test_layers_take_inference_tensors() -> None:
    """They have no versions, by which other arguments show that they were written to."""

    class Added(Block):
        def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + more

    class Net2(Net):
        def body(self, h: Tensor) -> Tensor:
            with torch.inference_mode():
                more = torch.ones(h.shape[-1])
            for block in self.blocks:
                h = block(h, more)
            return h

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = Steps(Net2(Added))
    assert_same(run("auto", module, zoo.make_batches("mlp")[0], steps=STEPS), ran(module))


# ----------------------------------------------------------------------------------------------------------- evaluation


class Predicts(Steps):
    """Returns logits, and the attributes that layers have set."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        Clock.batch.set(batch_idx)
        _, logits = self.loss_and_logits(batch)
        return logits, [getattr(block, "aux", None) for block in self.model.blocks]


def predicted(strategy: Any, late: Callable[[Any, Tensor], Tensor], inference_mode: bool, devices: int = 1) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = Predicts(Net(type("Turning", (Turning,), {"late": late})))
    trainer = trainer_of(strategy, devices=devices, inference_mode=inference_mode)
    with quiet():
        return copy_context().run(trainer.predict, module, loader(zoo.make_batches("mlp", STEPS)))


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "late",
    [
        usual, sets_an_attribute, fills_a_list, returns_its_input, returns_a_view_of_its_input,
        returns_a_view_of_its_weight, caches_parametrizations, writes_to_its_argument,
    ],
)  # fmt: skip
def test_evaluation_equals_plain_when_a_layer_turns(
    late: Callable[[Any, Tensor], Tensor], microbatches: int, inference_mode: bool
) -> None:
    plain = predicted("auto", late, inference_mode)
    other = predicted(ours(num_microbatches=microbatches, emulation={"poison": True}), late, inference_mode, devices=2)
    assert_tensors_same(plain, other)


def test_layers_that_fill_a_cache_in_evaluation() -> None:
    module, prompt = zoo.make_module("llama"), torch.tensor([[3, 5, 7, 2], [4, 1, 6, 2]])

    class Generates(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(module.model)

        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            found: Tensor = self.model.generate(batch, max_new_tokens=6, do_sample=False, pad_token_id=0)
            return found

    def generated(strategy: Any, devices: int = 1) -> Any:
        with quiet():
            return trainer_of(strategy, devices=devices).predict(Generates(), loader([prompt, prompt + 1]))

    plain, other = generated("auto"), generated(ours(), devices=2)
    assert_tensors_same(plain, other)


# ------------------------------------------------------------------------------------------------- the thread that runs


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * (2.0 if func is torch.ones_like else 1.0)


class _Own(torch.Tensor):
    """A tensor subclass whose sum is its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 3.0 if func is torch.sum else result


def uses_a_mode(block: Any, x: Tensor) -> Tensor:
    with _Doubling():
        return usual(block, x) * torch.ones_like(x)


def uses_a_subclass(block: Any, x: Tensor) -> Tensor:
    return usual(block, x) + torch.sum(torch.ones(2).as_subclass(_Own)).as_subclass(Tensor)


def uses_a_default_device(block: Any, x: Tensor) -> Tensor:
    with torch.device("meta"):
        columns = torch.ones(x.shape[-1], 1).shape[0]
        assert torch.ones(1).is_meta
    return usual(block, x) / columns


def draws(block: Any, x: Tensor) -> Tensor:
    """Draws, and gives back the state, so that plain training draws the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return usual(block, x) + torch.rand(x.shape[-1])


@pytest.mark.parametrize("always", [uses_a_mode, uses_a_subclass, uses_a_default_device, draws])
def test_layers_have_modes_and_draws_of_their_own(always: Callable[[Any, Tensor], Tensor]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = Steps(Net(type("Always", (Block,), {"forward": always})))
    assert_same(run("auto", module, zoo.make_batches("mlp")[0], steps=STEPS), ran(module))


@pytest.mark.slow
def test_more_microbatches_and_devices_take_no_more_switches_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread gives up the baton where it waits for its turn, and in long computations. Another one is woken then."""
    woken: Counter[int] = Counter()
    own = Runner.wake

    def wake(self: Runner) -> None:
        woken[Clock.step] += 1
        own(self)

    monkeypatch.setattr(Runner, "wake", wake)
    switches = {}
    for devices, microbatches in ((1, 8), (8, 8), (8, 32)):
        woken.clear()
        strategy = ours(
            num_microbatches=microbatches, plan=f"forward 0-1; fused 2-4; backward 0-1; round {microbatches}"
        )
        batches = zoo.make_batches("mlp", 1, 2 * microbatches)[0]
        run(strategy, module_of(usual), batches, steps=STEPS, devices=devices)
        calls = microbatches * (CALLS + 2 + CALLS)  # forward, recomputation and backward
        switches[devices, microbatches] = min(woken[step] for step in range(3, STEPS)) / calls
    assert 0 < max(switches.values()) < 1.0, switches


class Surrounded(Steps):
    """Calls its layers within a context of autograd's."""

    context: Callable[[], Any]

    def loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        with type(self).context():
            return super().loss_and_logits(batch)


def passing() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0])


def forbidden() -> Any:
    return torch.autograd.graph.disable_saved_tensors_hooks("not here")


@pytest.mark.parametrize("context", [passing, forbidden, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_hooks_on_saved_tensors_around_a_call_are_not_the_layers(
    context: Callable[[], Any], memory: str | None
) -> None:
    """Calls run on the thread that has the hooks. `torch.utils.checkpoint` computed layers in backward there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = type("Surrounded", (Surrounded,), {"context": staticmethod(context)})(Net(Block))
    strategy = ours(num_microbatches=MICROBATCHES, plan=halves(CALLS), emulation={"memory": memory})
    batches = zoo.make_batches("mlp")[0]
    assert_same(run("auto", module, batches, steps=STEPS), run(strategy, module, batches, steps=STEPS, devices=2))
