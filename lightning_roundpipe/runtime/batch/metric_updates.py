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
from torchmetrics import Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_roundpipe.runtime.batch.microbatches import weighted_mean

BY_LOSS, BY_SAMPLES, SUM = "mean by the loss", "mean over samples", "sum"
"""How what a whole batch adds to a state follows from what its parts add. The mean by the loss has a value's own count
in place of that of the loss, if it is a mean itself."""
_RULES = (BY_LOSS, BY_SAMPLES)
_ADDED = (dim_zero_sum, None)
"""Reductions of states that may be sums. A metric that reduces a state itself may keep anything in it."""
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
    """Records the updates of one metric, whether it is called or updated, and its resets.

    A reset in each part before its updates is that of the whole batch if the first of them is the only one: the later
    ones would drop what other parts have added.

    Args:
        metric: the metric.
        owner: knows those that are parts of it, as in a wrapper, and whether a metric is in a call already.
        records: whether its states are recorded.
    """

    def __init__(self, metric: Metric, owner: MetricUpdates, *, records: bool) -> None:
        self.metric, self.records, self._owner = metric, records, owner
        self.updates: list[Update] = []
        self.called = self.has_updates = False
        self._reset_by: set[int] = set()
        self._adding: set[int] = set()
        self._dropped: set[int] = set()
        """Parts, by the ids of their recorders: those that have reset it, those that have added something since their
        last reset, and those of which a reset of another one has dropped that."""

    def put(self) -> None:
        own = vars(self.metric)
        self._before: dict[str, Any] = {name: own[name] for name in ("forward", "update", "reset") if name in own}
        for name in ("forward", "update"):
            own[name] = _RecordedMethod(
                self.metric, getattr(self.metric, name), functools.partial(self._owner.call, self)
            )
        own["reset"] = _RecordedMethod(self.metric, self.metric.reset, functools.partial(self._owner.reset, self))

    def remove(self) -> None:
        own = vars(self.metric)
        for name in ("forward", "update", "reset"):
            del own[name]
        own.update(self._before)

    def add(self, part: Any, before: dict[str, Tensor], weight: float | None, *, called: bool) -> None:
        """Record that ``part`` has updated the metric, whose states were ``before``."""
        self.has_updates = True
        self._adding.add(id(part))
        if self.records:
            nth = sum(update.part is part for update in self.updates)
            self.updates.append(Update(part, nth, before, states_of(self.metric), weight))
            self.called |= called

    def is_reset_again(self, part: Any) -> bool:
        """Return whether a reset by ``part`` is one that another part has done for the batch. Else forget updates."""
        mine = id(part)
        if self._reset_by - {mine} and mine not in self._adding | self._reset_by:
            self._reset_by.add(mine)
            return True
        self._reset_by.add(mine)
        self._dropped |= self._adding
        self._dropped.discard(mine)
        self._adding.discard(mine)
        self.updates.clear()
        self.called = False
        return False

    def copies(self, parts: MetricParts) -> bool:
        """Return whether the metric holds what another one holds, as a collection has copied it."""
        if self.metric is parts.metric or (self.updates and self.is_whole):
            return False
        states = states_of(self.metric, every=True)
        return states.keys() == parts.left.keys() and _same(states, parts.left)

    @property
    def has_lost(self) -> bool:
        """Whether a reset of one part has dropped what another one has added, which the whole batch would not."""
        return bool(self._dropped & self._adding)

    @property
    def is_whole(self) -> bool:
        """Whether nothing but the updates has changed the states."""
        states = [*(update.before for update in self.updates[1:]), states_of(self.metric)]
        after = [update.after for update in self.updates]
        return all(_same(one, other) for one, other in zip(after, states, strict=True))


