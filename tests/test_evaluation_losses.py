"""Evaluation in parts of models that return losses and caches, as Hugging Face models do: equal to plain Lightning."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_tensors_same, loader, ours, quiet, trainer_of
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.lean_loss import lean_logits, make_lean
from lightning_roundpipe.runtime.modes import evaluation_parts, parted_caches
from lightning_roundpipe.runtime.modes.evaluation_step import EvaluationStep

Ran = list[tuple[bool, set[int]]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """Of each call in parts: whether it is unsplittable, and on which workers it ran."""
    found: Ran = []
    real = EvaluationStep.run_parts

    def run_parts(self: EvaluationStep, *args: Any) -> None:
        real(self, *args)
        found.append((self.unsplittable, {slot.worker for slot in self.slots}))

    monkeypatch.setattr(EvaluationStep, "run_parts", run_parts)
    yield found


def cut(**options: Any) -> Any:
    return ours(**({"num_microbatches": 3, "emulation": {"poison": True, "delay_seed": 3}} | options))


class Validates(pl.LightningModule):
    """Calls the model with all of the batch, and logs the loss that it returns."""

    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model, self.given = model, given

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.model(**batch, **self.given).loss, on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return tuple(self.model(**batch, **self.given)[:2])


def batches(name: str, count: int = 4) -> list[Any]:
    """Batches whose samples have very different numbers of targets."""
    made = zoo.make_batches(name, count)
    for number, batch in enumerate(made):
        if batch["labels"].dim() > 1:
            batch["labels"][0, 2:] = -100
            batch["labels"][1 + number % 2] = -100
    return made


def validated(module: pl.LightningModule, strategy: Any, data: Any, devices: int = 2) -> Any:
    used = copy.deepcopy(module)
    trainer = trainer_of(strategy, devices=devices)
    with quiet():
        return [trainer.validate(used, loader(data), verbose=False), trainer.predict(used, loader(data))]


def check(module: pl.LightningModule, data: Any, ran: Ran, *, parts: bool = True) -> None:
    assert_tensors_same(validated(module, "auto", data, 1), validated(module, cut(), data))
    assert len(ran) == 2 * (len(data) if parts else 1)  # in two loops
    assert all(workers == {0, 1} for _, workers in ran)
    assert not parts or not any(unsplittable for unsplittable, _ in ran)


@pytest.mark.parametrize(
    ("name", "given"),
    [("llama", {}), ("llama", {"use_cache": False}), ("t5", {}), ("bert", {})],
    ids=["cache", "no cache", "encoder and decoder", "classes"],
)
def test_models_that_return_their_loss(name: str, given: Any, ran: Ran) -> None:
    check(Validates(zoo.make_module(name).model, **given), batches(name), ran)


class Lean(Validates):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with lean_logits(self.model):
            self.log("loss", self.model(**batch, use_cache=False).loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        with lean_logits(self.model):
            return self.model(**batch, use_cache=False).loss


def test_losses_without_logits(ran: Ran) -> None:
    model = zoo.make_module("llama").model
    make_lean(model)
    check(Lean(model), batches("llama"), ran)


class Regression(nn.Module):
    """Returns a loss of ``kind`` beside its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.stem, self.head = kind, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        out = self.head(torch.tanh(self.stem(x)))
        target, classes = x[:, :4], (x[:, 0] > 0).long() * 3
        if self.kind == "elements":
            loss = F.mse_loss(out, target)
        elif self.kind == "a sum":
            loss = F.l1_loss(out, target, reduction="sum")
        elif self.kind == "two sums":
            loss = F.l1_loss(out, target, reduction="sum") + F.cross_entropy(out, classes, reduction="sum")
        elif self.kind == "a sum and a mean":
            loss = F.l1_loss(out, target, reduction="sum") + F.mse_loss(out, target)
        elif self.kind == "a sum or a mean":
            loss = F.l1_loss(out, target, reduction="sum" if x.amax() > 2.3 else "mean")
        elif self.kind == "no targets":
            loss = F.cross_entropy(out, classes * 0 - 100)
        elif self.kind == "of each":
            loss = F.mse_loss(out, target, reduction="none").mean()
        elif self.kind == "elsewhere":
            loss = F.mse_loss(out, target)
            torch.add(loss, out.std(), out=loss)
        elif self.kind == "two halves":
            loss = (F.cross_entropy(out[:, :2], classes % 2) + F.cross_entropy(out, classes)) / 2
        elif self.kind == "weighed classes":
            loss = F.cross_entropy(out, classes, weight=torch.tensor([1.0, 2.0, 3.0, 9.0]))
        elif self.kind == "a penalty":
            loss = F.mse_loss(out, target)
            loss += out.std()
        elif self.kind == "a penalty in a list":
            loss = F.mse_loss(out, target)
            torch._foreach_add_([loss], [out.std()])
        elif self.kind == "keywords alone":
            loss = F.mse_loss(out, target)
            torch.relu_(input=out)
        elif self.kind == "targets and samples":
            loss = F.cross_entropy(out, classes, ignore_index=3) + F.mse_loss(out, target)
        elif self.kind == "pairs":
            loss = F.cross_entropy(out @ target.T, torch.arange(len(x)))
        else:
            loss = out.square().mean()
        return {"loss": loss, "out": out}


