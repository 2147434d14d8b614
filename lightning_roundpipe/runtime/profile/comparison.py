"""Compares what training_step has produced on a whole batch with what it has produced in parts."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_roundpipe.runtime.batch.log_rules import FLOOR, Calls, Fitting, How, Settled, fitting_of
from lightning_roundpipe.runtime.batch.log_sizes import COUNTED, LARGEST, are_counts, fitting_sizes
from lightning_roundpipe.runtime.batch.logs import RULES, USUAL, Key, counts_of, ruled
from lightning_roundpipe.runtime.batch.metric_updates import SUM, MetricParts, MetricRules, fitting
from lightning_roundpipe.runtime.layer_calls.arguments import flatten
from lightning_roundpipe.runtime.profile.custom_backward import CustomBackwards
from lightning_roundpipe.runtime.profile.recorded_operations import OperationRecorder
from lightning_roundpipe.runtime.profile.verdict import Difference
from lightning_roundpipe.runtime.user_code.left_behind import ABSENT

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative difference that rounding makes, by dtype of the computation."""
LOSS, OUTPUT = "the loss", "what it returns"
_ATTRIBUTE = "attribute or buffer "
"""What the places of most differences are called."""


@dataclass
class Shown:
    """What one side of a comparison has produced: the whole batch, or its parts, merged.

    Attributes:
        output, loss: as training_step returned them; ``loss`` is None if no microbatch has one.
        last_loss: that of the last microbatch.
        logged: names and merged values, in order.
        logs: the logged values of each part, and where their counts are found.
        calls: what user code has called for each.
        weights: of each part in the loss.
        spread: whether the targets were distributed over the parts otherwise than the samples.
        is_mixed: whether what layers return reaches the loss also beside means over targets.
        metrics: values of metrics that were updated, by description.
        added: what was added to each metric, by its name, before it was merged.
        beside: what updated metrics keep beside their states.
        left: changes to attributes, buffers and parameters, by path.
        settings: changes to the trainer, schedulers and settings of optimizers, by path.
        elsewhere: changes to numbers and lengths in callbacks, data sets, globals, closures and classes, by path.
        alike: whether all random numbers were the same for a sample in any part.
        backwards: what the user's own backward code gives.
        operations: what the last of its batches has called.
    """

    output: Any = None
    loss: Tensor | None = None
    last_loss: Tensor | None = None
    logged: list[tuple[str, Any]] = field(default_factory=list)
    logs: Settled = field(default_factory=Settled)
    calls: dict[Key, Calls] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    spread: bool = False
    is_mixed: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    added: dict[str, MetricParts] = field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, Any] = field(default_factory=dict)
    alike: bool = True
    backwards: CustomBackwards | None = None
    operations: OperationRecorder = field(default_factory=OperationRecorder)

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        """Record a merged value; takes the place of ``LightningModule.log``."""
        self.logged.append((name, value))