class _RecordedMethod:
    """Takes the place of a method of a metric. A copy of the metric has the method."""

    def __init__(self, metric: Metric, method: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self._metric, self._method, self._instead = metric, method, instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(self._method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(type(self._metric), self._method.__name__).__get__(memo[id(self._metric)])


class MetricUpdates:
    """The updates of metrics in one step, or in one side of a comparison.

    Args:
        rules: what comparisons have shown. The updates of metrics that count samples are not recorded.
        every: whether to record those of all metrics, as a comparison does.

    Attributes:
        doubtful: names of metrics that were corrected by one of several rules that give something else.
    """

    def __init__(self, rules: MetricRules, *, every: bool = False) -> None:
        self._rules, self._every = rules, every
        self._recorders: dict[str, _Recorder] = {}
        self._members: dict[int, list[_Recorder]] = {}
        self.doubtful: set[str] = set()
        self._corrected: dict[str, tuple[MetricParts, dict[str, str]]] = {}
        self._is_paused = False
        """Also within a call of a metric, which may reset itself and call others."""

    @contextlib.contextmanager
    def recorded(self, metrics: Mapping[str, Metric], current: Callable[[], Any]) -> Iterator[None]:
        """Record updates of ``metrics``. ``current`` returns the recorder of logs of the calling microbatch."""
        self._current = current
        kept = {name for name, metric in metrics.items() if metric._defaults}
        if not self._every:
            kept -= {name for name, rules in self._rules.items() if not rules}
        self._recorders = {name: _Recorder(one, self, records=name in kept) for name, one in metrics.items()}
        by_id = {id(recorder.metric): recorder for recorder in self._recorders.values()}
        self._members = {
            key: [by_id[id(m)] for m in one.metric.modules() if id(m) in by_id] for key, one in by_id.items()
        }
        for recorder in self._recorders.values():
            recorder.put()
        try:
            yield
        finally:
            for recorder in self._recorders.values():
                recorder.remove()
            # Recorders refer back to this object, so only a garbage collection frees it, and what `_current` refers to:
            # parts, with their tensors on devices.
            del self._current

    def call(self, recorder: _Recorder, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call or update a metric, and record what that changes in it and in those that are parts of it."""
        if self._is_paused:  # a call updates, too
            return function(*args, **kwargs)
        with self.paused():
            members = self._members[id(recorder.metric)]
            before = [(m, m.metric._update_count, states_of(m.metric) if m.records else {}) for m in members]
            output = function(*args, **kwargs)
            part, given = self._current(), next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            part.see_given(given)
            called = getattr(function, "__name__", "") == "forward"
            for member, count, states in before:
                if member is recorder or member.metric._update_count != count:
                    weight = part.counts.behind(given)
                    member.add(part, states, weight, called=called and member is recorder)
            return output

    def reset(self, recorder: _Recorder, function: Callable[[], Any]) -> Any:
        """Reset a metric, unless another part has done so for the batch."""
        if not self._is_paused and recorder.is_reset_again(self._current()):
            return None
        return function()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record meanwhile."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def updated(self) -> set[str]:
        """Return the names of metrics to which updates that were recorded have added something."""
        return {
            name for name, recorder in self._recorders.items()
            if any(not _same(update.before, update.after) for update in recorder.updates)
        }  # fmt: skip

    def first_part(self, name: str, parts: Sequence[Any]) -> int:
        """Return the number of the first of ``parts`` that has added something to a metric."""
        adding = {id(u.part) for u in self._recorders[name].updates if not _same(u.before, u.after)}
        return next((number for number, part in enumerate(parts) if id(part) in adding), 0)

    def lost(self) -> list[str]:
        """Return the names of metrics of which a reset of one part has dropped what another one has added."""
        return [name for name, recorder in self._recorders.items() if recorder.has_lost]

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the numbers and tensors that updated metrics keep beside their states, by name."""
        return {name: _beside_states(one.metric) for name, one in self._recorders.items() if one.has_updates}

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
                    found[name] = MetricParts(
                        recorder.metric, updates, states_of(recorder.metric, every=True), recorder.called
                    )
        return found

    def correct(
        self, parts: Sequence[Any], weights: Sequence[float], sizes: Sequence[float], rules: MetricRules | None = None
    ) -> None:
        """Leave in the metrics that count updates what the whole batch would have added.

        Args:
            parts: see `added`.
            weights: how much each part counts.
            sizes: samples of each part.
            rules: what comparisons have shown since; None for what they had before.
        """
        rules = self._rules if rules is None else rules
        if len(parts) < 2 or not any(rules.get(name) for name in self.updated()):
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            found = {name: added for name, added in self.added(parts).items() if name not in self._corrected}
            for name, added in (found | {name: added for name, (added, _) in self._corrected.items()}).items():
                if (of_metric := rules.get(name)) and set(of_metric) == set(added.left):
                    by = {state: fit[0] for state, fit in of_metric.items()}
                    before = self._corrected[name][1] if name in self._corrected else dict.fromkeys(by, SUM)
                    if by != before:
                        alike = [one for one in self._recorders.values() if one.copies(added)]
                        self._correct(self._recorders[name], added, before, by, weights, sizes)
                        for other in alike:
                            for state in of_metric:
                                getattr(other.metric, state).copy_(getattr(added.metric, state))
                    self._corrected[name] = added, by
                    if added.skips(weights) or any(
                        added.differ(state, fit, weights, sizes) for state, fit in of_metric.items()
                    ):
                        self.doubtful.add(name)
                    else:
                        self.doubtful.discard(name)

    def _correct(
        self, recorder: _Recorder, added: MetricParts, before: Mapping[str, str], by: Mapping[str, str],
        weights: Sequence[float], sizes: Sequence[float],
    ) -> None:  # fmt: skip
        metric = recorder.metric
        of_batch = {state: added.merged(state, rule, weights, sizes) for state, rule in by.items()}
        for state, value in of_batch.items():
            now: Tensor = getattr(metric, state)
            total = now.cpu().double() - added.merged(state, before[state], weights, sizes) + value
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
    """What parts have added to one metric: updates by the number of the part, and all states that they have left.

    ``called`` says whether it was called, instead of updated.
    """

    metric: Metric
    updates: list[tuple[int, Update]]
    left: dict[str, Any]
    called: bool

    def averaged(self) -> str:
        """Return the name of a state that calls average over updates, if there is one."""
        reductions = self.metric._reductions
        return next((s for s in self.left if self.called and reductions[s] is dim_zero_mean), "")

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

    def skips(self, weights: Sequence[float]) -> bool:
        """Return whether some of the parts that count have updated the metric more often than others."""
        numbers = [number for number, _ in self.updates]
        return len({numbers.count(part) for part, weight in enumerate(weights) if weight}) > 1

    def differ(self, state: str, rules: Sequence[str], weights: Sequence[float], sizes: Sequence[float]) -> bool:
        """Return whether ``rules`` lead to different values of what the whole batch adds to ``state``."""
        if len(rules) < 2 or not any(float(size) for size in sizes):
            return False
        values = [self.merged(state, rule, weights, sizes) for rule in rules if rule != SUM]
        slack = self.rounding(state)
        return any(bool(((value - values[0]).abs() > slack + 1e-6 * values[0].abs()).any()) for value in values[1:])


def states_of(metric: Metric, *, every: bool = False) -> dict[str, Any]:
    """Return copies of a metric's states on the host: of tensors that may be sums, or of ``every`` one."""
    with torch._C.DisableTorchFunction():
        found: dict[str, Any] = {}
        for name, reduction in metric._reductions.items():
            value = getattr(metric, name)
            if isinstance(value, Tensor) and (every or (reduction in _ADDED and _is_real(value))):
                found[name] = value.detach().cpu().clone()
            elif every:
                found[name] = list(value)
        return found


_OF_ANY = frozenset(vars(SumMetric()))
"""Attributes that any metric has."""


def _beside_states(metric: Metric) -> dict[str, Any]:
    own = {**vars(metric), **metric._buffers}
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in own.items()
        if name not in _OF_ANY and name not in metric._defaults and isinstance(value, (Tensor, int, float))
    }


def _is_real(value: Tensor) -> bool:
    return not (value.is_complex() or value.dtype is torch.bool)


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
        if not found[state] and whole.metric._reductions[state] is None:
            del found[state]
        elif not found[state]:
            return state
    if all(SUM in rules for rules in found.values()):
        return found
    is_sum = [SUM in rules for rules in found.values() if len(rules) < 1 + len(_RULES)]
    for state, rules in found.items():  # nothing added fits all: a sum is then one beside sums only
        means = tuple(rule for rule in rules if rule != SUM)
        found[state] = means if means and not (all(is_sum) and SUM in rules) else rules
    return found


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(map(_is_same, one.values(), other.values()))


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num())
