"""How much the batch of each machine counts in the loss of all batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.batch.contributions import (
    GIVEN,
    LENGTH,
    NOTHING,
    SAMPLES,
    SUM,
    TARGETS,
    UNKNOWN,
    Contribution,
    share,
)
from lightning_roundpipe.runtime.batch.loss_weights import Weighing, Weights
from lightning_roundpipe.runtime.batch.microbatches import RaisedCount

NAMES = ["machine 0 (a)", "machine 1 (b)", "machine 2 (c)"]


def shares(*everyones: Contribution) -> list[float]:
    return [share(rank, everyones, NAMES[: len(everyones)]) for rank in range(len(everyones))]


def test_batches_count_by_what_their_losses_are_means_over() -> None:
    assert shares(Contribution(SAMPLES, 6, 6), Contribution(SAMPLES, 2, 2)) == [0.75, 0.25]
    assert shares(Contribution(TARGETS, 10, 4, (10.0,)), Contribution(TARGETS, 30, 4, (30.0,))) == [0.25, 0.75]
    assert shares(Contribution(GIVEN, 0.5, 4), Contribution(GIVEN, 1.5, 4)) == [0.25, 0.75]


def test_sums_add_up() -> None:
    assert shares(Contribution(SUM, 1, 6), Contribution(SUM, 1, 2)) == [1.0, 1.0]


def test_a_machine_without_targets_or_loss_counts_for_nothing() -> None:
    assert shares(Contribution(TARGETS, 0, 4, (0.0,)), Contribution(TARGETS, 30, 4, (30.0,))) == [0.0, 1.0]
    assert shares(Contribution(), Contribution(SAMPLES, 3, 3)) == [0.0, 1.0]
    assert shares(Contribution(TARGETS, 0, 1, (0.0,)), Contribution(TARGETS, 0, 3, (0.0,))) == [0.25, 0.75]


@pytest.mark.parametrize(
    "everyones",
    [
        (Contribution(SAMPLES, 4, 4), Contribution(TARGETS, 4, 4, (4.0,))),
        (Contribution(UNKNOWN, 0, 4), Contribution(UNKNOWN, 0, 4)),
        (Contribution(TARGETS, 4, 4, (4.0, 1.0)), Contribution(TARGETS, 4, 4, (4.0, 3.0))),
        (Contribution(TARGETS, 4, 4, (4.0,), mixed=True), Contribution(TARGETS, 8, 4, (8.0,))),
        (Contribution(TARGETS, 4, 4, (4.0, 1.0)), Contribution(TARGETS, 4, 4, (4.0,))),
    ],
)
def test_losses_that_no_weight_combines_are_refused(everyones: tuple[Contribution, ...]) -> None:
    with pytest.raises(RoundPipeError, match="loss_weight"):
        shares(*everyones)


def test_several_cross_entropies_of_one_proportion() -> None:
    assert shares(Contribution(TARGETS, 4, 4, (4.0, 2.0)), Contribution(TARGETS, 12, 4, (12.0, 6.0))) == [0.25, 0.75]


@pytest.mark.parametrize("one", [Contribution(), Contribution(TARGETS, 3, 2, (3.0, 1.0), mixed=True)])
def test_it_travels_as_numbers(one: Contribution) -> None:
    assert len(one.encoded()) == LENGTH
    assert Contribution.decoded(one.encoded()) == one
    assert Contribution().kind == NOTHING


def microbatch(*counts: float, sums: bool = False, name: str = "", lacking: bool = False, mixed: bool = False) -> Any:
    """One whose loss has shown these counts of targets, and whether it is a sum."""
    counted = SimpleNamespace(of=list(counts), lacking=lacking, mixed=mixed)
    return SimpleNamespace(
        weight=0.5, mode=SimpleNamespace(counts=counted, sums=SimpleNamespace(whole=sums, name=name))
    )


@pytest.mark.parametrize(
    ("given", "runs", "expected"),
    [
        (None, [microbatch(lacking=True)] * 2, Contribution(NOTHING, 0, 6)),
        ("sum", [microbatch()] * 2, Contribution(SUM, 1, 6)),
        (None, [microbatch(sums=True)] * 2, Contribution(SUM, 1, 6)),
        ([1.0, 2.0], [microbatch()] * 2, Contribution(GIVEN, 1.0, 6)),
        (None, [microbatch(sums=True), microbatch()], Contribution(UNKNOWN, 0, 6)),
        (None, [microbatch(name="mse_loss")] * 2, Contribution(UNKNOWN, 0, 6)),
        (None, [microbatch(RaisedCount.of(1, 0)), microbatch(2)], Contribution(UNKNOWN, 0, 6)),
        (None, [microbatch()] * 2, Contribution(SAMPLES, 6, 6)),
        (None, [microbatch(3, 1), microbatch(lacking=True), microbatch(2, 4)], Contribution(TARGETS, 5, 6, (5, 5))),
        (None, [microbatch(3, mixed=True), microbatch(2)], Contribution(TARGETS, 5, 6, (5,), mixed=True)),
    ],
)
def test_a_batch_contributes_what_its_microbatches_have_shown(
    given: Weights, runs: list[Any], expected: Contribution
) -> None:
    assert Weighing([3, 3], given).contribution(runs, 6) == expected
