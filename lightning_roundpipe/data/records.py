"""The formats of records, and what each says to the model.

Data sets agree on a few formats but hardly on names. ``Fields`` knows which format to read and what its fields are
called in the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_roundpipe.messages import did_you_mean

FORMATS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "messages": ("messages",),
    "conversations": ("conversations",),
}
"""The required fields of each format."""

_OPTIONAL = {"instruction": ("input",)}
_NAMES = (*(name for names in FORMATS.values() for name in names), "input", "role", "content", "from", "value")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""The roles of chat templates for the speakers in ShareGPT's conversations; others keep their names."""


class BadRecord(ValueError):
    """The reason why a record cannot be used."""


@dataclass(frozen=True)
class Text:
    """Text to learn, after a prompt to read; or a piece of a text file, perhaps its first or last one."""

    text: str
    prompt: str = ""
    first: bool = True
    last: bool = True


Chat: TypeAlias = list[dict[str, Any]]
"""A conversation, in the form that chat templates take."""


class Fields:
    """The format of records, and the names of its fields in them.

    Args:
        format: one of ``FORMATS``, or ``"auto"``: each record has the only format whose fields it has.
        names: other names of fields, such as ``{"prompt": "question"}``.

    Attributes:
        known: names of the fields that are read.

    Raises:
        ValueError: there is no such format or no such field.
    """

    def __init__(self, format: str = "auto", names: Mapping[str, str] | None = None) -> None:
        if format not in ("auto", *FORMATS):
            raise ValueError(f"data.format={format!r} must be {' or '.join(map(repr, ('auto', *FORMATS)))}.")
        for field in names or {}:
            if field not in _NAMES:
                raise ValueError(
                    f"data.fields has no field {field!r}.{did_you_mean(field, _NAMES)} It has {', '.join(_NAMES)}."
                )
        self.format = format
        self.names = {field: field for field in _NAMES} | dict(names or {})
        for kind in FORMATS:
            called = self._called(kind)
            if len(set(called)) < len(called):
                raise ValueError(
                    f"data.fields gives two fields of the format {kind!r} one name: {', '.join(called)}. Give each "
                    "field its own."
                )
        self.known = {name for kind in FORMATS if format in ("auto", kind) for name in self._called(kind)}

    def _called(self, kind: str) -> list[str]:
        return [self.names[field] for field in (*FORMATS[kind], *_OPTIONAL.get(kind, ()))]

    def read(self, record: Mapping[str, Any]) -> Text | Chat:
        """Return what a record says to the model. Raises ``BadRecord``."""
        kind = self._kind(record)
        if kind == "text":
            return Text(self._string(record, "text"))
        if kind == "completion":
            return Text(self._string(record, "completion"), self._string(record, "prompt", may_be_empty=True))
        if kind == "instruction":
            asked = self._string(record, "instruction")
            given = record.get(self.names["input"]) or ""
            if given.strip():
                asked = f"{asked}\n\n{given}"
            return [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": self._string(record, "output")},
            ]
        return self._messages(record, kind)

    def _kind(self, record: Mapping[str, Any]) -> str:
        """Return the format of a record."""
        if self.format != "auto":
            return self.format
        has = {name for name, value in record.items() if value is not None}
        missing = {kind: {self.names[field] for field in FORMATS[kind]} - has for kind in FORMATS}
        whole = [kind for kind in missing if not missing[kind]]
        if len(whole) > 1:
            raise BadRecord(
                f"the record has the fields of several formats: set data.format to one of {', '.join(whole)}"
            )
        parts = whole or [kind for kind in missing if len(missing[kind]) < len(FORMATS[kind])]
        if len(parts) == 1:
            return parts[0]
        raise BadRecord(
            f"the record has {_listed(has)}, which no format has: if other names are meant, set them, as in "
            "data.fields.prompt=question data.fields.completion=answer"
        )

    def _string(self, record: Mapping[str, Any], field: str, may_be_empty: bool = False) -> str:
        name = self.names[field]
        value = record.get(name)
        if value is None:
            has = _listed({key for key, value in record.items() if value is not None})
            raise BadRecord(f'"{name}" is missing beside {has}: set data.fields.{field}=NAME')
        if not isinstance(value, str):
            raise BadRecord(f'"{name}" is {value!r:.40}, not a string')
        if not may_be_empty and not value.strip():
            raise BadRecord(f'"{name}" is empty')
        return value

    def _messages(self, record: Mapping[str, Any], field: str) -> Chat:
        found = record.get(self.names[field])
        if not isinstance(found, list) or not found:
            raise BadRecord(f'"{self.names[field]}" is {found!r:.40}, not a list of messages')
        messages = []
        for number, message in enumerate(found, 1):
            try:
                messages.append(self._message(message))
            except BadRecord as wrong:
                raise BadRecord(f"message {number}: {wrong}") from None
        return messages

    def _message(self, message: Any) -> dict[str, Any]:
        """Return a message with "role" and "content", from either pair of fields."""
        if not isinstance(message, dict):
            raise BadRecord(f"it is {message!r:.40}, not an object")
        # In tables, fields that only other messages have are null here. Templates test whether such fields exist.
        present = {key: value for key, value in message.items() if value is not None}
        by, what = ("role", "content") if self.names["role"] in present else ("from", "value")
        role = self._string(present, by)
        role = _ROLES.get(role, role) if by == "from" else role
        text = self._string(present, what, may_be_empty=role != "assistant")
        rest = {key: value for key, value in present.items() if key not in (self.names[by], self.names[what])}
        return rest | {"role": role, "content": text}


def _listed(names: set[str]) -> str:
    return (
        f"the field{'s'[: len(names) != 1]} " + ", ".join(f'"{name}"' for name in sorted(names))
        if names
        else "no field"
    )
