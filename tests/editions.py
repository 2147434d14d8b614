"""Which edition of the engine tests run, and where the parts are that tests replace.

``pytest --engine`` calls `choose`. Processes that tests start find the choice in the environment; see `edition_hook`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HOOK = Path(__file__).with_name("edition_hook")


def choose(edition: str) -> None:
    """Choose for this process, and for those that it starts."""
    os.environ["ROUNDPIPE_TEST_ENGINE"] = edition
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    follow()


def follow() -> None:
    """Do what the environment says."""
    if third():
        from lightning_roundpipe import strategy
        from lightning_roundpipe.engine.engine import Engine

        vars(strategy)["Engine"] = Engine


def third() -> bool:
    return os.environ.get("ROUNDPIPE_TEST_ENGINE") == "3"


def pool_module() -> Any:
    """The module with ``GRACE``."""
    if third():
        from lightning_roundpipe.engine import pool

        return pool
    from lightning_roundpipe.runtime.core import worker_pool

    return worker_pool


def engine_module() -> Any:
    """The module that calls ``report_of``."""
    if third():
        from lightning_roundpipe.engine import engine

        return engine
    from lightning_roundpipe.runtime import engine as second

    return second


def planner_module() -> Any:
    """The module that calls ``reserved_within``."""
    if third():
        from lightning_roundpipe.engine import planner

        return planner
    from lightning_roundpipe.runtime.profile import first_batch

    return first_batch


def worker_module() -> Any:
    """The module of the class ``Worker``."""
    if third():
        from lightning_roundpipe.engine import worker

        return worker
    from lightning_roundpipe.runtime.core import worker as second

    return second


def rounding_module() -> Any:
    """The module of ``send_rounded``."""
    if third():
        return planner_module()
    from lightning_roundpipe.runtime.profile import autocast_weights

    return autocast_weights
