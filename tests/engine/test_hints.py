"""What is said once: which settings were really switched off."""

import warnings

import zoo
from harness import ours, run

import lightning_roundpipe.strategy
from lightning_roundpipe import RoundPipeWarning


def said(monkeypatch, module, name):
    """What the strategy informs and warns of in three steps."""
    texts = []
    monkeypatch.setattr(lightning_roundpipe.strategy, "rank_zero_info", texts.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(ours(), module, zoo.make_batches(name), devices=2)
    texts += [str(warning.message) for warning in caught if warning.category is RoundPipeWarning]
    assert all(text.startswith("roundpipe: ") for text in texts)
    return [text for text in texts if "use_cache" in text or "checkpointing" in text]


def test_caches_are_switched_off(monkeypatch):
    module = zoo.make_module("llama")
    assert ["use_cache=False" in text for text in said(monkeypatch, module, "llama")] == [True]


class Checkpointed(zoo.CausalLM):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert self.model.config.use_cache is True
        assert self.model.model.gradient_checkpointing is True


def test_checkpointing_is_switched_off_and_on_again(monkeypatch):
    module = Checkpointed(zoo.make_module("llama").model)
    module.model.gradient_checkpointing_enable()
    texts = said(monkeypatch, module, "llama")
    assert sorted("gradient_checkpointing=False" in text for text in texts) == [False, True]
