"""What kind of loss training_step computes: a mean over targets, which are counted, or a sum.

The gradient of a mean over the batch is a weighted mean of the microbatches' gradients; that of a sum is their sum. The
loss functions that training_step calls tell which of the two a loss is, provided that it only adds up what they return:

    F.cross_entropy(..., reduction="sum") ── its autograd node is kept ── [1]
    the loss's graph, from its root ── sums and differences of such nodes, and nothing else ── [2]
    all microbatches agree ── [3]

A sum that is divided cannot be told from a mean: the divisor may belong to this microbatch or to the whole batch. A
rehearsal shows which (`loss_flow`), or the user has to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.graph_nodes import nodes_of
from lightning_roundpipe.runtime.batch.microbatches import RaisedCount, counted

_ALTERNATIVES = "set microbatch_scope='model' or num_microbatches=1, which compute the loss on the whole batch"

_LINEAR = {
    "AddBackward0", "SubBackward0", "NegBackward0", "CloneBackward0", "AliasBackward0", "ToCopyBackward0",
    "SqueezeBackward0", "UnsqueezeBackward0", "ViewBackward0", "ReshapeAliasBackward0",
}  # fmt: skip
"""Autograd nodes whose output is a sum or difference of their inputs, up to shape and dtype."""
_SUM = ("SumBackward0", "SumBackward1")


def _functions_with_a_reduction() -> dict[Callable[..., Any], tuple[int, str]]:
    """Return the position and default of the ``reduction`` argument of each loss in ``torch.nn.functional``."""
    found: dict[Callable[..., Any], tuple[int, str]] = {}
    for function in vars(F).values():
        if inspect.isfunction(function) and not function.__name__.startswith("_"):
            parameters = inspect.signature(function).parameters
            if "reduction" in parameters:
                found[function] = (list(parameters).index("reduction"), str(parameters["reduction"].default))
    return found


WITH_REDUCTION = _functions_with_a_reduction()
COUNTED = {F.cross_entropy: "cross_entropy", F.nll_loss: "nll_loss"}
"""Losses whose mean is over targets, some of which may be ignored."""


def reduction_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the reduction, ``"mean"``, ``"sum"`` or ``"none"``, of a call of one of ``WITH_REDUCTION``."""
    position, default = WITH_REDUCTION[function]
    return str(args[position] if len(args) > position else kwargs.get("reduction", default))


