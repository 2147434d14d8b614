"""Follows how the samples of a batch flow into its loss, and finds losses that parts of a batch cannot give.

A comparison of values shows what the compared samples show: a mean over a mask is a mean over samples as long as the
mask leaves nothing out, ``relu(mean - margin)`` has no gradient below its margin, and a term of weight zero no value.
The operations that lead to the loss show it in every batch:

    the rehearsals on the whole and on a part call the same operations, in order ── [1]
    a tensor has a row for each sample if its size follows theirs; else it is a value over the samples ── [2]
    a loss is the mean or sum of its parts as long as only linear operations follow such a value ── [3]
    divided by a count that it has found in the batch, it is a mean by these counts ── [4]

Layers are operations like others. What an unknown operation does with rows is left to the comparison of values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from lightning_roundpipe.runtime.batch.logs import USUAL, Key
from lightning_roundpipe.runtime.profile.recorded_operations import (
    MADE,
    PICKING,
    SHAPED_LIKE,
    Operation,
    OperationRecorder,
)
from lightning_roundpipe.runtime.user_code.own_means import Counting, How

_ADDING = {"add", "sub", "stack", "cat", "concat", "hstack", "vstack", "lerp", "setitem", "copy"}
_PASSING = {
    "neg", "positive", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "permute", "transpose", "t",
    "contiguous", "clone", "detach", "alias", "to", "type", "float", "double", "half", "bfloat16", "long", "int", "cpu",
    "cuda", "type_as", "select", "mean", "nanmean", "as_tensor", "nan_to_num", "broadcast_to", "repeat", "unbind",
    "split", "chunk", "movedim", "narrow", "index_select", "real", "atleast_1d", "cumsum", "get",
}  # fmt: skip
"""Linear operations on one value [3]; ``nan_to_num`` is one for all values that a training survives."""
_COMPARING = {"gt", "lt", "ge", "le", "eq", "ne", "isnan", "isinf", "isfinite", "logical_not", "logical_and", "and"}
_SUMMING = {
    "sum", "nansum", "dot", "vdot", "inner", "matmul", "rmatmul", "mm", "bmm", "mv", "einsum", "tensordot", "addmm",
    "baddbmm", "count_nonzero", "bincount", "histc", "trace", "scatter_add", "index_add", "linear",
}  # fmt: skip
_NOT_LINEAR = {
    "max", "amax", "min", "amin", "aminmax", "std", "var", "std_mean", "var_mean", "norm", "vector_norm", "matrix_norm",
    "logsumexp", "prod", "median", "nanmedian", "quantile", "nanquantile", "mode", "cov", "corrcoef", "topk",
    "kthvalue", "dist", "any", "all", "argmax", "argmin",
}  # fmt: skip
"""Operations on rows of which the result on the whole does not follow from those on parts as in a sum or mean."""

_DIVIDED = "divides by a count of its own in each part"
_PICKED = "is a mean over the elements that a mask picks, whose number is another one in each part"


@dataclass(frozen=True)
class Flow:
    """How a tensor depends on the samples [2].

    Attributes:
        kind: "fixed" for one that does not; "rows" for one with something of each sample; "picked" for rows whose
            number depends on the values of the batch; "value" for one over the samples; "coupled" for one that parts
            cannot give.
        degree: how it grows with the number of samples: 0 as a mean does, 1 as a sum does; None if unknown.
        divisor: identifies the counts that it is a mean by; None if it is one by samples.
        countings: how to find these counts; None if that is unknown.
        inverse: whether it is one over such a count.
        counts_targets: whether it is a mean over targets that are counted already.
        why: what couples it, or divides it.
        within_model: whether that is in the model.
    """

    kind: Literal["fixed", "rows", "picked", "value", "coupled"] = "fixed"
    degree: float | None = 0.0
    divisor: int | None = None
    countings: frozenset[Counting] | None = frozenset()
    inverse: bool = False
    counts_targets: bool = False
    why: str = ""
    within_model: bool = False


_FIXED, _ROWS = Flow(), Flow("rows")


@dataclass(frozen=True)
class Coupling:
    """What keeps a loss from being the mean, or the sum, of its parts by samples, whether or not its values show it.

    Attributes:
        why: describes it.
        within_model: whether it is in the model, so that cut calls do not help.
        by_counts: whether the loss is a mean by counts that each part finds.
        countings: how to find these; empty if that is unknown.
    """

    why: str
    within_model: bool = False
    by_counts: bool = False
    countings: frozenset[Counting] = frozenset()

    def __str__(self) -> str:
        return f"the loss may be another one, though not on the samples that were compared: {self.why}"


@dataclass(frozen=True)
class LossFlow:
    """What leads to the loss and to the logged values.

    Attributes:
        coupling: what keeps the loss from being a mean or sum of its parts; None if nothing does, or it is unknown.
        rules: the rules by which logged values of parts merge, as far as that is known, by name and number.
        countings: how to find the counts that logged values are means by.
    """

    coupling: Coupling | None = None
    rules: Mapping[Key, str] = field(default_factory=dict)
    countings: frozenset[Counting] = frozenset()


def flow_of(whole: OperationRecorder, part: OperationRecorder, samples: tuple[int, int]) -> LossFlow:
    """Return what the operations of a rehearsal show, which is nothing if the part has called others than the whole.

    Args:
        whole, part: the operations on the whole and on a part.
        samples: number of samples of each.
    """
    if (part.loss, part.logged) != (whole.loss, whole.logged) or not _are_the_same(whole.operations, part.operations):
        return LossFlow()
    flows = _Flows(whole, part, samples)
    rules: dict[Key, str] = {}
    countings: frozenset[Counting] = frozenset()
    said: dict[str, int] = {}
    for name, number in whole.logged:
        nth = said[name] = said.get(name, -1) + 1
        flow = _FIXED if number is None else flows.of(number)
        counted = flows.countings(flow)
        if flow.kind == "value" and (counted or flow.counts_targets):
            rules[name, nth] = USUAL
            countings |= counted
        elif flow.kind == "value" and flow.divisor is None and flow.degree in (0.0, 1.0):
            rules[name, nth] = "sum" if flow.degree else "mean over samples"
    coupling, loss = None, _FIXED if whole.loss is None else flows.of(whole.loss)
    if loss.kind == "coupled":
        coupling = Coupling(loss.why, loss.within_model)
    elif loss.divisor is not None:
        counted = frozenset() if loss.counts_targets else flows.countings(loss)
        coupling = Coupling(loss.why, loss.within_model, by_counts=True, countings=counted)
    return LossFlow(coupling, rules, countings)


def _are_the_same(one: Sequence[Operation], other: Sequence[Operation]) -> bool:
    """Return whether both runs have called the same operations on the same tensors [1]."""
    if len(one) != len(other):
        return False
    return all((a.name, a.given, a.made) == (b.name, b.given, b.made) for a, b in zip(one, other, strict=True))


class _Flows:
    """Follows the samples through all operations."""

    def __init__(self, whole: OperationRecorder, part: OperationRecorder, samples: tuple[int, int]) -> None:
        self._whole, self._part = whole.tensors, part.tensors
        self._ratio = samples[0] / samples[1]
        self._answers: list[tuple[float, float, int]] = []
        """Numbers that user code has read on the whole and on the part, and the tensor that they come from."""
        self._flows: dict[int, Flow] = {}
        self._first: dict[int, int] = {}
        """By tensor, the first one that the same operation has given on the same tensors."""
        self._calls = Counter((one.place, one.called) for one in whole.operations)
        self._counting: Counter[Counting] = Counter()
        seen: dict[Hashable, int] = {}
        for one, other in zip(whole.operations, part.operations, strict=True):
            flows = [self.of(number) for number in one.given]
            if any(flow.kind in ("value", "coupled") for flow in flows):
                self._answers += [(a, b, one.given[0]) for a, b in zip(one.answers, other.answers, strict=False)]
            for number in one.made:
                self._flows[number] = self._result(number, one, other, flows)
            for at, number in enumerate(one.made):
                given = tuple(self._first.get(x, x) for x in one.given)
                self._first[number] = seen.setdefault((one.name, given, one.constants, at), number)

    def of(self, number: int) -> Flow:
        """Return the flow of a tensor."""
        if number not in self._flows:
            self._flows[number] = self._as_values_show(number)
        return self._flows[number]

    def _as_values_show(self, number: int, *, of_numbers: bool = False) -> Flow:
        """Return the flow of a tensor that follows from no other one, as its sizes and values show."""
        one, other = self._whole[number], self._part[number]
        if one.is_parameter:
            return _FIXED
        if one.shape != other.shape:
            return _ROWS
        if one.values is None or other.values is None or torch.equal(one.values, other.values):
            return _FIXED
        number_of_samples = of_numbers and one.values.numel() == 1
        if number_of_samples and math.isclose(float(one.values), float(other.values) * self._ratio):
            return Flow(degree=1.0)
        return Flow("value", None)

    def _result(self, number: int, one: Operation, other: Operation, flows: list[Flow]) -> Flow:
        if one.name in SHAPED_LIKE:
            return self._as_values_show(number)
        if (coupled := next((flow for flow in flows if flow.kind == "coupled"), None)) is not None:
            return coupled
        rows = [flow for flow in flows if flow.kind in ("rows", "picked")]
        values = [flow for flow in flows if flow.kind == "value"]
        if one.is_layer:  # it may take counts, and what other layers give
            floats = [flow for x, flow in zip(one.given, flows, strict=True) if self._whole[x].dtype.is_floating_point]
            values = [flow for flow in floats if flow.kind == "value" and flow.degree is not None]
        if not rows and not values:
            if all(flow == _FIXED for flow in flows) or one.is_layer:
                return self._as_values_show(number, of_numbers=one.name in MADE)
            return max(flows, key=lambda flow: flow.degree or 0.0)
        if one.picks and rows:
            return replace(rows[0], kind="picked")
        if self._whole[number].shape != self._part[number].shape:
            if not rows:
                return self._coupled(one, "gives samples a value over all samples")
            return self._of_rows(number, one, other, rows, values)
        if rows:
            return self._reduced(number, one, rows, values)
        return self._of_values(number, one, other, flows, values)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _of_rows(self, number: int, one: Operation, other: Operation, rows: list[Flow], values: list[Flow]) -> Flow:
        """Return the flow of a result with rows."""
        if values:
            divided = self._divided(rows[0], values[0], one) if len(values) == 1 else None
            return divided or self._coupled(one, "combines samples with a value over all samples")
        if any(self._are_samples(one.given[0], dim) for dim in one.along):
            return self._coupled(one, "works along the samples")
        if (
            math.isclose(self._growth(number), self._ratio**2)
            and max(map(self._growth, one.given)) < self._ratio * 1.01
        ):
            return self._coupled(one, "makes a value for each pair of samples")
        divided_rows = [flow for flow in rows if flow.divisor is not None]
        if len({flow.divisor for flow in divided_rows}) > 1:
            return self._coupled(one, "combines means over different counts")
        found = divided_rows[0] if divided_rows else rows[0]
        picked = any(flow.kind == "picked" for flow in rows)
        return self._scaled(replace(found, kind="picked" if picked else "rows"), one, other)

    def _reduced(self, number: int, one: Operation, rows: list[Flow], values: list[Flow]) -> Flow:
        """Return the flow of a value over the samples, from their rows."""
        if one.name in PICKING:
            fixed = self._as_values_show(number) == _FIXED
            return _FIXED if fixed else self._coupled(one, "takes a sample by its place in the batch")
        if one.name in _NOT_LINEAR:
            if not self._whole[number].dtype.is_floating_point:
                return _FIXED  # the longest of lengths and the like
            return self._coupled(one, "is taken over the samples")
        if values:
            return self._coupled(one, "combines samples with a value over all samples")
        value = replace(rows[0], kind="value")
        is_mean = one.reduction not in ("", "sum") or one.name in ("mean", "nanmean")
        if one.counts_targets and is_mean:
            return replace(value, counts_targets=True)
        if is_mean:
            if one.name == "nanmean":
                return self._by_counts(value, -1 - number, None, one, _PICKED)
            if any(flow.kind == "picked" for flow in rows):
                return self._by_counts(value, -1 - number, "elements", one, _PICKED)
            return value
        if (one.reduction == "sum" or one.name in _SUMMING) and value.degree is not None:
            return replace(value, degree=value.degree + 1)
        return replace(value, degree=None)

    # -- values over the samples --------------------------------------------------------------------------------------

    def _of_values(
        self, number: int, one: Operation, other: Operation, flows: list[Flow], values: list[Flow]
    ) -> Flow:  # fmt: skip
        """Return the flow of a result of values over the samples."""
        name, alone, first = one.name, len(values) == 1, values[0]
        if one.is_layer:
            return self._as_values_show(number)
        if alone and (name in ("add", "sub") or name in _SUMMING or name in _PASSING):
            return _changed(first)
        if name in _ADDING or name in _PASSING:
            return self._added(one, values)
        if alone and (name == "mul" or (name == "div" and self._operand(one, 0) is first)):
            return self._scaled(_changed(first), one, other)
        if name in ("mul", "div") and len(values) == 2:
            divided = self._divided(first, values[1], one)
            if divided is None and name == "mul":
                divided = self._divided(values[1], first, one)
            return divided or self._coupled(one, "joins two values over all samples")
        if not any(self._whole[x].requires_grad for x in one.given):  # counts
            if name in _COMPARING:
                return replace(first, degree=None, countings=None)
            if name in ("where", "maximum", "max"):
                return replace(first, countings=None)
            if name == "clamp" and alone:
                return replace(first, countings=None if first.countings else self._shown(one, "at least"))
            if alone and name in ("reciprocal", "rtruediv", "div"):
                by = one.given[flows.index(first)]
                return replace(_changed(first), divisor=by, inverse=True)
        return self._coupled(one, "takes a value over all samples")

    def _divided(self, dividend: Flow, by: Flow, one: Operation) -> Flow | None:
        """Return the flow of a mean by counts [4]; None if it is something else."""
        if dividend.divisor is not None or dividend.counts_targets or dividend.inverse:
            return None
        if by.inverse and one.name == "mul":
            return self._by_counts(dividend, by.divisor, "inverse", one, _DIVIDED, by)
        number = one.operands[1] if one.name == "div" and len(one.operands) > 1 else None
        if type(number) is not int or self.of(number) is not by or by.divisor is not None or by.counts_targets:
            return None
        if self._whole[number].requires_grad:
            return None
        return self._by_counts(dividend, number, "divisor", one, _DIVIDED, by)

    def _shown(self, one: Operation, how: How | None) -> frozenset[Counting] | None:
        """Return what ``one`` shows of a count; None if that is unknown."""
        if how is None or one.place is None:
            return None
        counting = Counting(one.place, one.called, how)
        self._counting[counting] += 1
        return frozenset({counting})

    def _by_counts(
        self, flow: Flow, divisor: int | None, how: How | None, one: Operation,
        why: str, by: Flow | None = None,
    ) -> Flow:  # fmt: skip
        """Return the flow of a mean by the counts ``divisor``.

        Args:
            flow: what is divided.
            divisor: identifies the counts.
            how: how to find them at the operation; None if that is unknown.
            one: the operation that divides.
            why: describes it.
            by: the flow of the counts; None if they are numbers of elements.
        """
        if flow.divisor is not None:
            return self._coupled(one, why)
        degree = flow.degree if by is None or flow.degree is None or by.degree is None else flow.degree - by.degree
        countings, shown = flow.countings, self._shown(one, how)
        if shown is None or countings is None:
            countings = None
        elif by is None:
            countings |= shown
        else:
            countings = countings | by.countings | shown if by.countings is not None and by.degree == 1.0 else None
        divisor = None if divisor is None else self._first.get(divisor, divisor)
        return replace(
            flow, degree=degree, divisor=divisor, countings=countings, why=_described(one, why),
            within_model=one.within_model,
        )  # fmt: skip

    def _added(self, one: Operation, values: list[Flow]) -> Flow:
        if len({flow.divisor for flow in values}) > 1 or any(flow.inverse for flow in values):
            return self._coupled(one, "adds means over different counts")
        known = [flow for flow in values if flow.degree is not None]
        if len({flow.degree for flow in known}) > 1:
            return self._coupled(one, "adds a sum over the samples and a mean")
        countings: frozenset[Counting] | None = frozenset()
        for flow in values:
            countings = None if countings is None or flow.countings is None else countings | flow.countings
        counts_targets = any(flow.counts_targets for flow in values)
        return replace((known or values)[0], countings=countings, counts_targets=counts_targets)

    def _scaled(self, flow: Flow, one: Operation, other: Operation) -> Flow:
        """Return the flow of a product with, or quotient by, something that is the same for all samples."""
        if one.name not in ("mul", "div"):
            return flow
        sign = 1.0 if one.name == "mul" else -1.0
        grows: float | None
        for mine, its in zip(one.operands, other.operands, strict=True):
            if type(mine) is int:
                factor = self.of(mine)
                grows = sign * (factor.degree or 0.0) if factor.kind == "fixed" else 0.0
            elif type(mine) is float and type(its) is float:
                if (read := self._read(mine, its)) is not None:
                    if sign > 0 or flow.counts_targets:
                        return self._coupled(one, "multiplies by a number that was read from the batch")
                    return self._by_counts(flow, read, "divisor", one, _DIVIDED, self.of(read))
                powers = [p for p in (0.0, 1.0, -1.0) if math.isclose(mine, its * self._ratio**p)]
                grows = sign * powers[0] if powers else None
            else:
                continue
            flow = replace(flow, degree=None if flow.degree is None or grows is None else flow.degree + grows)
        return flow

    def countings(self, flow: Flow) -> frozenset[Counting]:
        """Return how to find the counts that a value is a mean by; nothing if that is unknown.

        A place may call a function several times, for other purposes, too; then it shows nothing.
        """
        found = flow.countings if flow.degree == 0.0 and flow.divisor is not None else None
        if not found or any(self._calls[c.place, c.called] != self._counting[c] for c in found):
            return frozenset()
        return found

    # -- what is seen -------------------------------------------------------------------------------------------------

    def _operand(self, one: Operation, at: int) -> Flow | None:
        number = one.operands[at] if len(one.operands) > at else None
        return self.of(number) if type(number) is int else None

    def _read(self, mine: float, its: float) -> int | None:
        """Return the tensor from which user code has read these two numbers; None if there is none."""
        for one, other, number in self._answers:
            if math.isclose(one, mine, rel_tol=1e-6) and math.isclose(other, its, rel_tol=1e-6):
                return number
        return None

    def _growth(self, number: int) -> float:
        """Return how many times as many elements the tensor has on the whole."""
        one, other = math.prod(self._whole[number].shape), math.prod(self._part[number].shape)
        return one / other if other else 1.0

    def _are_samples(self, number: int, dim: int) -> bool:
        """Return whether the samples are along dimension ``dim`` of the tensor, counted from the last."""
        one, other = self._whole[number].shape, self._part[number].shape
        return len(one) == len(other) and -dim <= len(one) and one[dim] != other[dim]

    def _coupled(self, one: Operation, does: str) -> Flow:
        return Flow("coupled", None, why=_described(one, does), within_model=one.within_model)


def _changed(flow: Flow) -> Flow:
    """Return the flow of a count that is no longer that which a place in user code shows."""
    return replace(flow, countings=None) if flow.divisor is None and flow.countings else flow


def _described(one: Operation, does: str) -> str:
    return f"{one.name} in {one.line} {does}" if one.line else f"{one.name} {does}"
