"""What is said once: which settings were really switched off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import zoo
from harness import ours, run

import lightning_roundpipe.strategy
from lightning_roundpipe import RoundPipeWarning


def said(monkeypatch: pytest.MonkeyPatch, module: zoo.ZooModule, name: str) -> list[str]:
    """What the strategy informs and warns of in three steps."""
    texts: list[str] = []
    monkeypatch.setattr(lightning_roundpipe.strategy, "rank_zero_info", texts.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(ours(), module, zoo.make_batches(name), devices=2)
    texts += [str(warning.message) for warning in caught if warning.category is RoundPipeWarning]
    assert all(text.startswith("roundpipe: ") for text in texts)
    return [text for text in texts if "use_cache" in text or "checkpointing" in text]


def test_caches_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    module = zoo.make_module("llama")
    assert ["use_cache=False" in text for text in said(monkeypatch, module, "llama")] == [True]


class Checkpointed(zoo.CausalLM):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.model.config.use_cache is True
        assert self.model.model.gradient_checkpointing is True


def test_checkpointing_is_switched_off_and_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Checkpointed(zoo.make_module("llama").model)
    module.model.gradient_checkpointing_enable()
    texts = said(monkeypatch, module, "llama")
    assert sorted("gradient_checkpointing=False" in text for text in texts) == [False, True]
