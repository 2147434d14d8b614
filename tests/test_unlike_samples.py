"""What depends on the longest sample of a batch is found although the first few samples are equally long."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, ours, run
from test_parts_are_the_whole import Module, batches, cut_by
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.profile.parts_check import PartsCheck
from lightning_roundpipe.runtime.profile.unlike_samples import AlikeSamples, unlike_parts

LENGTHS = [5, 5, 5, 5, 5, 2, 5, 1]
Step = Callable[[Any, Tensor, dict[str, Tensor]], Tensor]


def data(lengths: list[int]) -> list[dict[str, Tensor]]:
    found = batches(3)
    for batch in found:
        batch["n"] = torch.tensor(lengths)
        batch["mask"] = torch.arange(5) < batch["n"][:, None]
    return found


def squares(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return logits.pow(2) * batch["mask"]


def longest(batch: dict[str, Tensor]) -> int:
    return int(batch["n"].max())


LONGEST: dict[str, Step] = {
    "divided by it": lambda _, x, b: (squares(x, b).sum(1) / b["n"].max()).mean(),
    "divided by Python's number": lambda _, x, b: (squares(x, b).sum(1) / max(b["n"].tolist())).mean(),
    "trimmed": lambda _, x, b: squares(x, b)[:, : longest(b)].mean(),
    "trimmed by the mask": lambda _, x, b: x[:, b["mask"].any(0)].pow(2).mean(),
    "any of one kind": lambda _, x, b: squares(x, b).mean() * (1 + b["mask"][:, 4].any()),
    "the largest class": lambda _, x, b: F.mse_loss(x[:, : longest(b)], F.one_hot(b["n"] - 1).float()),
}


@pytest.mark.parametrize("name", LONGEST)
@pytest.mark.parametrize("lengths", [LENGTHS, [2, 2, 2, 2, 2, 5, 2, 2]], ids=["a short one", "a long one"])
def test_the_longest_of_a_batch(name: str, lengths: list[int]) -> None:
    result = run(ours(num_microbatches=4), Module(LONGEST[name]), data(lengths), devices=2)
    assert cut_by(result) == "model"
    assert_same(run("auto", Module(LONGEST[name]), data(lengths)), result)


def test_what_the_mask_leaves_needs_no_longest() -> None:
    def step(module: Any, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        kept = batch["mask"][:, : longest(batch)]
        return (logits[:, : longest(batch)].pow(2) * kept).sum(1).mean()

    result = run(ours(num_microbatches=4), Module(step), data(LENGTHS), devices=2)
    assert cut_by(result) == "step"
    assert_same(run("auto", Module(step), data(LENGTHS)), result)


class Trims(nn.Module):
    """A model that pads to the longest of the samples that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h: Tensor = self.first(x[:, : int(n.max()), None]).tanh()
        return self.last(h.mean(1))


