"""Gives processes that tests start, scripts of users too, the edition of the engine that ``pytest --engine`` names."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any


class _Finder:
    """Puts the third edition's `Engine` into the strategy's module when that is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "lightning_roundpipe.strategy":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec: Any = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            real(module)
            from lightning_roundpipe.engine.engine import Engine

            module.Engine = Engine

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("ROUNDPIPE_TEST_ENGINE") == "3":
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
