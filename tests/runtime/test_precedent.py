"""Steps of one microbatch that do what the last one did run without grad; those that do not are as right."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import zoo
from harness import Result, assert_same, ours, run
from torch import Tensor, nn
from traps import Block, Net

HIDDEN: dict[str, Any] = {}
"""What layers look at past the strategy: how they behave, and how often they were seen to run with grad and without."""


@pytest.fixture(autouse=True)
def nothing_hidden() -> Iterator[None]:
    HIDDEN.update(kind="", runs=Counter())
    yield
    HIDDEN.clear()


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor


class Moody(Block):
    """A layer that behaves as `HIDDEN` says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any, factor: float = 1.0) -> Any:
        if isinstance(x, Pair):
            x = x.first + x.second
        HIDDEN["runs"][torch.is_grad_enabled()] += 1
        return MOODS[HIDDEN["kind"]](self, x) if factor == 1.0 else Block.forward(self, x).detach() * factor


def usual(self: Block, x: Tensor) -> Any:
    return Block.forward(self, x)


def detaches(self: Block, x: Tensor) -> Any:
    return Block.forward(self, x).detach()


def detaches_half(self: Block, x: Tensor) -> Any:
    y = Block.forward(self, x)
    return y, y.cos().detach()


def writes_to_its_input(self: Block, x: Tensor) -> Any:
    x.mul_(0.5).add_(self.other.bias)
    return Block.forward(self, x)


def leaves_traces_and_fails_without_grad(self: Any, x: Tensor) -> Any:
    x.mul_(0.5)
    self.seen.data.add_(0.1)  # which moves no version
    self.flag *= 0.9
    y = Block.forward(self, x) * self.seen * self.flag
    y.register_hook(lambda grad: grad * 1.5)
    return y


def returns_two(self: Block, x: Tensor) -> Any:
    y = Block.forward(self, x)
    return y, y.sin()


def returns_its_input(self: Block, x: Tensor) -> Any:
    return x


def returns_counts(self: Block, x: Tensor) -> Any:
    return Block.forward(self, x), torch.arange(x.shape[0]).unsqueeze(1) % 2


def sets_an_attribute(self: Block, x: Tensor) -> Any:
    y = Block.forward(self, x)
    self.aux = y.square().mean(1, keepdim=True)
    return y


def writes_to_a_buffer(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.seen += x.mean()
    return Block.forward(self, x) + self.seen


def goes_another_way(self: Block, x: Tensor) -> Any:
    return torch.tanh(self.inner(x))


def is_another_without_grad(self: Block, x: Tensor) -> Any:
    return Block.forward(self, x) * (1.0 if torch.is_grad_enabled() else 0.5)


def is_another_in_evaluation_without_grad(self: Block, x: Tensor) -> Any:
    return usual(self, x) if self.training else is_another_without_grad(self, x)


def is_other_operations_without_grad(self: Block, x: Tensor) -> Any:
    """Computes otherwise without grad, with the same bits."""
    y = Block.forward(self, x)
    return y if torch.is_grad_enabled() else y * 2.0 * 0.5


MOODS: dict[str, Callable[[Block, Tensor], Any]] = {
    "": usual,
    "detaches": detaches,
    "detaches half": detaches_half,
    "writes to its input": writes_to_its_input,
    "leaves traces and fails without grad": leaves_traces_and_fails_without_grad,
    "returns two": returns_two,
    "returns its input": returns_its_input,
    "returns counts": returns_counts,
    "sets an attribute": sets_an_attribute,
    "writes to a buffer": writes_to_a_buffer,
    "goes another way": goes_another_way,
    "is another without grad": is_another_without_grad,
    "is another in evaluation without grad": is_another_in_evaluation_without_grad,
    "is other operations without grad": is_other_operations_without_grad,
}


def frozen(block: nn.Module, h: Tensor) -> Any:
    block.requires_grad_(False)
    y = block(h)
    block.requires_grad_(True)
    return y


def in_evaluation(block: nn.Module, h: Tensor) -> Any:
    block.eval()
    y = block(h)
    block.train()
    return y


def without_grad(block: nn.Module, h: Tensor) -> Any:
    with torch.no_grad():
        return block(h)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "": lambda block, h: block(h),
    "another argument": lambda block, h: block(h, factor=0.5),
    "an object": lambda block, h: block(Pair(h, h.cos())),
    "an input that requires no grad": lambda block, h: block(h.detach()),
    "frozen": frozen,
    "evaluation": in_evaluation,
    "no grad": without_grad,
    "left out": lambda block, h: h,
    "called again": lambda block, h: block(block(h)),
    "overwritten": lambda block, h: (block(h), h.mul_(0.5))[0],
}


