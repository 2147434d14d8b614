"""Records of every format in files of every kind: token by token, what the model reads and what it learns."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizer import tiny_tokenizer

from lightning_roundpipe.data import TextFiles
from lightning_roundpipe.data.rows import NO_TARGET

# What is learnt stands in brackets. In tokens Ċ is a line's end and Ġ a space.
CHATTED = "<begin> <user> the Ċ Ċ ab <turn> Ċ <assistant> [b] [e] [<turn>] [Ċ]"
TURNS = (
    "<begin> <system> b e <turn> Ċ <user> the <turn> Ċ <assistant> [ab] [<turn>] [Ċ] "
    "<user> Ġb <turn> Ċ <assistant> [e] [<turn>] [Ċ]"
)
MESSAGES = [("system", "be"), ("user", "the"), ("assistant", "ab"), ("user", " b"), ("assistant", "e")]
SHAREGPT = ("system", "human", "gpt", "user", "assistant")
"""Its own names of who speaks, or the usual ones."""
RECORDS = {
    "text": ({"text": "the ab"}, "[the] [Ġ] [ab] [<end>]"),
    "completion": ({"prompt": "the", "completion": " be"}, "the [Ġbe] [<end>]"),
    "instruction": ({"instruction": "the", "input": "ab", "output": "be"}, CHATTED),
    "messages": ({"messages": [{"role": role, "content": text} for role, text in MESSAGES]}, TURNS),
    "conversations": (
        {"conversations": [{"from": name, "value": m[1]} for name, m in zip(SHAREGPT, MESSAGES, strict=True)]},
        TURNS,
    ),
}


def write(folder, kind, records):
    """A file or folder of that kind with these records."""
    path = folder / {"lines": "a.json", "saved": "a"}.get(kind, f"a.{kind}")
    if kind == "saved":
        datasets.Dataset.from_list(records).save_to_disk(path)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif kind == "json":
        path.write_text(json.dumps(records, indent=1))
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def module(path, **settings):
    options = {"tokenizer": tiny_tokenizer(), "vocab_size": 300, "sequence_length": 64, "batch_size": 1}
    options |= {"rows": "padded", "validation_path": path} | settings
    return TextFiles(path, **options)


def shown(data):
    """The first record's tokens; those that are labels stand in brackets."""
    row = next(iter(data.val_dataloader()))
    length = int(row["attention_mask"].sum())
    ids, labels = row["input_ids"][0, :length].tolist(), row["labels"][0, :length].tolist()
    assert all(label in (token, NO_TARGET) for token, label in zip(ids, labels, strict=True))
    assert (row["labels"][0, length:] == NO_TARGET).all()
    names = tiny_tokenizer().convert_ids_to_tokens(ids)
    pairs = zip(names, labels, strict=True)
    return " ".join(name if label == NO_TARGET else f"[{name}]" for name, label in pairs)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "jsonl") for name in RECORDS), *(("messages", kind) for kind in ("json", "lines", "parquet", "saved"))],
)
def test_only_completions_are_learnt(name, kind, tmp_path):
    record, expected = RECORDS[name]
    path = write(tmp_path, kind, [record])
    assert shown(module(path)) == expected
    everything = " ".join(f"[{token.strip('[]')}]" for token in expected.split())
    assert shown(module(path, loss_on="everything")) == everything


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "the", "output": "be"}, CHATTED.replace(" Ċ Ċ ab", "")),
        ({"instruction": "the", "input": " ", "output": "be"}, CHATTED.replace(" Ċ Ċ ab", "")),
        # Alpaca's own files have its prompt written out beside the fields.
        (RECORDS["instruction"][0] | {"text": "the ab"}, CHATTED),
        # Columns of other records are null in this one.
        ({"text": None, "prompt": "the", "completion": " be"}, "the [Ġbe] [<end>]"),
        # ShareGPT's list with the other pair of fields, and the other way round.
        ({"conversations": RECORDS["messages"][0]["messages"]}, TURNS),
    ],
)
def test_what_is_written_in_other_ways_is_the_same(record, expected, tmp_path):
    assert shown(module(write(tmp_path, "jsonl", [record]))) == expected


PLAIN_TEXT = "### User:\nthe\n\nab\n\n### Assistant:\nbe<end>\n\n"


def test_without_a_chat_template_there_is_a_plain_format(tmp_path):
    path = write(tmp_path, "json", [RECORDS["instruction"][0]])
    plain = module(path, tokenizer=tiny_tokenizer(None), chat_template="plain")
    row = next(iter(plain.val_dataloader()))
    ids = row["input_ids"][0, : int(row["attention_mask"].sum())]
    assert tiny_tokenizer().decode(ids) == f"<begin>{PLAIN_TEXT}"
    assert shown(plain).endswith("A s s i s t a n t : Ċ [b] [e] [<end>] Ċ Ċ")
    assert shown(plain).count("[") == 3


def test_a_chat_template_from_a_file(tmp_path):
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] + '<turn>' }}{% endfor %}")
    path = write(tmp_path, "jsonl", [{"instruction": "the", "output": "be"}])
    assert shown(module(path, chat_template=template)) == "the <turn> [b] [e] [<turn>]"
    assert shown(module(path)) == CHATTED.replace(" Ċ Ċ ab", "")  # and not the tokens of another template


def test_tables_name_the_record(tmp_path):
    path = write(tmp_path, "parquet", [{"text": "the ab"}, {"text": None}, {"text": ""}])
    with pytest.raises(
        ValueError,
        match=r'a\.parquet .* record 2: its fields are none, which is no format.*; record 3: "text" is empty',
    ):
        module(path).prepare_data()


def test_a_broken_table_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then something else PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read \(.*\)\. Correct it, or save it again"):
        module(tmp_path / "a.parquet").prepare_data()
    folder = write(tmp_path, "saved", [RECORDS["text"][0]])
    [file] = folder.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"a cannot be read \(.*\)\. Correct it, or save it again"):
        module(folder).prepare_data()
