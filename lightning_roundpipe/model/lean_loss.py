"""The loss of a language model without its logits: the output layer computes cross entropy a few tokens at a time.

The logits of a long sequence are the largest tensor of a training step: for 49,000 tokens of Llama 3.1 they take 25 GB
in fp32, and the loss needs several times that. Inside `lean_logits`, the output layer returns a `Logits` object that
only stands for its logits. It records what the model does to them (a cast, a factor, a soft cap, a shift). When the
model asks for the loss, it calls the output layer with the targets, which computes the logits of a chunk of tokens,
their loss and gradient, and drops them. So the model's own code runs, and the loss is a call of the output layer like
any other.

Operations on the logits that are not known here raise an error that names them: they need the logits in memory.

torch has such a loss too (``linear_cross_entropy``, since 2.13). It returns the loss in the dtype of its inputs (three
digits in bf16), does not follow autocast, and knows neither caps nor factors; see docs/decisions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

_REMEDY = "Call the model outside of lean_logits() (in the packaged module: task.lean_loss=false)"

_Float = float
"""``float`` inside `Logits`, where a method has that name."""

LOSS_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
"""The arguments of ``torch.nn.functional.cross_entropy`` and ``nll_loss``, in order."""

Steps = tuple[tuple[str, Any], ...]
"""Operations on logits: names of `_STEPS` with their operands."""

_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "to": lambda logits, dtype: logits.to(dtype),
    "mul": lambda logits, factor: logits * factor,
    "div": lambda logits, divisor: logits / divisor,
    "tanh": lambda logits, _: torch.tanh(logits),
}
"""The elementwise operations on logits that a loss may include."""


@dataclass(frozen=True)
class LossOf:
    """The loss to compute from the logits.

    Attributes:
        steps: operations to apply to the logits first.
        ignore_index, reduction, label_smoothing: of `F.cross_entropy`; the reduction is mean or sum.
        rows: tokens per chunk; None: see `chunk_rows`.
    """

    steps: Steps
    ignore_index: int
    reduction: str
    label_smoothing: float
    rows: int | None


class LeanHead(nn.Linear):
    """An output layer that can return a loss. `make_lean` turns a model's own output layer into one."""

    @override
    def __call__(self, input: Tensor, target: Tensor | None = None, how: LossOf | None = None) -> Any:
        use = _active.get()
        if use is None or target is not None:
            return super().__call__(input) if target is None else super().__call__(input, target, how)
        if self._forward_hooks or self._forward_pre_hooks:
            raise ValueError(f"the output layer has hooks, which expect logits that are never there. {_REMEDY}.")
        use.called = True
        return Logits(self, input, (), use.rows)

    @override
    def forward(self, input: Tensor, target: Tensor | None = None, how: LossOf | None = None) -> Tensor:
        if target is None or how is None:
            return super().forward(input)
        loss: Tensor = _Loss.apply(input, self.weight, self.bias, target, how, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return loss


def make_lean(model: nn.Module) -> None:
    """Let the output layer of a Hugging Face language model compute losses in `lean_logits`. Nothing else changes.

    Raises:
        ValueError: the output layer is not a plain ``nn.Linear``.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is nn.Linear:
        head.__class__ = LeanHead  # keeps its parameters, its name and all references to it
    elif type(head) is not LeanHead:
        raise ValueError(
            f"the output layer of {type(model).__name__} is a {type(head).__name__}, and its loss cannot be computed "
            "without holding the logits: only that of an nn.Linear can. Set task.lean_loss=false."
        )


@dataclass
class _Use:
    rows: int | None
    called: bool = False


_active: ContextVar[_Use | None] = ContextVar("lean_logits", default=None)


@contextlib.contextmanager
def lean_logits(model: nn.Module, rows: int | None = None) -> Iterator[None]:
    """Let calls of ``model`` inside the context never hold its logits. Call `make_lean` on the model before.

    Args:
        model: the language model.
        rows: number of tokens whose logits are held at a time. None: as many as `chunk_rows` says.

    Raises:
        ValueError: ``model`` is not prepared, or did not call its output layer inside.
    """
    if type(model.get_output_embeddings()) is not LeanHead:  # type: ignore[operator]
        raise ValueError(f"lean_logits: call make_lean() on this {type(model).__name__} before it is trained.")
    token = _active.set(use := _Use(rows))
    try:
        yield
    finally:
        _active.reset(token)
    if not use.called:
        raise ValueError(f"{type(model).__name__} has not called its output layer, so nothing was saved. {_REMEDY}.")


class Logits:
    """Stands for the logits of ``hidden`` until their loss is computed.

    Args:
        head: the output layer.
        hidden: its input, of shape (..., features).
        steps: operations applied so far; see `LossOf`.
        rows: see `lean_logits`.
    """

    def __init__(self, head: LeanHead, hidden: Tensor, steps: Steps, rows: int | None) -> None:
        self._head, self._hidden, self._steps, self._rows = head, hidden, steps, rows

    # -- attributes of a tensor that do not depend on its values

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def dtype(self) -> torch.dtype:
        casts = [operand for name, operand in self._steps if name == "to"]
        return casts[-1] if casts else _computed_in(self._hidden, self._head.weight)

    @property
    def requires_grad(self) -> bool:
        return self._hidden.requires_grad or any(p.requires_grad for p in self._head.parameters())

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    # -- elementwise operations

    def _then(self, name: str, operand: Any = None) -> Logits:
        if name in ("mul", "div") and not isinstance(operand, (int, float)):
            _refuse(f"{name} by a {type(operand).__name__}")
        return Logits(self._head, self._hidden, (*self._steps, (name, operand)), self._rows)

    def float(self) -> Logits:
        return self._then("to", torch.float32)

    def to(self, wanted: Any) -> Logits:
        if isinstance(wanted, torch.dtype):
            return self._then("to", wanted)
        return self if torch.device(wanted) == self.device else _refuse("to(device)")

    def __mul__(self, factor: Any) -> Logits:
        return self._then("mul", factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        return self._then("div", divisor)

    def tanh(self) -> Logits:
        return self._then("tanh")

    # -- indexing and shapes

    def contiguous(self) -> Logits:
        return self

    def reshape(self, *shape: Any) -> Logits:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if sizes[-1] != self._head.out_features:
            _refuse(f"reshape{sizes}")
        hidden = self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1])
        return Logits(self._head, hidden, self._steps, self._rows)

    view = reshape

    def __getitem__(self, index: Any) -> Logits:
        indices = index if isinstance(index, tuple) else (index,)
        reach = sum(i.ndim if isinstance(i, Tensor) and i.dtype is torch.bool else i is not None for i in indices)
        last = Ellipsis in indices[:-1] if all(i is None or isinstance(i, _INDICES) for i in indices) else False
        if (last or reach >= self.ndim) and not (isinstance(indices[-1], slice) and indices[-1] == slice(None)):
            _refuse("an index into the classes")
        return Logits(self._head, self._hidden[index], self._steps, self._rows)

    # -- the loss

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return cls._cross_entropy(**(dict(zip(LOSS_ARGUMENTS, args, strict=False)) | kwargs))
        known: dict[Any, Callable[..., Logits]] = {torch.tanh: cls.tanh, torch.mul: cls.__mul__}
        plain = (known | {torch.div: cls.__truediv__}).get(func)
        if plain is None or kwargs or not isinstance(args[0], cls):
            _refuse(getattr(func, "__name__", str(func)))
        return plain(*args)

    @staticmethod
    def _cross_entropy(
        input: Any, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: _Float = 0.0, **deprecated: Any,
    ) -> Any:  # fmt: skip
        if not isinstance(input, Logits) or input.ndim != 2 or target.shape != input.shape[:1]:
            _refuse("cross_entropy of anything but logits of shape (tokens, classes) and targets of shape (tokens,)")
        if weight is not None or reduction not in ("mean", "sum") or any(v is not None for v in deprecated.values()):
            _refuse("cross_entropy with weights of classes, or without a reduction")
        how = LossOf(input._steps, ignore_index, reduction, label_smoothing, input._rows)
        return input._head(input._hidden, target, how)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the logits are not held in lean_logits(), so they have no {name}. {_REMEDY}.")


_INDICES = (int, slice, type(Ellipsis), Tensor)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"the logits are not held in lean_logits(), so {what} cannot be computed. {_REMEDY}.")


ENOUGH = 1024
"""Tokens of a chunk whose products take many times as long as a GPU takes to read and write the weights' gradient."""
PIECE = 2**24
"""Elements of the weights' gradient of a chunk that are held before they are added to the sum: 64 MiB in fp32.

Used only where a product cannot add to the sum itself.
"""


def chunk_rows(tokens: int, features: int, classes: int, *, trained: bool) -> int:
    """Return the number of tokens whose logits are held at a time.

    Their logits have at most as many elements as the hidden states, or, if that is too few for fast products, as a
    fraction of the weights. If the weights are ``trained``, the fraction is larger, because each chunk reads and writes
    all of their gradient; `ENOUGH` tokens outweigh that.
    """
    return max(-(-tokens * features // classes), min(features // 2, ENOUGH) if trained else features // 8, 1)


def _is_autocast(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def _computed_in(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(hidden.device.type) if _is_autocast(hidden) else weight.dtype


Multiply = Callable[..., Tensor]


def _accepts(multiply: Multiply, device: torch.device, *operands: torch.dtype) -> bool:
    """Return whether ``multiply`` makes fp32 products of bf16 matrices on ``device``. Does not synchronize."""
    try:
        multiply(*(torch.empty(16, 16, dtype=dtype, device=device) for dtype in operands), out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


@functools.cache
def _multiplies(device: torch.device) -> tuple[bool, bool]:
    """Return which kernels ``device`` has for fp32 sums of bf16 products: products added to a sum, and plain products.

    The CPU has neither. Some versions of torch refuse an fp32 sum for the former. Dispatch modes do not see these
    probes: a mode that counts a model's operations would count them once per process.
    """
    narrow = torch.bfloat16
    with _disable_current_modes():
        return _accepts(torch.addmm, device, torch.float32, narrow, narrow), _accepts(torch.mm, device, narrow, narrow)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, fresh: bool) -> None:
    """Compute ``total += left @ right`` in fp32, whatever the product's dtype.

    A sum over thousands of tokens may overflow in fp16, and loses much precision in bf16. ``fresh``: nothing is in
    ``total`` yet, and the product is all that will be.
    """
    beta = 0 if fresh else 1  # zero: what is there is not read
    if left.dtype is total.dtype:
        total.addmm_(left, right, beta=beta)
        return
    added, alone = _multiplies(total.device)
    if added:
        torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)
    elif alone:
        rows = max(1, PIECE // total.shape[1])
        for part, factor in zip(torch.split(total, rows), torch.split(left, rows), strict=True):
            product = torch.mm(factor, right, out_dtype=total.dtype)
            part.copy_(product) if fresh else part.add_(product)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta)


def _without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = tensor.device.type
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


class _Loss(torch.autograd.Function):
    """Cross entropy of ``hidden @ weight.T + bias``, after the steps of ``how``, chunk by chunk.

    Forward computes gradients together with the loss, while a chunk's logits exist; backward only multiplies them. They
    are the gradients of the summed loss: in fp16, gradients of the mean (divided by the number of targets, before the
    loss is scaled) could underflow. So they do not depend on the loss scale either.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: LossOf, grad: bool
    ) -> Tensor:
        dtype = _computed_in(hidden, weight)
        wanted = [grad and needed for needed in ctx.needs_input_grad[:3]]
        chunks = _Chunks(hidden, weight.to(dtype), None if bias is None else bias.to(dtype), wanted)
        loss = chunks.loss(target, how)
        count = (target != how.ignore_index).sum()
        ctx.shape = hidden.shape
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mean = how.reduction == "mean"
        ctx.spent = False
        ctx.save_for_backward(count, *chunks.gradients)
        return loss / count if ctx.mean else loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("the gradients of a lean loss were used up: backward() runs through it only once.")
        ctx.spent = True
        count, *found = ctx.saved_tensors
        factor = grad / count.clamp(min=1) if ctx.mean else grad  # without targets, gradients are zero, not 0/0
        found = [None if g is None else _times(g, factor, dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)]
        hidden, weight, bias = found
        return None if hidden is None else hidden.view(ctx.shape), weight, bias, None, None, None


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in ``dtype``, cast in the same pass. ``gradient`` is used up."""
    if gradient.dtype is dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


class _Chunks:
    """The loop over chunks of tokens.

    Args:
        hidden: of shape (..., features).
        weight, bias: in the dtype to compute in.
        wanted: which of the three gradients to compute.

    Attributes:
        gradients: the gradients of the sum of all tokens' losses, after `loss`. Those of the parameters are summed in
            fp32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> None:
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.weight, self.bias = weight, bias
        self.exact = torch.promote_types(weight.dtype, torch.float32)
        dtypes = (weight.dtype, self.exact, self.exact)
        blank = torch.empty if len(self.hidden) else torch.zeros  # the first chunk writes all of them
        self.gradients = [
            blank(like.shape, dtype=dtype, device=like.device) if needed and like is not None else None
            for like, dtype, needed in zip((self.hidden, weight, bias), dtypes, wanted, strict=True)
        ]

    def loss(self, target: Tensor, how: LossOf) -> Tensor:
        """Return the summed loss, and write ``gradients``."""
        classes, features = self.weight.shape
        trained = self.gradients[1] is not None
        rows = how.rows or chunk_rows(len(self.hidden), features, classes, trained=trained)
        steps, dtype = _without_last_casts(how.steps, self.weight.dtype)
        if _is_autocast(self.hidden):
            dtype = torch.promote_types(dtype, torch.float32)  # as cross_entropy does
        how = replace(how, steps=steps)
        scored = (target != how.ignore_index)[:, None]
        target = target[:, None].masked_fill(~scored, 0)
        losses = self.hidden.new_empty(target.shape, dtype=torch.promote_types(dtype, torch.float32))
        for start in range(0, len(self.hidden), rows):
            part = slice(start, start + rows)
            # A token without a target is zero here. So its row of the logits' gradient, which is not zero, adds nothing
            # to that of the weights. What it gives the token is cleared in the end. Both are small beside the logits.
            chunk = self.hidden[part].to(self.weight.dtype) * scored[part]
            losses[part] = self._chunk(start, chunk, target[part], scored[part], how)
        if self.gradients[0] is not None:
            self.gradients[0].mul_(scored)
        return losses.masked_fill_(~scored, 0).sum().to(dtype)

    def _chunk(self, start: int, chunk: Tensor, target: Tensor, scored: Tensor, how: LossOf) -> Tensor:
        """Return the losses of tokens from ``start`` on, and add to ``gradients``. What it makes is freed with it."""
        differentiate = any(g is not None for g in self.gradients)
        logits = F.linear(chunk, self.weight, self.bias)
        with torch.set_grad_enabled(differentiate and bool(how.steps)):
            logits.requires_grad_(torch.is_grad_enabled())
            ready = functools.reduce(lambda made, step: _STEPS[step[0]](made, step[1]), how.steps, logits)
        with _without_autocast(chunk):
            losses, slope = _losses_and_slope(ready.detach(), target, how.label_smoothing, differentiate)
            if slope is not None:
                if ready.requires_grad:
                    (slope,) = torch.autograd.grad(ready, logits, slope)
                if self.gradients[2] is not None:
                    slope.mul_(scored)
                self._add(start, chunk, slope)
        return losses

    def _add(self, start: int, chunk: Tensor, slope: Tensor) -> None:
        hidden, weight, bias = self.gradients
        if hidden is not None:
            torch.mm(slope, self.weight, out=hidden[start : start + len(chunk)])
        if weight is not None:
            _add_product(weight, slope.t(), chunk, fresh=start == 0)
        if bias is not None:
            terms = slope.sum(0, dtype=bias.dtype)
            bias.copy_(terms) if start == 0 else bias.add_(terms)


def _without_last_casts(steps: Steps, dtype: torch.dtype) -> tuple[Steps, torch.dtype]:
    """Return the steps without the casts at their end that lose nothing, and the dtype that all of them give.

    The loss widens the logits itself. ``dtype``: of the logits.
    """
    dtypes = [dtype]
    for name, operand in steps:
        dtypes.append(operand if name == "to" else dtypes[-1])
    kept = len(steps)
    while kept and steps[kept - 1][0] == "to" and torch.promote_types(dtypes[kept - 1], dtypes[kept]) is dtypes[kept]:
        kept -= 1
    return steps[:kept], dtypes[-1]


def _losses_and_slope(
    logits: Tensor, target: Tensor, smoothing: float, differentiate: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the cross entropy of each token, in fp32 or wider, and the gradient of their sum, in the logits' dtype.

    There are three passes over the logits. The first widens them, the second makes the logarithms of the probabilities,
    and the third makes the probabilities, narrowed as they are written. These are the gradient, except for one number
    of each token: its target's is the probability less one, which is computed before it is narrowed.

    Args:
        logits: of shape (tokens, classes).
        target: of shape (tokens, 1).
        smoothing: of the labels.
        differentiate: whether to compute the gradient.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    each = smoothing / logits.shape[1]
    logarithms = F.log_softmax(logits, -1, dtype=wide)
    found = logarithms.gather(1, target)
    losses = (smoothing - 1) * found
    if smoothing:
        losses -= each * logarithms.sum(1, keepdim=True)
    if not differentiate:
        return losses, None
    if smoothing:
        slope = logarithms.exp_().sub_(each).to(logits.dtype)
    else:
        slope = torch.exp(logarithms, out=logarithms if logits.dtype is wide else torch.empty_like(logits))
    at_target = found.expm1_().add_(smoothing - each)
    return losses, slope.scatter_(1, target, at_target.to(slope.dtype))
