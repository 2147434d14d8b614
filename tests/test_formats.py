"""Records of every format in files of every kind: token by token, what the model reads and what it learns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from tiny_tokenizer import tiny_tokenizer

from lightning_roundpipe.data import TextFiles, sources
from lightning_roundpipe.data.records import FORMATS, Fields
from lightning_roundpipe.data.rows import NO_TARGET
from lightning_roundpipe.model import loading
from lightning_roundpipe.tasks.fine_tuning import build

# What is learnt stands in brackets. In tokens Ċ is a line's end and Ġ a space.
CHATTED = "<begin> <user> the Ċ Ċ ab <turn> Ċ <assistant> [b] [e] [<turn>] [Ċ]"
TURNS = (
    "<begin> <system> b e <turn> Ċ <user> the <turn> Ċ <assistant> [ab] [<turn>] [Ċ] "
    "<user> Ġb <turn> Ċ <assistant> [e] [<turn>] [Ċ]"
)
RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": "the ab"}, "[the] [Ġ] [ab] [<end>]"),
    "completion": ({"prompt": "the", "completion": " be"}, "the [Ġbe] [<end>]"),
    "instruction": ({"instruction": "the", "input": "ab", "output": "be"}, CHATTED),
    "messages": (
        {
            "messages": [
                {"role": "system", "content": "be"},
                {"role": "user", "content": "the"},
                {"role": "assistant", "content": "ab"},
                {"role": "user", "content": " b"},
                {"role": "assistant", "content": "e"},
            ]
        },
        TURNS,
    ),
    "conversations": (
        {
            "conversations": [
                {"from": "system", "value": "be"},
                {"from": "human", "value": "the"},
                {"from": "gpt", "value": "ab"},
                {"from": "user", "value": " b"},
                {"from": "assistant", "value": "e"},
            ]
        },
        TURNS,
    ),
}


def write(folder: Path, kind: str, records: list[dict[str, Any]]) -> Path:
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


def module(path: Path, **settings: Any) -> TextFiles:
    options: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "vocab_size": 300, "sequence_length": 64, "batch_size": 1}
    options |= {"rows": "padded", "validation_path": path, "cache_folder": path.parent / "cache"} | settings
    return TextFiles(path, **options)


def shown(data: TextFiles) -> str:
    """The first record's tokens; those that are labels stand in brackets."""
    row = next(iter(data.val_dataloader()))
    length = int(row["attention_mask"].sum())
    ids, labels = row["input_ids"][0, :length].tolist(), row["labels"][0, :length].tolist()
    assert all(label in (token, NO_TARGET) for token, label in zip(ids, labels, strict=True))
    assert (row["labels"][0, length:] == NO_TARGET).all()
    names = tiny_tokenizer().convert_ids_to_tokens(ids)
    pairs = zip(names, labels, strict=True)
    return " ".join(name if label == NO_TARGET else f"[{name}]" for name, label in pairs)


@pytest.mark.parametrize("kind", ["jsonl", "json", "lines", "parquet", "saved"])
@pytest.mark.parametrize("name", RECORDS)
def test_only_completions_are_learnt(name: str, kind: str, tmp_path: Path) -> None:
    record, expected = RECORDS[name]
    path = write(tmp_path, kind, [record])
    assert shown(module(path)) == expected
    everything = " ".join(f"[{token.strip('[]')}]" for token in expected.split())
    assert shown(module(path, loss_on="everything")) == everything


