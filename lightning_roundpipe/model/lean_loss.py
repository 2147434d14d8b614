"""The loss of a language model without its logits: the output layer computes cross entropy a few tokens at a time.

The logits of a long sequence are the largest tensor of a training step: for 49,000 tokens of Llama 3.1 they take 25 GB
in fp32, and the loss needs several times that. Inside `lean_logits`, two calls of the model's forward differ:

    the output layer ── keeps its input and returns logits of no classes
    the model's loss function ── calls the output layer with the targets, which returns the loss

So the loss is a call of the output layer like any other. For each chunk of tokens, the layer computes the logits, their
loss and gradients, and drops them. What a model does to its logits (a soft cap, a factor) is its own code: its forward
runs on a chunk, with the decoder and the output layer replaced by their results.

torch has such a loss too (``linear_cross_entropy``, since 2.13). It returns the loss in the dtype of its inputs (three
digits in bf16), does not follow autocast, and knows neither caps nor factors; see docs/decisions.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutput
from typing_extensions import override

from lightning_roundpipe.model.packed_rows import base_model

_IGNORED = -100
"""A label without a target."""
_REMEDY = "Call the model outside of lean_logits() (in the packaged module: task.lean_loss=false)"

Finish = Callable[[Tensor], Tensor]
"""Returns what a model makes of its output layer's result, of shape (tokens, classes)."""


class LeanHead(nn.Linear):
    """An output layer that can return a loss. `make_lean` turns a model's own output layer into one."""

    @override
    def __call__(self, input: Tensor, target: Tensor | None = None, finish: Finish | None = None) -> Any:
        use = _active.get()
        if target is not None:
            return super().__call__(input, target, finish)
        if use is None:
            return super().__call__(input)
        if self._forward_hooks or self._forward_pre_hooks:
            raise ValueError(f"the output layer has hooks, which expect logits that are never there. {_REMEDY}.")
        use.hidden = input
        return input[..., :0]

    @override
    def forward(self, input: Tensor, target: Tensor | None = None, finish: Finish | None = None) -> Tensor:
        """Return logits; or, given targets of shape (tokens,), the sum of their losses in fp32."""
        if target is None:
            return super().forward(input)
        hidden = input.reshape(-1, self.in_features)
        loss: Tensor = _loss_of(hidden, self.weight, self.bias, target, finish)
        return loss


# Under bf16-true, Dynamo fails inside; and between chunks there is nothing to fuse.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, finish: Finish | None) -> Any:
    return _Loss.apply(hidden, weight, bias, target, finish, torch.is_grad_enabled())  # type: ignore[no-untyped-call]


def make_lean(model: nn.Module) -> None:
    """Let the output layer of a Hugging Face language model compute losses in `lean_logits`. Nothing else changes.

    Raises:
        ValueError: the output layer is not a plain ``nn.Linear``, or the loss is not that of causal language models.
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    why = None
    if type(head) not in (nn.Linear, LeanHead) or head not in base.children():
        why = f"its output layer is a {type(head).__name__}, not an nn.Linear of its own"
    elif base.loss_function not in (ForCausalLMLoss, lean_causal_lm_loss):
        why = "its loss function is not that of causal language models"
    if why is not None:
        raise ValueError(
            f"the loss of {type(base).__name__} cannot be computed without holding the logits: {why}. "
            "Set task.lean_loss=false."
        )
    head.__class__ = LeanHead  # keeps its parameters, its name and all references to it
    base.loss_function = lean_causal_lm_loss


@dataclass
class _Use:
    """A call of a model in `lean_logits`."""

    model: nn.Module
    """Without adapters."""
    hidden: Tensor | None = None
    """The output layer's input, of shape (rows, tokens, features), until the loss is computed."""
    done: bool = False


_active: ContextVar[_Use | None] = ContextVar("lean_logits", default=None)


@contextlib.contextmanager
def lean_logits(model: nn.Module) -> Iterator[None]:
    """Let calls of ``model`` inside the context return losses without logits. Call `make_lean` on the model before.

    The ``logits`` of its output have no classes.

    Raises:
        ValueError: ``model`` is not prepared, or did not compute its loss inside.
    """
    base = base_model(model)
    if type(base.get_output_embeddings()) is not LeanHead:
        raise ValueError(f"lean_logits: call make_lean() on this {type(base).__name__} before it is trained.")
    token = _active.set(use := _Use(base))
    try:
        yield
    finally:
        _active.reset(token)
    if not use.done:
        raise ValueError(f"{type(base).__name__} has not computed its loss: it was called without labels. {_REMEDY}.")


def lean_causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return the loss as transformers' ``ForCausalLMLoss`` does; inside `lean_logits`, from hidden states."""
    use = _active.get()
    if use is None or use.hidden is None:
        loss: Tensor = ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others
        )
        return loss
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(use.hidden.device)
    target = target.masked_fill(target == ignore_index, _IGNORED)
    head: Any = use.model.get_output_embeddings()  # type: ignore[operator]
    total: Tensor = head(use.hidden, target, _Finish(use.model, head))
    use.hidden, use.done = None, True
    if num_items_in_batch is not None:
        return total.div(num_items_in_batch)
    mean = total / (target != _IGNORED).sum().clamp(min=1)
    # A mean of equal numbers: without targets it is no number, as the plain loss, and strategies that count the targets
    # of cross entropies find them here.
    return F.nll_loss((-mean).expand(len(target), 1), target.clamp(max=0), ignore_index=_IGNORED)


