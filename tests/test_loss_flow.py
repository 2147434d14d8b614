"""Losses that parts of a batch cannot give are found by their operations, whatever the first batch shows of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run
from test_parts_are_the_whole import Batch, Module, batches, cut_by, entropy
from torch import Tensor, nn
from traps import Block, Net

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.profile.unlike_samples import AlikeSamples

SAMPLES = 8
Step = Callable[[Any, Tensor, Batch], Tensor]


def trained(module: Any, data: Any, microbatches: int, devices: int, **options: Any) -> Any:
    layers = ["Linear", "Block", "Positions", "Squares", "Biased"]
    return run(ours(num_microbatches=microbatches, layers=layers, **options), module, data, devices=devices)


def data(*, later: bool = True) -> list[Batch]:
    """Batches with a mask that leaves nothing out of the first one, and later more of one part, or all of it."""
    found = batches(4, SAMPLES)
    for batch in found:
        batch["mask"] = torch.ones(SAMPLES, dtype=torch.bool)
    if later:
        found[1]["mask"][:6:2] = False
        found[2]["mask"][4:] = False
    for batch in found:
        batch["weight"] = batch["mask"].float()
    return found


@pytest.fixture
def compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is compared because its samples differ, as where these sizes have differed before."""
    monkeypatch.setattr(AlikeSamples, "begin_to_differ_in", lambda *_: False)


def without_masks() -> list[Batch]:
    """Batches of which only weights say what is left out."""
    return [{key: value for key, value in batch.items() if key != "mask"} for batch in data()]


