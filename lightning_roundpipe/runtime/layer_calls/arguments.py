"""A call's arguments and outputs as flat lists of leaves, and checks of what may be among them."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_unflatten

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import Container, tensors_in
from lightning_roundpipe.model.lean_loss import LeanHead, Logits

_PLAIN = (str, int, float, complex, type(None), nn.Module, type, types.FunctionType, types.ModuleType)


@dataclasses.dataclass(frozen=True)
class Given:
    """Marks an output that is one of the layer's inputs: user code gets back the tensor that it passed."""

    index: int


@dataclasses.dataclass
class FlatValue:
    """A flattened value. ``objects``: whether its structure includes objects that hold tensors."""

    leaves: list[Any]
    spec: TreeSpec
    objects: bool = False

    @classmethod
    def of(cls, value: Any, given: dict[int, Tensor]) -> FlatValue:
        """Flatten ``value``, replacing the tensors in ``given`` (by position) by `Given`."""
        leaves, spec, objects = _flatten(value)
        known = {id(t): i for i, t in given.items()}
        return cls([Given(known[id(x)]) if id(x) in known else x for x in leaves], spec, objects)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def value(self, tensors: list[Tensor], originals: list[Any]) -> Any:
        """Rebuild the value with ``tensors`` in place of its own, and ``originals`` in place of `Given`."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return unflatten([originals[x.index] if isinstance(x, Given) else x for x in leaves], self.spec)


class OneTensor(FlatValue):
    """The value of a layer that returned one tensor, and that collected nothing; see `output_collectors`."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__([tensor], _ONE)

    def tensors(self) -> list[Tensor]:
        return list(self.leaves)

    def value(self, tensors: list[Tensor], originals: list[Any]) -> Any:
        return tensors[0], {}