Script = Sequence[tuple[str, str]]


class Steps(zoo.PlainClassifier):
    """``script`` says for each step how layers behave, and how the second one is called."""

    script: Script = ()

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Any:
        HIDDEN["kind"], self.model.way = self.script[batch_idx]  # type: ignore[assignment]
        return super().training_step(batch, batch_idx)


class Wandering(Net):
    way = ""

    def body(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.aux = None
            y = CALLS[self.way](block, h) if i == 1 else block(h)
            if isinstance(y, tuple):
                y = y[0] * (1 + y[1].float().mean(-1, keepdim=True) * 0.1)
            h = y + h + (0 if block.aux is None else block.aux)
        return h


def train(strategy: Any, script: Script, devices: int = 1) -> Result:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = type("Steps", (Steps,), {"script": script})(Wandering(Moody))
    module.make_optimizer = functools.partial(torch.optim.SGD, lr=0.02)  # or rounding grows with each step
    HIDDEN["runs"] = Counter()
    return run(strategy, module, zoo.make_batches("mlp", len(script)), devices=devices)


def engine(**options: Any) -> Any:
    """Five layers: stem, blocks and head, which is not recomputed once it is known to be the last."""
    return ours(num_microbatches=1, layers=[f"model.blocks.{i}" for i in range(3)], **options)


def equals_plain(script: Script) -> None:
    assert_same(train("auto", script), train(engine(emulation={"poison": True}), script, devices=2))


def runs_of_the_last_step(script: Script) -> Counter[bool]:
    """How often layers ran with grad, and without."""
    train(engine(), script)
    after = HIDDEN["runs"]
    train(engine(), script[:-1])
    return after - HIDDEN["runs"]


def test_a_step_like_the_last_one_runs_without_grad() -> None:
    """The second step runs calls both ways, to see whether they compute the same."""
    recomputed, tried = 3, 3
    usual = [("", "")] * 4
    assert runs_of_the_last_step(usual[:1]) == {True: 3 + recomputed}
    assert runs_of_the_last_step(usual[:2]) == {True: 3 + recomputed, False: tried}
    assert runs_of_the_last_step(usual[:3]) == {True: recomputed, False: 3}
    assert runs_of_the_last_step(usual) == {True: recomputed, False: 3}


def test_what_ceases_to_require_grad_is_learned_in_the_next_step() -> None:
    script = [("", "")] * 3 + [("detaches", "")] * 2
    assert runs_of_the_last_step(script[:4]) == {True: 3, False: 3}
    assert runs_of_the_last_step(script) == {True: 3}


def test_layers_that_compute_otherwise_without_grad() -> None:
    equals_plain([("is another without grad", "")] * 4)


def test_other_operations_without_grad_count_even_if_their_bits_are_the_same() -> None:
    recomputed = 3
    script = [("is other operations without grad", "")] * 3
    assert runs_of_the_last_step(script) == {True: 3 + recomputed}


def test_layers_that_compute_otherwise_without_grad_in_another_mode() -> None:
    mood = "is another in evaluation without grad"
    equals_plain([(mood, "")] * 3 + [(mood, "evaluation")] * 4)


AFTER_A_WHILE = [0, 0, 0, 1, 0, 0, 1, 1, 1, 0]
"""Whether a step is the odd one: once among usual ones, and often enough to become usual itself."""


@pytest.mark.parametrize("mood", [m for m in MOODS if m and "is another" not in m])
def test_layers_that_begin_to_behave_otherwise(mood: str) -> None:
    equals_plain([(mood if odd else "", "") for odd in AFTER_A_WHILE])


def test_an_output_that_begins_to_require_grad() -> None:
    equals_plain([("detaches half", "")] * 4 + [("returns two", "")] * 2)


@pytest.mark.parametrize("way", [c for c in CALLS if c])
def test_user_code_that_begins_to_call_layers_otherwise(way: str) -> None:
    equals_plain([("", way if odd else "") for odd in AFTER_A_WHILE])