def test_every_format_is_tried() -> None:
    assert RECORDS.keys() == FORMATS.keys()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "the", "output": "be"}, CHATTED.replace(" Ċ Ċ ab", "")),
        ({"instruction": "the", "input": None, "output": "be"}, CHATTED.replace(" Ċ Ċ ab", "")),
        ({"instruction": "the", "input": " ", "output": "be"}, CHATTED.replace(" Ċ Ċ ab", "")),
        # Columns of other records are null in this one.
        ({"text": None, "prompt": "the", "completion": " be"}, "the [Ġbe] [<end>]"),
        # ShareGPT's list with the other pair of fields, and the other way round.
        ({"conversations": RECORDS["messages"][0]["messages"]}, TURNS),
        ({"messages": RECORDS["conversations"][0]["conversations"]}, TURNS),
    ],
)
def test_what_is_written_in_other_ways_is_the_same(record: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert shown(module(write(tmp_path, "jsonl", [record]))) == expected


@pytest.mark.parametrize("name", RECORDS)
def test_fields_have_other_names_by_setting(name: str, tmp_path: Path) -> None:
    record, expected = RECORDS[name]
    called = {"role": "wer", "content": "was", "from": "von", "value": "wert"}
    called |= {field: f"{field} in other words" for field in (*FORMATS[name], *(["input"] * (name == "instruction")))}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return {called[key]: renamed(item) for key, item in value.items()} if isinstance(value, dict) else value

    path = write(tmp_path, "jsonl", [renamed(record)])
    with pytest.raises(ValueError, match=r"which no format has.*, as in data\.fields\.prompt="):
        module(path).prepare_data()
    assert shown(module(path, fields=called)) == expected


def test_a_format_by_setting_decides_between_several(tmp_path: Path) -> None:
    """Alpaca's own files have its prompt written out beside the fields."""
    path = write(tmp_path, "jsonl", [RECORDS["instruction"][0] | {"text": "the ab"}])
    with pytest.raises(ValueError, match=r"several formats: set data\.format to one of text, instruction"):
        module(path).prepare_data()
    assert shown(module(path, format="instruction")) == CHATTED
    assert shown(module(path, format="text")) == RECORDS["text"][1]
    with pytest.raises(ValueError, match=r'"prompt" is missing beside the fields "instruction", "input", "output"'):
        module(path, format="completion").prepare_data()


def test_fields_that_two_formats_share_do_not_confuse(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"input": "the", "output": " be"}])
    with pytest.raises(ValueError, match=r'"instruction" is missing beside the fields "input", "output"'):
        module(path).prepare_data()
    assert shown(module(path, fields={"prompt": "input", "completion": "output"})) == RECORDS["completion"][1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "alpaca"}, r"^data\.format='alpaca' must be 'auto' or 'text' or 'completion' or 'instruction' or"),
        ({"fields": {"promt": "a"}}, r"^data\.fields has no field 'promt' \(did you mean 'prompt'\?\)\. It has text, "),
        ({"fields": {"prompt": ""}}, r"^data\.fields\.prompt='' must name a field of the records"),
        ({"fields": {"prompt": "a", "completion": "a"}}, r"^data\.fields gives two fields of the format 'completion'"),
        ({"chat_template": "nowhere"}, r"^data\.chat_template='nowhere' is not a file\. Name one .* set it to plain"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        module(tmp_path, **settings)


# -- chat templates ----------------------------------------------------------------------------------------------------

PLAIN_TEXT = "### User:\nthe\n\nab\n\n### Assistant:\nbe<end>\n\n"


def test_without_a_chat_template_there_is_an_error_or_a_plain_format(tmp_path: Path) -> None:
    path = write(tmp_path, "json", [RECORDS["text"][0], *[RECORDS["instruction"][0]] * 3])
    bare = {"tokenizer": tiny_tokenizer(None)}
    with pytest.raises(
        ValueError,
        match=r"^data\.path: a\.json record 2: it is a conversation, and the tokenizer has no chat template\. "
        r"Set data\.chat_template to plain",
    ):
        module(path, **bare).prepare_data()
    path = write(tmp_path, "json", [RECORDS["instruction"][0]])
    plain = module(path, **bare, chat_template="plain")
    row = next(iter(plain.val_dataloader()))
    ids = row["input_ids"][0, : int(row["attention_mask"].sum())]
    assert tiny_tokenizer().decode(ids) == f"<begin>{PLAIN_TEXT}"
    assert shown(plain).endswith("A s s i s t a n t : Ċ [b] [e] [<end>] Ċ Ċ")
    assert shown(plain).count("[") == 3


def test_a_chat_template_from_a_file(tmp_path: Path) -> None:
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] + '<turn>' }}{% endfor %}")
    path = write(tmp_path, "jsonl", [{"instruction": "the", "output": "be"}])
    assert shown(module(path, chat_template=template)) == "the <turn> [b] [e] [<turn>]"
    assert shown(module(path)) == CHATTED.replace(" Ċ Ċ ab", "")  # and not the tokens of another template


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ('[{"text": "a"},\n {"text": "b"', "1", r"the file is not JSON \(.*, line 2\)"),
        ('[{"text": "a"}]\n{"text": "b"}', "1", r"the file is not JSON \(Extra data, line 2\)"),
        ('[{"text": tru}]', "1", r"the file is not JSON \(Expecting value, column 11\)"),
        ('[{"text": "a", "text": "b"}]', "1", '"text" is there twice'),
        ('[{"text": "a"}, 5]', "2", "the record is a number, not a JSON object"),
        (b'[{"text": "\xff"}]', "1", r"the file is not UTF-8 \(byte 12\)"),
    ],
)
def test_what_is_wrong_with_a_json_list(text: str | bytes, place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"^data\.path: 1 of \d records? .*: a\.json record {place}: .*{reason}"):
        module(tmp_path / "a.json").prepare_data()


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_tables_name_the_record(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind, [{"text": "the ab"}, {"text": None}, {"text": ""}])
    with pytest.raises(
        ValueError,
        match=rf'2 of 3 records .*: {path.name} record 2: "text" is null.*; {path.name} record 3: "text" is empty',
    ):
        module(path).prepare_data()


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then something else PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet record 1: it cannot be read \(.*\): copy or save it again"):
        module(tmp_path / "a.parquet").prepare_data()
    folder = write(tmp_path, "saved", [RECORDS["text"][0]])
    [file] = folder.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"a record 1: it cannot be read \(.*\): copy or save it again"):
        module(folder).prepare_data()


