"""Records which torch functions and layers a rehearsal of training_step calls, on which tensors."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_roundpipe.model.attributes import STRUCTURE, tensors_in
from lightning_roundpipe.runtime.batch.logs import log_call
from lightning_roundpipe.runtime.batch.losses import COUNTED, WITH_REDUCTION, reduction_of, spelled
from lightning_roundpipe.runtime.user_code.inference_writes import IN_PLACE
from lightning_roundpipe.runtime.user_code.new_code import Key, line_of, place_of
from lightning_roundpipe.runtime.user_code.untraced import leave_untraced

_KEPT_ELEMENTS = 1 << 16
"""Elements of a tensor whose values are kept, at most."""
_KEPT_ANSWERS = 64
"""Numbers of one answer that are kept, at most."""
_MOST_OPERATIONS = 20_000
"""Operations that are recorded at most: each takes up to 0.1 ms."""

_SPELLINGS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "itruediv": "div", "rdiv": "rtruediv", "iadd": "add",
    "radd": "add", "isub": "sub", "subtract": "sub", "rsub": "sub", "imul": "mul", "rmul": "mul", "multiply": "mul",
    "negative": "neg", "pos": "positive", "clip": "clamp", "clamp_min": "clamp", "getitem": "select",
    "reshape_as": "reshape", "view_as": "reshape", "view": "reshape",
}  # fmt: skip
SHAPED_LIKE = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor",
}  # fmt: skip
"""Operations that only take the shape of their argument."""
PICKING = {"select", "narrow", "index_select", "unbind", "split", "chunk", "take", "gather"}
"""Operations that take some elements of their argument."""
MADE = {"tensor", "as_tensor", "full", "scalar_tensor", "from_numpy"}
"""Operations that make a tensor of Python's numbers."""
_SELECTING = {"masked_select", "nonzero", "argwhere", "unique", "unique_consecutive", "pack_padded_sequence"}
"""Operations whose result is as long as the values say."""
_ALONG = {
    "softmax": 1, "log_softmax": 1, "softmin": 1, "cumsum": 1, "cumprod": 1, "logcumsumexp": 1, "cummax": 1,
    "cummin": 1, "sort": 1, "argsort": 1, "flip": 1, "roll": 2, "normalize": 2, "topk": 2, "diff": 2, "renorm": 2,
    "unfold": 1, "index_select": 1, "gather": 1, "take_along_dim": 2, "chunk": 2, "split": 2,
}  # fmt: skip
"""Operations that join or move what is along a dimension, and the position of that argument."""
_DEFAULT_DIMENSION = {"normalize": 1, "chunk": 0, "split": 0}
"""That argument's default, where it is not the last dimension."""
_READING = {"item", "tolist", "float", "int", "index", "bool", "numpy", "array"}
"""Operations that give Python the values of a tensor; some are also names of casts, which give a tensor."""
_SIZES = {"len", "numel", "size", "nelement"}
_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_DIVIDED_BY_WEIGHTS = {F.mse_loss, F.l1_loss, F.huber_loss}
"""Losses that are a mean by their weights, if they get any."""
_IGNORED = {"set", "delete", "requires_grad", "retain_grad", "register_hook", "backward"}
_OVERRIDES = os.path.join("torch", "overrides.py")
_TORCH, _METRICS = (os.path.join(os.path.dirname(str(package.__file__)), "") for package in (torch, torchmetrics))
_RESTORING = (_METRICS, os.path.join(_TORCH, "nn", "utils", ""), os.path.join(_TORCH, "nn", "modules", "rnn"))
"""Code that puts samples back to where it has taken them from."""


