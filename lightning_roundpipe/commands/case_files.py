"""The measured cases that come with the package, by name: they lie in ``conf/cases``, wherever that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from lightning_roundpipe.commands.options import did_you_mean


def find_cases(text: str, name: str) -> tuple[Path, str | None]:
    """The file that ``text`` names, and the model in it if it names one.

    Args:
        text: a path, the name of a file in ``conf/cases``, or that of a model in one.
        name: the option.

    Raises:
        ValueError: there is none.
    """
    path = Path(text).expanduser()
    if path.is_file() or text.endswith(".json") or "/" in text:
        if not path.exists() and path.stem in _shipped():
            raise ValueError(
                f"{name}={text} is not there. The package's own cases are {name}={path.stem}, without a path."
            )
        return path, None
    shipped = _shipped()
    if text in shipped:
        return shipped[text], None
    for file in shipped.values():
        if text in models(file):
            return file, text
    known = [*shipped, *(model for file in shipped.values() for model in models(file))]
    raise ValueError(
        f"There is no {name}={text}.{did_you_mean(text, known)} It is a JSON file, or one of {', '.join(known)}."
    )


def models(file: Path) -> list[str]:
    """The models that a file of cases holds, each once."""
    data = json.loads(file.read_bytes())
    return list(dict.fromkeys(str(case["model"]) for case in (data if isinstance(data, list) else [data])))


def _shipped() -> dict[str, Path]:
    return {item.name.removesuffix(".json"): Path(str(item)) for item in sorted(_files(), key=lambda item: item.name)}


def _files() -> Iterator[Traversable]:
    return (item for item in (files("lightning_roundpipe.conf") / "cases").iterdir() if item.name.endswith(".json"))
