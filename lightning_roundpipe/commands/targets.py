"""Files that a command is to write, checked before it starts to work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_roundpipe.extras import is_installed, remedy

PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


def check_targets(targets: Mapping[str, Path | None]) -> None:
    """Check the paths of output files, by option. ``picture`` must have a suffix of `PICTURE_SUFFIXES`.

    Raises:
        ValueError: a file cannot be written, or two options name the same one.
    """
    taken: dict[Path, str] = {}
    for name, path in ((name, path) for name, path in targets.items() if path is not None):
        if name == "picture" and path.suffix.lower() not in PICTURE_SUFFIXES:
            raise ValueError(f"picture={path} must be the name of a file that ends in {', '.join(PICTURE_SUFFIXES)}.")
        if name == "picture" and not is_installed("matplotlib"):
            raise ValueError(f"picture={path} cannot be drawn, as {remedy('matplotlib')}")
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
            raise ValueError(f"{name}={path} {what}. Give the name of a file in a folder that exists.")
        if path.resolve() in taken:
            raise ValueError(f"{name}={path} would overwrite {taken[path.resolve()]}: give it another name.")
        taken[path.resolve()] = name