@dataclass
class TensorSeen:
    """A tensor that an operation takes or gives.

    Attributes:
        shape, dtype, requires_grad: the tensor's.
        is_parameter: whether it is a parameter.
        has_grad_fn: whether autograd has its history.
        values: a copy on the host; None for large tensors, and for results that follow from their inputs.
        set_as: names the attribute of a layer as which its code has set the tensor, if it has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool
    has_grad_fn: bool
    values: Tensor | None = None
    set_as: str = ""


@dataclass
class Operation:
    """A call of a torch function or a layer by user code.

    Attributes:
        name: of the function, one for all its spellings.
        called: the spelling that user code has called.
        known_as: the same as `NewCode` has it.
        is_layer: whether it is a layer.
        line, place: where user code calls it.
        within_model: whether a model whose calls may be cut calls it.
        given: numbers of the tensors that it takes.
        operands: its first two arguments: the number of a tensor, or a Python number as a float; None for others.
        constants: its other arguments, as text.
        made: numbers of the tensors that it gives or writes to.
        reads: whether it gives Python values of a tensor, or sizes that depend on values.
        answers: the Python numbers that it gives.
        reduction: of a loss function; empty for others.
        by_weights: whether it is a mean by weights that it is given.
        counts_targets: whether a loss function counts its targets.
        picks: whether the values of its arguments say how many elements it takes.
        bounds: the whole numbers in an index.
        ends: the dimensions that an index slices, counted from the last, with the whole numbers that bound the slice.
        moves: whether an index gives samples other places.
        restores: whether a library calls it that puts samples back to their places.
        along: the dimensions along which it joins elements, counted from the last.
        by_transformers: whether Hugging Face's own code calls it.
    """

    name: str
    called: str = ""
    known_as: str = ""
    is_layer: bool = False
    line: str = ""
    place: Key | None = None
    within_model: bool = False
    given: list[int] = field(default_factory=list)
    operands: tuple[int | float | None, ...] = ()
    constants: tuple[str, ...] = ()
    made: list[int] = field(default_factory=list)
    reads: bool = False
    answers: list[float] = field(default_factory=list)
    reduction: str = ""
    by_weights: bool = False
    counts_targets: bool = False
    picks: bool = False
    bounds: list[int] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    moves: bool = False
    restores: bool = False
    along: tuple[int, ...] = ()
    by_transformers: bool = False


class LoggedValue(NamedTuple):
    """A value that was logged.

    Attributes:
        key: its name, and how many values were logged under that before.
        number: of a tensor, or Python's number as a float; None for others.
        is_read: whether it is a number that Python has read of a tensor, or a whole number, which is no quotient.
        place, called: where it was logged, and what `NewCode` knows that as.
        before: how many operations there were.
        value: the value itself.
    """

    key: tuple[str, int]
    number: int | float | None
    is_read: bool
    place: Key | None
    called: str
    before: int
    value: Any


class OperationRecorder:
    """Records the operations of one run of training_step.

    Tensors are numbered as they are met. A tensor that an operation writes to gets a new number.

    Attributes:
        operations: in order.
        is_complete: whether these are all.
        tensors: by their number.
        loss: number of the loss, once the run has ended; None if no operation has given it.
        same: by number of a tensor, that of the one that it stands for: where a layer's code is recorded, user code and
            this code have tensors of their own.
        logged: the logged values, in order.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.is_complete = True
        self.tensors: list[TensorSeen] = []
        self.loss: int | None = None
        self.same: dict[int, int] = {}
        self.logged: list[LoggedValue] = []
        self.given: list[int | None] = []
        """The numbers of the tensors that metrics are given, in order."""
        self._reads: list[tuple[int, Any]] = []
        """Numbers of the operations that give Python values, and these."""
        self._within_model = 0
        self._numbers: Any = WeakTensorKeyDictionary()
        self._set_as: Any = WeakTensorKeyDictionary()
        """Names of the attributes as which layers have set tensors."""
        self._made_by_python: set[int] = set()
        self._picked: set[int] = set()
        """Tensors whose sizes depend on values."""

    @contextlib.contextmanager
    def within_model(self) -> Iterator[None]:
        """Record operations as those of a model whose calls may be cut."""
        self._within_model += 1
        try:
            yield
        finally:
            self._within_model -= 1

    def see(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, frame: FrameType
    ) -> None:
        """Record that ``frame`` has called ``func``, a torch function, which returned ``result``.

        What cannot be recorded makes the recording incomplete.
        """
        try:
            self._see(func, args, kwargs, result, frame)
        except Exception:  # user code must not see it
            self.is_complete = False

    def _see(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, frame: FrameType
    ) -> None:
        called = getattr(func, "__name__", "")
        if called == "__get__" and not isinstance(result, Tensor) and func != _SHAPE:
            return
        bare = called.strip("_")
        name = _SPELLINGS.get(bare, bare)
        if func == _SET_DATA:
            name, called = "copy", "copy_"
        if name in _IGNORED or func == _GRAD:
            return
        if name == "clamp" and (kwargs.get("max") is not None or (len(args) > 2 and args[2] is not None)):
            name = "clamp_max"
        if func == _SHAPE or name in _SIZES:
            if not self._picked or not args or self._numbers.get(args[0]) not in self._picked:
                return
            name = "size"
        made = _tensors_in(result)
        target = args[0] if IN_PLACE.fullmatch(called) and args and isinstance(args[0], Tensor) else None
        reads = not made and (name in _READING or name == "size")
        if not made and target is None and not reads:
            return
        given, others = _tensors_in((args, kwargs)), _others_in((args, kwargs))
        called_from = _called_from(frame, func)
        caller = called_from.f_code.co_filename
        if reads and name == "bool" and caller.startswith((_TORCH, _METRICS)):
            return  # such as checks of arguments
        if len(self.operations) >= _MOST_OPERATIONS:
            self.is_complete = False
            return
        known_as = spelled(func, getattr(func, "__name__", ""), args, kwargs)
        operation = Operation(name, called, known_as, False, line_of(frame), place_of(frame), self._within_model > 0)
        operation.reads = reads
        if reads:
            is_one = isinstance(result, np.ndarray) and result.size == 1
            numbers = itertools.islice(tree_leaves(result.item() if is_one else result), _KEPT_ANSWERS)
            operation.answers = [float(x) for x in numbers if _is_number(x)]
            self._reads.append((len(self.operations), result))
        if func in WITH_REDUCTION:
            operation.reduction, operation.counts_targets = reduction_of(func, args, kwargs), func in COUNTED
            operation.by_weights = func in _DIVIDED_BY_WEIGHTS and isinstance(kwargs.get("weight"), Tensor)
        operation.restores = caller.startswith(_RESTORING)
        operation.by_transformers = str(called_from.f_globals.get("__name__")).startswith("transformers.")
        operation.given = [self._number(x) for x in given]
        first = (*args, *(kwargs[key] for key in ("other", "value", "min") if key in kwargs))[:2]
        operation.operands = tuple(self._operand(x) for x in first)
        operation.constants = tuple(f"{type(x).__name__} {x}"[:64] for x in others[:64])
        if name == "select":
            index = args[1] if len(args) > 1 else None
            items = index if isinstance(index, tuple) else (index,)
            listed = any(isinstance(x, (list, np.ndarray)) for x in items)
            operation.picks = listed or any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
            indices = {self._numbers.get(x) for x in given[1:]}
            operation.picks |= bool(indices & (self._made_by_python | self._picked))
            ends = [end for x in items if isinstance(x, slice) for end in (x.start, x.stop)]
            operation.bounds = [x for x in (*items, *ends) if type(x) is int]
            operation.ends = _ends_by_dimension(items, given[0].dim())
            operation.picks |= any(isinstance(x, Tensor) for x in ends)
            operation.moves = not operation.restores and _moves(args[0], next(iter(items), None))
        operation.picks |= name in _SELECTING or (name == "where" and len(given) == 1)
        if name in _ALONG and given and not operation.restores:
            operation.along = _dimensions(name, args, kwargs, given[0].dim())
        if target is not None:
            written = [target] if target._base is None else [target, target._base]
            made = [*written, *(x for x in made if all(x is not y for y in written))]
        keeps = name in PICKING or name in MADE or name in SHAPED_LIKE
        operation.made = [self._renumber(x, keeps) for x in made]
        if name in MADE:
            self._made_by_python.update(operation.made)
        if target is None and (operation.picks or any(x in self._picked for x in operation.given)):
            self._picked.update(operation.made)
        self.operations.append(operation)

    def see_layer(self, name: str, given: Any, output: Any) -> None:
        """Record a call of a layer."""
        operation = Operation(name, is_layer=True, within_model=self._within_model > 0)
        with torch._C.DisableTorchFunction():
            operation.given = [self._number(x) for x in _tensors_in(given)]
            operation.made = [self._renumber(x, True) for x in _tensors_in(output)]
        self.operations.append(operation)

    def see_attributes(self, layer: str, module: nn.Module) -> None:
        """Record which tensors a layer's code has set as attributes of the layer, whose name is ``layer``."""
        with torch._C.DisableTorchFunction():
            for inner in module.modules():
                for name, value in inner.__dict__.items():
                    for tensor in tensors_in(value) if name not in STRUCTURE else ():
                        if tensor.grad_fn is not None:
                            self._set_as[tensor] = f"attribute {name!r} of {type(inner).__name__} in layer {layer!r}"

    def inside(self) -> TorchFunctionMode:
        """Return the mode that records what a layer's own code calls, as if user code had called it."""
        return _Inside(self)

    def see_inside(self, given: Iterable[tuple[Any, Any]], output: Iterable[tuple[Any, Any]]) -> None:
        """Record that a layer whose code was recorded was called.

        Args:
            given: pairs of what user code has passed, and what the layer's code got.
            output: pairs of what user code gets, and what the layer's code returned.
        """
        with torch._C.DisableTorchFunction():
            for outer, inner in given:
                if isinstance(outer, Tensor) and isinstance(inner, Tensor):
                    self._stands_for(self._number(inner), self._number(outer))
            for outer, inner in output:
                if isinstance(outer, Tensor) and isinstance(inner, Tensor) and outer is not inner:
                    self._stands_for(self._renumber(outer, True), self._number(inner))

    def _stands_for(self, number: int, other: int) -> None:
        self.same[number] = self.same.get(other, other)  # a layer may pass on what another one has given

    def see_logged(self, name: str, value: Any, frame: FrameType | None) -> None:
        """Record that ``frame`` has logged ``value``; None if training_step has returned it."""
        is_float = type(value) is float
        is_read = type(value) is int or (is_float and any(value is answer for _, answer in self._reads))
        number = float(value) if _is_number(value) else None
        if isinstance(value, Tensor):
            number = self._numbers.get(value)
        key = name, sum(one.key[0] == name for one in self.logged)
        place = place_of(frame)
        self.logged.append(LoggedValue(key, number, is_read, place, log_call(name), len(self.operations), value))

    def see_given(self, value: Any) -> None:
        """Record that a metric is given ``value``."""
        self.given.append(self._numbers.get(value) if isinstance(value, Tensor) else None)

    def led_to(self) -> dict[tuple[str, int], set[tuple[Key, str]]]:
        """Return which calls of user code have computed and logged each value, by name and number.

        A number that Python computes may follow from all that it has read. What layers are called on is left out.
        """
        made_by = {number: at for at, one in enumerate(self.operations) for number in one.made}
        found: dict[tuple[str, int], set[tuple[Key, str]]] = {}
        for key, number, _, place, called, before, value in self.logged:
            if type(number) is int:
                left = self._makers([number], made_by)
            else:
                reads = [(at, x) for at, x in self._reads if at < before and self.operations[at].name != "bool"]
                same = [at for at, x in reads if x is value or (type(value) is int and _is_whole(x, value))]
                left = same or [at for at, _ in reads]
            seen: set[int] = set()
            while left:
                if (at := left.pop()) not in seen:
                    seen.add(at)
                    if not self.operations[at].is_layer:
                        left += self._makers(self.operations[at].given, made_by)
            by = [self.operations[at] for at in seen]
            calls = {(one.place, one.known_as) for one in by if one.place is not None}
            found[key] = calls if place is None else calls | {(place, called)}
        return found

    def _makers(self, numbers: Iterable[int], made_by: Mapping[int, int]) -> list[int]:
        """Return which operations have made tensors."""
        return [made_by[x] for number in numbers if (x := self.same.get(number, number)) in made_by]

    def end(self, loss: Tensor | None) -> None:
        """The run has ended and returned ``loss``."""
        self.loss = None if loss is None else self._numbers.get(loss)

    def _operand(self, value: Any) -> int | float | None:
        if isinstance(value, Tensor):
            return self._number(value)
        return float(value) if _is_number(value) else None

    def _number(self, tensor: Tensor) -> int:
        known = self._numbers.get(tensor)
        return self._renumber(tensor, True) if known is None else known

    def _renumber(self, tensor: Tensor, keeps: bool) -> int:
        number = self._numbers[tensor] = len(self.tensors)
        is_parameter = isinstance(tensor, nn.Parameter)
        seen = TensorSeen((), tensor.dtype, tensor.requires_grad, is_parameter, tensor.grad_fn is not None)
        seen.set_as = self._set_as.get(tensor, "")
        with contextlib.suppress(Exception):  # tensors of other layouts, and those inside of torch.func transforms
            seen.shape = tuple(tensor.shape)
            if (
                keeps
                and not is_parameter
                and tensor.numel() <= _KEPT_ELEMENTS
                and not is_functorch_wrapped_tensor(tensor)
            ):
                seen.values = tensor.detach().cpu().clone()
        self.tensors.append(seen)
        return number


