"""Values of device tensors that the host can compute without waiting for the device.

Reading a value from a device blocks the host until the device has reached it, while the microbatch holds the user-code
lock. Masks and positions come from the host or from values that it has, and Hugging Face's code asks whether a mask
masks anything, or whether positions increase by one. So tensors that are copied to a device or created there are
remembered with references to their host values, and so are tensors computed from them. When a value is read, the host
computes it.

    mask.to(device), torch.arange(n, device=device) ── remembered ── [1]
    mask[:, 1:] == 0 ── how it follows from remembered tensors ── [2]
    if (mask[:, 1:] == 0).all() ── computed on the host ── [3]
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

MOST = 1 << 20
"""Elements of the largest tensor that is remembered. The host computes that many in about a millisecond."""

_ANY_FORMAT = {
    "ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "getitem",
    "view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "repeat",
    "permute", "transpose", "t", "T", "mT", "movedim", "contiguous", "clone", "detach", "narrow", "select",
    "index_select", "gather", "take_along_dim", "pad", "flip", "roll", "tril", "triu", "cat", "concat", "stack",
    "broadcast_to", "where", "masked_fill", "to", "bool", "long", "int", "byte", "short", "eq", "ne", "lt", "le",
    "gt", "ge", "isin", "not", "and", "or", "xor", "invert", "logical_not", "logical_and", "logical_or",
    "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "all", "any",
}  # fmt: skip
"""Torch functions that give the same values on any device, for every dtype."""
_WHOLE_NUMBERS = {
    "arange", "add", "radd", "sub", "rsub", "mul", "rmul", "neg", "abs", "floordiv", "floor_divide", "remainder",
    "mod", "sum", "cumsum", "diff", "count_nonzero", "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum",
    "max", "min", "amax", "amin",
}  # fmt: skip
"""Torch functions that do so if all operands are integers or bools, which no order of summation rounds."""
_CASTS = frozenset({"to", "long", "int", "byte", "short"})
"""Casts to integers. Out-of-range floating point values give device-dependent results."""
_ASKS = frozenset({"item", "tolist", "is_nonzero", "__bool__", "__int__", "__float__", "__index__"})
"""Functions that return values to Python."""


class _Unknown(Exception):
    """Raised if the host does not have the values, or no longer."""


class _HostValue:
    """A host tensor as of now: a later write to it makes it unknown."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def value(self) -> Tensor:
        if self._tensor._version != self._version:
            raise _Unknown
        return self._tensor


class _Derived:
    """The result of a function of known values, computed when it is first read."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._made_by: tuple[Callable[..., Any], Any, Any] | None = (function, args, kwargs)
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        if self._made_by is not None:
            function, args, kwargs = tree_map(_told, self._made_by)
            self._value, self._made_by = function(*args, **kwargs), None
        assert self._value is not None
        return self._value


_Value = _HostValue | _Derived


def _told(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, _Value) else leaf


class KnownValues:
    """The known values of one microbatch. Keeps no device memory; an entry lives as long as its tensor.

    Args:
        accelerator: the type of the devices; None if they are the host.
    """

    def __init__(self, accelerator: str | None) -> None:
        self._accelerator = accelerator
        self._values: MutableMapping[Tensor, tuple[int, _Value]] = WeakTensorKeyDictionary()

    def brought(self, there: Tensor, host: Tensor) -> None:
        """Record that ``there`` is a copy of ``host`` [1]."""
        if host.numel() <= MOST and not (there.is_inference() or host.is_inference()):
            self._values[there] = (there._version, _HostValue(host))

    def record_op(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record that the torch function ``name`` returned ``result`` [2]."""
        bare = name.strip("_") if name.startswith("__") else name
        if bare not in _ANY_FORMAT and bare not in _WHOLE_NUMBERS:
            return
        if not isinstance(result, Tensor) or result.device.type != self._accelerator or result.numel() > MOST:
            return
        whole = bare in _WHOLE_NUMBERS or (
            bare in _CASTS and not (_has_fractions(result) or result.dtype == torch.bool)
        )
        if result.is_inference() or result.requires_grad or (bare in _WHOLE_NUMBERS and _has_fractions(result)):
            return
        if self._of(result) is not None:
            return  # the function returned one of its arguments
        try:
            told = tree_map(lambda leaf: self._noted(leaf, whole), (args, kwargs))
        except _Unknown:
            return
        self._values[result] = (result._version, _Derived(function, *told))

    def _noted(self, leaf: Any, whole: bool) -> Any:
        """Return the host's counterpart of an argument."""
        if isinstance(leaf, Tensor):
            if whole and _has_fractions(leaf):
                raise _Unknown
            if (value := self._of(leaf)) is not None:
                return value
            if leaf.device.type != "cpu" or leaf.is_inference():
                raise _Unknown
            return _HostValue(leaf)
        where = leaf.type if isinstance(leaf, torch.device) else leaf.partition(":")[0] if type(leaf) is str else ""
        return "cpu" if where == self._accelerator else leaf

    def _of(self, tensor: Tensor) -> _Value | None:
        known = self._values.get(tensor)
        return None if known is None or known[0] != tensor._version else known[1]

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a device tensor, which must not be written to [3]; None if the host lacks them."""
        if not self._values or (value := self._of(tensor)) is None:
            return None
        try:
            return value.value()
        except (_Unknown, RuntimeError, IndexError):  # such as a view that the host tensor's strides do not allow
            return None

    def answer(self, function: Callable[..., Any], name: str, args: Any) -> list[Any]:
        """Return the result of ``name`` in a list; an empty list if it reads no values, or unknown ones."""
        if name not in _ASKS or not self._values or not isinstance(args[0], Tensor):
            return []
        host = self.on_host(args[0])
        return [] if host is None else [function(host, *args[1:])]


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


_READS = _ASKS | {
    "__complex__", "__contains__", "__repr__", "__str__", "__format__", "__array__", "cpu", "equal", "allclose",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
}  # fmt: skip
"""Torch functions that wait for the device of their arguments, beside those in `waits`."""


def waits(name: str, args: Any, kwargs: Any, accelerator: str) -> bool:
    """Return whether the torch function ``name`` blocks the host until a device is ready, judging by its arguments."""

    def is_there(value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == accelerator

    if name in _READS or (name == "where" and len(args) == 1) or name == "repeat_interleave":
        return any(is_there(leaf) for leaf in tree_iter((args, kwargs)))
    if name in ("__getitem__", "__setitem__"):
        return any(is_there(leaf) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_iter(args[1:2]))
    if name == "copy_":
        return is_there(args[0]) != is_there(args[1] if len(args) > 1 else kwargs.get("src"))
    if name == "to":
        return is_there(args[0]) and any(_is_host(value) for value in (*args[1:], *kwargs.values()))
    return False


def _is_host(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu"
    return (isinstance(value, torch.device) and value.type == "cpu") or (type(value) is str and value == "cpu")
