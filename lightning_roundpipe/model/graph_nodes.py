"""The nodes of autograd graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def nodes_of(roots: Iterable[Any], ends: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return each node of the graphs behind ``roots`` (nodes, or None), which are included, once.

    ``ends`` returns whether to leave out what is behind a node. None: a graph ends at its leaves.
    """
    waiting, found = list(roots), dict[Any, None]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            if ends is None or not ends(node):
                waiting += [behind for behind, _ in node.next_functions]
    return list(found)
