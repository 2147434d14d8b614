"""Files of ``conf`` by name, wherever the package is installed: models, adapters, machines and measured cases."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from lightning_roundpipe.messages import did_you_mean


def find_cases(text: str, name: str) -> tuple[Path, str | None]:
    """Return the file of cases that ``text`` names, and the model in it if ``text`` names one.

    Args:
        text: a path, the name of a file in ``conf/cases``, or the name of a model in such a file.
        name: the option, for messages.

    Raises:
        ValueError: there is no such file or model.
    """
    path = Path(text).expanduser()
    shipped = shipped_files("cases", ".json")
    if path.is_file() or text.endswith(".json") or "/" in text:
        if not path.exists() and path.stem in shipped:
            raise ValueError(
                f"{name}={text} is not there. The package's own cases are {name}={path.stem}, without a path."
            )
        return path, None
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
    """Return the models in a file of cases, without duplicates."""
    data = json.loads(file.read_bytes())
    return list(dict.fromkeys(str(case["model"]) for case in (data if isinstance(data, list) else [data])))


def shipped_files(group: str, suffix: str = ".yaml") -> dict[str, Path]:
    """Return the files of a folder in ``conf`` by their names without the suffix, in alphabetical order."""
    folder = Path(str(files("lightning_roundpipe.conf") / group))
    return {path.stem: path for path in sorted(folder.glob(f"*{suffix}"))}