def test_a_saved_dataset_within_a_folder_is_one_source(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "saved", [RECORDS["text"][0]] * 2)
    write(tmp_path / "data", "jsonl", [RECORDS["completion"][0]])
    assert sources.find_sources(tmp_path / "data", "data.path") == (
        [tmp_path / "data" / "a", tmp_path / "data" / "a.jsonl"],
        [],
    )
    data = module(tmp_path / "data")
    data.prepare_data()
    assert len(data._sources()[0]) == 3


def test_of_several_splits_one_is_named(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([RECORDS["text"][0]])
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "both")
    with pytest.raises(
        ValueError, match=r"^data\.path: '.*both' holds a DatasetDict of test, train\. Name .*/test'; data\.v"
    ):
        module(tmp_path / "both").prepare_data()
    data = module(tmp_path / "both" / "train", validation_path=tmp_path / "both" / "test")
    assert shown(data) == RECORDS["text"][1]


@pytest.mark.parametrize(
    ("record", "settings", "message"),
    [
        ({"question": "the", "answer": "be"}, [], r"no format has: .* set them, as in data\.fields\.prompt="),
        ({"prompt": "the " * 50, "completion": "be"}, [], r"1 record of more than 32 tokens"),
        ({"instruction": "the", "output": "be"}, ["data.tokenizer=bare"], "the tokenizer has no chat template"),
        ({"prompt": "the", "completion": "be"}, ["data.fields.promt=the"], "promt"),
        ({"question": "the", "answer": "be"}, ["data.fields.prompt=question", "data.fields.completion=answer"], None),
    ],
)
def test_data_are_checked_before_weights_are_read(
    record: dict[str, Any], settings: list[str], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reading(BaseException):
        pass

    def read(*_: Any, **__: Any) -> Any:
        raise Reading

    import_module("lightning_roundpipe.train")  # its resolvers, which conf/ refers to
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_whole_model", read)
    loading.from_config("llama", vocab_size=300, hidden_size=32, num_hidden_layers=1).model.save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    tiny_tokenizer(None).save_pretrained("bare")
    path = write(tmp_path, "jsonl", [record])
    options = ["model=folder", "model.folder=model", "data=completions", f"data.path={path}", "data.cache_folder=cache"]
    options += [f"data.validation_path={path}", "data.sequence_length=32", "data.batch_size=1", "run_folder=here"]
    with initialize_config_module("lightning_roundpipe.conf", version_base="1.3"):
        try:
            cfg = compose("train", [*options, *settings])
        except ConfigCompositionException as error:  # a setting that there is not
            assert message is not None and message in str(error)
            return
    with pytest.raises(ValueError if message else Reading, match=message):
        build(cfg, tmp_path)


def test_other_fields_of_messages_reach_the_template() -> None:
    """Templates ask for them; columns that other messages have, which come as null, are as good as not there."""
    message: Mapping[str, Any] = {"role": "assistant", "content": "a", "name": "b", "tool_calls": None}
    content, unread = Fields().read({"messages": [{"role": "user", "content": "q"}, message], "id": 3})
    assert content.messages[1] == {"role": "assistant", "content": "a", "name": "b"}  # type: ignore[union-attr]
    assert unread == {"id"}
