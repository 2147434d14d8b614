"""A layer that computes something else when it is recomputed is refused, with what has changed in between.

Plain training runs a layer's forward once. What is recomputed may differ where the layer reads what the strategy does
not know of; the first batches show that, before an update is made of the wrong gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import traps
import zoo
from harness import ours, run
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.layer_calls import recompute_check
from lightning_roundpipe.runtime.layer_calls.recompute_check import CallFingerprint


class Shared(SimpleNamespace):
    """A copy of the module keeps it."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


SCALE = 1.0
SETTINGS = Shared(scale=1.0)
NUMBERS = Shared(count=itertools.count())
TABLE = Shared(table=np.ones(zoo.WIDTH, dtype=np.float32))


class Block(traps.Block):
    def noise(self) -> Tensor | float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.noise()


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(1)

    def noise(self) -> Tensor | float:
        return torch.rand(zoo.WIDTH, generator=self.draws)


class NumpyGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(1)

    def noise(self) -> Tensor | float:
        return float(self.draws.uniform())


class PythonGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(1)

    def noise(self) -> Tensor | float:
        return self.draws.random()


class CountsInObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.helper = SimpleNamespace(calls=0)

    def noise(self) -> Tensor | float:
        self.helper.calls += 1
        return 1.0 + self.helper.calls


class CountsInClass(Block):
    calls: ClassVar[int] = 0

    def noise(self) -> Tensor | float:
        type(self).calls += 1
        return 1.0 + type(self).calls


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def noise(self) -> Tensor | float:
        return 1.0 + next(self.numbers)


