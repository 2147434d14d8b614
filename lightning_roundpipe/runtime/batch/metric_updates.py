"""What each microbatch adds to metrics that count updates, merged to what the whole batch would have added.

``MeanMetric`` adds a mean and a one with each update. A batch in parts would add several of both, so that batches
of more parts would weigh more in the mean over an epoch. A comparison tells such a state from one that counts samples:

    added by the whole batch = sum of what the parts add ── it counts samples: nothing to do
    added by the whole batch = mean of what the parts add ── it counts updates: a step leaves the mean ── `fitting`
    neither ── `Hints` warns
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_roundpipe.runtime.batch.microbatches import weighted_mean

BY_LOSS, BY_SAMPLES, SUM = "mean by the loss", "mean over samples", "sum"
"""How what a whole batch adds to a state follows from what its parts add. The mean by the loss has a value's own count
in place of that of the loss, if it is a mean itself."""
_RULES = (BY_LOSS, BY_SAMPLES)
_REDUCTIONS = (dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum)

MetricRules = dict[str, dict[str, tuple[str, ...]]]
"""By the name of a metric and that of a state: the rules that fit. Nothing of a metric that counts samples."""


class Update(NamedTuple):
    """One update: the part's recorder of logs, and how often the part updated the metric before.

    ``before`` and ``after`` are the metric's states on the host, ``weight`` is the count behind the value that it was
    given, if that is known.
    """

    part: Any
    nth: int
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    weight: float | None

    def added(self, state: str) -> Tensor:
        return self.after[state].double() - self.before[state].double()


class _Recorder:
    """Records the updates of one metric, whether it is called or updated."""

    def __init__(self, metric: Metric, current: Callable[[], Any]) -> None:
        self.metric, self._current = metric, current
        self.updates: list[Update] = []
        self.called = self.paused = False

    def put(self) -> None:
        own = vars(self.metric)
        self._before: dict[str, Any] = {name: own[name] for name in ("forward", "update") if name in own}
        for name in ("forward", "update"):
            own[name] = functools.partial(self._call, getattr(self.metric, name))

    def remove(self) -> None:
        own = vars(self.metric)
        for name in ("forward", "update"):
            del own[name]
        own.update(self._before)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.paused:  # a call updates, too
            return function(*args, **kwargs)
        self.paused = True
        try:
            before = states_of(self.metric)
            output = function(*args, **kwargs)
            part, given = self._current(), args[0] if args else None
            nth = sum(update.part is part for update in self.updates)
            weight = part.counts.behind(given) if isinstance(given, Tensor) else None
            self.updates.append(Update(part, nth, before, states_of(self.metric), weight))
            self.called |= getattr(function, "__name__", "") == "forward"
            return output
        finally:
            self.paused = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing but the updates has changed the states, such as a reset."""
        states = [*(update.before for update in self.updates[1:]), states_of(self.metric)]
        after = [update.after for update in self.updates]
        return all(_same(one, other) for one, other in zip(after, states, strict=True))