class _Inside(TorchFunctionMode):
    """Records the code of a layer. It has no place in user code: nothing is counted there."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        leave_untraced(_Inside.__torch_function__)
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = len(self._recorder.operations)
        with self._recorder.within_model():
            self._recorder.see(func, args, kwargs or {}, result, sys._getframe(1))
        for operation in self._recorder.operations[before:]:
            operation.place = None
        return result


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_whole(answer: Any, value: int) -> bool:
    """Return whether ``answer``, which Python has read, is the whole number ``value``, also as numpy's array of one."""
    if isinstance(answer, np.ndarray):
        return answer.size == 1 and bool(answer.item() == value)
    return bool(answer == value)


def _ends_by_dimension(items: Sequence[Any], count: int) -> list[tuple[int, int]]:
    """Return the whole numbers that bound slices, each with its dimension, of ``count``, counted from the last."""
    found = []
    if any(not isinstance(x, (slice, int, type(None), type(...))) for x in items):
        return []  # a tensor may index several dimensions
    dim = -count
    for item in items:
        if item is ...:
            dim = -sum(1 for x in items[items.index(...) + 1 :] if x is not None)
            continue
        if isinstance(item, slice):
            found += [(dim, x) for x in (item.start, item.stop) if type(x) is int and x]
        dim += item is not None
    return found