class Regresses(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Regression(kind)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.model(batch)["loss"])

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(batch)


def rows(count: int = 4) -> list[Tensor]:
    return list(torch.randn(count, 7, 6, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("kind", ["elements", "a sum", "two sums", "two halves", "weighed classes", "no targets"])
def test_losses_of_which_it_is_known_how_they_combine(kind: str, ran: Ran) -> None:
    check(Regresses(kind), rows(), ran)


@pytest.mark.parametrize(
    "kind",
    [
        "a penalty", "a penalty in a list", "keywords alone", "targets and samples", "a mean of its own", "of each",
        "a sum and a mean", "elsewhere",
    ],
)  # fmt: skip
def test_other_losses_are_made_whole(kind: str, ran: Ran) -> None:
    check(Regresses(kind), rows(), ran, parts=False)


def test_losses_that_are_a_sum_in_some_parts_only_are_made_whole() -> None:
    module, data = Regresses("a sum or a mean"), rows(6)
    assert len({bool(part.amax() > 2.3) for batch in data for part in batch.tensor_split(3)}) == 2
    assert_tensors_same(validated(module, "auto", data, 1), validated(module, cut(), data))


def test_losses_over_pairs_of_samples_differ_and_are_made_whole(ran: Ran) -> None:
    module, data = Regresses("pairs"), rows()
    assert_tensors_same(validated(module, "auto", data, 1), validated(module, cut(), data))
    assert len(ran) == 2  # one in each loop


def test_a_batch_without_targets(ran: Ran) -> None:
    data = batches("llama")
    data[2]["labels"][:] = -100
    module = Validates(zoo.make_module("llama").model, use_cache=False)
    plain, found = (validated(module, strategy, data, n)[1] for strategy, n in (("auto", 1), (cut(), 2)))
    assert [loss.isnan().item() for loss, _ in found] == [loss.isnan().item() for loss, _ in plain]
    assert plain[2][0].isnan()


# --------------------------------------------------------------------------------------------------------------- caches


class Continues(Validates):
    """Computes with the cache that the model returned, and gives it back to the model."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        first = self.model(**given)
        cache = first.past_key_values
        assert type(cache) is type(cache).__mro__[0] and len(cache.layers) == len(cache)
        mask = torch.cat([given["attention_mask"], torch.ones(len(cache.layers[0].keys), 1, dtype=torch.long)], 1)
        next_tokens = first.logits[:, -1:].argmax(-1)
        second = self.model(input_ids=next_tokens, attention_mask=mask, past_key_values=cache)
        keys = [layer.keys.sum((1, 2, 3)) for layer in second.past_key_values.layers]
        return first.logits, second.logits, keys


@pytest.mark.slow
def test_a_cache_is_joined_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    real = parted_caches._become

    def become(later: Any) -> None:
        used.append(1)
        real(later)

    monkeypatch.setattr(parted_caches, "_become", become)
    model, data = zoo.make_module("llama").model, zoo.make_batches("llama", 4)
    assert_tensors_same(validated(Continues(model), "auto", data, 1)[1], validated(Continues(model), cut(), data)[1])
    assert used


def test_a_cache_that_nobody_uses_stays_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only comparisons join caches: those of two parts, and of one that has the samples of both, in three batches."""
    joins: list[list[int]] = []
    real = parted_caches.joined
    monkeypatch.setattr(parted_caches, "joined", lambda parts, sizes: joins.append(list(sizes)) or real(parts, sizes))
    module = Validates(zoo.make_module("llama").model)
    with quiet():
        trainer_of(cut(), devices=2).validate(module, loader(zoo.make_batches("llama", 7)), verbose=False)
    assert joins == [[4], [2, 2]] * 3  # the 1st, 3rd and 7th


def test_a_joined_cache_is_an_ordinary_one() -> None:
    from transformers import DynamicCache

    parts = [DynamicCache(), DynamicCache()]
    for number, part in enumerate(parts):
        part.update(torch.full((1 + number, 2, 3, 4), 1.0 + number), torch.zeros(1 + number, 2, 3, 4), 0)
    later = parted_caches.join_later(parts, [1, 2], lambda: None)
    assert isinstance(later, DynamicCache)
    assert len(later) == 1
    assert type(later) is DynamicCache
    assert later.get_seq_length() == 3
    assert later.layers[0].keys[:, 0, 0, 0].tolist() == [1.0, 2.0, 2.0]
    again = parted_caches.join_later(parts, [1, 2], lambda: None)
    other = pickle.loads(pickle.dumps(again))
    assert torch.equal(other.layers[0].keys, later.layers[0].keys)
    copied = copy.deepcopy(parted_caches.join_later(parts, [1, 2], lambda: None))
    assert torch.equal(copied.layers[0].keys, later.layers[0].keys)


def filled(*rows: int) -> Any:
    """A cache of one layer, of texts with these numbers, and three tokens of each."""
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.tensor(rows).view(-1, 1, 1, 1).expand(-1, 2, 3, 4).double(), torch.zeros(len(rows), 2, 3, 4), 0)
    return cache


def numbers(cache: Any) -> list[int]:
    return [int(row) for row in cache.layers[0].keys[:, 0, 0, 0]]


def test_parts_get_the_rows_of_a_cache_and_write_to_their_own() -> None:
    """An attempt in parts that is given up must not have filled what the caller gave."""
    more = torch.zeros(1, 2, 1, 4)
    for cache in (filled(7, 8, 9), parted_caches.join_later([filled(7), filled(8, 9)], [1, 2], lambda: None)):
        first, second = parted_caches.parts_of(cache, [1, 2]) or []
        assert (numbers(first), numbers(second)) == ([7], [8, 9])
        first.update(more, more, 0)
        assert first.get_seq_length() == 4 and second.get_seq_length() == 3
        assert numbers(parted_caches.joined(parted_caches.parts_of(cache, [2, 1]) or [], [2, 1])) == [7, 8, 9]
        assert cache.get_seq_length() == 3


def test_what_is_set_on_a_cache_in_parts_is_set_on_the_cache() -> None:
    later = parted_caches.join_later([filled(7), filled(8, 9)], [1, 2], lambda: None)
    later.note = "mine"
    assert vars(later)["note"] == "mine" and len(later) == 1 and numbers(later) == [7, 8, 9]


def test_code_that_may_not_wait_gets_an_ordinary_cache() -> None:
    later, other = parted_caches.join_later([filled(7), filled(8)], [1, 1], lambda: None), filled(7)
    for cache in (later, other, None):
        parted_caches.make_ordinary(cache)
    assert "layers" in vars(later) and numbers(later) == [7, 8] and numbers(other) == [7]


def test_what_is_the_same_in_all_parts_is_so_in_the_cache() -> None:
    position, held = torch.arange(3), parted_caches.joined([[torch.arange(3), 4, "x"]] * 2, [1, 2])
    assert torch.equal(held[0], position) and held[1:] == [4, "x"]
    with pytest.raises(RoundPipeError, match="do not make up one cache"):
        parted_caches.joined([[4], [5]], [1, 2])


def test_caches_that_cannot_be_cut_stay_whole() -> None:
    """Their updates write to tensors, or a tensor has no row for each sample."""
    from transformers import StaticCache
    from transformers.cache_utils import DynamicLayer

    static = StaticCache(zoo.make_module("llama").model.config, max_cache_len=8)
    assert parted_caches.parts_of(static, [1, 2]) is None
    assert parted_caches.parts_of(filled(7, 8), [1, 2]) is None

    class OwnLayer(DynamicLayer):
        pass

    own = filled(7, 8, 9)
    own.layers = [OwnLayer()]
    assert parted_caches.parts_of(own, [1, 2]) is None


def test_caches_of_parts_that_do_not_make_up_one_are_refused_with_the_remedy() -> None:
    longer = filled(8, 9)
    longer.update(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4), 0)
    for parts in ([filled(7), longer], [filled(7), {"keys": torch.zeros(2, 3)}]):
        with pytest.raises(RoundPipeError, match=r"do not make up one cache .* Set num_microbatches=1"):
            parted_caches.joined(parts, [1, 2])


