"""Compares gradients on the parts of a batch with those on the whole batch: of losses, and in the user's own backward.

The backward of torch's own operations is linear in the incoming gradient, so the gradients of parts add up. A
``torch.autograd.Function`` or a hook may do otherwise: add the gradient of a loss of its own, which then counts once
for each part, or divide by a norm. A loss may have the value of its parts and another gradient. So a rehearsal runs
backward through the graph of the loss, and through each other one that has such code in it:

    the graph of a layer call, of a layer's inputs, or of a loss ── is there such code in it? ── [1]
    backward from random gradients, the same for a sample in any part; backward from zeros ── [2]
    sums over the gradients of inputs and parameters ── those of the parts must add up to those of the whole ── [3]

From zeros, a linear backward gives zeros. Whatever else arrives was added by the code, however small it is beside the
other gradients.

A gradient may be nothing but the rounding of the terms that it is a sum of, as that of a key's bias in attention is.
So the size of these terms is measured where backward sums them up, and their rounding is no difference.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction

from lightning_roundpipe.model.graph_nodes import nodes_of

_LINEAR = ("torch", "lightning_roundpipe", "bitsandbytes")
"""Packages whose autograd functions have backwards that are linear in the incoming gradient."""
_REGISTERED = "torch._library"
"""The package in which torch makes an autograd function of a custom operator's backward: that is the user's code."""

_ROUNDED = 4.0
"""Difference that rounding makes in a sum at most, in units of its terms' precision."""


@dataclass
class GradEnd:
    """An end of a graph, where gradients arrive.

    Attributes:
        of: describes it in messages.
        at: the tensor, or graph edge, whose gradient to take.
        hooks: hooks of user code to call with that gradient.
    """

    of: str
    at: Tensor | GradientEdge
    hooks: Sequence[Callable[[Tensor], Tensor | None]] = ()


@dataclass
class Arrived:
    """Sums over one gradient, added up over all runs: two weighted sums, and the norm."""

    code: str
    """Names the user's own code; empty if there is none."""
    of: str
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    rounding: float = 0.0
    """Norm of the terms that the gradient is a sum of, times their precision."""

    def differs(self, other: Arrived, tolerance: float) -> bool:
        """Return whether the sums differ by more than ``tolerance`` times the norm, and than rounding makes.

        Infinite or NaN sums never do.
        """
        mine, its = self.sums.tolist(), other.sums.tolist()
        if any(x != x or abs(x) == float("inf") for x in (*mine, *its)):
            return False
        bound = max(tolerance * max(mine[2], its[2]), _ROUNDED * max(self.rounding, other.rounding))
        return any(abs(a - b) > bound for a, b in zip(mine[:2], its[:2], strict=True))