def test_a_model_that_trims_is_refused() -> None:
    def step(module: Any, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(module.trims(batch["x"], batch["n"]) + logits, batch["y"])

    with pytest.raises(RoundPipeError, match="neither does cutting the calls of the model alone"):
        run(ours(num_microbatches=4), Module(step, trims=Trims()), data(LENGTHS), devices=2)


# ------------------------------------------------------------------------------------------------------ later batches


def begins_alike(length: int = 5) -> list[dict[str, Tensor]]:
    """Batches of which the second is the first whose samples differ in length."""
    found = data(LENGTHS)
    found[0] = data([length] * 8)[0]
    return found


@pytest.mark.parametrize("name", LONGEST)
def test_samples_that_begin_to_differ_are_compared_before_they_are_trained_on(name: str) -> None:
    result = run(ours(num_microbatches=4), Module(LONGEST[name]), begins_alike(), devices=2)
    assert cut_by(result) == "model"
    assert_same(run("auto", Module(LONGEST[name]), begins_alike()), result)


def by_padding(module: Any, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A loss divided by the longest, which only padding tells, with ones."""
    lengths = (batch["ids"] != 1).sum(1)
    return (logits.pow(2).sum(1) / lengths.max()).mean()


def test_padding_with_any_value_is_seen() -> None:
    batches = begins_alike()
    for batch in batches:
        batch["ids"] = torch.where(batch.pop("mask"), torch.arange(2, 7), 1)
        del batch["n"]
    result = run(ours(num_microbatches=4), Module(by_padding), batches, devices=2)
    assert cut_by(result) == "model"
    assert_same(run("auto", Module(by_padding), batches), result)


@pytest.mark.parametrize("kind", [list, tuple])
def test_texts_that_begin_to_differ_in_length(kind: type) -> None:
    """Nothing but texts tells how long the samples are, which training_step pads to the longest."""

    def step(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
        codes = [torch.tensor([float(ord(letter)) for letter in text]) for text in batch["text"]]
        module.log("longest", float(max(map(len, codes))))
        return (logits.mean(1, keepdim=True) - nn.utils.rnn.pad_sequence(codes, batch_first=True) / 100).pow(2).mean()

    batches: list[dict[str, Any]] = [*begins_alike()]
    for batch in batches:
        batch["text"] = kind("abcde"[:n] for n in batch["n"].tolist())
        del batch["n"], batch["mask"]
    result = run(ours(num_microbatches=4), Module(step), batches, devices=2)
    assert cut_by(result) == "model"
    assert_same(run("auto", Module(step), batches), result)


@pytest.mark.parametrize("how", ["a model that trims", "the user's scope"])
def test_batches_stay_whole_where_calls_cannot_be_cut(how: str) -> None:
    def step(module: Any, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(module.trims(batch["x"], batch["n"]) + logits, batch["y"])

    trims = how == "a model that trims"
    module = Module(step, trims=Trims()) if trims else Module(LONGEST["trimmed"])
    options = {} if trims else {"microbatch_scope": "step"}
    with pytest.warns(RoundPipeWarning, match="whose samples differ as those of no batch before, .* stay whole"):
        result = run(ours(num_microbatches=4, **options), module, begins_alike(), devices=2)
    assert_same(run("auto", module, begins_alike()), result)


def test_what_has_differed_once_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    find_out = PartsCheck.find_out
    monkeypatch.setattr(PartsCheck, "find_out", lambda *given: looks.append(1) or find_out(*given))
    kept: Step = lambda _, x, b: squares(x, b).sum(1).mean()  # noqa: E731
    result = run(ours(num_microbatches=4), Module(kept), [*begins_alike(), *begins_alike()], devices=2)
    assert cut_by(result) == "step"
    assert len(looks) == 2


def test_sizes_that_are_alike() -> None:
    alike = AlikeSamples()
    assert not alike.begin_to_differ_in({"n": torch.tensor([1, 2])}, 2), "no batch was compared"
    first, mask = torch.tensor([4, 4, 4]), torch.ones(3, 2, dtype=torch.bool)
    alike.begin({"n": first, "mask": mask, "k": torch.arange(3)}, 3)
    alike.begin({"n": torch.arange(3), "mask": mask, "k": first}, 3)
    assert not alike.begin_to_differ_in({"n": 2 * first, "mask": mask, "k": torch.tensor([3, 4, 5])}, 3)
    assert alike.begin_to_differ_in({"n": torch.arange(3), "mask": mask, "k": first}, 3)
    assert not alike.begin_to_differ_in({"n": torch.arange(3), "mask": mask, "k": first}, 3)
    mask[1] = False
    assert alike.begin_to_differ_in({"n": torch.arange(3), "mask": mask, "k": first}, 3)


# ----------------------------------------------------------------------------------- layers over the whole batch's mask


class ByTheMask(nn.Module):
    """A layer whose rows are divided by a number that it computes from the masks of all samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.how, self.inner = how, nn.Linear(5, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        by = {
            "sum": lambda: mask.sum() / mask.numel(),
            "number": lambda: float(mask.float().mean()),
            "longest": lambda: mask.sum(1).max() / 5,
            "states": lambda: (x.detach() * mask).mean() / x.detach().mean(),
        }[self.how]()
        return x + self.inner(x / (1 + by)).tanh()  # type: ignore[no-any-return]


def over_means(module: Any, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A loss that needs the whole batch's logits, so that the calls of the model are cut."""
    found = module.by_the_mask(logits, batch["mask"])
    return F.cross_entropy(found, batch["y"]) + F.relu(found.mean() + 2)


BY_THE_MASK = ["sum", "number", "longest", "states"]


@pytest.mark.parametrize("how", BY_THE_MASK)
def test_calls_are_compared_where_samples_begin_to_differ(how: str) -> None:
    module = Module(over_means, by_the_mask=ByTheMask(how))
    with pytest.warns(RoundPipeWarning, match="in parts of calls of the model, in a batch .* batches stay whole"):
        result = run(ours(num_microbatches=4), module, begins_alike(), devices=2)
    assert_same(run("auto", Module(over_means, by_the_mask=ByTheMask(how)), begins_alike()), result)


def test_weights_that_begin_to_differ() -> None:
    """The first batch has a weight of one for each sample, later ones leave some samples out."""

    def data() -> list[dict[str, Tensor]]:
        found = batches(3)
        for batch in found:
            batch["mask"] = torch.ones(8)
        for batch in found[1:]:
            batch["mask"][5:] = 0
        return found

    with pytest.warns(RoundPipeWarning, match="whose samples differ as those of no batch before"):
        result = run(ours(num_microbatches=4), Module(over_means, by_the_mask=ByTheMask("number")), data(), devices=2)
    assert_same(run("auto", Module(over_means, by_the_mask=ByTheMask("number")), data()), result)


def test_the_users_scope_is_compared_where_samples_begin_to_differ() -> None:
    module, options = Module(over_means, by_the_mask=ByTheMask("sum")), {"microbatch_scope": "model"}
    with pytest.warns(RoundPipeWarning, match="in parts of calls of the model, in a batch .* batches stay whole"):
        result = run(ours(num_microbatches=4, **options), module, begins_alike(), devices=2)
    assert_same(run("auto", Module(over_means, by_the_mask=ByTheMask("sum")), begins_alike()), result)


def test_a_plan_of_cut_calls_is_refused_where_samples_begin_to_differ() -> None:
    module = Module(over_means, by_the_mask=ByTheMask("sum"))
    plan = "forward 0; fused 1; backward 0; round 4"
    options = {"microbatch_scope": "model", "layers": ["model", "by_the_mask"], "plan": plan}
    with pytest.raises(RoundPipeError, match="something else where microbatch_scope='model' cuts its calls"):
        run(ours(num_microbatches=4, **options), module, begins_alike(), devices=2)


def test_calls_are_compared_on_the_shortest_before_they_are_cut() -> None:
    """The first few samples are equally long, others are not: parts differ on the former, and cut calls do not."""
    with pytest.raises(RoundPipeError, match="neither does cutting the calls of the model alone"):
        run(ours(num_microbatches=4), Module(over_means, by_the_mask=ByTheMask("sum")), data(LENGTHS), devices=2)


def test_calls_that_treat_each_sample_for_itself_stay_cut() -> None:
    def step(module: Any, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits, batch["y"]) + F.relu((logits * batch["mask"]).mean() + 2)

    for lengths in (begins_alike(), data(LENGTHS)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RoundPipeWarning)
            result = run(ours(num_microbatches=4), Module(step), lengths, devices=2)
        assert cut_by(result) == "model"
        assert_same(run("auto", Module(step), lengths), result)


def test_parts_whose_means_are_equal_are_compared_again() -> None:
    """The longest samples of two sides differ, but not the sum of their masks."""
    batch = {"mask": torch.arange(5) < torch.tensor([1, 5, 3, 3, 5, 5, 1, 2])[:, None]}
    assert unlike_parts(batch, 8, [0, 1, 2, 3], 2) == [([1, 4, 0, 6], 2)]


def test_parts_with_equal_shortest_samples_are_compared_again() -> None:
    """The longest samples of two sides differ, and their mean, but both have one of the shortest."""
    batch = {"mask": torch.arange(5) < torch.tensor([5, 2, 4, 2, 5, 5, 3, 2])[:, None]}
    assert unlike_parts(batch, 8, [0, 1, 2, 3], 2) == [([0, 4, 3, 7], 2)]


# ---------------------------------------------------------------------------------------------------- which samples


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.tensor(LENGTHS), [([0, 1, 5, 7], 2)]),
        ([torch.ones(n) for n in LENGTHS], [([0, 1, 5, 7], 2)]),
        ({"mask": torch.arange(5) < torch.tensor(LENGTHS)[:, None], "x": torch.rand(8, 3) + 1}, [([0, 1, 5, 7], 2)]),
        (torch.where(torch.arange(5) < torch.tensor(LENGTHS)[:, None], 3, -100), [([0, 1, 5, 7], 2)]),
        (torch.full((8,), 3), []),
        (torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), []),
        (torch.rand(8), []),
        (torch.tensor([[5, 5, 5, 5, 5, 2, 5, 1]]), []),
        ("text", []),
    ],
    ids=["numbers", "list", "mask", "targets", "alike", "compared already", "no whole numbers", "not samples", "text"],
)
def test_samples_that_are_compared_as_well(batch: Any, expected: Any) -> None:
    assert unlike_parts(batch, 8, [0, 1, 2, 3], 2) == expected


def test_different_sizes_are_compared_apart() -> None:
    """Two more comparisons at most; one if it serves for both."""
    n = torch.tensor(LENGTHS)
    assert unlike_parts((n, 2 * n), 8, [2, 3, 4, 6], 2) == [([0, 1, 5, 7], 2)]
    many = [torch.ones(8, dtype=torch.long).index_fill(0, torch.tensor([i]), 5) for i in range(8)]
    assert len(unlike_parts(tuple(many), 8, [0, 0, 0, 0], 2)) == 2
