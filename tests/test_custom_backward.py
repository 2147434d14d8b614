"""Backward code of the user's own: as in plain training, or refused where it counts once for each part."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, ours, run
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.profile.custom_backward import CustomBackwards, GradEnd
from lightning_roundpipe.runtime.reporting.hints import Hints


class Adds(torch.autograd.Function):
    """The gradient of ``loss``, whatever that of ``x`` is; as routers of experts balance their load."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=grad.dtype)


class Normed(torch.autograd.Function):
    """Gradients of one norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-6)


class Reversed(torch.autograd.Function):
    """Gradients the other way, as adversaries in the domain of another loss get them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * grad, None


class Rounded(torch.autograd.Function):
    """Rounds, and passes gradients straight through where values are small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Deaf(torch.autograd.Function):
    """A mean of squares whose backward does not look at what its loss is multiplied by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x / x.numel()


class Squares(Deaf):
    """The same, as it should be."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x / x.numel() * grad


@torch.library.custom_op("test_custom_backward::penalised", mutates_args=())
def penalised(x: Tensor) -> Tensor:
    """An operator with a formula of its own for the backward."""
    return x.clone()


penalised.register_autograd(lambda ctx, grad: grad + 0.01 / grad.numel())


class Block(nn.Module):
    """A layer; ``kind`` is what its backward does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.kind = kind
        if kind == "module hook":
            self.down.register_full_backward_hook(lambda m, gi, go: tuple(g / (g.norm() + 1e-6) for g in gi))
        if kind == "watching module hook":
            self.down.register_full_backward_hook(lambda m, gi, go: None)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.kind == "added":
            h = Adds.apply(h, 0.1 * h.mean(0).square().sum())
        elif self.kind == "normed":
            h = Normed.apply(h)
        elif self.kind == "penalised":
            h = penalised(h)
        elif self.kind == "hook that adds":
            h.register_hook(lambda grad: grad + 0.01 * h.detach().mean())
        elif self.kind == "reversed":
            h = Reversed.apply(h, 0.5)
        elif self.kind == "rounded":
            h = Rounded.apply(h)
        elif self.kind == "clamped" and h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        elif self.kind == "scaled" and h.requires_grad:
            h.register_hook(lambda grad: 0.5 * grad)
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and self.kind == "added between":
                x = Adds.apply(2 * x, 0.1 * x.mean(0).square().sum())
            if i == 1 and self.kind == "normed between":
                x = Normed.apply(x)
            if i == 1 and self.kind == "hook between":
                x = 2 * x
                x.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
            if i == 1 and self.kind == "hook on a layer's output":
                x.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
            if i == 1 and self.kind == "reversed between":
                x = Reversed.apply(x, 0.5)
        return self.head(x)