def _moves(taken: Tensor, first: Any) -> bool:
    """Return whether ``first`` of an index takes all rows of a tensor in another order, or some more than once."""
    if (
        not isinstance(first, Tensor)
        or first.dim() != 1
        or not taken.dim()
        or first.dtype not in (torch.int32, torch.int64)
    ):
        return False
    return len(first) == len(taken) and not torch.equal(first.cpu().long(), torch.arange(len(first)))


def _called_from(frame: FrameType, func: Any) -> FrameType:
    """Return the frame that has called ``func``, which may itself be Python code that torch's overrides have left."""
    own = getattr(func, "__code__", None)
    found: FrameType | None = frame
    while found is not None and (found.f_code is own or found.f_code.co_filename.endswith(_OVERRIDES)):
        found = found.f_back
    return found or frame


def _tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor)]


def _others_in(tree: Any) -> list[Any]:
    return [leaf for leaf in _leaves(tree) if not isinstance(leaf, Tensor)]


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, as `tree_leaves` does, which takes five times as long for plain containers."""
    if type(tree) in (tuple, list):
        return [leaf for item in tree for leaf in _leaves(item)]
    if type(tree) is dict:
        return [leaf for item in tree.values() for leaf in _leaves(item)]
    return [tree] if isinstance(tree, (Tensor, int, float, str, type(None))) else tree_leaves(tree)


def _dimensions(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> tuple[int, ...]:
    """Return the dimensions, of ``count``, along which ``name`` joins elements, counted from the last."""
    at = _ALONG[name]
    given = args[at] if len(args) > at else next((kwargs[key] for key in ("dim", "dims") if key in kwargs), None)
    if given is None:
        given = _DEFAULT_DIMENSION.get(name, -1)
    found = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(d if d < 0 else d - count for d in found if type(d) is int)
