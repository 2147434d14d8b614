"""Changes to the whole process that several contexts share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec

P = ParamSpec("P")


def shared_context(change: Callable[P, Iterator[None]]) -> Callable[P, AbstractContextManager[None]]:
    """Decorate a generator function, as `contextlib.contextmanager`, whose contexts may overlap, in any threads.

    The first context to be entered runs the generator up to its ``yield``, and the last one to exit runs the rest. The
    arguments of the others are ignored.
    """
    enter = contextmanager(change)
    lock = threading.Lock()
    users = 0
    entered = ExitStack()

    @functools.wraps(change)
    @contextmanager
    def shared(*args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        nonlocal users
        with lock:
            if not users:
                entered.enter_context(enter(*args, **kwargs))
            users += 1
        try:
            yield
        finally:
            with lock:
                users -= 1
                if not users:
                    entered.close()

    return shared


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of ``owner``, such as functions of a module, within this context."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