class Module(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Model(kind).double()
        self.kind = kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.model(batch)
        if self.kind == "deaf loss":
            return Deaf.apply(output)  # type: ignore[no-any-return]
        if self.kind == "loss with a backward":
            return Squares.apply(output)  # type: ignore[no-any-return]
        if self.kind == "added to the loss":
            output = Adds.apply(output, 0.1 * output.mean(0).square().sum())
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


LINEAR = [
    "reversed", "rounded", "clamped", "scaled", "watching module hook", "reversed between", "loss with a backward",
]  # fmt: skip
IN_LAYERS = ["added", "normed", "penalised", "hook that adds", "module hook"]
BETWEEN = ["added between", "normed between", "hook between", "hook on a layer's output"]
OF_THE_LOSS = ["deaf loss", "added to the loss"]


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", [*LINEAR, *IN_LAYERS, *BETWEEN, *OF_THE_LOSS])
def test_the_whole_batch_is_as_plain(kind: str) -> None:
    expected = run("auto", Module(kind), batches())
    assert_same(expected, run(ours(num_microbatches=1), Module(kind), batches(), devices=2))


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize(("microbatches", "devices"), [(2, 1), (4, 2)])
def test_what_adds_up_is_as_plain(kind: str, microbatches: int, devices: int) -> None:
    expected = run("auto", Module(kind), batches())
    assert_same(expected, run(ours(num_microbatches=microbatches), Module(kind), batches(), devices=devices))


@pytest.mark.parametrize("kind", [*IN_LAYERS, *BETWEEN])
@pytest.mark.parametrize(("microbatches", "devices"), [(2, 1), (4, 2)])
def test_what_does_not_add_up_is_refused(kind: str, microbatches: int, devices: int) -> None:
    with pytest.raises(RoundPipeError, match=r"in whose backward .* runs once for each part.*num_microbatches=1"):
        run(ours(num_microbatches=microbatches), Module(kind), batches(), devices=devices)


@pytest.mark.parametrize("kind", OF_THE_LOSS)
@pytest.mark.parametrize(("microbatches", "devices"), [(2, 1), (4, 2)])
def test_after_the_model_it_runs_once(
    kind: str, microbatches: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Hints, "of_the_scope", lambda self, what: said.append(what))
    expected = run("auto", Module(kind), batches())
    assert_same(expected, run(ours(num_microbatches=microbatches), Module(kind), batches(), devices=devices))
    assert len(said) == 1 and "runs once for each part" in said[0]


@pytest.mark.parametrize("kind", [*IN_LAYERS, *BETWEEN])
def test_calls_that_are_cut_as_asked_are_looked_at(kind: str) -> None:
    with pytest.raises(RoundPipeError, match=r"microbatch_scope='model' cuts its calls.* runs once for each part"):
        run(ours(num_microbatches=4, microbatch_scope="model"), Module(kind), batches(), devices=2)


@pytest.mark.parametrize("kind", [*LINEAR, *OF_THE_LOSS])
def test_around_calls_that_are_cut_as_asked_it_runs_once(kind: str) -> None:
    expected = run("auto", Module(kind), batches())
    result = run(ours(num_microbatches=4, microbatch_scope="model"), Module(kind), batches(), devices=2)
    assert_same(expected, result)


@pytest.mark.parametrize("scope", ["auto", "step"])
def test_who_added_what(scope: str) -> None:
    with pytest.raises(RoundPipeError, match=r"'model\.blocks\.0\.up\.weight'.* torch\.autograd\.Function 'Adds'"):
        run(ours(num_microbatches=2, microbatch_scope=scope), Module("added"), batches())


def test_it_is_what_is_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else finds it, and without the look the numbers are others."""
    expected = run("auto", Module("added"), batches())
    monkeypatch.setattr(CustomBackwards, "see", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_same(expected, run(ours(num_microbatches=4), Module("added"), batches()))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_little_that_is_added_shows_in_low_precision(precision: str) -> None:
    module = Module("added").float()
    strategy = ours(num_microbatches=2)
    with pytest.raises(RoundPipeError, match="'Adds' runs once for each part"):
        run(strategy, module, [batch.float() for batch in batches()], precision=precision)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_rounding_is_no_difference(precision: str) -> None:
    for kind in LINEAR:
        run(ours(num_microbatches=2), Module(kind).float(), [batch.float() for batch in batches()], precision=precision)


# ---------------------------------------------------------------------------------------- gradients that are rounding


class Invariant(nn.Module):
    """A layer with a backward of its own, and a parameter whose gradient is zero but for rounding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.shift = nn.Parameter(torch.full((1,), 0.3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None] * torch.linspace(-1, 1, 7)[:, None].to(x)
        h = self.query(tokens)
        if self.kind == "key of attention":
            h = F.scaled_dot_product_attention(h, self.key(tokens), self.value(tokens))
        elif self.kind == "shift before a norm":
            h = F.layer_norm(3 * h + self.shift, (6,)).tanh()
        elif self.kind == "shift before softmax":
            h = (h + self.shift).softmax(-1)
        elif self.kind == "expanded shift":
            h = (h + self.shift.exp().expand(len(x), 7, 2)[..., :1]).softmax(-1)
        else:
            scores = self.key(tokens)[..., :1] + self.shift.square() * 0.1
            h = scores.softmax(1) * h
        return x + self.last(Reversed.apply(h, -0.5)).mean(1)


class Invariants(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(*(Invariant(kind) for _ in range(2)), nn.Linear(6, 3))
        self.shift = nn.Parameter(torch.full((1,), 0.3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch) + 0.1 * self.shift
        return F.cross_entropy(logits, (batch[:, 0] > 0).long())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


INVARIANT = [
    "key of attention", "shift before a norm", "shift before softmax", "expanded shift", "shift of scores",
]  # fmt: skip


@pytest.mark.parametrize("kind", INVARIANT)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
def test_terms_that_cancel_are_no_difference(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums on the parts and on the whole have nothing in common."""
    said: list[str] = []
    monkeypatch.setattr(Hints, "of_the_scope", lambda self, what: said.append(what))
    data = [batch if precision == "64-true" else batch.float() for batch in batches()]
    result = run(ours(num_microbatches=2), Invariants(kind), data, precision=precision, devices=2)
    assert not said
    if not precision.startswith("bf16"):
        assert_same(run("auto", Invariants(kind), data, precision=precision), result)


@pytest.mark.parametrize("factor", [1.0, 1e-9])
def test_what_differs_beside_larger_terms_shows(factor: float) -> None:
    """Only the terms of a sum say what its rounding is, not what else is in the loss."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    own, shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def seen(rows: slice, share: float, sides: CustomBackwards) -> None:
        loss = (x[rows] + shift).softmax(1).square().sum() + x[rows].sum() * shift + factor * (own * x[rows]).mean()
        sides.see("the loss", [loss], [GradEnd("own", own)], "", share)

    whole = CustomBackwards(8, lambda: slice(0, 8))
    seen(slice(0, 8), 1.0, whole)
    for share, differs in ((0.5, False), (0.6, True)):
        running = slice(0, 4)
        parts = CustomBackwards(8, lambda: running, whole)  # noqa: B023
        for running in (slice(0, 4), slice(4, 8)):
            seen(running, share, parts)
        assert bool([*whole.different(parts, 1e-4)]) == differs
