"""Which parts of a call are compared in evaluation: what couples samples is found, whichever samples these are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_tensors_same, loader, ours, quiet, trainer_of
from torch import Tensor, nn

from lightning_roundpipe.runtime.modes.compared_parts import Pairs, numbers_of
from lightning_roundpipe.runtime.modes.evaluation_step import EvaluationStep

Pool = Callable[[Tensor, Tensor], Tensor]
LENGTHS = (6, 6, 6, 6, 2, 3, 2, 1)
"""The first two parts of four are alike."""
STEPS = 6


def _positions(lengths: Tensor) -> Tensor:
    return torch.arange(STEPS) < lengths[:, None]


def _cuts(h: Tensor, lengths: Tensor) -> Tensor:
    return h[:, _positions(lengths).any(0)].mean(1)


def _divides(h: Tensor, lengths: Tensor) -> Tensor:
    return (h * _positions(lengths)[..., None]).sum(1) / lengths.max()


def _centres(h: Tensor, lengths: Tensor) -> Tensor:
    return h.mean(1) - h.mean((0, 1)) * (lengths < 2).any()


def _doubles_some(h: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([h[:4], h[4:] * 2]).mean(1)


def _doubles_the_last(h: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([h[:-5].mean(1), h[-5:, :3].mean(1)])


class Net(nn.Module):
    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.first, self.last, self.pool = nn.Linear(4, 16), nn.Linear(16, 3), pool

    def forward(self, x: Tensor, given: Tensor | None) -> Tensor:
        lengths = (x.abs().sum(-1) > 0).sum(1) if given is None else given if given.dim() == 1 else given.sum(1)
        out: Tensor = self.last(self.pool(self.first(x).tanh(), lengths))
        return out


class Pools(pl.LightningModule):
    """Pools with what ``pool`` takes from all samples. Its model is given lengths, or a mask, or only the inputs."""

    def __init__(self, pool: Pool = _cuts, given: str = "lengths") -> None:
        super().__init__()
        self.model, self.given = Net(pool), given

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, lengths = batch
        if self.given == "inputs":
            return self.model(x * _positions(lengths)[..., None], None)
        mask = _positions(lengths)
        return self.model(x, {"lengths": lengths, "a mask": mask, "a mask of numbers": mask.long()}[self.given])

    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...


Compared = list[tuple[int, ...]]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    """Of each call in parts, those that were compared."""
    found: Compared = []
    real = EvaluationStep.run_parts

    def run_parts(self: EvaluationStep, *args: Any) -> None:
        found.append(self.compared)
        real(self, *args)

    monkeypatch.setattr(EvaluationStep, "run_parts", run_parts)
    yield found


def batches(*lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(len(of), STEPS, 4, generator=generator), torch.tensor(of)) for of in lengths]


def predicted(module: pl.LightningModule, strategy: Any, data: Any, devices: int = 1) -> Any:
    with quiet():
        return trainer_of(strategy, devices=devices).predict(copy.deepcopy(module), loader(data))


def assert_predicted_as_plain(module: pl.LightningModule, data: Any, microbatches: int = 4) -> None:
    found = predicted(module, ours(num_microbatches=microbatches), data, devices=2)
    assert_tensors_same(predicted(module, "auto", data), found)


@pytest.mark.parametrize("pool", [_cuts, _divides, _centres, _doubles_some, _doubles_the_last])
def test_the_first_two_parts_may_be_alike(pool: Any) -> None:
    torch.manual_seed(2)
    assert_predicted_as_plain(Pools(pool), batches(*[LENGTHS] * 5))


@pytest.mark.parametrize("given", ["lengths", "a mask", "a mask of numbers", "inputs"])
def test_whatever_shows_that_samples_differ(given: str) -> None:
    torch.manual_seed(2)
    assert_predicted_as_plain(Pools(_divides, given), batches(*[LENGTHS] * 3))


@pytest.mark.parametrize("given", ["lengths", "a mask"])
def test_samples_that_begin_to_differ_are_compared_at_once(given: str, compared: Compared) -> None:
    """The second call would not be compared otherwise, nor the fourth."""
    torch.manual_seed(2)
    alike = (6,) * 8
    assert_predicted_as_plain(Pools(_cuts, given), batches(alike, LENGTHS, alike, LENGTHS))
    assert compared == [(0, 3), (0, 3)]  # then never in parts


def test_another_two_parts_each_time(compared: Compared) -> None:
    """Where nothing shows which samples differ; in the 1st, 3rd and 7th call, of two samples' worth each."""
    torch.manual_seed(2)
    data = batches(*[(6,) * 8] * 8)
    assert_predicted_as_plain(Pools(_cuts), data)
    assert compared == [(0, 3), (), (1, 3), (), (), (), (2, 3), ()]