class Permutes(Block):
    """Sums of the outputs stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        return traps.Block.forward(self, x)[:, torch.from_numpy(self.draws.permutation(zoo.WIDTH))]


class ReadsGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return traps.Block.forward(self, x) * SCALE


class ReadsObject(Block):
    def forward(self, x: Tensor) -> Tensor:
        return traps.Block.forward(self, x) * SETTINGS.scale


class ReadsConfig(Block):
    def __init__(self) -> None:
        super().__init__()
        self.config = SETTINGS

    def noise(self) -> Tensor | float:
        return float(self.config.scale)


def hidden() -> float:
    return float(SETTINGS.scale)


class ReadsHidden(Block):
    def noise(self) -> Tensor | float:
        return hidden()


class CountsHidden(Block):
    def noise(self) -> Tensor | float:
        return 1.0 + next(NUMBERS.count)


class Refilled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shared = TABLE

    def noise(self) -> Tensor | float:
        return torch.from_numpy(self.shared.table.copy())


@contextlib.contextmanager
def scaled() -> Iterator[None]:
    global SCALE
    SCALE = SETTINGS.scale = 2.0
    TABLE.table[:] = 2
    try:
        yield
    finally:
        SCALE = SETTINGS.scale = 1.0
        TABLE.table[:] = 1


class Step(zoo.PlainClassifier):
    around: Callable[[], Any] = contextlib.nullcontext

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with type(self).around():
            return super().training_step(batch, batch_idx)


class Scaled(Step):
    around = staticmethod(scaled)


CASES: dict[str, tuple[type[Block], type[Step], str]] = {
    "torch generator": (OwnGenerator, Step, r"generator OwnGenerator\.draws has another state"),
    "numpy generator": (NumpyGenerator, Step, r"generator NumpyGenerator\.draws has another state"),
    "python generator": (PythonGenerator, Step, r"generator PythonGenerator\.draws has another state"),
    "count in an object": (CountsInObject, Step, r"CountsInObject\.helper\.calls changed from 0 to \d"),
    "count in the class": (CountsInClass, Step, r"class attribute CountsInClass\.calls changed from \d+ to \d+"),
    "counter": (Counts, Step, r"counter Counts\.numbers has another state"),
    "permutation": (Permutes, Step, r"generator Permutes\.draws has another state"),
    "global": (ReadsGlobal, Scaled, r"global SCALE changed from 2\.0 to 1\.0"),
    "object": (ReadsObject, Scaled, r"global SETTINGS\.scale changed from 2\.0 to 1\.0"),
    "config": (ReadsConfig, Scaled, r"ReadsConfig\.config\.scale changed from 2\.0 to 1\.0"),
    "read elsewhere": (ReadsHidden, Scaled, "A second recomputation agrees with the first"),
    "counted elsewhere": (CountsHidden, Step, "A second recomputation differs from the first"),
    "array": (Refilled, Scaled, r"array Refilled\.shared\.table has another state"),
}


def build(block: type[Block], step: type[Step]) -> Step:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return step(traps.Net(block))


def train(block: type[Block], step: type[Step], microbatches: int, devices: int, **options: Any) -> Any:
    strategy = ours(num_microbatches=microbatches, layers=["Linear", block.__name__], **options)
    return run(strategy, build(block, step), zoo.make_batches("mlp", count=4), devices=devices)


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("case", CASES)
def test_what_is_recomputed_otherwise_is_refused(case: str, microbatches: int, devices: int) -> None:
    block, step, said = CASES[case]
    with pytest.raises(RoundPipeError, match=said) as error:
        train(block, step, microbatches, devices)
    assert "layer 'model.blocks." in str(error.value) and "recomputed" in str(error.value)


# --------------------------------------------------------------------------------------------------- what is compared


def _print(*tensors: Tensor) -> CallFingerprint:
    return CallFingerprint.of(tensors, {})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(3, 4).half(),
        torch.randn(3, 4, dtype=torch.complex64),
        torch.randn(6),
        torch.tensor(2.5),
        torch.arange(12),
        torch.arange(12) % 2 == 0,
    ],
    ids=["float64", "half", "complex", "one dimension", "no dimension", "integers", "bools"],
)
def test_other_values_and_other_places_of_them_are_seen(tensor: Tensor) -> None:
    same, other = _print(tensor), tensor.clone()
    other.view(-1)[0] = tensor.reshape(-1)[0].logical_not() if tensor.dtype is torch.bool else 5
    moved = tensor.reshape(-1).roll(1).reshape(tensor.shape)
    assert same.difference(_print(tensor.clone()), None) is None
    assert str(same.difference(_print(other), None)).startswith("output 0 differs")
    assert tensor.numel() == 1 or str(same.difference(_print(moved), None)).startswith("output 0 differs")


def test_differences_of_rounding_are_none() -> None:
    """In the format that layers compute in; a NaN in both is the same."""
    tensor = torch.randn(40, 4)
    near, low = tensor * (1 + 1e-7), tensor.bfloat16().float()
    assert _print(tensor).difference(_print(near), None) is None
    assert _print(tensor).difference(_print(low), torch.bfloat16) is None
    assert "of its norm" in str(_print(tensor).difference(_print(low), None))
    tensor[0, 0] = float("nan")
    assert _print(tensor).difference(_print(tensor.clone()), None) is None
    assert _print(tensor).difference(_print(near), None) == "output 0 differs"


def test_shapes_and_formats_are_compared_and_what_has_no_places_by_these() -> None:
    tensor = torch.randn(3, 4)
    for other in (tensor.double(), tensor.t()):
        assert _print(tensor).difference(_print(other), None) == "the outputs have other shapes or formats"
    narrow = tensor.to(torch.float8_e4m3fn)
    assert _print(narrow).sums == _print(narrow.float()).sums
    assert _print(torch.zeros(0, 4), torch.eye(3).to_sparse()).sums == [[0.0] * 3] * 2


def test_of_many_integers_the_number_that_are_not_zero_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_check, "_MOST_INTEGERS", 8)
    tensor = torch.arange(12)
    assert _print(tensor).difference(_print(tensor.flip(0)), None) is None
    assert _print(tensor).difference(_print(tensor + 1), None) is not None