class CustomBackwards:
    """The gradients that arrived on one side of the comparison: the whole batch, or its parts.

    Args:
        samples: number of samples in the whole batch.
        rows: returns the rows of the whole batch that are running.
        whole: the side of the whole batch; None if this is that side.

    Attributes:
        arrived: the sums by place of the code, index of the end, and whether the backward began with zeros.
    """

    def __init__(self, samples: int, rows: Callable[[], slice], whole: CustomBackwards | None = None) -> None:
        self.arrived: dict[tuple[str, int, bool], Arrived] = {}
        self._samples, self._rows, self._whole = samples, rows, whole
        self._shapes: dict[tuple[str, Any], set[torch.Size]] = {}
        self._untold: set[str] = set()
        """Places whose backward raised, so that they cannot be compared."""

    def see(
        self, place: str, roots: Sequence[Tensor], ends: list[GradEnd], code: str, share: float | None = None
    ) -> None:
        """Run backward from ``roots``, and add to the sums of what arrives [2].

        Args:
            place: names the code; the same on both sides.
            roots: tensors that require grad.
            ends: the ends to take gradients at; as many and in the same order on both sides.
            code: names the user's own code in the graph; empty if there is none.
            share: weight of this part's loss in the loss of the batch; None weights by number of samples.
        """
        try:
            gradients = [self._gradient(place, i, root, share) for i, root in enumerate(roots)]
            for zeros in (False, True):
                given = [torch.zeros_like(g) for g in gradients] if zeros else gradients
                at: Any = [end.at for end in ends]
                with _Rounding(roots, ends) as rounding:
                    found = torch.autograd.grad(roots, at, given, retain_graph=True, allow_unused=True)
                for i, (end, gradient) in enumerate(zip(ends, found, strict=True)):
                    arrived = self.arrived.setdefault((place, i, zeros), Arrived(code, end.of))
                    arrived.rounding += rounding.of(i)
                    if gradient is not None:
                        for hook in end.hooks:
                            changed = hook(gradient)
                            gradient = gradient if changed is None else changed
                        arrived.sums += sums_of(self._placed(place, f"end {i}", gradient.detach())).cpu()
        except Exception:
            self._untold.add(place)  # if the user's code is wrong, the step's own backward raises

    def different(self, parts: CustomBackwards, tolerance: float) -> Iterator[tuple[Arrived, Arrived]]:
        """Yield the pairs of sums that differ between this side and ``parts`` [3], those from zeros first."""
        told = {place for place, _, _ in self.arrived.keys() & parts.arrived.keys()} - self._untold - parts._untold
        for key in sorted(self.arrived, key=lambda key: not key[2]):
            if key[0] in told and key in parts.arrived and self.arrived[key].differs(parts.arrived[key], tolerance):
                yield self.arrived[key], parts.arrived[key]

    def _gradient(self, place: str, index: int, root: Tensor, share: float | None) -> Tensor:
        shape, rows = self._whole_shape(place, index, root.shape)
        seed = zlib.crc32(f"{place} {index} {tuple(shape)}".encode())
        full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        if rows is not None:
            full = full[rows]
        elif share is None:
            share = self._count() / self._samples
        return (full * (1.0 if share is None else share)).to(root.device, root.dtype)

    def _placed(self, place: str, what: str, gradient: Tensor) -> Tensor:
        """Return ``gradient`` with its rows at their places in the whole batch, and zeros elsewhere."""
        shape, rows = self._whole_shape(place, what, gradient.shape)
        if rows is None:
            return gradient
        placed = gradient.new_zeros(shape)
        placed[rows] = gradient
        return placed

    def _whole_shape(self, place: str, what: Any, shape: torch.Size) -> tuple[torch.Size, slice | None]:
        """Return the shape in the whole batch, and the place of the rows in it; None if the tensor has no sample rows.

        Raises:
            ValueError: if the whole batch had no tensor of a corresponding shape here.
        """
        if self._whole is None:
            self._shapes.setdefault((place, what), set()).add(shape)
            return shape, None
        rows, known = self._rows(), self._whole._shapes.get((place, what), set())
        if shape in known:
            return shape, None
        if shape and shape[0] % self._count() == 0:
            each = shape[0] // self._count()
            full = torch.Size((each * self._samples, *shape[1:]))
            if full in known:
                return full, slice(each * rows.start, each * rows.stop)
        raise ValueError("a shape that the whole batch does not have")

    def _count(self) -> int:
        rows = self._rows()
        return int(rows.stop - rows.start)