class _Shell:
    """An object that holds tensors, without them: its contents are beside it, so it equals others of its type.

    Its own comparison would compare tensors.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and type(self.value) is type(other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return type(self.value).__name__


@dataclasses.dataclass(eq=False)
class _Opened:
    """An object that holds tensors, opened for flattening: the emptied object and a dict of its contents."""

    shell: Any
    contents: dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class _Sparse:
    """The metadata of a sparse tensor, beside the dense tensors that it consists of."""

    layout: torch.layout
    size: torch.Size
    dtype: torch.dtype

    @staticmethod
    def opened(tensor: Tensor) -> _Opened:
        shell = _Sparse(tensor.layout, tensor.shape, tensor.dtype)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()
            return _Opened(shell, {"indices": tensor.indices(), "values": tensor.values()})
        row, column = _COMPRESSED[tensor.layout]
        first, second = getattr(tensor, row)(), getattr(tensor, column)()
        return _Opened(shell, {"first": first, "second": second, "values": tensor.values()})

    def of(self, *parts: Tensor) -> Tensor:
        if self.layout is torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(indices, values, self.size, dtype=self.dtype, is_coalesced=True)
        first, second, values = parts
        size = list(self.size)
        return torch.sparse_compressed_tensor(first, second, values, size, dtype=self.dtype, layout=self.layout)


@dataclasses.dataclass(frozen=True)
class _Lean:
    """What stands for logits that are not held, beside the hidden states that they follow from."""

    head: LeanHead
    steps: Any
    rows: int | None

    def of(self, hidden: Tensor) -> Logits:
        return Logits(self.head, hidden, self.steps, self.rows)


@dataclasses.dataclass(frozen=True, repr=False)
class _Block:
    """What a mask of `flex_attention` consists of beside its tensors, of which some are in its function's closures.

    A copy of the object would leave those where user code made them.
    """

    kind: Any
    context: Any = dataclasses.field(compare=False)

    def of(self, *parts: Any) -> Any:
        return self.kind._unflatten(parts, self.context)


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.layout is torch.sparse_coo or value.layout in _COMPRESSED)


def _opened(value: Any) -> _Opened:
    if type(value) is Logits:
        return _Opened(_Lean(value._head, value._steps, value._rows), {"hidden": value._hidden})
    if _is_block_mask(value):
        parts, context = value._flatten()
        return _Opened(_Block(type(value), context), dict(enumerate(parts)))
    return _Sparse.opened(value) if _is_sparse(value) else _Opened(_Shell(value), _contents(value))


def _is_block_mask(value: Any) -> bool:
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # whose import takes long, and which few use
    return flex is not None and type(value) is flex.BlockMask and hasattr(value, "_flatten")


def _close(contents: Any, shell: Any) -> Any:
    if isinstance(shell, (_Sparse, _Lean, _Block)):
        (parts,) = contents
        return shell.of(*parts.values())
    fresh = copy.copy(shell.value)
    held = fresh if isinstance(fresh, dict) else fresh.__dict__
    held.clear()
    held.update(*contents)
    return fresh


register_pytree_node(_Opened, lambda opened: ([opened.contents], opened.shell), _close)

_Shape = tuple[Any, ...] | None
"""Shape of tuples, lists and dicts: (type, shapes of the items), for a dict (type, keys, shapes). None: a leaf."""

MOST_SHAPES = 4096
"""How many shapes are cached: a list that grows from call to call has another shape each time."""

_specs: dict[_Shape, TreeSpec] = {}
_shapes: dict[int, tuple[_Shape, bool]] = {}
"""By id of a call's spec: its shape, and whether one of the arguments is, or contains, a list or a dict."""


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten containers, and objects that hold tensors (dataclasses, mappings, sparse tensors).

    Key-value caches stay whole; they are refused where they would be filled twice. `torch.Size` stays whole too,
    because torch would rebuild it as a plain tuple.
    """
    return _flatten(value)[:2]


def _flatten(value: Any) -> tuple[list[Any], TreeSpec, bool]:
    """Like `flatten`, and return whether objects were opened. The spec then holds these with all their contents."""
    leaves, spec = _flatten_usual(value) or tree_flatten(value, is_leaf=_is_leaf)
    objects = False
    while any(map(_holds_tensors, leaves)):
        objects = True
        opened = [_opened(x) if _holds_tensors(x) else x for x in leaves]
        leaves, spec = tree_flatten(unflatten(opened, spec), is_leaf=_is_leaf)
    return leaves, spec, objects


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    known = _shapes.get(id(spec))
    return tree_unflatten(leaves, spec) if known is None else _filled(known[0], iter(leaves))


class _Unusual(Exception):
    """Raised for a value with containers of other types."""


def _flatten_usual(value: Any) -> tuple[list[Any], TreeSpec] | None:
    """Flatten nested tuples, lists and dicts, which is what most calls have; None for other containers.

    Torch's functions look up each level's type in a registry, in Python, which took a fifth of the cost of a call.
    """
    leaves: list[Any] = []
    try:
        shape = _shape_of(value, leaves)
    except _Unusual:
        return None
    spec = _specs.get(shape)
    if spec is None:
        spec = tree_flatten(value, is_leaf=_is_leaf)[1]
        if len(_specs) < MOST_SHAPES:
            spec = _specs.setdefault(shape, spec)
            _shapes[id(spec)] = shape, any(map(_has_mutable, _inner(shape)))
    return leaves, spec


def _shape_of(value: Any, leaves: list[Any]) -> _Shape:
    """Return the shape of ``value`` and append its leaves to ``leaves``."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, _shapes_of(value, leaves)
    if kind is dict:
        return kind, tuple(value), _shapes_of(value.values(), leaves)
    if isinstance(value, _UNUSUAL) and kind is not torch.Size:
        raise _Unusual
    leaves.append(value)
    return None


def _shapes_of(items: Iterable[Any], leaves: list[Any]) -> tuple[_Shape, ...]:
    shapes: list[_Shape] = []
    for item in items:
        if type(item) is Tensor:  # most items are; a call of `_shape_of` for each takes several times as long
            leaves.append(item)
            shapes.append(None)
        else:
            shapes.append(_shape_of(item, leaves))
    return tuple(shapes)


