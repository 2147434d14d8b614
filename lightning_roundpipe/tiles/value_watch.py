"""Finds out whether a recomputation needs the values that a tiled module returns, or only their places in the graph.

In ``hidden = residual + mlp(hidden)`` the sum is what the layer returns, and its gradient does not depend on the value
of either term. So a recomputation, of which only the graph is wanted, may leave out the forward of ``mlp``: its tiles
are computed in the backward anyway. This is watched in the first recomputation of each layer:

    what depends on a module's outputs ── by storages, through each operation ── [1]
    an operation that only adds, scales or views it ── goes on ── [2]; any other one may read it: values are needed
    something that depends on it and is saved for the backward ── values are needed ── [3]
    code of the user's own in the backward ── may read anything: values are needed ── [4]
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_roundpipe.model.below_modes import call_below
from lightning_roundpipe.model.graph_nodes import nodes_of
from lightning_roundpipe.tiles.layer_mode import LayerMode

aten = torch.ops.aten

_LINEAR = {
    aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.mul.Tensor, aten.mul.Scalar,
    aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.clone.default, aten.cat.default, aten._to_copy.default,
    aten._unsafe_view.default, aten.detach.default, aten.alias.default,
}  # fmt: skip
"""Operations [2] that control no choice, and save what their gradients need in a way that [3] sees."""


class ValueWatch(LayerMode):  # type: ignore[no-untyped-call]
    """Follows the outputs of tiled modules through one recomputation.

    Attributes:
        needed: the modules, by number, whose outputs' values are needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.needed: set[int] = set()
        self._of: weakref.WeakKeyDictionary[torch.UntypedStorage, set[int]] = weakref.WeakKeyDictionary()

    def returned(self, number: int, tensors: Iterable[Tensor]) -> None:
        """Follow ``tensors``, the outputs of module ``number``."""
        self.seen.add(number)
        for tensor in tensors:
            self._of.setdefault(tensor.untyped_storage(), set()).add(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        origins = [self._origins(tensor) for tensor in given]
        result = call_below(func, args, kwargs or {})
        found = set().union(*origins)
        if found:
            written = func._schema.is_mutable and origins[0]  # its memory may be one expanded number
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if written or not (func.is_view or func in _LINEAR) or not all(t.is_floating_point() for t in made):
                self.needed |= found
            for tensor in made:
                self._of.setdefault(tensor.untyped_storage(), set()).update(found)
        return result

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Look at the graph of the layer's ``outputs`` [3, 4]."""
        for node in nodes_of(t.grad_fn for t in outputs):
            if _is_own(node):
                self.needed |= self.seen
            for tensor in _saved_by(node):
                self.needed |= self._origins(tensor)

    def _origins(self, tensor: Tensor) -> set[int]:
        if tensor.layout is not torch.strided or not self._of:
            return set()
        try:
            return self._of.get(tensor.untyped_storage(), set())
        except NotImplementedError:  # a tensor without a storage
            return set()


def _saved_by(node: Any) -> Iterable[Tensor]:
    if hasattr(node, "saved_tensors"):
        yield from (t for t in node.saved_tensors if t is not None)
        return
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            yield from (t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor))


def _is_own(node: Any) -> bool:
    function = getattr(type(node), "_forward_cls", None)
    if function is None:
        return "CppNode" in str(node.name())
    return function.__module__.partition(".")[0] not in ("torch", "lightning_roundpipe")