class Attends(nn.Module):
    """A step of a decoder of one block, with the cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixes, self.head = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 11)

    def forward(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        query, key, value = self.mixes(self.tokens(tokens))[:, None].chunk(3, -1)
        key, value = cache.update(key, value, 0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.head(mixed[:, 0, -1]), cache


class Decodes(pl.LightningModule):
    """Tokens one by one. It looks into the cache once, when the cache is its parts'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = Attends().double()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        from transformers import DynamicCache

        tokens, cache, found = batch, DynamicCache(), list[Tensor]()
        for step in range(6):
            logits, cache = self.model(tokens, cache)
            found.append(tokens := logits.argmax(-1, keepdim=True))
            if step == 3:
                found.append(cache.layers[0].keys.clone())
        return found


def test_decoding_with_a_cache_equals_plain(ran: Ran) -> None:
    """The cache of no configuration holds the class of its layers, which was taken for a cache of itself."""
    data = [torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    plain, cached = generated(Decodes(), "auto", data, 1), generated(Decodes(), cut(num_microbatches=2), data)
    assert_tensors_same(plain, cached)
    assert len(ran) > 9 and not any(unsplittable for unsplittable, _ in ran)


# ------------------------------------------------------------------------------------------------------------- generate


class Generates(pl.LightningModule):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, {"max_new_tokens": 7, "do_sample": False} | options

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        given = {name: batch[name][:, :5] for name in ("input_ids", "attention_mask")}
        given["attention_mask"] = given["attention_mask"].flip(1)  # padding comes first
        return self.model.generate(**given, **self.options)


def generated(module: pl.LightningModule, strategy: Any, data: Any, devices: int = 2) -> Any:
    with quiet():
        torch.manual_seed(5)
        return trainer_of(strategy, devices=devices).predict(copy.deepcopy(module), loader(data))


SAMPLING = {"do_sample": True, "top_k": 20, "temperature": 2.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {}, id="llama greedy"),
        pytest.param("llama", {"num_beams": 3}, id="llama beams", marks=pytest.mark.slow),
        pytest.param("llama", SAMPLING, id="llama sampling", marks=pytest.mark.slow),
        pytest.param("t5", {}, id="t5 greedy", marks=pytest.mark.slow),
        pytest.param("t5", {"num_beams": 3}, id="t5 beams", marks=pytest.mark.slow),
        pytest.param("t5", SAMPLING, id="t5 sampling", marks=pytest.mark.slow),
        pytest.param("t5", {"repetition_penalty": 1.5}, id="t5 penalty", marks=pytest.mark.slow),
    ],
)
def test_generate_runs_in_parts(name: str, options: Any, ran: Ran) -> None:
    """Some texts end earlier than others: the end of a text is one of the tokens that greedy decoding gives."""
    model, data = zoo.make_module(name).model, zoo.make_batches(name, 2)
    first = generated(Generates(model), "auto", data, 1)
    ends = int(first[0][0, -3])
    module = Generates(model, eos_token_id=ends, pad_token_id=0, **options)
    expected, found = (generated(module, strategy, data, n) for strategy, n in (("auto", 1), (cut(), 3)))
    assert all(map(torch.equal, expected, found))
    assert len(ran) >= len(expected) * (min(len(texts[0]) for texts in expected) - 7)
    assert all(not unsplittable and workers >= {0, 1} for unsplittable, workers in ran)  # T5 has two encoder layers