def test_the_most_different_parts() -> None:
    numbers, pairs = numbers_of([torch.zeros(8, 3), torch.tensor(LENGTHS)], [2, 2, 2, 2]), Pairs()
    assert numbers[1, "numbers"] == [(6, 6), (6, 6), (2, 3), (1, 2)]
    for _ in range(3):
        assert pairs.next(numbers, 4) == (0, 3)
        pairs.note(numbers, (0, 3))
    assert not pairs.is_new(numbers)


def test_a_number_that_did_not_differ_before_has_its_own_comparison() -> None:
    """And so has one that differs much more than before."""
    lengths, labels = torch.tensor([1, 2, 2, 9]), torch.tensor([5, 5, 7, 5])
    pairs, sizes = Pairs(), [1, 1, 1, 1]
    numbers = numbers_of([lengths, labels], sizes)
    assert pairs.next(numbers, 4) == (0, 3)
    pairs.note(numbers, (0, 3))
    assert pairs.is_new(numbers)
    assert pairs.next(numbers, 4) == (2, 3)
    pairs.note(numbers, (2, 3))
    assert not pairs.is_new(numbers)
    for lengths, new in ((torch.tensor([0, 9, 2, 16]), False), (torch.tensor([0, 20, 2, 5]), True)):
        numbers = numbers_of([lengths, labels], sizes)
        assert pairs.is_new(numbers) is new
    assert pairs.next(numbers, 4) == (0, 1)


def test_the_numbers_of_samples() -> None:
    padded = torch.tensor([[3, 4, 5, 6], [3, 4, 0, 0], [0, 0, 0, 7]])
    frames = (padded != 0)[..., None] * torch.arange(1, 5)[:, None] * torch.ones(2)
    others = [torch.ones(()), torch.zeros(2, 3), torch.zeros(3), None, "text", torch.zeros(3, 0)]
    listed = [torch.ones(3), torch.ones(2, 2), torch.ones(1)]
    numbers = numbers_of([padded, padded != 0, (padded != 0).int(), frames, listed, *others], [2, 1])
    filled, repeats = [(2, 4), (1, 1)], [(0, 1), (2, 2)]
    assert numbers == {
        (0, "elements"): filled,
        (0, "targets"): [(4, 4), (4, 4)],
        (0, "repeats"): repeats,
        (1, "elements"): filled,
        (2, "elements"): filled,
        (3, "elements"): [(4, 8), (2, 2)],
        (3, "repeats"): repeats,
        (4, "lengths"): [(3, 4), (1, 1)],
        (7, "elements"): [(0, 0), (0, 0)],
    }


class Generates(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.make_module("llama").model

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)


def test_caches_of_parts_that_are_not_neighbours(compared: Compared) -> None:
    """Samples of the last two parts are padded in front."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 20, (8, STEPS), generator=generator)
    mask = _positions(torch.tensor(LENGTHS)).flip(1).long()
    assert_predicted_as_plain(Generates(), [{"input_ids": ids * mask, "attention_mask": mask}] * 2)
    assert len(compared) == 10
    assert {pair for pair in compared if pair} == {(0, 3)}