class Comparison:
    """Finds the first value that differs by more than rounding.

    Args:
        tolerance: the relative difference that is rounding; that of a tensor's own dtype, if this is more.
        ignored: what is not compared.
        collected: takes everything that differs, if given; the search does not end at the first value then.

    Attributes:
        found: the first difference; None so far.
        open_metrics: whether nothing shows if a metric counts updates.
        rules, fixed_sizes, size_rules, metric_rules, uneven_metrics, kept_rows, lost_rows, open: see `Verdict`.
    """

    def __init__(
        self, tolerance: float, sizes: list[int], ignored: Iterable[str] = (), collected: set[str] | None = None
    ) -> None:
        self._tolerance, self._sizes = tolerance, sizes
        self._ignored, self._collected = {*ignored}, collected
        self.found: Difference | None = None
        self.rules: dict[How, Fitting] = {}
        self.fixed_sizes: set[Key] = set()
        self.size_rules: dict[Key, set[str]] = {}
        self.metric_rules: MetricRules = {}
        self.uneven_metrics: dict[str, str] = {}
        self.open_metrics = False
        self.kept_rows: set[str] = set()
        self.lost_rows: list[str] = []
        self.open = False

    def see(self, what: str, whole: Any, parts: Any) -> None:
        """Compare a value, described by ``what``."""
        if what in self._ignored or (self.found is not None and self._collected is None):
            return
        if whole is ABSENT or parts is ABSENT or type(whole) is not type(parts):
            numbers = isinstance(whole, (int, float)) and isinstance(parts, (int, float))
            if not numbers and whole is not parts:
                self._differs(what, whole, parts)
            if not numbers:
                return
        if not self._alike(whole, parts):
            self._differs(what, whole, parts)

    def _alike(self, whole: Any, parts: Any, dtype: torch.dtype | None = None) -> bool:
        """Return whether two values are the same but for rounding, also that of values of ``dtype``."""
        (one, spec), (other, found) = flatten(whole), flatten(parts)
        near = functools.partial(self._near, tolerance=0.0 if dtype is None else TOLERANCE.get(dtype, 0.0))
        return bool(spec == found) and len(one) == len(other) and all(map(near, one, other))

    def see_logs(self, whole: Shown, parts: Shown, known: Mapping[Key, Collection[str]] | None = None) -> None:
        """Compare the logged values, in order under each name.

        Args:
            whole, parts: the two sides.
            known: rules of which each is one, from how the values are computed; others are not tried if these fit.
        """
        one, other = _by_name(whole.logged), _by_name(parts.logged)
        for name in {**one, **other}:
            a, b = one.get(name, []), other.get(name, [])
            if len(a) != len(b):
                self.see(f"the number of values logged as {name!r}", len(a), len(b))
            for nth, (x, y) in enumerate(zip(a, b, strict=False)):
                key = name, nth
                said = (shown.logs.said.get(key, []) for shown in (whole, parts))
                size, of_parts = (set[Any](one.kwargs.get("batch_size") for one in side) for side in said)
                if len(size) == 1 and of_parts and None not in size | of_parts:
                    given: list[Any] = [p.kwargs["batch_size"] for p in parts.logs.said[key]]
                    counts: Any = counts_of(parts.logs.said[key], parts.weights)
                    fits = self.size_rules[key] = fitting_sizes(size.pop(), given, counts)
                    if len(of_parts) == 1 and LARGEST in fits and not (COUNTED in fits and are_counts(given, counts)):
                        self.fixed_sizes.add(key)
                if isinstance(x, Metric):
                    continue
                dtype = x.dtype if isinstance(x, Tensor) else None
                x, y = _number(x), _number(y)
                rules = [USUAL] if self._alike(x, y, dtype) else []
                of_operations = (known or {}).get(key, frozenset())
                rules += self._rules_for(key, x, dtype, parts, dict.fromkeys((*RULES, *sorted(of_operations))))
                values = [_number(said.value) for said in parts.logs.said.get(key, [])]
                numbers = [float(v) for v in values if isinstance(v, Tensor) and v.numel() == 1]
                way, calls = parts.logs.ways.get(key), parts.calls.get(key, frozenset())
                self.rules[key, calls, way and way.site] = fitting_of(rules, numbers, of_operations)
                if not rules:
                    self.see(f"the logged {name!r}", x, y)

    def see_metrics(self, whole: Shown, parts: Shown, known: MetricRules) -> None:
        """Compare what was added to metrics, which may have equal values. Sets ``metric_rules`` and ``uneven_metrics``.

        Args:
            whole, parts: the two sides.
            known: rules that comparisons before have shown.
        """
        for name, one in whole.added.items():
            if (other := parts.added.get(name)) is None or set(other.left) != set(one.left):
                continue
            fits = fitting(one, other, parts.weights, self._sizes, self._are_near) if one.updates[0][1].after else {}
            state = fits if isinstance(fits, str) else ""
            if not isinstance(fits, str):
                others = (
                    s for s in one.comparable() if s not in fits and not self._are_equal(one.left[s], other.left[s])
                )
                state = next(others, "")
                counts = any(SUM not in rules for rules in fits.values())
                before = known.get(name, {})
                is_open = bool(fits) and all(SUM in rules and len(rules) > 1 for rules in fits.values())
                self.open_metrics |= is_open and not before
                if not state and (counts or before):
                    rules = {s: tuple(r for r in before.get(s, found) if r in found) for s, found in fits.items()}
                    state = next((s for s, fit in rules.items() if not fit), "")
                    if counts and set(fits) != set(one.left):
                        state = next(s for s, fit in fits.items() if SUM not in fit)
                    elif not state:
                        self.metric_rules[name] = rules
                elif not state and not is_open:
                    self.metric_rules[name] = {}
            if state or (state := one.averaged()):
                self.uneven_metrics.setdefault(name, state)
        for name, attributes in whole.beside.items():
            for key, value in parts.beside.get(name, {}).items():
                if key in attributes and not self._near(attributes[key], value):
                    self.uneven_metrics.setdefault(name, key)

    def _are_near(self, one: Tensor, other: Tensor, slack: float) -> bool:
        gap = (one - other).abs().nan_to_num(math.inf)
        return self._near(one, other) or bool((gap <= slack).all())

    def _are_equal(self, whole: Any, parts: Any) -> bool:
        """Return whether two states are the same, or lists whose numbers are, in any order."""
        if not isinstance(whole, list):
            return self._near(whole, parts)
        whole, parts = ([x.flatten() if isinstance(x, Tensor) else x for x in side] for side in (whole, parts))
        if not all(isinstance(x, Tensor) for x in (*whole, *parts)) or not whole or not parts:
            return True  # texts and the like, which are there for each sample
        one, other = torch.cat(whole), torch.cat(parts)
        return self._near(one.double().sort().values, other.double().sort().values)

    def _rules_for(
        self, key: Key, whole: Any, dtype: torch.dtype | None, parts: Shown, rules: Iterable[str]
    ) -> list[str]:
        """Return those of ``rules`` by which the parts' values merge into ``whole``."""
        said = parts.logs.said.get(key, [])
        if not said or not isinstance(whole, Tensor):
            return []
        values, sizes = [_number(p.value) for p in said], [float(self._sizes[p.part]) for p in said]
        weights = [parts.weights[p.part] if p.weight is None else p.weight for p in said]
        found = []
        for rule in rules:
            with contextlib.suppress(Exception):
                if self._alike(whole, _number(ruled(rule, values, weights, sizes)), dtype):
                    found.append(rule)
        return found

    def see_backwards(self, whole: CustomBackwards, parts: CustomBackwards) -> None:
        """Compare the gradients that pass through the loss, and through the user's own backward code."""
        for one, other in whole.different(parts, self._tolerance):
            at = max((0, 1), key=lambda i: abs(float(one.sums[i] - other.sums[i])))
            where = f", in whose backward {one.code} runs once for each part," if one.code else ""
            self.found = self.found or Difference(
                f"a sum over the gradient of {one.of}{where}",
                f"{float(one.sums[at]):.6g}", f"{float(other.sums[at]):.6g}",
            )  # fmt: skip

    def see_elsewhere(self, path: str, whole: Any, parts: Any) -> None:
        """Compare what a global, a callback or the like keeps at ``path``: numbers, lengths and rows of samples."""
        if any(isinstance(value, Tensor) and value.dim() for value in (whole, parts)):
            if self._are_rows(whole, parts) and self._near(whole[-self._sizes[-1] :], parts):
                self.lost_rows.append(path)
            return
        self.see_left(path, whole, parts, "what is kept in ")
        if self.found is not None:
            self.found = replace(self.found, elsewhere=True)

    def see_rows(self, path: str, whole: Any, parts: Any) -> None:
        """Note an attribute inside a layer that keeps a row of each sample; nothing else is compared of these."""
        if self._are_rows(whole, parts) and self._near(whole[-self._sizes[-1] :], parts):
            self.kept_rows.add(path)

    def _are_rows(self, whole: Any, parts: Any) -> bool:
        """Return whether ``whole`` has a row for each sample, and ``parts`` for each of the last part."""
        if not (isinstance(whole, Tensor) and isinstance(parts, Tensor) and whole.dim() and parts.dim()):
            return False
        rows = (len(whole), len(parts))
        return rows == (sum(self._sizes), self._sizes[-1]) and whole.shape[1:] == parts.shape[1:]

    def see_left(self, path: str, whole: Any, parts: Any, what: str = _ATTRIBUTE) -> None:
        """Compare what is left at ``path``. Of a tensor with a row per sample, parts leave only the last one's rows."""
        if self._are_rows(whole, parts):
            whole = whole[-self._sizes[-1] :]
            if what == _ATTRIBUTE:
                self.kept_rows.add(path)
        self.open |= what == _ATTRIBUTE and _may_coincide(whole)
        name = f"the length of {path[4:-1]!r}" if path.startswith("len(") else f"{what}{path!r}"
        self.see(name, whole, parts)

    def leave_the_same(self, path: str, whole: Mapping[str, Any], parts: Mapping[str, Any], *, rows: bool) -> bool:
        """Return whether what two sides have left at ``path`` is the same or, with ``rows``, the last part's of it."""
        a, b = whole.get(path, ABSENT), parts.get(path, ABSENT)
        if b is ABSENT or a is ABSENT:  # what is as it was before does not show
            return a is b
        return self._near(a[-self._sizes[-1] :] if rows and self._are_rows(a, b) else a, b)

    def _near(self, a: Any, b: Any, tolerance: float = 0.0) -> bool:
        tolerance = max(tolerance, self._tolerance)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype is not b.dtype:
                return False
            if not (a.is_floating_point() or a.is_complex()) or not a.numel():
                return torch.equal(a, b)
            x, y = a.detach().cpu().double().flatten(), b.detach().cpu().double().flatten()
            if not torch.equal(x.isfinite(), y.isfinite()):
                return False
            x, y = torch.nan_to_num(x), torch.nan_to_num(y)
            tolerance = max(tolerance, TOLERANCE.get(a.dtype, 0.0))
            return float((x - y).abs().max()) <= tolerance * (float(torch.maximum(x.abs(), y.abs()).max()) + FLOOR)
        if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
            if not (math.isfinite(a) and math.isfinite(b)):
                return str(a) == str(b)
            return abs(a - b) <= tolerance * (max(abs(a), abs(b)) + FLOOR)
        try:
            return a is b or bool(a == b) or not isinstance(a, (str, bytes, bool, int, float, type(None)))
        except Exception:
            return True  # not comparable: count them as equal

    def _differs(self, what: str, whole: Any, parts: Any) -> None:
        if self._collected is not None:
            self._collected.add(what)
        if isinstance(whole, Tensor) and isinstance(parts, Tensor) and whole.shape == parts.shape and whole.dim():
            gap = (whole.detach().cpu().double() - parts.detach().cpu().double()).abs().flatten()
            at = int(gap.nan_to_num(math.inf).argmax())
            what = f"{what}, at {[int(i) for i in np.unravel_index(at, whole.shape)]},"
            whole, parts = whole.flatten()[at], parts.flatten()[at]
        self.found = self.found or Difference(what, _text(whole), _text(parts))


def _may_coincide(value: Any) -> bool:
    """Return whether parts may have left ``value``, too, by chance: it is a number, or zeros."""
    if isinstance(value, Tensor):
        return value.numel() == 1 or not bool(value.any())
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        return value.detach().cpu().double().squeeze()
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, (int, float, np.number)) else value


def _by_name(logged: list[tuple[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, value in logged:
        found.setdefault(name, []).append(value)
    return found


def _text(value: Any) -> str:
    if value is ABSENT:
        return "not there"
    if isinstance(value, Tensor):
        return f"{float(value):.6g}" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