def _filled(shape: _Shape, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    items = [next(leaves) if inner is None else _filled(inner, leaves) for inner in shape[-1]]
    return dict(zip(shape[1], items, strict=True)) if shape[0] is dict else shape[0](items)


def _inner(shape: _Shape) -> list[_Shape]:
    """Return the shapes of the arguments in a shape of (args, kwargs)."""
    return [] if shape is None else [item for part in shape[-1] if part is not None for item in part[-1]]


def _has_mutable(shape: _Shape) -> bool:
    return shape is not None and (shape[0] is not tuple or any(map(_has_mutable, shape[-1])))


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """The structure of a call: of its arguments, and of the module attributes that it carries.

    Attributes:
        arguments: spec of (args, kwargs).
        count: number of their leaves.
        carried: spec of the carried attributes; None if there are none.
        objects: whether the arguments include objects that hold tensors.
    """

    arguments: TreeSpec
    count: int
    carried: TreeSpec | None
    objects: bool = False

    @property
    def is_immutable(self) -> bool:
        """Whether the arguments include no container that a layer could change, and no object with tensors."""
        known = _shapes.get(id(self.arguments))
        return not self.objects and known is not None and not known[1]


def flatten_call(args: Any, kwargs: Any, carried: dict[Any, Any]) -> tuple[list[Any], CallSpec]:
    """Flatten a call's arguments and its carried attributes, of which there are usually none."""
    leaves, spec, objects = _flatten((args, kwargs))
    if not carried:
        return leaves, CallSpec(spec, len(leaves), None, objects)
    more, carried_spec = flatten(carried)
    return leaves + more, CallSpec(spec, len(leaves), carried_spec, objects)


def unflatten_call(leaves: list[Any], spec: CallSpec) -> tuple[tuple[Any, ...], dict[str, Any], dict[Any, Any]]:
    """The inverse of `flatten_call`."""
    args, kwargs = unflatten(leaves[: spec.count], spec.arguments)
    return args, kwargs, {} if spec.carried is None else unflatten(leaves[spec.count :], spec.carried)


_UNUSUAL = (*Container, tuple, _Opened)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (dict, list, tuple, _Opened)) or isinstance(value, torch.Size)


def _contents(value: Any) -> dict[Any, Any]:
    return dict(value) if isinstance(value, dict) else dict(value.__dict__)


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout is not torch.strided and _is_sparse(leaf)
    if isinstance(leaf, _PLAIN) or is_cache(leaf):
        return False
    if isinstance(leaf, (dict, UserDict)):
        return True
    held = getattr(leaf, "__dict__", None)
    return bool(held) and any(True for _ in tensors_in(held))


def is_cache(value: Any) -> bool:
    """Return whether ``value`` is a key-value cache of a Hugging Face model, and not a class of them."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update") and not isinstance(value, type)


def mutable_parts(value: Any) -> Iterator[Any]:
    """Yield the lists and dicts in ``value`` that a layer may change, in an order that its structure determines."""
    if isinstance(value, Container):
        yield value
    elif not isinstance(value, tuple):
        if _is_sparse(value) or not _holds_tensors(value):
            return
        yield value.__dict__
        value = value.__dict__
    for item in value.values() if isinstance(value, dict) else value:
        yield from mutable_parts(item)


def refuse_caches(leaves: list[Any], layer: str) -> None:
    """Refuse a cache among the arguments of a layer that is recomputed: it would be filled twice."""
    for leaf in leaves:
        if is_cache(leaf):
            raise RoundPipeError(
                f"layer {layer!r} is called with a {type(leaf).__name__} in training: recomputing the layer would fill "
                "it a second time, and gradients cannot flow through it. Call the model with use_cache=False. Prefix "
                "tuning trains what such a cache holds: take prompt tuning, P-tuning or adapters instead."
            )


def refuse_filled(leaves: list[Any], layer: str) -> None:
    """Refuse tensors in an object that held none when it was passed: the worker's changes to it would be lost."""
    for leaf in leaves:
        if _holds_tensors(leaf):
            raise RoundPipeError(
                f"layer {layer!r} puts tensors into a {type(leaf).__name__} that it was given, which held none. "
                "Tensors leave a layer through what it returns: return them, or give it a dict."
            )


def refuse_hidden(leaves: list[Any], layer: str) -> None:
    """Refuse outputs that torch cannot look into: tensors would cross the boundary unseen."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            continue
        function = isinstance(leaf, types.FunctionType) and leaf.__closure__
        slots = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and not hasattr(leaf, "__dict__")
        if function or slots or isinstance(leaf, (types.GeneratorType, types.MethodType)):
            raise RoundPipeError(
                f"layer {layer!r} returns a {type(leaf).__name__}, in which tensors would pass the boundary between "
                "devices unseen. Return tensors, or containers and plain objects that hold them."
            )


_ONE = flatten((None, {}))[1]
