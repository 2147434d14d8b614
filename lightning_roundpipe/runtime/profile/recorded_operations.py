"""Records which torch functions and layers a rehearsal of training_step calls, on which tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_roundpipe.runtime.batch.losses import COUNTED, WITH_REDUCTION, reduction_of
from lightning_roundpipe.runtime.user_code.inference_writes import IN_PLACE
from lightning_roundpipe.runtime.user_code.new_code import Key, calling_place

_KEPT_ELEMENTS = 1 << 16
"""Elements of a tensor whose values are kept, at most."""
_KEPT_ANSWERS = 64
"""Numbers of one answer that are kept, at most."""

_SPELLINGS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "itruediv": "div", "rdiv": "rtruediv",
    "iadd": "add", "radd": "add", "isub": "sub", "subtract": "sub", "rsub": "sub", "imul": "mul", "rmul": "mul",
    "multiply": "mul", "negative": "neg", "pos": "positive", "clip": "clamp", "clamp_min": "clamp",
    "clamp_max": "clamp", "getitem": "select", "reshape_as": "reshape", "view_as": "reshape", "view": "reshape",
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
_SELECTING = {"masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"}
"""Operations whose result is as long as the values say."""
_ALONG = {
    "softmax": 1, "log_softmax": 1, "softmin": 1, "cumsum": 1, "cumprod": 1, "logcumsumexp": 1, "sort": 1, "argsort": 1,
    "flip": 1, "roll": 2, "normalize": 2,
}  # fmt: skip
"""Operations that join what is along a dimension, and the position of that argument."""
_ANSWERING = {"item", "tolist", "float", "int", "index"}
_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_IGNORED = {"set", "delete", "requires_grad", "retain_grad", "register_hook", "backward"}


@dataclass
class TensorSeen:
    """A tensor that an operation takes or gives.

    Attributes:
        shape, dtype, requires_grad: the tensor's.
        is_parameter: whether it is a parameter.
        values: a copy on the host; None if it is large, or an operation has given it from which it follows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool
    values: Tensor | None = None


@dataclass
class Operation:
    """A call of a torch function or a layer by user code.

    Attributes:
        name: of the function, one for all its spellings.
        called: the spelling that user code has called.
        is_layer: whether it is a layer.
        line, place: where user code calls it.
        within_model: whether a model whose calls may be cut calls it.
        given: numbers of the tensors that it takes.
        operands: its first two arguments: the number of a tensor, or a Python number as a float; None for others.
        constants: its other arguments, as text.
        made: numbers of the tensors that it gives or writes to.
        answers: the Python numbers that it gives.
        reduction: of a loss function; empty for others.
        counts_targets: whether a loss function counts its targets.
        picks: whether the values of its arguments say how many elements it takes.
        along: the dimensions along which it joins elements, counted from the last.
    """

    name: str
    called: str = ""
    is_layer: bool = False
    line: str = ""
    place: Key | None = None
    within_model: bool = False
    given: list[int] = field(default_factory=list)
    operands: tuple[int | float | None, ...] = ()
    constants: tuple[str, ...] = ()
    made: list[int] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    reduction: str = ""
    counts_targets: bool = False
    picks: bool = False
    along: tuple[int, ...] = ()


class OperationRecorder:
    """Records the operations of one run of training_step.

    Tensors are numbered as they are met. A tensor that an operation writes to gets a new number.

    Attributes:
        operations: in order.
        tensors: by their number.
        loss: number of the loss, once the run has ended; None if no operation has given it.
        logged: the names of logged values, in order, and their numbers, if operations have given them.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.tensors: list[TensorSeen] = []
        self.loss: int | None = None
        self.logged: list[tuple[str, int | None]] = []
        self._within_model = 0
        self._numbers: Any = WeakTensorKeyDictionary()

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
        """Record that ``frame`` has called ``func``, a torch function, which returned ``result``."""
        called = getattr(func, "__name__", "")
        bare = called.strip("_")
        name = _SPELLINGS.get(bare, bare)
        if name in _IGNORED or func == _GRAD:
            return
        given, made = _tensors_in((args, kwargs)), _tensors_in(result)
        target = args[0] if IN_PLACE.fullmatch(called) and args and isinstance(args[0], Tensor) else None
        answers: list[float] = []
        if name in _ANSWERING:
            answers = [float(x) for x in tree_leaves(result)[:_KEPT_ANSWERS] if type(x) in (int, float)]
        if not made and not answers and target is None:
            return
        place, line = calling_place(frame)
        operation = Operation(name, called, False, line, place, self._within_model > 0, answers=answers)
        if func in WITH_REDUCTION:
            operation.reduction, operation.counts_targets = reduction_of(func, args, kwargs), func in COUNTED
        operation.given = [self._number(x) for x in given]
        first = (*args, *(kwargs[key] for key in ("other", "value") if key in kwargs))[:2]
        operation.operands = tuple(self._operand(x) for x in first)
        others = (x for x in tree_leaves((args, kwargs)) if not isinstance(x, Tensor))
        operation.constants = tuple(f"{type(x).__name__} {x}"[:64] for x in itertools.islice(others, 64))
        if name in ("select", *_SELECTING):
            operation.picks = name != "select" or any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        if name in _ALONG and given:
            operation.along = _dimensions(name, args, kwargs, given[0].dim())
        if target is not None:
            written = [target] if target._base is None else [target, target._base]
            made = [*written, *(x for x in made if all(x is not y for y in written))]
        keeps = name in PICKING or name in MADE or name in SHAPED_LIKE
        operation.made = [self._renumber(x, keeps) for x in made]
        self.operations.append(operation)

    def see_layer(self, name: str, given: Any, output: Any) -> None:
        """Record a call of a layer."""
        operation = Operation(f"layer {name!r}", is_layer=True, within_model=self._within_model > 0)
        with torch._C.DisableTorchFunction():
            operation.given = [self._number(x) for x in _tensors_in(given)]
            operation.made = [self._renumber(x, True) for x in _tensors_in(output)]
        self.operations.append(operation)

    def see_logged(self, name: str, value: Any) -> None:
        """Record that user code has logged ``value``."""
        self.logged.append((name, self._numbers.get(value) if isinstance(value, Tensor) else None))

    def end(self, loss: Tensor | None) -> None:
        """The run has ended and returned ``loss``."""
        self.loss = None if loss is None else self._numbers.get(loss)

    def _operand(self, value: Any) -> int | float | None:
        if isinstance(value, Tensor):
            return self._number(value)
        return float(value) if type(value) in (int, float) else None

    def _number(self, tensor: Tensor) -> int:
        known = self._numbers.get(tensor)
        return self._renumber(tensor, True) if known is None else known

    def _renumber(self, tensor: Tensor, keeps: bool) -> int:
        number = self._numbers[tensor] = len(self.tensors)
        seen = TensorSeen(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter))
        if keeps and not seen.is_parameter and tensor.numel() <= _KEPT_ELEMENTS:
            with contextlib.suppress(Exception):  # a subclass, or one without memory
                seen.values = tensor.detach().cpu().clone()
        self.tensors.append(seen)
        return number


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _dimensions(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> tuple[int, ...]:
    """Return the dimensions, of ``count``, along which ``name`` joins elements, counted from the last."""
    at = _ALONG[name]
    given = args[at] if len(args) > at else next((kwargs[key] for key in ("dim", "dims") if key in kwargs), None)
    if given is None:
        given = 1 if name == "normalize" else -1
    found = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(d if d < 0 else d - count for d in found if type(d) is int)