def of_each(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"], reduction="none")


def similarities(logits: Tensor) -> Tensor:
    z = F.normalize(logits, dim=-1)
    return z @ z.T


def in_place(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    losses = torch.zeros(2)
    losses[0] = F.cross_entropy(logits, batch["y"])
    losses[1] = losses[1] + logits.pow(2).mean()
    total = losses.sum()
    total *= 0.5
    return total


def logs(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.log("accuracy", (logits.argmax(-1) == batch["y"]).float().mean())
    module.log("largest", logits.max())
    return entropy(module, logits, batch)


def centres(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    with torch.no_grad():
        batch["centre"] = logits.mean(0)  # nothing of it reaches the loss
    return entropy(module, logits, batch)


def lengths(batch: Batch) -> Tensor:
    return batch["y"] % 3 + 1


def up_to_the_longest(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    longest = int(lengths(batch).max())
    kept = torch.arange(longest) < lengths(batch)[:, None]
    share = logits[:, :longest].masked_fill(~kept, -1e9).softmax(1)
    return (share * logits[:, :longest]).sum(1).mean()


def written_to_their_places(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    kept = torch.arange(5) < lengths(batch)[:, None]
    squares = torch.zeros_like(logits)
    squares[kept] = logits[kept].pow(2)
    return (squares.sum(1) / lengths(batch)).mean()


def packed(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(logits[:, :, None], lengths(batch), batch_first=True, enforce_sorted=False)
    padded, _ = nn.utils.rnn.pad_packed_sequence(rows, batch_first=True, total_length=5)
    return padded.pow(2).sum((1, 2)).mean()


class Positions(nn.Module):
    """A layer that gives no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0, 1, 5)[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.table[:, : x.shape[1]]


class Squares(nn.Module):
    """A layer that computes the loss, of what a mask leaves if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        each = (x * self.scale).pow(2).mean(1)
        return each.mean() if weight is None else (each * weight).sum() / weight.sum()


class Biased(nn.Module):
    """A layer that hands on a bias, as T5's do: zeros at first, or with what it computes of all samples."""

    def __init__(self, *, of_samples: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.of_samples = of_samples

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = torch.zeros(1, 5, requires_grad=True)
            bias = bias + self.scale * (x.mean(0, keepdim=True) if self.of_samples else 1)
        return x + torch.where(torch.ones(5, dtype=torch.bool), bias, 0), bias


def handed_on(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    x, bias = module.biased(logits)
    x, bias = module.biased(x, bias)
    x, bias = module.biased(x, bias)
    return F.cross_entropy(x, batch["y"])


def in_two_loops(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    sizes = [int(size) for size in lengths(batch)]
    return torch.cat([row[None] for row, size in zip(logits, sizes, strict=True) if size])


def as_many_as_said(batch: Batch) -> Tensor:
    return torch.arange((batch["mask"] | True).sum() * 5)


def tables_in_a_loop(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """What Python picks for each sample of something that is the same for all."""
    places = torch.zeros_like(logits)
    for i, size in enumerate(lengths(batch).tolist()):
        places[i] = torch.ones(4, 5)[:size].sum(0)
    return F.cross_entropy(logits * places, batch["y"])


PARTS: dict[str, Step] = {
    "mean cross entropy": entropy,
    "mean of squares": lambda _, x, b: ((x - 1) ** 2).mean(),
    "sum over the number of samples": lambda _, x, b: (x - 1).pow(2).sum() / len(x),
    "sum over a tensor of that number": lambda _, x, b: (x - 1).pow(2).sum() / torch.tensor(x.shape[0]),
    "sum times its inverse": lambda _, x, b: (x - 1).pow(2).sum() * (1 / x.numel()),
    "rows, then a mean": lambda _, x, b: (of_each(x, b) * 2).mean(),
    "focal": lambda _, x, b: ((1 - torch.exp(-of_each(x, b))) ** 2 * of_each(x, b)).mean(),
    "two losses": lambda _, x, b: F.cross_entropy(x, b["y"], label_smoothing=0.1) + 0.1 * x.pow(2).mean(),
    "stacked": lambda _, x, b: torch.stack([F.cross_entropy(x, b["y"]), x.pow(2).mean()]).sum(),
    "added by Python": lambda _, x, b: sum([F.cross_entropy(x, b["y"]), x.pow(2).mean()]),  # type: ignore[return-value]
    "in place": in_place,
    "a learnt temperature": lambda m, x, b: F.cross_entropy(x / m.tau.exp(), b["y"]) * (-m.tau).exp() + m.tau,
    "a norm of each": lambda _, x, b: (1 - F.cosine_similarity(x, b["x"][:, :5])).mean(),
    "softmax of each": lambda _, x, b: -(x.softmax(-1) * x.log_softmax(1)).sum(1).mean(),
    "divergence": lambda _, x, b: F.kl_div(x.log_softmax(-1), b["x"][:, :5].softmax(-1), reduction="batchmean"),
    "targets that a mask picks": lambda _, x, b: F.cross_entropy(x[b["mask"]], b["y"][b["mask"]]),
    "a weight of each sample": lambda _, x, b: (of_each(x, b) * b["weight"]).mean(),
    "casts of a mask": lambda _, x, b: (
        (of_each(x, b) * b["mask"].float() * b["mask"].int()).sum() * b["mask"].any().bool() / len(x)
    ),
    "logged values": logs,
    "slices that take all samples": lambda _, x, b: F.cross_entropy(x[: len(x), 0:][:100, ..., 0:5][-8:], b["y"]),
    "slices of features": lambda _, x, b: (x[..., 1:3] - x[:, None, 2:4][:, 0, -2:]).pow(2).mean(),
    "a mean that is only kept": centres,
    "what is finite": lambda _, x, b: torch.where(torch.isfinite(x.pow(2).mean()), x.pow(2).mean(), torch.zeros(())),
    "as many as there are": lambda _, x, b: x.pow(2).sum() / torch.ones_like(x).sum(),
    "up to the longest": up_to_the_longest,
    "written to their places": written_to_their_places,
    "packed sequences": packed,
    "a function of each": lambda _, x, b: torch.vmap(lambda row: (row - row.mean()).pow(2).sum())(x).mean(),
    "a checked distribution": lambda _, x, b: -torch.distributions.Categorical(logits=x).log_prob(b["y"]).mean(),
    "a loop": lambda _, x, b: torch.stack([x[i].pow(2).mean() for i in range(len(x))]).mean(),
    "positions of a layer": lambda m, x, b: (x + m.positions(x)).pow(2).mean(),
    "a loss of a layer": lambda m, x, b: m.squares(x),
    "not a number": lambda _, x, b: torch.nan_to_num(F.cross_entropy(x, b["y"])),
    "a bias that layers hand on": handed_on,
    "two loops": lambda m, x, b: in_two_loops(m, x, b).pow(2).mean(),
    "as many numbers as a tensor says": lambda _, x, b: (x + as_many_as_said(b).view(-1, 5) % 5).pow(2).mean(),
    "a table in a loop": tables_in_a_loop,
}


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp_min(1)


def by_a_helper(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = masked_mean(of_each(logits, batch), batch["weight"])
    module.log("loss", loss)
    module.log("size", masked_mean(logits.detach().abs().sum(1), batch["weight"] * 2))
    return loss + 0.1 * masked_mean(logits.pow(2).sum(1), batch["weight"])


def where_there_are_targets(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    if not batch["mask"].any():
        return logits.sum() * 0
    return of_each(logits, batch)[batch["mask"]].mean()


def up_to_lengths(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """Each part has the mean by its own lengths, which Python has added up."""
    total, count = torch.zeros(()), 0
    for i, length in enumerate((batch["mask"] * 3 + 2).tolist()):
        total = total + logits[i, :length].pow(2).sum()
        count += length
    return total / count


def appended_in_a_loop(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    rows = [logits[i].pow(2) for i in range(len(logits)) if batch["mask"][i]]
    return torch.stack(rows).mean() if rows else logits.sum() * 0


def in_a_loop(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    losses = [logits[i].pow(2).mean() * batch["weight"][i] for i in range(len(logits))]
    return torch.stack(losses).sum() / batch["weight"].sum()


class _MaskedMean(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, each: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(weight / weight.sum())
        return (each * weight).sum() / weight.sum()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * context.saved_tensors[0], None


COUNTED: dict[str, Step] = {
    "a mask": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / b["weight"].sum(),
    "at least one": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / b["weight"].sum().clamp(min=1),
    "and a little": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / (b["mask"].sum() + 1e-8),
    "a number": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / b["weight"].sum().item(),
    "an inverse": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() * (1.0 / b["weight"].sum()),
    "each over the count": lambda _, x, b: (of_each(x, b) * b["weight"] / b["weight"].sum()).sum(),
    "a mean of what a mask picks": lambda _, x, b: of_each(x, b)[b["mask"]].mean(),
    "a loss of what a mask picks": lambda _, x, b: F.mse_loss(x[b["mask"]], b["x"][b["mask"]][:, :5]),
    "at least one, by Python": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / max(b["weight"].sum(), 1),
    "at least one, of a number": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / max(b["mask"].sum().item(), 1),
    "or one": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / (int(b["mask"].sum()) or 1),
    "at least one of what is picked": lambda _, x, b: x[b["mask"]].pow(2).sum() / max(len(x[b["mask"]]), 1),
    "by keyword": lambda _, x, b: torch.div((of_each(x, b) * b["weight"]).sum(), other=b["weight"].sum()),
    "no number": lambda _, x, b: torch.nan_to_num((of_each(x, b) * b["weight"]).sum() / b["weight"].sum()),
    "appended in a loop": appended_in_a_loop,
    "picked in a loop": lambda _, x, b: torch.cat([x[i][b["mask"][i]] for i in range(len(x))]).pow(2).mean(),
    "two terms": lambda _, x, b: (
        2 * (of_each(x, b) * b["weight"]).sum() / b["weight"].sum()
        + 0.1 * x[b["mask"]].pow(2).sum() / b["weight"].sum()
    ),
    "a function of the user's": by_a_helper,
    "its own length": lambda _, x, b: of_each(x, b)[b["mask"]].sum() / len(of_each(x, b)[b["mask"]]),
    "as many elements": lambda _, x, b: x[b["mask"]].pow(2).sum() / x[b["mask"]].numel(),
    "picked by their indices": lambda _, x, b: of_each(x, b)[torch.where(b["mask"])[0]].mean(),
    "in a loop": in_a_loop,
    "picked by a list": lambda _, x, b: of_each(x, b)[[i for i, kept in enumerate(b["mask"].tolist()) if kept]].mean(),
    "in place": lambda _, x, b: (of_each(x, b) * b["weight"]).sum().div_(b["mask"].sum()),
    "none where there are none": where_there_are_targets,
    "summed by torch": lambda _, x, b: (
        F.cross_entropy(x, b["y"].where(b["mask"], -100), reduction="sum")
        / (b["y"].where(b["mask"], -100) != -100).sum()
    ),
}
"""Means by counts of their own, as by the targets that a mask leaves."""


def centred_in_a_loop(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    rows = in_two_loops(module, logits, batch)
    rows = torch.cat([row[None] for row in rows - 0 * rows.mean(0)])
    return F.cross_entropy(rows, batch["y"])


COUPLED: dict[str, Step] = {
    "centred in a loop": centred_in_a_loop,
    "as many numbers as a count, or their mean": lambda _, x, b: F.cross_entropy(
        x / (torch.arange(b["mask"].sum()) + 1.0).mean().clamp(max=1), b["y"]
    ),
    "the first few": lambda _, x, b: F.cross_entropy(x[:6], b["y"][:6]),
    "the last few": lambda _, x, b: entropy(_, x, b) + x[-5:, 1:].pow(2).mean(),
    "all but one": lambda _, x, b: (x[..., 1:, 2:4] - 1).pow(2).mean(),
    "two means": lambda _, x, b: (of_each(x, b) * b["weight"]).mean() / b["weight"].mean(),
    "at least one, in place": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / b["weight"].sum().clamp_(min=1),
    "one more": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / (b["weight"].sum() + 1),
    "a count of each column": lambda _, x, b: (
        (x * b["weight"][:, None]).sum(0) / (b["weight"][:, None] * torch.ones(5)).sum(0).clamp(min=1)
    ).sum(),
    "a multiple of a number": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / (b["mask"].sum().item() * 2),
    "a number of numpy's": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / b["mask"].numpy().sum(),
    "numbers that Python adds": lambda _, x, b: (of_each(x, b) * b["weight"]).sum() / sum(b["mask"].tolist()),
    "a tensor of a number": lambda _, x, b: (
        (of_each(x, b) * b["weight"]).sum() / torch.tensor(float(b["mask"].sum().item() * 2))
    ),
    "weights that are divided": lambda _, x, b: (of_each(x, b) * (b["weight"] / b["weight"].sum())).sum(),
    "a product of two means": lambda _, x, b: ((x / b["weight"].sum()) * (b["x"][:, :5] / b["mask"].sum())).sum(),
    "a mean of what was divided": lambda _, x, b: (of_each(x, b) / b["weight"].sum())[b["mask"]].mean(),
    "over its own shape": lambda _, x, b: of_each(x, b)[b["mask"]].sum() / x[b["mask"]].shape[0],
    "that number itself": lambda _, x, b: x.clamp(max=x.detach().mean().item()).pow(2).mean(),
    "a product of weights": lambda _, x, b: torch.dot(of_each(x, b), b["weight"] / b["weight"].sum()),
    "mean by given weights": lambda _, x, b: F.l1_loss(
        x, b["x"][:, :5], weight=b["weight"][:, None].expand(-1, 5) + 1e-6
    ),
    "an autograd function": lambda _, x, b: _MaskedMean.apply(of_each(x, b), b["weight"]),
    "a decision": lambda _, x, b: entropy(_, x, b) * (1.0 if entropy(_, x, b).detach() > 1.6 else 0.5),
    "a hinge": lambda _, x, b: F.cross_entropy(x, b["y"]) + F.relu(x.mean() - 0.5),
    "free bits": lambda _, x, b: F.cross_entropy(x, b["y"]) + x.pow(2).mean().clamp(min=0.4),
    "flooding": lambda _, x, b: (F.cross_entropy(x, b["y"]) - 1.6).abs() + 1.6,
    "deviations": lambda _, x, b: F.cross_entropy(x, b["y"]) + F.relu(0.5 - x.std(0)).mean(),
    "a score of counts": lambda _, x, b: (
        F.cross_entropy(x, b["y"]) - (x[:, 0].sigmoid() * 0).sum() / x[:, 0].sigmoid().sum()
    ),
    "a weight of each class": lambda _, x, b: F.cross_entropy(x, b["y"], weight=1 + 0 * x.detach().mean(0)),
    "lengths in a loop": up_to_lengths,
    "the largest whole number": lambda _, x, b: F.cross_entropy(x * 200 / (b["mask"] * 200 + 100).max(), b["y"]),
    "that number, as Python's": lambda _, x, b: F.cross_entropy(x * (b["mask"] * 200).max().item(), b["y"]),
    "one that is moved": lambda _, x, b: F.cross_entropy(x + ((b["mask"] * 2).max().clamp(min=1) - 1).float(), b["y"]),
    "centred": lambda _, x, b: F.cross_entropy(x - 0 * x.mean(0), b["y"]),
}
WARMS_UP: dict[str, Step] = {
    "pairs": lambda _, x, b: F.cross_entropy(similarities(x), torch.arange(len(x))),
    "a sum": lambda _, x, b: x.pow(2).sum(),
    "along the samples": lambda _, x, b: x.softmax(0).pow(2).mean(),
    "neighbours": lambda _, x, b: (x[1:] - x[:-1]).pow(2).mean(),
    "the hardest": lambda _, x, b: of_each(x, b).topk(max(1, len(x) // 2))[0].mean(),
    "another sample": lambda _, x, b: (x * x.index_select(0, (torch.arange(len(x)) + 1) % len(x))).mean(),
    "a norm": lambda _, x, b: torch.linalg.vector_norm(x),
    "the last sample": lambda _, x, b: (x - x[-1]).pow(2).mean(),
    "the largest": lambda _, x, b: x.max(),
}
"""Terms whose weight is zero in the first batch."""


def warming_up(term: Step) -> Step:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        factor = float(module.trainer.global_step > 0)
        return F.cross_entropy(logits, batch["y"]) + factor * term(module, logits, batch)

    return step


def ignoring(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"].where(batch["mask"], -100))


def hits(logits: Tensor, batch: Batch) -> Tensor:
    return (logits.argmax(-1) == batch["y"]).float()


LOGGED: dict[str, Callable[[Tensor, Batch], Any]] = {
    "over samples": lambda x, b: hits(x, b).mean(),
    "over the mask": lambda x, b: (hits(x, b) * b["weight"]).sum() / b["weight"].sum().clamp(min=1),
    "over what the mask picks": lambda x, b: x.detach().pow(2)[b["mask"]].mean(),
    "over what another mask picks": lambda x, b: x.detach().pow(2).sum(1)[b["y"] * b["mask"] < 3].mean(),
    "a sum": lambda x, b: hits(x, b).sum(),
    "a count": lambda x, b: b["mask"].sum().float(),
    "a share": lambda x, b: b["weight"].mean(),
    "the largest": lambda x, b: x.detach().max(),
    "a part of a mean": lambda x, b: 1 - 0.5 * masked_mean(hits(x, b), b["weight"]),
    "a number": lambda x, b: masked_mean(hits(x, b), b["weight"]).item(),
    "a root by Python": lambda x, b: math.sqrt(x.detach().pow(2).mean().item()),
    "a root of a share": lambda x, b: math.sqrt(b["weight"].mean().item()),
    "in another format": lambda x, b: masked_mean(hits(x, b), b["weight"]).double().view(1),
    "in bits": lambda x, b: torch.nan_to_num(ignoring(x, b).detach()) / 0.69,
}
LOSSES: dict[str, Step] = {
    "ignores targets": lambda _, x, b: ignoring(x, b),
    "over a mask": COUNTED["at least one"],
    "over samples": entropy,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", LOGGED)
def test_logged_values_are_merged_by_what_they_are(name: str, loss: str) -> None:
    """The first batch, in which all samples count, does not show over what they are means."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        module.log("value", LOGGED[name](logits, batch), on_step=True, on_epoch=True)
        found = LOSSES[loss](module, logits, batch)
        module.log("loss", found, on_step=True, on_epoch=True)
        return found

    result = trained(module_of(step), data(), 2, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", module_of(step), data()), result)


def test_two_values_of_one_function() -> None:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        values = {
            "one": masked_mean(hits(logits, batch), batch["weight"]),
            "other": masked_mean(hits(logits, batch), batch["y"] > 1),
        }
        module.log_dict({name: value * 100 for name, value in values.items()}, on_step=True, on_epoch=True)
        return entropy(module, logits, batch)

    assert_same(run("auto", module_of(step), data()), trained(module_of(step), data(), 2, 2))


def test_values_that_are_the_same_for_all_samples_are_logged_as_they_are() -> None:
    """Python may have computed them from what it has read of the samples; those of parameters follow from nothing."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        some = bool(batch["mask"].sum().item())
        values = {
            "temperature": (module.tau.detach() + 1).exp(),
            "some": torch.tensor(2.0 + some),
            "three": torch.ones(3).sum(),
        }
        module.log_dict(values, on_step=True, on_epoch=True)
        return entropy(module, logits, batch)

    assert_same(run("auto", module_of(step), data()), trained(module_of(step), data(), 2, 2))


def test_the_largest_of_counted_means_is_that_of_batches() -> None:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        module.log("hits", masked_mean(hits(logits, batch), batch["weight"]), reduce_fx="max", on_epoch=True)
        return entropy(module, logits, batch)

    assert_same(run("auto", module_of(step), data()), trained(module_of(step), data(), 2, 2))


def test_a_loss_of_zero_beside_a_value_that_is_counted() -> None:
    """It is a mean over samples, whatever the logged value is one over."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        module.log("hits", masked_mean(hits(logits, batch), batch["weight"]))
        return F.relu(logits.pow(2).sum(1) * batch["weight"]).mean()

    result = trained(module_of(step), data(), 2, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", module_of(step), data()), result)


def test_decisions_that_the_loss_does_not_follow() -> None:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = entropy(module, logits, batch)
        assert loss > 0
        return loss

    result = trained(module_of(step), data(), 2, 2)
    assert cut_by(result) == "step"


def module_of(step: Step) -> Module:
    layers = {"positions": Positions(), "squares": Squares(), "biased": Biased()}
    return Module(step, tau=nn.Parameter(torch.tensor(0.3)), left=SimpleNamespace(out=1.0), **layers)


@pytest.mark.parametrize("name", PARTS)
def test_what_parts_can_give_is_cut_into_parts(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(module_of(PARTS[name]), data(later=name != "targets that a mask picks"), 2, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", module_of(PARTS[name]), data(later=name != "targets that a mask picks")), result)


@pytest.mark.parametrize("counts", [(2, 2), (4, 3)], ids=str)
@pytest.mark.parametrize("first", ["whole", "empty"])
@pytest.mark.parametrize("name", COUNTED)
def test_means_by_counts_of_their_own(name: str, first: str, counts: tuple[int, int]) -> None:
    """Whether the first batch shows the mask, or leaves nothing of a part."""
    batches = data() if first == "whole" else [*reversed(data())][1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(module_of(COUNTED[name]), batches, *counts)
    if not (name.endswith("ed in a loop") and first == "empty"):  # a part of which nothing is left shows another loop
        assert cut_by(result) == "step"
    assert_same(run("auto", module_of(COUNTED[name]), batches), result)


def of_positives(divisor: Callable[[Tensor], Any], *, more: bool = False) -> Step:
    """A loss over all samples, as detection losses are over all anchors, that is divided by the number of positives."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Any:
        weight, count = batch["weight"], divisor(batch["weight"].sum())
        loss = F.binary_cross_entropy_with_logits(logits[:, 0], weight, reduction="none").sum() / count
        module.log("class", loss)
        if more:
            box = (logits.square().sum(1) * weight).sum() / count
            module.log("box", box)
            module.log("right", ((logits[:, 0] > 0) == weight.bool()).float().mean())
            return loss + 2 * box
        module.log("twice", 2 * loss)
        return {"loss": loss, "detached": loss.detach(), "mean": logits.mean().detach()}

    return step


@pytest.mark.usefixtures("compared_once")
@pytest.mark.parametrize("counts", [(2, 2), (4, 3)], ids=str)
@pytest.mark.parametrize(
    "step",
    [
        of_positives(lambda count: count.clamp(min=1)),
        of_positives(lambda count: count.clamp(min=1), more=True),
        of_positives(lambda count: count.clamp(min=3)),
        of_positives(lambda count: max(int(count), 1)),
    ],
    ids=["clamped", "two terms", "clamped at 3", "max"],
)
def test_counts_that_are_raised_are_those_of_the_whole_batch(step: Step, counts: tuple[int, int]) -> None:
    """A part has fewer than its divisor, one part or all have none. In the first batch all have enough."""
    batches = without_masks()
    batches.append({**batches[0], "weight": torch.zeros(SAMPLES)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(module_of(step), batches, *counts)
    assert cut_by(result) == "step"
    assert_same(run("auto", module_of(step), batches), result)


def test_two_terms_with_counts_that_are_raised_in_two_ways_need_the_whole_batch() -> None:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = of_each(logits, batch).sum() / batch["weight"].sum().clamp(min=1)
        return loss + (logits[:, 0] * batch["weight"]).sum() / batch["weight"].sum().clamp(min=3)

    result = trained(module_of(step), without_masks(), 2, 2)
    assert cut_by(result) == "model"
    assert_same(run("auto", module_of(step), without_masks()), result)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_batch_without_targets_is_said(*, own: bool, first: bool) -> None:
    """Its parts count nothing, so that nothing comes from them: no zeros, which an optimizer would make a step of."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        if own:
            return masked_mean(of_each(logits, batch), batch["weight"])
        return F.cross_entropy(logits, batch["y"])

    batches = data()
    batches[2]["weight"] = torch.zeros(SAMPLES)
    if not own:
        batches[2]["y"] = torch.full((SAMPLES,), -100)
    with pytest.warns(RoundPipeWarning, match="a batch has no targets"):
        trained(module_of(step), [*reversed(batches)][1:] if first else batches, 2, 2)


@pytest.mark.parametrize("how", ["divisor", "inverse"])
def test_a_sum_of_all_over_a_count_of_none_is_refused(how: str) -> None:
    """As detection losses do: the sum over all anchors, divided by the number of positives."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        total, count = of_each(logits, batch).sum(), batch["weight"].sum()
        return total / count if how == "divisor" else total * (1 / count)

    with pytest.raises(RoundPipeError, match="divides by a count of 0 what it has summed up nevertheless"):
        trained(module_of(step), data(), 2, 2)


@pytest.mark.usefixtures("compared_once")
def test_divisors_that_cancel_are_refused() -> None:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return (of_each(logits, batch) * batch["weight"]).sum() / batch["weight"].sum()

    batches = without_masks()
    batches[1]["weight"][4:] *= -batches[1]["weight"][:4].sum() / batches[1]["weight"][4:].sum()
    with pytest.raises(RoundPipeError, match="divides its loss by numbers that add up to zero"):
        trained(module_of(step), batches, 2, 2)


@pytest.mark.parametrize("name", COUPLED)
def test_what_the_first_batch_does_not_show(name: str) -> None:
    result = trained(module_of(COUPLED[name]), data(), 2, 2)
    assert cut_by(result) == "model"
    assert_same(run("auto", module_of(COUPLED[name]), data()), result)


def left_out(batch: Batch) -> float:
    return (1 - batch["weight"]).sum().item()


def share(batch: Batch) -> float:
    return batch["weight"].sum().item() / len(batch["weight"])


def at_least_one(number: float) -> float:
    return max(1.0, number)


def share_in_an_attribute(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.share = share(batch)
    return (of_each(logits, batch) * batch["weight"]).mean() / module.share


def in_an_attribute(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.left.out = max(1.0, left_out(batch))
    return F.cross_entropy(logits / module.left.out, batch["y"])


def in_an_attribute_by_its_name(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    vars(module.left).update(out=at_least_one(left_out(batch)))
    return F.cross_entropy(logits / module.left.out, batch["y"])


def note(holder: Any, number: float) -> None:
    """Code that calls no torch function."""
    holder.out = max(1.0, number)


def in_an_attribute_by_a_function(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    note(module.left, left_out(batch))
    return entropy(module, logits, batch) / module.left.out


ONES: dict[str, Step] = {
    "a share": lambda _, x, b: (of_each(x, b) * b["weight"]).mean() / share(b),
    "a share of numbers": lambda _, x, b: (of_each(x, b) * b["weight"]).mean() / (sum(b["weight"].tolist()) / len(x)),
    "a share in numpy": lambda _, x, b: (of_each(x, b) * b["weight"]).mean() / float(b["weight"].numpy().mean()),
    "a share in an attribute": share_in_an_attribute,
    "at least one": lambda m, x, b: entropy(m, x, b) / at_least_one(left_out(b)),
    "at least one, whole": lambda m, x, b: entropy(m, x, b) / max(1, int(left_out(b))),
    "at most one": lambda m, x, b: entropy(m, x, b) * min(1.0, (1 + b["weight"].sum().item()) / len(x)),
    "a temperature": lambda _, x, b: F.cross_entropy(x * at_least_one(left_out(b)), b["y"]),
    "in an attribute": in_an_attribute,
    "in an attribute by its name": in_an_attribute_by_its_name,
    "in an attribute by a function": in_an_attribute_by_a_function,
}
"""Factors that Python computes from the batch, which are one as long as its weights leave nothing out."""


@pytest.mark.usefixtures("compared_once")
@pytest.mark.parametrize("name", ONES)
def test_a_factor_that_is_one_at_first(name: str) -> None:
    result = trained(module_of(ONES[name]), without_masks(), 2, 2)
    assert cut_by(result) == "model"
    assert_same(run("auto", module_of(ONES[name]), without_masks()), result)


@pytest.mark.parametrize("name", WARMS_UP)
def test_a_term_whose_weight_is_zero_at_first(name: str) -> None:
    step = warming_up(WARMS_UP[name])
    result = trained(module_of(step), data(), 2, 2)
    assert cut_by(result) == "model"
    assert_same(run("auto", module_of(step), data()), result)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, factor: float) -> Tensor:
        context.save_for_backward(factor * x)
        return factor * x.pow(2).mean()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (scaled,) = context.saved_tensors
        return grad * 2 * scaled / scaled.numel(), None


def annealed(module: Any, first: float = 0.0) -> float:
    return min(1.0, int(module.trainer.global_step) / 2) or first


ANNEALED: dict[str, Step] = {
    "from zero": lambda m, x, b: entropy(m, x, b) + annealed(m) * x.pow(2).mean(),
    "from next to nothing": lambda m, x, b: entropy(m, x, b) + annealed(m, 1e-9) * x.pow(2).mean(),
    "between two": lambda m, x, b: torch.lerp(entropy(m, x, b), x.pow(2).mean(), annealed(m) / 2),
    "in a list": lambda m, x, b: torch.stack(
        [F.nll_loss(x.log_softmax(1), b["y"]), annealed(m) * x.pow(2).mean()]
    ).sum(),
    "in an autograd function": lambda m, x, b: entropy(m, x, b) + _Square.apply(x, annealed(m)),
    "of a parameter outside of layers": lambda m, x, b: entropy(m, x, b) + annealed(m) * m.tau * b["x"].pow(2).mean(),
    "beside two cross entropies": lambda m, x, b: sum(
        [entropy(m, x, b), 0.1 * F.cross_entropy(-x, b["y"]), annealed(m) * x.pow(2).mean()]
    ),  # type: ignore[return-value]
    "that is only read": lambda m, x, b: entropy(m, x, b) + annealed(m) * x.detach().pow(2).mean(),
}
"""Means over samples that are added to one over targets, with a factor that the first batches do not show."""
FIXED: dict[str, Step] = {
    "of a layer": lambda m, x, b: entropy(m, x, b) + m.positions(x).pow(2).mean(),
    "of a layer, from zero": lambda m, x, b: entropy(m, x, b) + annealed(m) * m.positions(x).pow(2).mean(),
    "of a parameter": lambda m, x, b: entropy(m, x, b) + 0.1 * m.tau.pow(2),
}
"""What is the same in all parts, added to a mean over targets."""


def ignored(first: int) -> list[Batch]:
    """Batches of which the ``first`` ignore no target, and the others three of the first part's."""
    found = batches(5, SAMPLES)
    for batch in found[first:]:
        batch["y"][1:4] = -100
    return found


@pytest.mark.parametrize("counts", [(2, 2), (4, 3)], ids=str)
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("name", ANNEALED)
def test_a_mean_over_samples_that_is_added_to_one_over_targets(name: str, first: int, counts: tuple[int, int]) -> None:
    result = trained(module_of(ANNEALED[name]), ignored(first), *counts)
    assert_same(run("auto", module_of(ANNEALED[name]), ignored(first)), result)
    assert cut_by(result) == "model"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", FIXED)
def test_what_is_no_mean_over_samples_may_be_added_to_one_over_targets(name: str, first: int) -> None:
    result = trained(module_of(FIXED[name]), ignored(first), 2, 2)
    assert_same(run("auto", module_of(FIXED[name]), ignored(first)), result)
    assert cut_by(result) == "step"


def test_a_mean_over_samples_that_a_later_batch_adds_is_refused() -> None:
    """That the first batches are right without it says nothing of it."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = F.cross_entropy(logits, batch["y"])
        if module.trainer.global_step > 1:
            loss = loss + logits.pow(2).mean()
        return loss

    with pytest.raises(RoundPipeError, match="a cross entropy and something else that comes from the model"):
        trained(module_of(step), ignored(0), 2, 2)


def test_a_layer_that_divides_by_a_count_is_said() -> None:
    """Its own code shows it. Cut calls would cut the layer's, too."""
    step = module_of(lambda module, x, b: module.squares(x, b["weight"]))
    with pytest.warns(RoundPipeWarning, match=r"div in line \d+ of test_loss_flow.py divides by a count of its own"):
        trained(step, data(), 2, 2)


def test_a_bias_of_all_samples_that_layers_hand_on_is_said() -> None:
    """As long as its scale is zero, values do not show it."""
    module = module_of(handed_on)
    module.biased.of_samples = True
    with pytest.warns(RoundPipeWarning, match="broadcasts a value over the batch to its samples"):
        trained(module, data(), 2, 2)


def test_the_message_names_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(
        RoundPipeWarning, match=r"relu in line \d+ of test_loss_flow.py is applied to a mean or sum over the batch"
    ):
        trained(module_of(COUPLED["a hinge"]), data(), 2, 2, microbatch_scope="step")


def test_weights_that_are_given_are_those_counts() -> None:
    step = COUNTED["a mask"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = trained(module_of(step), data(), 2, 2, loss_weight=lambda batch: batch["weight"].sum())
    assert cut_by(result) == "step"
    assert_same(run("auto", module_of(step), data()), result)


def test_function_modes_get_the_weight_of_an_l1_loss() -> None:
    """Torch 2.13 does not give it to them: each of two equal losses would be a plain mean."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return F.l1_loss(logits, batch["x"][:, :5], weight=batch["x"][:, 1:].abs())

    for parts in (1, 2):
        assert_same(run("auto", module_of(step), data()), trained(module_of(step), data(), parts, 2))


class Router(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.z_loss = (x.logsumexp(-1) ** 2).mean()
        return super().forward(x)


class WithZLoss(zoo.PlainClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.01 * self.model.blocks[1].z_loss  # type: ignore[union-attr, index, operator]


def test_an_attribute_of_a_layer_is_named() -> None:
    with pytest.warns(RoundPipeWarning, match="attribute 'z_loss' of Router in layer 'model.blocks.1' is computed by"):
        run(ours(num_microbatches=2, microbatch_scope="step"), WithZLoss(Net(Router)), zoo.make_batches("mlp", 1))