class _Rounding(contextlib.ExitStack):
    """Measures how large the terms are that backward sums up on the way to the ends of a graph.

    Operands that are broadcast get such sums. What rounds there is scaled by the nodes between, if the end is scaled or
    reshaped first.

    Args:
        roots: where backward begins.
        ends: where it ends.
    """

    def __init__(self, roots: Sequence[Tensor], ends: Sequence[GradEnd]) -> None:
        super().__init__()
        edges = [end.at if isinstance(end.at, GradientEdge) else get_gradient_edge(end.at) for end in ends]
        self._edges: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in edges]
        self._users: dict[Any, list[tuple[int, Any, int]]] = {}
        """Of each node, its output, the node that takes that, and as which of its operands."""
        self._terms: dict[tuple[Any, int], float] = {}
        self._gains: dict[Any, float] = {}
        """How many times as large the only result of a node is as what it gets."""
        ended = {node for node, _ in self._edges}
        for node in nodes_of((root.grad_fn for root in roots), ended.__contains__):
            for at, (below, output) in enumerate(node.next_functions if node not in ended else ()):
                self._users.setdefault(below, []).append((output, node, at))
        waiting = [node for edge in self._edges for node, _ in self._above(*edge)]
        hooked: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node not in hooked:
                hooked.add(node)
                self.callback(node.register_hook(functools.partial(self._measure, node)).remove)
                waiting += [above for above, _ in self._above(node)] if _is_unary(node) else ()

    def of(self, end: int) -> float:
        """Return the norm of the terms of an end, times their precision."""
        return sum((self._of(node, at) for node, at in self._above(*self._edges[end])), 0.0)

    def _of(self, node: Any, at: int) -> float:
        found = self._terms.get((node, at), 0.0)
        if gain := self._gains.get(node, 0.0):
            found += gain * sum(self._of(above, operand) for above, operand in self._above(node))
        return found

    def _above(self, node: Any, output: int | None = None) -> list[tuple[Any, int]]:
        return [(user, at) for taken, user, at in self._users.get(node, ()) if output in (taken, None)]

    def _measure(self, node: Any, results: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        gradients = [gradient for gradient in given if gradient is not None]
        size = sum(map(_norm, gradients))
        for at, result in enumerate(results):
            if result is None or not size:
                continue
            if result.numel() < max(gradient.numel() for gradient in gradients):
                self._terms[node, at] = size * max(torch.finfo(gradient.dtype).eps for gradient in gradients)
            if _is_unary(node):
                self._gains[node] = _norm(result) / size


def _norm(gradient: Tensor) -> float:
    dense = gradient.layout is torch.strided and not gradient.is_nested
    return float(torch.linalg.vector_norm(gradient.detach())) if dense else 0.0


def _is_unary(node: Any) -> bool:
    return sum(below is not None for below, _ in node.next_functions) == 1


def code_in(roots: Sequence[Tensor]) -> tuple[str, list[GradEnd]]:
    """Walk the graph of ``roots``, up to layer calls and leaves.

    Returns:
        The name of the first of the user's own code in it [1], empty if there is none; and the ends of the graph.
    """
    nodes: list[tuple[Any, int]] = [(t.grad_fn, t.output_nr) for t in reversed(roots) if t.grad_fn is not None]
    seen: set[Any] = set()
    code, ends = "", []
    while nodes:
        node, output = nodes.pop()
        graph_cut = getattr(node, "graph_cut", None)
        leaf = hasattr(node, "variable")
        key = (node, output) if graph_cut is not None else node
        if node is None or key in seen:
            continue
        seen.add(key)
        if graph_cut is not None:
            hooks = tuple(graph_cut.hooks.get(output, {}).values())
            ends.append(GradEnd(f"what {graph_cut.what} returns", GradientEdge(node, output), hooks))
            code = code or (_HOOK if hooks else "")
        elif leaf:
            ends.append(GradEnd("a parameter or another leaf", GradientEdge(node, 0)))
        else:
            code = code or _own(node)
            nodes += [edge for edge in reversed(node.next_functions) if edge[0] is not None]
    return code, ends


_HOOK = "a hook on a tensor"


def hooked(code: str, hooks: bool) -> str:
    """Return ``code``; if that is empty and there are ``hooks``, a name for these."""
    return code or (_HOOK if hooks else "")


def _own(node: Any) -> str:
    function = getattr(type(node), "_forward_cls", None)
    if function is not None:
        module = function.__module__
        if function is BackwardHookFunction:
            return "a backward hook of a module"
        library = module.partition(".")[0] in _LINEAR and not module.startswith(_REGISTERED)
        return "" if library else f"torch.autograd.Function {function.__qualname__!r}"
    name = str(node.name())
    return name if "CppNode" in name else ""


def sums_of(tensor: Tensor) -> Tensor:
    """Return two sums that depend on the places of values, and the norm, as float64. The sums are linear."""
    zeros = torch.zeros(3, dtype=torch.float64, device=tensor.device)
    if tensor.layout is not torch.strided or not tensor.numel():
        return zeros
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        if tensor.numel() > 1 << 22:
            zeros[0] = torch.count_nonzero(tensor)
            return zeros
        tensor, exact = tensor.double(), True
    else:
        exact = False
    if tensor.element_size() == 1:
        tensor = tensor.float()
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    shape = tensor.shape or (1,)
    tensor = tensor.reshape(1) if not tensor.dim() else tensor
    rows = tensor.sum(-1, dtype=wide).reshape(-1).double()
    columns = tensor.sum(tuple(range(len(shape) - 1)), dtype=wide).double() if len(shape) > 1 else tensor.double()
    norm = zeros[2] if exact else torch.linalg.vector_norm(tensor, dtype=wide).double()
    return torch.stack([(rows * _weights(rows)).sum(), (columns * _weights(columns)).sum(), norm])


def _weights(like: Tensor) -> Tensor:
    """Return a weight per place; neighbours differ."""
    return torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device).cos()
