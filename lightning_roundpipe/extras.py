"""Optional packages. They are installed by the extras of ``pyproject.toml``, which error messages name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

EXTRAS = {
    "matplotlib": "plots",
    "tensorboard": "tensorboard",
    "bitsandbytes": "quant",
    "accelerate": "quant",
}
"""The extra that installs each package."""


def is_installed(package: str) -> bool:
    """Return whether ``package`` can be imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a program may have put None into sys.modules
        return False


def remedy(package: str) -> str:
    """Return what is missing, with the command that installs it."""
    return f"{package} is not installed: pip install 'lightning-roundpipe[{EXTRAS[package]}]'"


def need(module: str, why: str) -> Any:
    """Import ``module``.

    Raises:
        ImportError: its package is not installed. The message begins with ``why`` and names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{why}, and {remedy(module.partition('.')[0])}") from error
