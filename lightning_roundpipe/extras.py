"""Packages that only some uses need. They come with the extras of ``pyproject.toml``, which errors name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

EXTRAS = {
    "matplotlib": "plots",
    "tensorboard": "tensorboard",
    "pyarrow": "data",
    "datasets": "data",
}
"""The extra that brings a package."""


def is_installed(package: str) -> bool:
    """Whether ``package`` can be imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a program may have put None in its place
        return False


def remedy(package: str) -> str:
    """What is missing, and the command that installs it."""
    return f"{package} is not installed: pip install 'lightning-roundpipe[{EXTRAS[package]}]'"


def need(module: str, why: str) -> Any:
    """Imports ``module``.

    Raises:
        ImportError: its package is not installed; the message begins with ``why`` and names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{why}, and {remedy(module.partition('.')[0])}") from error