@pytest.mark.slow
def test_caches_of_generate_stay_on_their_workers_and_are_never_joined(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for comparisons: in the 1st, 3rd, 7th and 15th call in parts, and the 8th, in which a text first repeats."""
    joins: list[list[int]] = []
    real = parted_caches._join
    for module in (parted_caches, evaluation_parts):
        monkeypatch.setattr(
            module, "joined", lambda parts, sizes: joins.append(list(sizes)) or real(list(parts), sizes)
        )
    generated(Generates(zoo.make_module("llama").model), cut(), zoo.make_batches("llama", 3))
    assert len(ran) == 3 * 7
    # The cache that the one part takes, what it returns, and what the two parts return.
    assert joins == [[2, 2], [4], [2, 2]] * 5


def test_a_failed_attempt_leaves_the_cache_as_it_was(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth call in parts fails after its parts have filled their caches; it is repeated whole."""
    real = EvaluationStep.run_parts

    def run_parts(self: EvaluationStep, *args: Any) -> None:
        real(self, *args)
        self.unsplittable |= len(ran) in (3, 7)

    monkeypatch.setattr(EvaluationStep, "run_parts", run_parts)
    module, data = Generates(zoo.make_module("llama").model), zoo.make_batches("llama", 2)
    assert all(map(torch.equal, generated(module, "auto", data, 1), generated(module, cut(), data)))
    assert len(ran) == 2 * 7
