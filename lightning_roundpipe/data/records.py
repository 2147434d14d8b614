"""Records: five formats, the fields of each, and errors for values that fit none of them.

Data sets agree on a few formats but hardly on names. ``Fields`` knows which format to read and what its fields are
called in the data, and converts the values of a record to its content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

FORMATS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "messages": ("messages",),
    "conversations": ("conversations",),
}
"""The required fields of each format."""

_OPTIONAL = {"instruction": ("input",)}
_OF_MESSAGES = ("role", "content", "from", "value")
_NAMES = tuple(dict.fromkeys([*(name for names in FORMATS.values() for name in names), "input", *_OF_MESSAGES]))
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""The roles of chat templates for the speakers in ShareGPT's conversations."""

_SHOWN = 8


@dataclass(frozen=True)
class Text:
    """Text to learn as a whole: a ``"text"`` field, or a piece of a text file, perhaps its first or last one."""

    text: str
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Completion:
    """A prompt and the completion that follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation, in the form that chat templates take."""

    messages: list[dict[str, Any]]


Content: TypeAlias = Text | Completion | Chat


@dataclass(frozen=True)
class Record:
    """A record, its place in the file, such as ``"line 3"``, and the names of its fields that are not read."""

    place: str
    content: Content
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BadRecord:
    """A place in a file without a valid record, and the reason."""

    place: str
    reason: str


class Wrong(Exception):
    """The reason why a record cannot be used."""


