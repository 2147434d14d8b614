"""Files of ``conf`` by name, wherever the package is installed: models, adapters and machines."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped_files(group: str) -> dict[str, Path]:
    """Return the files of a folder in ``conf`` by their names without the suffix, in alphabetical order."""
    folder = Path(str(files("lightning_roundpipe.conf") / group))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
