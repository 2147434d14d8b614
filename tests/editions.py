"""Where the parts of the engine are that tests replace."""

from __future__ import annotations

from typing import Any


def third() -> bool:
    return True


def pool_module() -> Any:
    """The module with ``GRACE``."""
    from lightning_roundpipe.engine import pool

    return pool


def engine_module() -> Any:
    """The module that calls ``report_of``."""
    from lightning_roundpipe.engine import engine

    return engine


def planner_module() -> Any:
    """The module that calls ``reserved_within``."""
    from lightning_roundpipe.engine import planner

    return planner


def worker_module() -> Any:
    """The module of the class ``Worker``."""
    from lightning_roundpipe.engine import worker

    return worker


def rounding_module() -> Any:
    """The module of ``send_rounded``."""
    return planner_module()
