"""Records from files of every format: what is learnt of them, how they lie in rows, and what is refused."""

import json
import re

import numpy as np
import pytest
import torch
from lightning_utilities.core import rank_zero
from tiny_tokenizer import CHAT, FORGETFUL, MARKED, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe.data import TextFiles, text_files
from lightning_roundpipe.data.encoding import Encoder
from lightning_roundpipe.data.records import BadRecord, Text
from lightning_roundpipe.data.rows import NO_TARGET, packed

decode = tiny_tokenizer().decode
USER = {"role": "user", "content": "the ab?"}
ASSISTANT = {"role": "assistant", "content": "abbey"}


def jsonl(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def texts(number=40):
    return [{"text": f"{letter}{number} " * (1 + number % 7)} for number in range(number) for letter in "xy"[:1]]


def questions(number=40):
    return [{"prompt": f"{number}" * (1 + number % 5), "completion": f"={number * number}"} for number in range(number)]


def module(path, **settings):
    options = {"sequence_length": 32, "batch_size": 4, "validation_fraction": 0.2} | settings
    options = {"tokenizer": tiny_tokenizer(), "vocab_size": 300} | options
    return TextFiles(path, **options)


def learnt(content, loss_on="completions", **tokenizer):
    """The whole of what is encoded, and what is learnt of it, as text."""
    made = tiny_tokenizer(**tokenizer)
    tokens = Encoder(made, loss_on).encode(content)
    return made.decode(np.maximum(tokens, ~tokens)), made.decode(tokens[tokens >= 0])


def rows_of(data, kind="train"):
    loader = data.train_dataloader() if kind == "train" else data.val_dataloader()
    return [{key: value[i] for key, value in batch.items()} for batch in loader for i in range(len(batch["labels"]))]


# ---------------------------------------------------------------------------------------------------- what is learnt


def test_of_a_conversation_what_the_assistant_says_is_learnt():
    chat = [{"role": "system", "content": "be"}, USER, ASSISTANT, USER, ASSISTANT | {"content": "b"}]
    start = "<begin><system>be<turn>\n<user>the ab?<turn>\n<assistant>abbey<turn>\n"
    whole = f"{start}<user>the ab?<turn>\n<assistant>b<turn>\n"
    assert learnt(chat) == (whole, "abbey<turn>\nb<turn>\n")
    assert learnt(chat, "everything") == (whole, whole)
    _, marked = learnt(chat, chat_template=MARKED)  # by the template's own marks
    assert marked == "abbey<turn>b<turn>"


@pytest.mark.parametrize(
    ("content", "template", "reason"),
    [
        ([USER, ASSISTANT], None, "the tokenizer has no chat template"),
        ([USER], CHAT, 'no message is from "assistant"'),
        ([ASSISTANT], CHAT, 'its first message is from "assistant"'),
        ([USER, ASSISTANT, USER, ASSISTANT], FORGETFUL, "writes messages up to 2 differently"),
        ([USER, ASSISTANT], "{{ raise_exception('only poems') }}", "refuses it: only poems"),
        ([USER, ASSISTANT], f"{CHAT}{{% generation %}}{{% endgeneration %}}", "no token to be learnt"),
        (Text("t"), CHAT, "no token to be learnt"),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt(content, template, reason):
    made = tiny_tokenizer(template)
    if isinstance(content, Text):
        made.eos_token = None
    with pytest.raises(BadRecord, match=reason):
        Encoder(made, "completions").encode(content)


# ---------------------------------------------------------------------------------------------------- what is refused


BAD = [
    ({}, "its fields are none, which is no format"),
    ({"text": 5}, '"text" is 5, not a string'),
    ({"question": "a", "answer": "b"}, "its fields are answer, question, which is no format. Rename them"),
    ({"messages": "hi"}, "\"messages\" is 'hi', not a list of messages"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, '"content" is empty'),
]


def test_every_bad_record_is_named(tmp_path):
    """With file, number and reason."""
    jsonl(tmp_path / "data" / "good.jsonl", texts())
    path = jsonl(tmp_path / "data" / "sub" / "bad.jsonl", [texts(1)[0], *(record for record, _ in BAD), {"text": 5}])
    for _ in range(2):  # the second run finds nothing in the cache
        with pytest.raises(ValueError, match=r"^data\.path: sub/bad\.jsonl has records") as caught:
            module(path.parent.parent).prepare_data()
        for number, (_, reason) in enumerate(BAD, 2):
            more = " and 1 more" if number == 3 else ""
            assert re.search(rf"record {number}{more}: .*{reason}", str(caught.value))


def test_broken_files_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nnot f\xfcne\n")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ab"}\n{"text": "\xff"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "ab"}\n{\n')
    for name in ("a.txt", "a.jsonl", "b.jsonl"):
        with pytest.raises(ValueError, match=rf"^data\.path: {name} cannot be read \(.*\)\. Correct it"):
            module(tmp_path / name).prepare_data()


# ---------------------------------------------------------------------------------------------------- rows


def test_packed_records_do_not_see_each_other(tmp_path):
    """A row's loss is that of its records by themselves, in a batch of several rows; padding counts for nothing."""
    path = jsonl(tmp_path / "a.jsonl", questions())
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    def losses(batch):
        targets = int((batch["labels"][:, 1:] != NO_TARGET).sum())
        with torch.no_grad():
            return float(model(**batch, use_cache=False).loss) * targets, targets

    found = {}
    for rows in ("packed", "padded"):
        data = module(path, rows=rows, validation_path=path, batch_size=2)
        sums = [losses(batch) for batch in data.val_dataloader()]
        found[rows] = [sum(values) for values in zip(*sums, strict=True)]
        assert len(rows_of(data, "validation")) == 40 if rows == "padded" else len(rows_of(data, "validation")) < 14
    encoder = Encoder(tiny_tokenizer(), "completions")
    alone = []
    for question in questions():
        tokens = encoder.encode(Text(question["completion"], question["prompt"]))
        ids = torch.from_numpy(np.maximum(tokens, ~tokens))[None].long()
        alone.append(
            losses({"input_ids": ids, "labels": torch.where(torch.from_numpy(tokens)[None] < 0, NO_TARGET, ids)})
        )
    expected = [sum(values) for values in zip(*alone, strict=True)]
    assert found["packed"] == pytest.approx(expected, rel=1e-5)
    assert found["padded"] == pytest.approx(expected, rel=1e-5)


def test_packing_fills_rows():
    lengths = np.array([5, 3, 8, 2, 2, 6, 1, 8, 4])
    rows = packed(lengths, 8)
    assert [int(lengths[rows == row].sum()) for row in range(rows.max() + 1)] == [8] * 4 + [7]
    many = np.random.default_rng(0).integers(1, 100, 2000)
    sums = np.bincount(packed(many, 128), many)
    assert sums.max() <= 128
    assert sums.mean() > 126


def test_training_and_validation_share_no_text(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(30) * 3)  # each of them three times
    data = module(path, rows="padded", sequence_length=64)
    training, validation = (
        {decode(row["input_ids"][row["attention_mask"] == 1]) for row in rows_of(data, kind)}
        for kind in ("train", "validation")
    )
    assert not training & validation
    assert len(validation) == 6
    assert 20 < len(training) <= 24  # the last batch may be smaller, and is left out
    other = module(path, rows="padded", sequence_length=64, seed=1)
    assert {decode(row["input_ids"][row["attention_mask"] == 1]) for row in rows_of(other, "v")} != validation
    few = module(path, rows="padded", sequence_length=64, max_validation_sequences=2)
    assert len(rows_of(few, "validation")) == 2


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_records_that_are_too_long(rows, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(text_files, "rank_zero_info", said.append)
    long = {"prompt": "p", "completion": "c" * 50, "id": 7}
    path = jsonl(tmp_path / "a.jsonl", [*questions(), long])
    options = {"rows": rows, "validation_path": path}
    joined = [decode(row["input_ids"]) for row in rows_of(module(path, **options, too_long="drop"), "v")]
    assert not any("cc" in row for row in joined)
    assert "without 1 record of more than 32 tokens, a.jsonl record 41 first" in said[-1]
    joined = [decode(row["input_ids"]) for row in rows_of(module(path, **options, too_long="truncate"), "v")]
    assert [row for row in joined if "cc" in row] == ["p" + "c" * 31]
    assert "truncated: 1 record" in said[-1]


# ---------------------------------------------------------------------------------------------------- from disk


def test_what_there_is_is_said(tmp_path, caplog):
    jsonl(tmp_path / "data" / "a.jsonl", [question | {"source": "me"} for question in questions()])
    (tmp_path / "data" / "README.md").write_text("no data")
    with caplog.at_level("INFO", logger=rank_zero.__name__):
        module(tmp_path / "data").setup("fit")
    first, second, third = caplog.messages
    assert first.startswith("roundpipe: data.path: 40 records of ") and "tokens from 1 file" in first
    assert "files that are not read: README.md" in first
    assert second.startswith("roundpipe: training: 32 records in ") and third.startswith(
        "roundpipe: validation: 8 records in "
    )