class MetricUpdates:
    """The updates of metrics in one step, or in one side of a comparison.

    Args:
        rules: what comparisons have shown. The updates of metrics that count samples are not recorded.
        every: whether to record those of all metrics, as a comparison does.
    """

    def __init__(self, rules: MetricRules, *, every: bool = False) -> None:
        self._rules, self._every = rules, every
        self._recorders: dict[str, _Recorder] = {}

    @contextlib.contextmanager
    def recorded(self, metrics: Mapping[str, Metric], current: Callable[[], Any]) -> Iterator[None]:
        """Record updates of ``metrics``. ``current`` returns the recorder of logs of the calling microbatch."""
        self._recorders = {
            name: _Recorder(metric, current) for name, metric in metrics.items()
            if metric._defaults and (self._every or self._rules.get(name, True))
        }  # fmt: skip
        for recorder in self._recorders.values():
            recorder.put()
        try:
            yield
        finally:
            for recorder in self._recorders.values():
                recorder.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record meanwhile."""
        before = [(recorder, recorder.paused) for recorder in self._recorders.values()]
        for recorder, _ in before:
            recorder.paused = True
        try:
            yield
        finally:
            for recorder, value in before:
                recorder.paused = value

    def updated(self) -> set[str]:
        """Return the names of metrics of which updates were recorded."""
        return {name for name, recorder in self._recorders.items() if recorder.updates}

    def added(self, parts: Sequence[Any]) -> dict[str, MetricParts]:
        """Return what was added to each metric that only updates have changed, by its name.

        ``parts`` are the recorders of logs of all parts, in order.
        """
        found = {}
        for name, recorder in self._recorders.items():
            if recorder.updates and recorder.is_whole:
                numbers = {id(part): number for number, part in enumerate(parts)}
                updates = [(numbers[id(u.part)], u) for u in recorder.updates if id(u.part) in numbers]
                if len(updates) == len(recorder.updates):
                    found[name] = MetricParts(recorder.metric, updates, states_of(recorder.metric, every=True))
        return found

    def correct(
        self, parts: Sequence[Any], weights: Sequence[float], sizes: Sequence[float], rules: MetricRules | None = None
    ) -> set[str]:
        """Leave in the metrics that count updates what the whole batch would have added.

        Args:
            parts: see `added`.
            weights: how much each part counts.
            sizes: samples of each part.
            rules: what comparisons have shown since; None for what they had before.

        Returns:
            The names of these metrics.
        """
        rules = self._rules if rules is None else rules
        if len(parts) < 2 or not any(rules.get(name) for name in self.updated()):
            return set()
        corrected = set()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for name, added in self.added(parts).items():
                if (of_metric := rules.get(name)) and set(of_metric) == set(added.left):
                    self._correct(self._recorders[name], added, of_metric, weights, sizes)
                    corrected.add(name)
        return corrected

    def _correct(
        self, recorder: _Recorder, added: MetricParts, rules: Mapping[str, Sequence[str]], weights: Sequence[float],
        sizes: Sequence[float],
    ) -> None:  # fmt: skip
        metric = recorder.metric
        of_batch = {state: added.merged(state, rule[0], weights, sizes) for state, rule in rules.items()}
        for state, value in of_batch.items():
            now: Tensor = getattr(metric, state)
            total = now.cpu().double() - added.merged(state, SUM, weights, sizes) + value
            now.copy_(total if now.is_floating_point() else total.round())  # in place: those of a collection share it
        metric._computed = None
        if recorder.called:
            kept = dict(vars(metric))
            try:
                metric.reset()
                for state, value in of_batch.items():
                    default: Tensor = getattr(metric, state)
                    default.copy_(value if default.is_floating_point() else value.round())
                metric._to_sync = False
                metric._update_count = 1
                value = metric.compute()
            finally:
                vars(metric).clear()
                vars(metric).update(kept)
            metric._forward_cache = tree_map_only(Tensor, lambda tensor: tensor.cpu(), value)


class MetricParts(NamedTuple):
    """What parts have added to one metric: updates by the number of the part, and all states that they have left."""

    metric: Metric
    updates: list[tuple[int, Update]]
    left: dict[str, Any]

    @property
    def adds(self) -> bool:
        """Whether all states are sums, so that what parts add can be merged."""
        return set(self.updates[0][1].after) == set(self.left)

    def comparable(self) -> list[str]:
        """Return the names of states that are the same in parts, unless the metric counts updates.

        These are lists and what is reduced by a function of torchmetrics. Metrics that reduce states themselves may
        keep something that depends on the parts, such as a deviation from the mean so far.
        """
        reductions = self.metric._reductions
        return [s for s, value in self.left.items() if isinstance(value, list) or reductions[s] in _REDUCTIONS]

    def rounding(self, state: str) -> float:
        """Return the difference that rounding may make in what is added to a state, as it may be large before."""
        largest = max(float(update.after[state].abs().max()) if update.after[state].numel() else 0.0
                      for _, update in self.updates)  # fmt: skip
        dtype = self.updates[0][1].after[state].dtype
        return 8 * len(self.updates) * largest * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0

    def merged(self, state: str, rule: str, weights: Sequence[float], sizes: Sequence[float]) -> Tensor:
        """Return what the whole batch adds to ``state`` by ``rule``."""
        values = [(part, update, update.added(state)) for part, update in self.updates]
        if rule == SUM:
            return torch.stack([value for _, _, value in values]).sum(0)
        total = torch.zeros_like(values[0][2])
        for nth in sorted({update.nth for _, update, _ in values}):
            mine = [(part, update, value) for part, update, value in values if update.nth == nth]
            counts = [float(sizes[part]) for part, _, _ in mine]
            if rule == BY_LOSS:
                own = [weights[part] if update.weight is None else update.weight for part, update, _ in mine]
                counts = own if any(own) else counts
            total += weighted_mean([value for _, _, value in mine], counts)
        return total


def states_of(metric: Metric, *, every: bool = False) -> dict[str, Any]:
    """Return copies of a metric's states on the host: of tensors that are sums, or of ``every`` one."""
    with torch._C.DisableTorchFunction():
        found: dict[str, Any] = {}
        for name, reduction in metric._reductions.items():
            value = getattr(metric, name)
            if isinstance(value, Tensor) and (every or (reduction is dim_zero_sum and not value.is_complex())):
                found[name] = value.detach().cpu().clone()
            elif every:
                found[name] = list(value)
        return found


def fitting(
    whole: MetricParts, parts: MetricParts, weights: Sequence[float], sizes: Sequence[float],
    near: Callable[[Tensor, Tensor, float], bool],
) -> dict[str, tuple[str, ...]] | str:  # fmt: skip
    """Return the rules by which what the whole batch adds follows from what its parts add; those of a sum first.

    Returns:
        By the name of each state. The name of a state that follows by none, if there is one.
    """
    found: dict[str, tuple[str, ...]] = {}
    for state in whole.updates[0][1].after:
        of_whole = whole.merged(state, SUM, [], [])
        slack = whole.rounding(state) + parts.rounding(state)
        found[state] = tuple(
            rule for rule in (SUM, *_RULES) if near(of_whole, parts.merged(state, rule, weights, sizes), slack)
        )
        if not found[state]:
            return state
    if all(SUM in rules for rules in found.values()):
        return found
    is_sum = [SUM in rules for rules in found.values() if len(rules) < 1 + len(_RULES)]
    for state, rules in found.items():  # nothing added fits all: a sum is then one beside sums only
        means = tuple(rule for rule in rules if rule != SUM)
        found[state] = means if means and not (all(is_sum) and SUM in rules) else rules
    return found


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one.values(), other.values(), strict=True)
    )