def spelled(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what a call of the torch function ``name`` is called: another reduction is another function."""
    return f"{name} ({reduction_of(function, args, kwargs)})" if function in WITH_REDUCTION else name


Site = tuple[Hashable | None, int, int]
"""Where the count is found that a logged value is a mean by: a place, which of the counts there, of how many; `ITSELF`.
"""
ITSELF: Site = (None, -1, 0)
"""The logged value is what a place has given at which counts are found."""


class Sums:
    """The sum-reduced losses of one microbatch.

    Attributes:
        name: the last cross entropy that was summed; empty if there was none.
        whole: whether the loss consists of sums alone.
        plain: whether the loss is the ``sum()`` of a tensor with a row per sample, which may be any weighted sum.
    """

    def __init__(self) -> None:
        self.name = ""
        self.whole = self.plain = False
        self._nodes: set[Any] = set()

    def note(self, result: Any, name: str = "") -> None:
        """Record that a loss function returned the sum ``result`` [1]. ``name`` is given for a cross entropy."""
        if isinstance(result, Tensor) and result.grad_fn is not None:
            self._nodes.add(result.grad_fn)
            self.name = name or self.name

    def judge(self, loss: Tensor | None, samples: int) -> None:
        """Set the attributes from the graph of ``loss``, over ``samples`` samples. Keeps nothing of the graph."""
        nodes, self._nodes = self._nodes, set()
        if loss is None or loss.grad_fn is None:
            return
        self.whole = bool(nodes) and _adds_up(loss.grad_fn, nodes)
        self.plain = not self.whole and _sums_rows(loss.grad_fn, samples)


def _adds_up(node: Any, nodes: set[Any]) -> bool:
    """Return whether ``node`` computes sums and differences of the outputs of ``nodes`` alone [2]."""
    if node in nodes:
        return True
    if node is None or type(node).__name__ not in _LINEAR or getattr(node, "_saved_alpha", 1) != 1:
        return False
    return all(_adds_up(below, nodes) for below, _ in node.next_functions)


def _sums_rows(node: Any, samples: int) -> bool:
    while type(node).__name__ in _LINEAR and len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    shape: Sequence[int] = getattr(node, "_saved_self_sym_sizes", ()) if type(node).__name__ in _SUM else ()
    return bool(shape) and int(shape[0]) == samples


class Counts:
    """The target counts of the means of one microbatch: of cross entropies, and of the user's own (`target_counts`).

    Args:
        read: returns the value of a count, for which the host may have to wait.

    Attributes:
        of: count of each of them that the loss depends on, once judged. One that is only logged is left out.
        mixed: whether the loss also depends on layer outputs other than through these.
        latest: the last count, which may still be on a device; None if there was none.
        lacking: whether there are none, and the loss is zero for that reason.
        seen: counts of the user's own by where they are found, in order.
    """

    def __init__(self, read: Callable[[float | Tensor], float] = float) -> None:
        self.of: list[float] = []
        self.mixed = self.lacking = False
        self.latest: float | Tensor | None = None
        self.seen: dict[Hashable, list[float]] = {}
        self._read = read
        self._nodes: dict[Any, float] = {}
        self._results: list[tuple[Tensor, float | Tensor]] = []

    def note(self, result: Any, count: float | Tensor) -> None:
        """Record that ``result`` is a mean over ``count`` targets.

        The count of one without a graph is read only if it is logged: it may be one that nobody looks at.
        """
        if isinstance(result, Tensor) and result.grad_fn is not None:
            count = self._nodes[result.grad_fn] = self._number(count)
        self.latest = count
        if isinstance(result, Tensor):
            self._results.append((result.detach(), count))

    def behind(self, value: Any) -> float | None:
        """Return the target count of ``value`` if it is such a mean itself, else None."""
        for result, count in self._results if isinstance(value, Tensor) else ():
            if value.data_ptr() == result.data_ptr() and value.shape == result.shape:
                return self._number(count)
        return None

    def _number(self, count: float | Tensor) -> float:
        return self._read(count) if isinstance(count, Tensor) else count

    def at(self, site: Site) -> float | None:
        """Return the count that is found at ``site``: zero if code has run in its place; None if it is unknown."""
        place, nth, of = site
        found = self.seen.get(place, ())
        return found[nth] if found and len(found) == of else None if found else 0.0

    def judge(self, loss: Tensor | None) -> None:
        """Set the attributes from the graph of ``loss``. Keeps nothing of the graph."""
        nodes, self._nodes, self._results = self._nodes, {}, []
        if loss is None or not nodes:
            return
        reached = set(nodes_of([loss.grad_fn], nodes.__contains__))
        self.mixed |= any(hasattr(node, "graph_cut") for node in reached - nodes.keys())
        self.of = [count for node, count in nodes.items() if node in reached]


class Counted(Protocol):
    """What is known of a microbatch's loss; see `UserCodeMode`."""

    @property
    def counts(self) -> Counts: ...

    @property
    def sums(self) -> Sums: ...


def are_spread(modes: Sequence[Counted], sizes: Sequence[int]) -> bool:
    """Return whether targets are distributed over the microbatches unlike samples (``sizes``)."""
    counts = counted(m.counts.of[0] for m in modes if m.counts.of)
    if len(counts) < len(sizes) or not sum(counts):
        return False
    return any(abs(c / sum(counts) - size / sum(sizes)) > 1e-6 for c, size in zip(counts, sizes, strict=True))


def check_counts(modes: Sequence[Counted], sizes: Sequence[int], *, mixed: bool | None = None) -> None:
    """Refuse losses for which it is unknown how those of the microbatches combine [3].

    Args:
        modes: modes of the microbatches.
        sizes: samples of each microbatch.
        mixed: whether something else beside a cross entropy makes a difference; None for what the graphs show.

    Raises:
        RoundPipeError: if the step computed several mean-reduced cross entropies whose targets are distributed
            differently over the microbatches, or one whose targets are distributed unlike the samples together with
            another loss, or sums with further operations on them.
    """
    known = [i for i, m in enumerate(modes) if not m.counts.lacking]
    modes, sizes = [modes[i] for i in known], [sizes[i] for i in known]
    if len(modes) < 2 or all(m.sums.whole for m in modes):
        return
    if any(m.sums.whole for m in modes) or any(m.sums.name and not m.counts.of for m in modes):
        name = next((m.sums.name for m in modes if m.sums.name), "a loss function")
        raise RoundPipeError(
            f"the loss is computed from {name} with reduction='sum', and not by adding up alone, so it is unknown how "
            "the losses of microbatches make up that of the batch. If they add up to it (a sum that is multiplied or "
            "divided by a number that is the same for every microbatch), set RoundPipeStrategy(loss_weight='sum'). If "
            "each is divided by a number of its own, such as that of its targets, set loss_weight to a function that "
            f"returns this number: RoundPipeStrategy(loss_weight=lambda batch: ...). Otherwise {_ALTERNATIVES}."
        )
    kinds = {len(m.counts.of) for m in modes}
    if len(kinds) > 1:
        raise RoundPipeError(
            "some microbatches of this batch computed a mean over targets (a cross entropy, or one over a mask) and "
            "others did not, so their weights in the loss are unknown: set RoundPipeStrategy(loss_weight=...) to a "
            f"function that returns the weight of a microbatch. Otherwise {_ALTERNATIVES}."
        )
    totals = [sum(counted(m.counts.of[k] for m in modes)) for k in range(kinds.pop())]
    raised = any(isinstance(count, RaisedCount) for m in modes for count in m.counts.of)
    for mode in modes:
        shares = [c / t if t else 0.0 for c, t in zip(counted(mode.counts.of), totals, strict=True)]
        divisors = {float(count) for count in mode.counts.of if count}
        if shares and (max(shares) - min(shares) > 1e-6 or (raised and len(divisors) > 1)):
            raise RoundPipeError(
                "training_step computes several means over targets whose numbers differ between microbatches "
                f"in different ways ({[m.counts.of for m in modes]}), so no single weight per microbatch gives the "
                f"loss of the whole batch: {_ALTERNATIVES}."
            )
    mixed = any(m.counts.mixed for m in modes) if mixed is None else mixed
    if mixed and (raised or are_spread(modes, sizes)):
        raise RoundPipeError(
            "the loss is a cross entropy and something else that comes from the model, and this batch's targets are "
            f"spread over the microbatches ({[m.counts.of[0] for m in modes]}) unlike its samples ({list(sizes)}), so "
            f"no single weight per microbatch gives the loss of the whole batch: {_ALTERNATIVES}."
        )
