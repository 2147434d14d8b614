"""How much each microbatch counts in the loss of its window.

    samples (default) ── within a batch that is cut; each batch of the window counts the same, as in Lightning ── [1]
    "sum" ── the losses of the parts add up to that of the batch ── [2]
    a function ── its number over those of all microbatches of the window ── [3]
    "targets" ── the number of targets of the part's mean cross entropy, over that of the window ── [4]

Lightning divides each loss by ``accumulate_grad_batches``. That is what [1] and [2] want. [3] and [4] weigh over the
window, so they multiply by it. The backward of a microbatch begins before Lightning divides, so its loss is divided
before, by the same number, and gradients round and overflow as in Lightning. One factor takes that back.

[4] knows the total only when the last microbatch has its loss, and by then the first is in its backward. So losses are
divided by a guess that depends on the data alone, and the factor corrects the sums of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.graph_nodes import nodes_of

LossWeight = Callable[[Any], Any] | Literal["targets", "sum"] | None
"""The option: how microbatches count. None: by their samples."""


class Contribution(NamedTuple):
    """How much the window of one of several machines counts.

    Attributes:
        kind: what microbatches are weighed by: ``"samples"``, ``"targets"``, ``"sum"`` or ``"a function"``.
        total: their weight.
    """

    kind: str
    total: float


class LossWeights:
    """The weights of the microbatches of one step.

    Args:
        by: the option.
        samples: samples of each microbatch.
        batches: the batch of the window that each microbatch belongs to.
        accumulated: Lightning's ``accumulate_grad_batches``.
        by_function: what the user's function has returned for each microbatch, if ``by`` is one.

    Attributes:
        fewest_samples: samples of the smallest microbatch.
    """

    def __init__(
        self, by: LossWeight, samples: Sequence[int], batches: Sequence[int], accumulated: int = 1,
        by_function: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self._by, self._accumulated = by, accumulated
        self.counts_targets = by == "targets"
        self.count = len(samples)
        self._samples = sum(samples)
        self.fewest_samples = min(samples, default=0)
        self._guess: float | None = None
        self._unit = 1.0
        """What a weight of 1 is in the user's numbers."""
        if self.counts_targets:
            self._known: list[float] = []
        elif by == "sum":
            self._known = [1.0] * len(samples)
        elif by is None:
            totals = [sum(n for n, other in zip(samples, batches, strict=True) if other == b) for b in batches]
            self._known = [n / total if total else 1.0 for n, total in zip(samples, totals, strict=True)]
        else:
            self._unit = sum(by_function) / accumulated
            self._known = [weight / self._unit for weight in by_function]

    @property
    def adds(self) -> bool:
        """Whether the loss of a batch is the sum of those of its parts, rather than their mean by weights."""
        return self._by == "sum"

    def of(self, microbatch: int, loss: Tensor, counts: TargetCounts) -> float:
        """Return the weight of a microbatch that has its ``loss``; ``counts`` are those of its cross entropies."""
        return counts.behind(loss) if self.counts_targets else self._known[microbatch]

    def share(self, weight: float) -> float:
        """Return the factor of a loss of this ``weight`` in its backward, as far as it is known before the last one.

        The first microbatch with targets determines the guess of the total.
        """
        if not self.counts_targets:
            return weight / self._accumulated
        if self._guess is None:
            if not weight:
                return 0.0
            self._guess = weight * self.count
        return weight / self._guess

    def factor(self, weights: Iterable[float]) -> float:
        """Return the factor of the sums of gradients, once all microbatches have their losses, of these ``weights``."""
        if self._guess is None:
            return self._accumulated
        return self._guess / sum(weights) * self._accumulated

    def contribution(self, weights: Iterable[float]) -> Contribution:
        """Return how much the window counts beside those of other machines: [2] adds up, all else is weighed."""
        kind = "samples" if self._by is None else self._by if isinstance(self._by, str) else "a function"
        total = float(self._samples) if self._by is None else self._unit * sum(weights)
        return Contribution(kind, total)


