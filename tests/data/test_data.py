"""Data modules: nothing is in training and validation both, and the same settings give the same batches."""

import warnings

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_roundpipe.data import PackedText, RandomTokens, pydoc_topics
from lightning_roundpipe.data.in_memory import SHARED_PARAGRAPH, split_texts
from lightning_roundpipe.messages import RoundPipeWarning


class Letters:
    """A tokenizer whose tokens are code points."""

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


def packed(**settings):
    texts = {f"topic {number}": f"{number}" * 100 for number in range(10)}
    options = {"sequence_length": 16, "batch_size": 4, "validation_fraction": 0.3} | settings
    return PackedText(texts, Letters(), **options)


def test_the_topics_of_python_are_split_without_overlap():
    texts = pydoc_topics()
    training, validation = split_texts(texts, 0.1)
    assert sorted(training + validation) == sorted(texts)
    share = sum(len(texts[name]) for name in validation) / sum(map(len, texts.values()))
    assert 0.05 < share <= 0.1

    def paragraphs(names):
        blocks = (" ".join(block.split()) for name in names for block in texts[name].split("\n\n"))
        return {block for block in blocks if len(block) >= SHARED_PARAGRAPH}

    assert not paragraphs(training) & paragraphs(validation)


def test_batches_are_what_a_causal_model_takes():
    data = packed()
    batches = list(data.train_dataloader())
    assert all(batch["input_ids"].shape == batch["labels"].shape == (4, 16) for batch in batches)
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in batches)
    seen = torch.cat([batch["input_ids"] for batch in data.val_dataloader()])
    assert torch.equal(seen, data.validation)  # in order, and a smaller batch at the end is kept


def test_a_loader_goes_on_where_its_state_was_taken():
    whole = packed().train_dataloader()
    epochs = [[batch["input_ids"] for batch in whole] for _ in range(3)]
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))

    for epoch, done in ((0, 1), (1, 3), (1, len(epochs[0]))):
        first = packed().train_dataloader()
        for _ in range(epoch):
            list(first)
        iterator = iter(first)
        for _ in range(done):
            next(iterator)
        second = packed().train_dataloader()
        second.load_state_dict(first.state_dict())
        left = [*epochs[epoch][done:], *epochs[epoch + 1]]
        found = [batch["input_ids"] for batch in second]
        if done < len(epochs[0]):
            found += [batch["input_ids"] for batch in second]
        assert torch.equal(torch.cat(found), torch.cat(left))


def test_a_loader_goes_on_after_the_samples_that_were_taken():
    """With another batch size it went on after as many batches, so that samples came twice or not at all."""
    size = 3
    first = RandomTokens(50, 8, batch_size=2, sequences=12, num_workers=1).train_dataloader()  # it fetches ahead
    whole = torch.cat([batch["input_ids"] for batch in RandomTokens(50, 8, 2, sequences=12).train_dataloader()])
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    second = RandomTokens(50, 8, batch_size=size, sequences=12).train_dataloader()
    second.load_state_dict(first.state_dict())
    found = torch.cat([batch["input_ids"] for batch in second])
    assert torch.equal(found, whole[6 : 6 + 6 // size * size])


def test_an_epoch_has_whole_steps_only():
    """The rows are those of one batch a step; what a step does not fill is dropped, unless it is all there is."""
    whole = [batch["input_ids"] for batch in RandomTokens(50, 8, batch_size=4, sequences=14).train_dataloader()]
    for steps, sequences in ((3, 14), (0, 2)):
        data = RandomTokens(50, 8, batch_size=1, sequences=sequences)
        data.trainer = Trainer(accumulate_grad_batches=4, logger=False, enable_checkpointing=False, barebones=True)
        loader = data.train_dataloader()
        batches = [batch["input_ids"] for batch in loader]
        assert len(loader) == len(batches) == (4 * steps or sequences)
        if steps:
            assert torch.equal(torch.cat(batches), torch.cat(whole))


def test_it_is_said_that_an_epoch_goes_on_with_other_samples():
    first = RandomTokens(50, 8, batch_size=2, sequences=12).train_dataloader()
    start = first.state_dict()
    list(first)
    end = first.state_dict()
    next(iter(first))
    second = RandomTokens(50, 8, batch_size=2, sequences=12, seed=1).train_dataloader()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        second.load_state_dict(start)
        second.load_state_dict(end)
    with pytest.warns(RoundPipeWarning, match=r"within an epoch over 12 sequences in the order of data\.seed=0"):
        second.load_state_dict(first.state_dict())


def random_tokens(**settings):
    return RandomTokens(**({"vocab_size": 50, "sequence_length": 8, "batch_size": 2} | settings))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (packed, {"sequence_length": 1}, r"data\.sequence_length=1 "),
        *((random_tokens, {name: 0}, rf"data\.{name}=0 must be at least 1\.$")
          for name in ("vocab_size", "sequences", "batch_size")),
        *((make, {"num_workers": -1}, r"data\.num_workers=-1 must be at least 0, which loads in this process\.$")
          for make in (packed, random_tokens)),
        (packed, {"max_validation_sequences": 0}, r"data\.max_validation_sequences=0 must be at least 1\.$"),
        (packed, {"sequence_length": 5000}, r"data\.sequence_length=5000 is longer than all text for training"),
        (packed, {"batch_size": 1000}, r"data\.batch_size=1000 is more than there are sequences for training, \d+"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_named(make, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make(**settings).train_dataloader()