class _Given(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    @property
    def decoder(self) -> _Given:
        """For models that call a part of theirs (OPT)."""
        return self

    @override
    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


@dataclass
class _DecoderOutput(BaseModelOutput):
    """Hidden states, and None for all else that an output may have."""

    def __getattr__(self, name: str) -> None:
        return None


class _Finish:
    """Runs a model's own forward on logits, with the decoder and the output layer replaced by their results.

    Holds no modules, so a layer call may take it as an argument.
    """

    def __init__(self, model: Any, head: nn.Module) -> None:
        self._shell = _shallow(model)
        self._names = {name: module is head for name, module in model.named_children()}
        self._shell._modules = {}

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits[None]
        shell = _shallow(self._shell)
        outputs = _DecoderOutput(last_hidden_state=logits[..., :0])
        shell._modules = {name: _Given(logits if is_head else outputs) for name, is_head in self._names.items()}
        finished: Tensor = type(shell).forward(shell, inputs_embeds=logits[..., :0], use_cache=False).logits
        return finished[0]


def _shallow(model: Any) -> Any:
    """Return a copy with the same attributes. ``copy.copy`` calls ``__new__``, which FSDP2 overrides with arguments."""
    made = object.__new__(type(model))
    made.__dict__.update(model.__dict__)
    return made


ENOUGH = 1024
"""Tokens of a chunk whose products take many times as long as a GPU takes to read and write the weights' gradient."""


def chunk_rows(tokens: int, features: int, classes: int, *, trained: bool) -> int:
    """Return the number of tokens whose logits are held at a time.

    Their logits have at most as many elements as the hidden states, or, if that is too few for fast products, as a
    fraction of the weights. If the weights are ``trained``, the fraction is larger, because each chunk reads and writes
    all of their gradient; `ENOUGH` tokens outweigh that.
    """
    return max(-(-tokens * features // classes), min(features // 2, ENOUGH) if trained else features // 8, 1)


def _without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = tensor.device.type
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _computed_in(hidden: Tensor, weight: Tensor) -> torch.dtype:
    kind = hidden.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else weight.dtype


class _Loss(torch.autograd.Function):
    """The sum of the cross entropies of ``finish(hidden @ weight.T + bias)``, chunk by chunk.

    Forward computes gradients together with the loss, while a chunk's logits exist; backward only multiplies them, and
    in place, so it runs once. Gradients of the mean, before the loss is scaled, could underflow in fp16. Those of
    parameters are summed in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, finish: Finish, grad: bool
    ) -> Tensor:
        dtype = _computed_in(hidden, weight)
        given = (hidden, weight, bias)
        wanted = [grad and needed for needed in ctx.needs_input_grad[:3]]
        ctx.dtypes = [None if t is None else t.dtype for t in given]
        exact = torch.promote_types(dtype, torch.float32)
        sums = [
            torch.zeros_like(t, dtype=t.dtype if t is hidden else exact) if needed and t is not None else None
            for t, needed in zip(given, wanted, strict=True)
        ]
        parameters = [
            None if t is None else t.to(dtype).detach().requires_grad_(needed)
            for t, needed in zip(given[1:], wanted[1:], strict=True)
        ]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = chunk_rows(len(hidden), *reversed(weight.shape), trained=wanted[1])
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            chunk = hidden[part].detach().requires_grad_(wanted[0])
            ours = [None if sums[0] is None else sums[0][part], *sums[1:]]
            total += _add_chunk([chunk, *parameters], ours, target[part], finish)
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sums = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if one is None else one.mul_(grad).to(dtype) for one, dtype in sums), None, None, None


def _add_chunk(inputs: list[Tensor | None], sums: list[Tensor | None], target: Tensor, finish: Finish) -> Tensor:
    """Return the summed loss of a chunk's tokens, and add its gradients by the ``inputs`` to ``sums``."""
    chunk, weight, bias = inputs
    assert chunk is not None and weight is not None
    scored = (target != _IGNORED)[:, None]
    needed = [t for t in inputs if t is not None and t.requires_grad]
    with torch.set_grad_enabled(bool(needed)):
        # A token without a target is zero here, and so is what it adds to the gradient of the weights. Its row of the
        # logits' gradient is not, but that is large.
        logits = finish(F.linear(chunk.to(weight.dtype) * scored, weight, bias))
    with _without_autocast(chunk):
        losses, slope = _cross_entropy(logits.detach(), target[:, None].clamp(min=0), differentiate=bool(needed))
        if slope is not None:
            if bias is not None:
                slope.mul_(scored)
            gradients = torch.autograd.grad(logits, needed, slope)
            for one, gradient in zip((one for one in sums if one is not None), gradients, strict=True):
                one.add_(gradient)
    return losses.masked_fill(~scored, 0).sum()


def _cross_entropy(logits: Tensor, target: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """Return the cross entropy of each token, in fp32, and the gradient of their sum, in the logits' dtype.

    There are three passes over the logits, where autograd's gradient takes six: a cast to fp32, the logarithms of
    probabilities, and the probabilities, narrowed as they are written. These are the gradient but for the target's.
    ``target`` is of shape (tokens, 1).
    """
    logarithms = F.log_softmax(logits, -1, dtype=torch.float32)
    found = logarithms.gather(1, target)
    if not differentiate:
        return -found, None
    narrow = logarithms if logits.dtype is torch.float32 else torch.empty_like(logits)
    slope = torch.exp(logarithms, out=narrow) if logits.dtype is not torch.float64 else logarithms.double().exp()
    return -found, slope.scatter_(1, target, found.expm1().to(slope.dtype))
