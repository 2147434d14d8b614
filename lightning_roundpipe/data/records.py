"""The formats of records, and what each says to the model. The fields of a record decide its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The required fields of each format. A record has the first one whose fields it has: some data sets have conversations
written out as a text beside them."""

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""The roles of chat templates for the speakers in ShareGPT's conversations; others keep their names."""


class BadRecord(ValueError):
    """The reason why a record cannot be used."""


@dataclass(frozen=True)
class Text:
    """Text to learn, after a prompt to read."""

    text: str
    prompt: str = ""


Chat: TypeAlias = list[dict[str, Any]]
"""A conversation, in the form that chat templates take."""


def read_record(record: Mapping[str, Any]) -> Text | Chat:
    """Return what a record says to the model.

    Raises:
        BadRecord: it has no format, or a field is empty or no string.
    """
    record = {name: value for name, value in record.items() if value is not None}  # columns of other records in tables
    kind = next((kind for kind, names in FORMATS.items() if record.keys() >= set(names)), None)
    if kind is None:
        has = ", ".join(sorted(record)) or "none"
        formats = "; ".join(" and ".join(names) for names in FORMATS.values())
        raise BadRecord(f"its fields are {has}, which is no format. Rename them; formats have {formats}")
    if kind == "text":
        return Text(_string(record, "text"))
    if kind == "completion":
        return Text(_string(record, "completion"), _string(record, "prompt", may_be_empty=True))
    if kind == "instruction":
        asked, given = _string(record, "instruction"), _string(record, "input", may_be_empty=True)
        question = f"{asked}\n\n{given}" if given.strip() else asked
        return [{"role": "user", "content": question}, {"role": "assistant", "content": _string(record, "output")}]
    messages = record[kind]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRecord(f'"{kind}" is {messages!r:.40}, not a list of messages')
    return list(map(_message, messages))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with "role" and "content", from either pair of fields."""
    present = {key: value for key, value in message.items() if value is not None}  # templates test for some fields
    by, what = ("role", "content") if "role" in present else ("from", "value")
    role = _string(present, by)
    role = _ROLES.get(role, role) if by == "from" else role
    rest = {key: value for key, value in present.items() if key not in (by, what)}
    return rest | {"role": role, "content": _string(present, what, may_be_empty=role != "assistant")}


def _string(record: Mapping[str, Any], field: str, *, may_be_empty: bool = False) -> str:
    value = record.get(field, "")
    if not isinstance(value, str):
        raise BadRecord(f'"{field}" is {value!r:.40}, not a string')
    if not may_be_empty and not value.strip():
        raise BadRecord(f'"{field}" is empty')
    return value