def given_weights(function: Callable[[Any], Any], parts: Sequence[Any]) -> list[float]:
    """Return what ``function``, the user's ``loss_weight``, returns for each microbatch.

    Raises:
        ValueError: the weights are not finite numbers of at least 0, or are all 0.
    """
    weights = []
    for index, part in enumerate(parts):
        weight = function(part)
        try:
            weights.append(float(weight))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"loss_weight returned {weight!r} for microbatch {index}: it must give one number, such as that of the "
                "targets in it."
            ) from error
    if not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise ValueError(
            f"loss_weight returned {weights} for the microbatches: weights must be finite, at least 0, and not all 0."
        )
    return weights


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of tensors of one shape by ``weights``; of the values themselves if no weight is above 0.

    A weight of 0 leaves its tensor out, even if it holds NaN.
    """
    weights = weights if sum(weights) else [1.0] * len(values)
    pairs = [(value.detach(), weight / sum(weights)) for value, weight in zip(values, weights, strict=True) if weight]
    if len(pairs) == 1:
        return pairs[0][0]
    dtype = pairs[0][0].dtype if pairs[0][0].is_floating_point() else torch.get_default_dtype()
    return torch.stack([value.double() * weight for value, weight in pairs]).sum(0).to(dtype)


# -- targets -----------------------------------------------------------------------------------------------------------

_CROSS_ENTROPIES = (F.cross_entropy, F.nll_loss)
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_REMEDY = "Leave loss_weight out, or set it to a function of a microbatch that returns what it counts."


class TargetCounts:
    """The targets of the mean cross entropies of one microbatch [4].

    Attributes:
        read: returns the value of a count, for which the host may have to wait.
    """

    def __init__(self) -> None:
        self.read: Callable[[Tensor], float] = float
        self._counts: dict[Any, Tensor] = {}

    def note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the targets of a call of a torch function, if it is a mean cross entropy with a graph."""
        if function not in _CROSS_ENTROPIES:
            return
        arguments = dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs)
        if arguments.get("reduction", "mean") != "mean" or not isinstance(result, Tensor) or result.grad_fn is None:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._counts[result.grad_fn] = _targets(**arguments)

    def behind(self, loss: Tensor) -> float:
        """Return the number of targets that the mean behind ``loss`` is over. Keeps nothing of the graph.

        Raises:
            RoundPipeError: the loss is not made with exactly one mean cross entropy, or several with the same count.
        """
        counts, self._counts = self._counts, {}
        reached = set(nodes_of([loss.grad_fn], counts.__contains__)) if loss.grad_fn is not None else set()
        found = {self.read(count) for node, count in counts.items() if node in reached}
        if not found:
            raise RoundPipeError(
                "loss_weight='targets' counts the targets of the mean cross entropy that a loss is made with, and "
                "training_step returned a loss that is made with none (torch.nn.functional.cross_entropy or nll_loss "
                f"with reduction='mean', called outside of the layers). {_REMEDY}"
            )
        if len(found) > 1:
            raise RoundPipeError(
                "loss_weight='targets' counts the targets of the mean cross entropy that a loss is made with, and "
                f"training_step returned a loss that is made with several over different numbers of targets "
                f"({', '.join(f'{count:g}' for count in sorted(found))}). {_REMEDY}"
            )
        return found.pop()


def _targets(input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, **_: Any) -> Tensor:
    """Return what torch divides the sum of a mean cross entropy by."""
    if target.is_floating_point():  # probabilities of classes: each sample or position is a target
        classes = input.shape[1] if input.dim() > 1 else input.shape[0]
        return torch.tensor(float(input.numel() // max(classes, 1)))
    kept = target != ignore_index
    return kept.sum() if weight is None else weight[target[kept].to(weight.device)].sum()
