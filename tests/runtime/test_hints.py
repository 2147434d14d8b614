"""What is said once: where microbatches differ from the whole batch, and what was really switched off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import zoo
from harness import ours, run
from torch import Tensor, nn

import lightning_roundpipe.strategy
from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.runtime.reporting.hints import Hints


def said(monkeypatch: pytest.MonkeyPatch, module: zoo.ZooModule, name: str, microbatches: int = 3) -> list[str]:
    """What the strategy informs and warns of in three steps."""
    texts: list[str] = []
    monkeypatch.setattr(lightning_roundpipe.strategy, "rank_zero_info", texts.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(ours(num_microbatches=microbatches), module, zoo.make_batches(name), devices=2)
    texts += [str(warning.message) for warning in caught if warning.category is RoundPipeWarning]
    assert all(text.startswith("roundpipe: ") for text in texts)
    return [text for text in texts if "use_cache" in text or "checkpointing" in text or "whole" in text]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("batch_norm", "batch norm computes its statistics over each microbatch"),
        ("spectral_norm", "buffer '_u' of _SpectralNorm in layer 'model.stem' changes in every forward pass"),
        ("qwen3_moe", "the router's loss"),
    ],
)
def test_coupled_samples(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    texts = [text for text in said(monkeypatch, zoo.make_module(name), name) if "use_cache" not in text]
    assert len(texts) == 1
    assert words in texts[0]
    assert "num_microbatches=1 keeps the batch whole" in texts[0]


def test_buffers_that_hooks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older spectral norm is a hook, which is user code."""
    module = zoo.make_module("mlp")
    for block in module.model.blocks:
        nn.utils.spectral_norm(next(m for m in block.modules() if isinstance(m, nn.Linear)))
    [text] = said(monkeypatch, module, "mlp")
    assert "a hook changes buffers of layers" in text or "changes in every forward pass" in text


def test_reasons_that_are_sentences() -> None:
    texts: list[str] = []
    hints = Hints(nn.Linear(1, 1), texts.append)
    hints.of_no_comparison("noise cannot be compared. Set num_microbatches=1.")
    assert "Set num_microbatches=1. It runs" in texts[0]


@pytest.mark.parametrize("name", ["batch_norm", "spectral_norm"])
def test_one_microbatch_is_the_whole_batch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert said(monkeypatch, zoo.make_module(name), name, microbatches=1) == []


class WithFrozenStatistics(zoo.PlainClassifier):
    """Fine-tuning as it is often done: batch norm keeps the statistics that it came with."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.norm.eval()
        for block in self.model.blocks:
            block.norm.eval()


@pytest.mark.parametrize("name", ["mlp", "bert", "batch_norm"])
def test_nothing_to_say(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Not of batch norm that keeps its statistics, nor of a cache that an encoder never asks for."""
    module = zoo.make_module(name)
    if name == "batch_norm":
        module = WithFrozenStatistics(module.model)
    assert said(monkeypatch, module, name) == []


class Choosing(zoo.CausalLM):
    """Says itself whether there is to be a cache."""

    use_cache: Any = None

    def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
        output = self.model(**batch, use_cache=self.use_cache)
        return output.loss, output.logits


def test_caches_are_switched_off_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Choosing(zoo.make_module("llama").model)
    assert ["use_cache=False" in text for text in said(monkeypatch, module, "llama", 1)] == [True]
    module.use_cache = False
    assert said(monkeypatch, module, "llama", 1) == []


class Checkpointed(zoo.CausalLM):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.model.config.use_cache is True
        assert self.model.model.gradient_checkpointing is True


def test_checkpointing_is_switched_off_and_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Checkpointed(zoo.make_module("llama").model)
    module.model.gradient_checkpointing_enable()
    texts = said(monkeypatch, module, "llama", 1)
    assert sorted("gradient_checkpointing=False" in text for text in texts) == [False, True]


def test_a_false_that_notes_being_asked() -> None:
    from lightning_roundpipe.runtime.user_code.interception import without_caches

    model = zoo.make_module("llama").model
    with without_caches(model) as switched_off:
        off = model.config.use_cache
        assert off == False  # noqa: E712
        assert switched_off == []
        assert not off
        assert switched_off == ["use_cache"]
    assert model.config.use_cache is True