class Fields:
    """The format of records, and the names of its fields in them.

    Args:
        format: one of ``FORMATS``, or ``"auto"``: each record has the only format whose fields it has.
        names: other names of fields, such as ``{"prompt": "question"}``.

    Raises:
        ValueError: there is no such format or no such field.
    """

    def __init__(self, format: str = "auto", names: Mapping[str, str] | None = None) -> None:
        if format not in ("auto", *FORMATS):
            raise ValueError(f"data.format={format!r} must be {' or '.join(map(repr, ('auto', *FORMATS)))}.")
        names = dict(names or {})
        for field, name in names.items():
            if field not in _NAMES:
                raise ValueError(
                    f"data.fields has no field {field!r}{did_you_mean(field, _NAMES)}. It has {', '.join(_NAMES)}."
                )
            if not name:
                raise ValueError(f"data.fields.{field}={name!r} must name a field of the records.")
        self.format = format
        self._names = {field: names.get(field, field) for field in _NAMES}
        for kind, wanted in FORMATS.items():
            called = [self._names[field] for field in (*wanted, *_OPTIONAL.get(kind, ()))]
            if len(set(called)) < len(called):
                raise ValueError(
                    f"data.fields gives two fields of the format {kind!r} one name: {', '.join(called)}. Give each "
                    "field its own."
                )

    @property
    def settings(self) -> list[Any]:
        """All settings that decide how a record is read."""
        return [self.format, self._names]

    def read(self, values: Any) -> tuple[Content, frozenset[str]]:
        """Return the content of a record, and the names of fields that are not read. Raises ``Wrong``."""
        if not isinstance(values, dict):
            raise Wrong(f"the record is {kind_of(values)}, not a JSON object")
        kind = self._kind(values)
        used = {self._names[field] for field in (*FORMATS[kind], *_OPTIONAL.get(kind, ()))}
        return self._content(kind, values), frozenset(values.keys() - used)

    def _kind(self, values: Mapping[str, Any]) -> str:
        """Return the format of a record."""
        if self.format != "auto":
            return self.format
        has = {key for key, value in values.items() if value is not None}
        wanted = {kind: {self._names[field] for field in fields} for kind, fields in FORMATS.items()}
        whole = [kind for kind in wanted if wanted[kind] <= has]
        if len(whole) > 1:
            raise Wrong(f"the record has the fields of several formats: set data.format to one of {', '.join(whole)}")
        if whole:
            return whole[0]
        parts = [kind for kind in wanted if wanted[kind] & values.keys()]
        if len(parts) == 1:
            return parts[0]
        known = [name for fields in wanted.values() for name in fields]
        close = [f'"{near[0]}"' for key in values if (near := get_close_matches(str(key), known, 1, 0.75))]
        raise Wrong(
            f"the record has {_listed(values)}, which no format has"
            + (f" (did you mean {', '.join(close)}?)" if close else "")
            + ": if other names are meant, set them, as in data.fields.prompt=question data.fields.completion=answer"
        )

    def _content(self, kind: str, values: Mapping[str, Any]) -> Content:
        if kind == "text":
            return Text(self._string(values, "text"))
        if kind == "completion":
            return Completion(self._string(values, "prompt", may_be_empty=True), self._string(values, "completion"))
        if kind == "instruction":
            asked = self._string(values, "instruction")
            if values.get(self._names["input"]) is not None:
                given = self._string(values, "input", may_be_empty=True)
                asked = f"{asked}\n\n{given}" if given.strip() else asked
            answer = self._string(values, "output")
            return Chat([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}])
        return Chat(self._messages(values, kind))

    def _string(self, values: Mapping[str, Any], field: str, may_be_empty: bool = False) -> str:
        name = self._names[field]
        value = self._value(values, field)
        if not isinstance(value, str):
            raise Wrong(f'"{name}" is {kind_of(value)}, not a string')
        if not may_be_empty and not value.strip():
            raise Wrong(f'"{name}" is empty')
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Wrong(f'"{name}" holds half of a character (a lone surrogate)') from None
        return value

    def _value(self, values: Mapping[str, Any], field: str) -> Any:
        name = self._names[field]
        if name not in values:
            close = get_close_matches(name, map(str, values), 1, 0.7)
            guess = f' (did you mean "{close[0]}"?)' if close else ""
            called = close[0] if close else "NAME"
            raise Wrong(f'"{name}" is missing beside {_listed(values)}{guess}: set data.fields.{field}={called}')
        return values[name]

    def _messages(self, values: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
        name = self._names[field]
        found = self._value(values, field)
        if not isinstance(found, list):
            raise Wrong(f'"{name}" is {kind_of(found)}, not a list of messages')
        if not found:
            raise Wrong(f'"{name}" is empty')
        messages = []
        for number, message in enumerate(found, 1):
            try:
                messages.append(self._message(message))
            except Wrong as wrong:
                raise Wrong(f"message {number}: {wrong}") from None
        return messages

    def _message(self, message: Any) -> dict[str, Any]:
        """Return a message with "role" and "content", from either pair of fields."""
        if not isinstance(message, dict):
            raise Wrong(f"it is {kind_of(message)}, not a JSON object")
        # In tables, fields that only other messages have are null here. Templates test whether such fields exist.
        present = {key: value for key, value in message.items() if value is not None}
        theirs = self._names["from"] in present and self._names["role"] not in present
        by, what = ("from", "value") if theirs else ("role", "content")
        role = self._string(present, by)
        if theirs and role not in _ROLES:
            raise Wrong(
                f'"{self._names["from"]}" is "{role}"{did_you_mean(role, _ROLES)}, and must be {" or ".join(_ROLES)}'
            )
        role = _ROLES[role] if theirs else role
        text = self._string(present, what, may_be_empty=role != "assistant")
        rest = {key: value for key, value in present.items() if key not in (self._names[by], self._names[what])}
        return rest | {"role": role, "content": text}


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` for a name that is close to a known one, else an empty string."""
    close = get_close_matches(given, list(known), 1, 0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def kind_of(value: Any) -> str:
    """Return the type of a value in the words of JSON, with its article."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def _listed(values: Mapping[str, Any]) -> str:
    names = [f'"{key}"' for key in values]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the field{'s'[: len(names) != 1]} {', '.join(names[:_SHOWN])}{more}" if names else "no field"
