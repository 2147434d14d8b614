"""Follows how the samples of a batch flow into its loss, and finds losses that parts of a batch cannot give.

A comparison of values shows what the compared samples show: a mean over a mask is a mean over samples as long as the
mask leaves nothing out, ``relu(mean - margin)`` has no gradient below its margin, and a term of weight zero no value.
The operations that lead to the loss show it in every batch:

    the rehearsals on the whole and on a part call the same operations, except for loops over samples ── [1]
    a tensor has a row for each sample if its size follows theirs; else it is a value over the samples ── [2]
    a loss is the mean or sum of its parts as long as only linear operations follow such a value ── [3]
    divided by a count that it has found in the batch, it is a mean by these counts ── [4]

Layers are operations like others. What an unknown operation does with rows is left to the comparison of values.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_roundpipe.runtime.batch.logs import (
    BY_ITS_COUNT,
    LINEAR,
    Key,
    function_of,
    is_of_a_mean,
    of_mean,
    over_samples,
)
from lightning_roundpipe.runtime.batch.losses import ITSELF, Site
from lightning_roundpipe.runtime.profile.recorded_operations import (
    MADE,
    PICKING,
    SHAPED_LIKE,
    Operation,
    OperationRecorder,
)
from lightning_roundpipe.runtime.user_code.inference_writes import IN_PLACE
from lightning_roundpipe.runtime.user_code.target_counts import CountSite, How

_JOINING = {"stack", "cat", "concat", "hstack", "vstack"}
_ADDING = {"add", "sub", "lerp", "setitem", "copy"} | _JOINING
_PASSING = PICKING | {
    "neg", "positive", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "permute", "transpose", "t",
    "contiguous", "clone", "detach", "alias", "to", "type", "float", "double", "half", "bfloat16", "long", "int", "cpu",
    "cuda", "type_as", "mean", "nanmean", "as_tensor", "nan_to_num", "broadcast_to", "repeat", "movedim", "real",
    "atleast_1d", "cumsum", "get",
}  # fmt: skip
"""Linear operations on one value [3]; ``nan_to_num`` is one for all values that a training survives."""
_COMPARING = {"gt", "lt", "ge", "le", "eq", "ne", "logical_not", "logical_and", "logical_or", "and", "or", "invert"}
_GUARDS = {"isnan", "isinf", "isfinite"}
"""Comparisons that have the same result for all values that a training survives."""
_SUMMING = {
    "sum", "nansum", "dot", "vdot", "inner", "matmul", "rmatmul", "mm", "bmm", "mv", "einsum", "tensordot", "addmm",
    "baddbmm", "count_nonzero", "bincount", "histc", "trace", "scatter_add", "index_add", "linear",
}  # fmt: skip
_NOT_LINEAR = {
    "max", "amax", "min", "amin", "aminmax", "std", "var", "std_mean", "var_mean", "norm", "vector_norm", "matrix_norm",
    "logsumexp", "prod", "median", "nanmedian", "quantile", "nanquantile", "mode", "cov", "corrcoef", "topk",
    "kthvalue", "dist", "any", "all", "argmax", "argmin", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_det", "nuclear_norm", "msort", "is_all_true", "is_any_true", "logdet", "slogdet", "cummax", "cummin",
}  # fmt: skip
"""Operations on rows of which the result on the whole does not follow from those on parts as in a sum or mean."""
_EXTREMES = {
    "max": "largest",
    "amax": "largest",
    "any": "largest",
    "min": "smallest",
    "amin": "smallest",
    "all": "smallest",
}
"""Operations on rows, and the rule by which parts merge into their results."""
_COMPUTING = {"add", "sub", "mul", "div", "rtruediv", "pow", "rpow", "remainder", "addcmul", "addcdiv", "lerp"}
_CASTING = {
    "to", "type", "float", "double", "half", "bfloat16", "long", "int", "cpu", "cuda", "detach", "clone", "squeeze",
    "unsqueeze", "reshape", "flatten", "contiguous", "alias",
}  # fmt: skip
"""Operations that keep the value of a number."""
_DISTINCT = {"unique", "unique_consecutive"}
_POWERS = {"root": 0.5, "reciprocal": -1.0}
_LOGARITHMS = {"log": 1.0, "log2": 1.0 / math.log(2), "log10": 1.0 / math.log(10)}
_FACTORS = (1.0, -1.0, 10.0, -10.0)
"""Factors of logarithms that Python takes."""
_ITSELF = "itself"
_UNRULED = "none"
"""The rule of counts that are compared, and of numbers of distinct values: there is none."""
_WRITING = {
    "setitem", "index_add", "index_put", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce",
    "masked_scatter", "masked_fill", "copy", "where",
}  # fmt: skip
"""Operations whose result has the rows of the tensor that they write to, or of their condition."""
_PAIRING = {"pdist"}
_PADDING = {"pad_packed_sequence", "pad_sequence", "to_padded_tensor"}
"""Operations that give a row for each sample, of elements whose number depends on values."""
_UNKNOWN = "comes from code whose operations torch does not show (an autograd.Function, TorchScript)"
_MOST_REALIGNED = 2_000
"""Operations in which the whole and the part may differ; they are aligned in quadratic time."""

_EXPONENTS = (1.0, -1.0, math.log(2))
_READ_TWICE = 1e-6
"""Relative difference that rounding makes between numbers that Python has computed in one way."""
_TELLING = 1e-2
"""Relative difference between two means that shows whether something is one of them times a number."""
_SIMPLE = 5040.0
"""Multiples of one over this are quotients of small counts."""
_NEGLIGIBLE = 1e-5
"""What may be added to a count, so that it is not zero."""
_NOT_BY_CHANCE = 16
"""Whole numbers that are smaller are equal to other ones, such as the weights of terms, by chance."""
_COUNTS = ("divisor", "inverse", "elements", "targets")
_MANY = ("__get__", "size", "tolist", "numpy", "__array__")
"""Operations that may give Python more than one number."""
_RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal")

_DIVIDED = "divides by a count of its own in each part"
_PICKED = "is a mean over the elements that a mask picks, whose number is another one in each part"


@dataclass(frozen=True)
class Flow:
    """How a tensor depends on the samples [2].

    Attributes:
        kind: "fixed" for one that does not; "rows" for one with something of each sample; "picked" for rows whose
            number depends on the values of the batch; "value" for one over the samples; "coupled" for one that parts
            cannot give; "unpaired" for one that the part does not compute, as in a loop over samples.
        degree: how it grows with the number of samples: 0 as a mean does, 1 as a sum does; None if unknown.
        divisor: identifies the counts that it is a mean by; None if it is one by samples.
        sites: how to find these counts; None if that is unknown.
        nth: which of the counts that are found there it is a mean by.
        inverse: whether it is one over such a count.
        is_in_graph: whether the divisions by these counts are in autograd's graph, where weights are looked for.
        counts_targets: whether it is a mean over targets that are counted already.
        of_layers: whether what layers have given is in it.
        why: what couples it, or divides it; of what is fixed, that it is the largest or smallest of the batch.
        within_model: whether that is in the model.
        mixing: what adds means over samples to means over targets, which are the same only where targets are
            distributed over parts as samples are; empty if nothing does.
        rule: the rule of `logs.RULES` by which parts merge if this is logged, of what is no mean or sum.
    """

    kind: Literal["fixed", "rows", "picked", "value", "coupled", "unpaired"] = "fixed"
    degree: float | None = 0.0
    divisor: int | None = None
    sites: frozenset[CountSite] | None = frozenset()
    nth: int = 0
    inverse: bool = False
    is_in_graph: bool = True
    counts_targets: bool = False
    of_layers: bool = False
    why: str = ""
    within_model: bool = False
    mixing: str = ""
    rule: str = field(default="", compare=False)


_FIXED, _ROWS = Flow(), Flow("rows")


@dataclass(frozen=True)
class Coupling:
    """What keeps a loss from being the mean, or the sum, of its parts by samples, whether or not its values show it.

    Attributes:
        why: describes it.
        within_model: whether it is in the model, so that cut calls do not help.
        by_counts: whether the loss is a mean by counts that each part finds.
        sites: how to find these; empty if that is unknown.
        log: the name of the logged value, if it is not about the loss.
        is_guessed: whether comparisons have shown too little of it, and no operation does.
    """

    why: str
    within_model: bool = False
    by_counts: bool = False
    sites: frozenset[CountSite] = frozenset()
    log: str = ""
    is_guessed: bool = False

    def __str__(self) -> str:
        what = f"the logged {self.log!r}" if self.log else "the loss"
        return f"{what} may differ from the whole batch's, though not on the samples that were compared: {self.why}"


NOT_FOLLOWED = Coupling("something that could not be followed is added to a mean over targets")


@dataclass(frozen=True)
class LossFlow:
    """What leads to the loss and to the logged values.

    Attributes:
        coupling: what keeps the loss from being a mean or sum of its parts; None if nothing does, or it is unknown.
        mixing: what does so where targets are distributed over parts unlike samples.
        is_over_targets: whether the loss is known to be a mean over targets, and nothing else of the samples.
        rules: the rules by which logged values of parts may merge, as far as that is known, by name and number.
        log_counts: where the counts are found that logged values are means by, by name and number.
        sites: all that finding these takes.
        coupled_logs: what keeps other logged values from following from those of parts, by name and number.
        reducing_layers: names of layers whose own code decides what they show.
        is_hidden: whether Python has values of single samples, and what is logged may follow from them.
    """

    coupling: Coupling | None = None
    mixing: Coupling | None = None
    is_over_targets: bool = False
    rules: Mapping[Key, frozenset[str]] = field(default_factory=dict)
    log_counts: Mapping[Key, Site] = field(default_factory=dict)
    sites: frozenset[CountSite] = frozenset()
    coupled_logs: Mapping[Key, Coupling] = field(default_factory=dict)
    reducing_layers: frozenset[str] = frozenset()
    is_hidden: bool = False

    def with_logs_of(self, other: LossFlow) -> LossFlow:
        """Return this with what ``other``, the flow into another part, shows of logged values beside it."""
        rules = {**other.rules, **self.rules}
        theirs = {key: site for key, site in other.log_counts.items() if key not in self.rules}
        coupled = {key: why for key, why in {**other.coupled_logs, **self.coupled_logs}.items() if key not in rules}
        return replace(
            self, rules=rules, log_counts=theirs | dict(self.log_counts), sites=self.sites | other.sites,
            coupled_logs=coupled, is_hidden=self.is_hidden or other.is_hidden,
        )  # fmt: skip


def flow_in_parts(
    whole: OperationRecorder, parts: Sequence[OperationRecorder], sizes: Sequence[int], batch: int, *,
    has_numbers: bool = False, has_values: bool = False,
) -> LossFlow:  # fmt: skip
    """Return what the operations of a rehearsal in parts show.

    The first part shows it of the loss. A logged value may be one of another part only, as behind ``if mask.any()``.

    Args:
        whole, has_numbers, has_values: see `flow_of`.
        parts: the operations on each part.
        sizes: number of samples of each part.
        batch: number of samples of the batch that they are taken from.
    """
    found: LossFlow | None = None
    calls = [Counter((one.place, one.called) for one in run.operations) for run in (whole, *parts)]
    uneven = frozenset(place for place, count in calls[0].items() if any(part[place] != count > 1 for part in calls))
    keys = {one.key for one in whole.logged}
    for part, size in zip(parts, sizes, strict=False):
        if found is None or not found.rules.keys() >= keys:
            samples = sum(sizes), size, batch
            shown = flow_of(whole, part, samples, has_numbers=has_numbers, has_values=has_values, uneven=uneven)
            found = shown if found is None else found.with_logs_of(shown)
    return found or LossFlow()


def flow_of(
    whole: OperationRecorder, part: OperationRecorder, samples: tuple[int, int, int], *, has_numbers: bool = False,
    has_values: bool = False, uneven: Collection[tuple[Hashable, str]] = (),
) -> LossFlow:  # fmt: skip
    """Return what the operations of a rehearsal show.

    Args:
        whole, part: the operations on the whole and on a part.
        samples: number of samples of each, and of the batch that they are taken from.
        has_numbers: whether the batch has numbers of Python's in it.
        has_values: whether it has anything but tensors in it.
        uneven: places, and what they call several times, as often as the samples say.
    """
    pairs = _aligned(whole.operations, part.operations)
    if pairs is None or not (whole.is_complete and part.is_complete):
        return LossFlow()
    flows = _Flows(whole, part, samples, pairs, has_numbers=has_numbers, has_values=has_values)
    rules: dict[Key, frozenset[str]] = {}
    log_counts: dict[Key, Site] = {}
    coupled: dict[Key, Coupling] = {}
    sites: frozenset[CountSite] = frozenset()
    is_hidden = False
    its_values = {one.key: one.number for one in part.logged}
    for logged in whole.logged:
        key, value, its = logged.key, logged.number, its_values.get(logged.key)
        flow = flows.of_logged(value, its)
        counted = flows.sites(flow)
        shown = [site for site in counted if site.how in _COUNTS]
        by_samples = flow.divisor is None and not flow.counts_targets
        is_itself = type(value) is int and flow.kind == "value" and flows.is_shown_at(value, shown)
        is_mean = flow.kind == "value" or is_of_a_mean(flow.rule)
        if is_mean and len(shown) == 1 and (is_itself or (shown[0].place, shown[0].called) not in uneven):
            rules[key] = frozenset({flow.rule or BY_ITS_COUNT})
            log_counts[key] = ITSELF if is_itself else (shown[0], flow.nth, flows.seen_sites[shown[0]])
            sites |= counted
        elif is_of_a_mean(flow.rule):
            rules[key] = frozenset({over_samples(flow.rule) if by_samples else flow.rule})
        elif flow.rule == _UNRULED:
            coupled[key] = Coupling("it compares counts over the batch", flow.within_model, log=key[0])
        elif flow.rule:
            rules[key] = frozenset({flow.rule})
        elif flow.kind == "value" and by_samples and flow.degree in (0.0, 1.0):
            rules[key] = frozenset({"sum" if flow.degree else "mean over samples"})
        elif flow.kind == "coupled" or (flow.kind == "value" and flow.divisor is not None):
            coupled[key] = Coupling(flow.why, flow.within_model, log=key[0])
        elif read := flows.rules_of_number(value, its, is_read=logged.is_read):
            if read == {_UNRULED}:
                coupled[key] = Coupling("the number of distinct values does not follow from those of parts", log=key[0])
            elif _UNRULED not in read:
                rules[key] = read
        elif flows.is_fixed(value, its):
            rules[key] = LINEAR
        else:
            is_hidden |= flows.has_samples
    for value, its in zip(whole.given, part.given, strict=False):
        sites |= flows.count_sites(flows.of_logged(value, its))
    reducing = frozenset(flows.reducing_layers)
    coupling, mixing, is_over_targets = flows.of_loss(whole.loss)
    return LossFlow(coupling, mixing, is_over_targets, rules, log_counts, sites, coupled, reducing, is_hidden)


Pairs = list[tuple[Operation, Operation | None]]


def _aligned(whole: Sequence[Operation], part: Sequence[Operation]) -> Pairs | None:
    """Return the operations on the whole, each with that on the part if there is one [1]; None if they differ a lot.

    What both call as often is the frame. Between two operations of it, a loop's first turns on the whole are those on
    the part, which has the first samples.
    """
    keys = [[(one.name, one.place) for one in operations] for operations in (whole, part)]
    calls = [Counter(of_one) for of_one in keys]
    frames = [[i for i, key in enumerate(of_one) if calls[0][key] == calls[1][key]] for of_one in keys]
    names = [[of_one[i] for i in frame] for of_one, frame in zip(keys, frames, strict=True)]
    if names[0] == names[1]:
        matched = list(zip(*frames, strict=True))
    elif max(map(len, names)) > _MOST_REALIGNED:
        return None
    else:
        blocks = difflib.SequenceMatcher(None, names[0], names[1], autojunk=False).get_matching_blocks()
        matched = [(frames[0][x.a + i], frames[1][x.b + i]) for x in blocks for i in range(x.size)]
    partner, start = dict(matched), (0, 0)
    for end in (*matched, (len(whole), len(part))):
        seen: dict[Hashable, list[int]] = {}
        for j in range(start[1], end[1]):
            seen.setdefault(keys[1][j], []).append(j)
        turns = {key: iter(found) for key, found in seen.items()}
        for i in range(start[0], end[0]):
            if (turn := next(turns.get(keys[0][i], iter(())), None)) is not None:
                partner[i] = turn
        start = end[0] + 1, end[1] + 1
    return [(one, part[partner[i]] if i in partner else None) for i, one in enumerate(whole)]


class _Flows:
    """Follows the samples through all operations.

    It has many attributes because one pass over the operations answers all questions: each keeps what it has met so
    far, and what it says of an operation depends on what the others have said of those before.

    Attributes:
        reducing_layers: names of layers that give a value over the samples, so that their own code decides what it is.
        has_samples: whether Python has read values of single samples.
        seen_sites: how many counts each place has shown.
    """

    def __init__(
        self, whole: OperationRecorder, part: OperationRecorder, samples: tuple[int, int, int], pairs: Pairs, *,
        has_numbers: bool, has_values: bool,
    ) -> None:  # fmt: skip
        self._whole, self._part = whole.tensors, part.tensors
        self._ratio, self._samples = samples[0] / samples[1], samples[2]
        self._decided: tuple[Operation, Flow] | None = None
        """The first decision by a value over the batch that layers' outputs are in."""
        self._same, self._same_of_part = whole.same, part.same
        self.reducing_layers: set[str] = set()
        self._partner: dict[int, int] = {}
        """Numbers of the part's tensors, by those of the whole's."""
        self._numbers_read: list[tuple[float, float, Operation, Flow]] = []
        """Numbers that user code has read of the whole and of the part, how, and the flow of what they come from."""
        self._rules_read: list[tuple[float, float, str]] = []
        """Numbers that it has read of what parts merge into by a rule, and the rule."""
        self._whole_numbers_read: set[float] = set()
        self._counts_read: list[tuple[int, float]] = []
        """Numbers that it has read of the whole one by one, by the tensor that they come from."""
        self.has_samples = False
        self._knows = has_values
        """Whether Python has read anything that depends on the samples, with which it may compute."""
        self._reads, self._chooses = has_numbers, False
        """Whether it has read anything of the batch, with which it may compute in Python, and whether it has
        chosen what to do by it."""
        self._flows: dict[int, Flow] = {}
        self._first: dict[int, int] = {}
        """By tensor, the first one that the same operation has given on the same tensors."""
        self._calls = Counter((one.place, one.called) for one in whole.operations)
        self.seen_sites: Counter[CountSite] = Counter()
        self._made_by: dict[int, Operation] = {}
        self._order = {id(one): i for i, (one, _) in enumerate(pairs)}
        seen: dict[Hashable, int] = {}
        for one, other in pairs:
            if other is not None:
                for mine, its in zip(one.given, other.given, strict=False):
                    self._meet(mine, its)
                self._partner.update(zip(one.made, other.made, strict=False))
            flows = [self.of(number) for number in one.given]
            self._see_read(one, other, flows)
            for number in one.made:
                self._made_by[number] = one
                self._flows[number] = self._of_result(number, one, other, flows)
            for at, number in enumerate(one.made):
                given = tuple(self._first.get(x, x) for x in one.given)
                if not any(name in one.name for name in _RANDOM):
                    self._first[number] = seen.setdefault((one.called, given, one.constants, at), number)
        if whole.loss is not None and part.loss is not None:
            self._meet(whole.loss, part.loss)

    def of_loss(self, loss: int | None) -> tuple[Coupling | None, Coupling | None, bool]:
        """Return the first attributes of `LossFlow`."""
        flow = _FIXED if loss is None else self.of(loss)
        if flow.kind != "coupled" and self._decided is not None and self._follows(loss, self._decided[0]):
            flow = self._decided[1]
        if flow.kind == "coupled":
            return Coupling(flow.why, flow.within_model), None, False
        is_over_targets = flow.kind == "value" and not flow.mixing and (flow.counts_targets or flow.divisor is not None)
        if flow.divisor is None:
            return None, Coupling(flow.mixing, flow.within_model) if flow.mixing else None, is_over_targets
        counted = self.sites(flow) if flow.is_in_graph and not flow.counts_targets else frozenset()
        return Coupling(flow.why, flow.within_model, by_counts=True, sites=counted), None, is_over_targets

    def _follows(self, number: int | None, one: Operation) -> bool:
        """Return whether a tensor was computed after ``one``."""
        by = None if number is None else self._made_by.get(number)
        return by is not None and self._order[id(by)] > self._order[id(one)]

    def of(self, number: int) -> Flow:
        """Return the flow of a tensor."""
        number = self._same.get(number, number)
        if number not in self._flows:
            found = self._as_values_show(number)
            unknown = self._whole[number].has_grad_fn and (found.kind == "value" or self._is_zero(number))
            set_as = self._whole[number].set_as
            why = (
                f"{set_as} is computed by the layer's own code, whose operations are not followed"
                if set_as
                else _UNKNOWN
            )
            self._flows[number] = Flow("coupled", None, why=why) if unknown else found
        return self._flows[number]

    def _is_zero(self, number: int) -> bool:
        """Return whether the values of a tensor show nothing, as they may have a factor that is zero at first."""
        values = self._whole[number].values
        return values is not None and values.dtype.is_floating_point and not bool((values.abs() > _NEGLIGIBLE).any())

    def _meet(self, mine: int, its: int) -> None:
        self._partner.setdefault(mine, its)
        mine, its = self._same.get(mine, mine), self._same_of_part.get(its, its)
        has_partner = mine in self._partner
        self._partner.setdefault(mine, its)
        kind, shape = self._flows.get(mine, _FIXED).kind, self._whole[mine].shape
        if kind == "unpaired":  # the part has computed another one
            same = shape == self._part[its].shape
            self._flows[mine] = replace(self._flows[mine], kind="value" if same else "rows", degree=None)
        elif kind == "picked" and shape == () and not has_partner:  # the sum of a loop over some of the samples
            self._flows[mine] = replace(self._flows[mine], kind="value", degree=None)

    def _see_read(self, one: Operation, other: Operation | None, flows: list[Flow]) -> None:
        """Note what Python reads of a tensor."""
        if not one.reads or not flows:
            return
        flow = flows[0]
        self._knows |= flow.kind != "fixed"
        self.has_samples |= one.name not in ("bool", "size") and flow.kind in ("rows", "picked", "unpaired")
        if one.name == "bool":
            if flow.of_layers and flow.kind in ("value", "coupled") and self._decided is None:
                self._decided = one, self._coupled(one, "branches on a value over the batch")
            self._chooses |= not flow.of_layers and flow.kind in ("rows", "picked", "unpaired")
        if one.name == "size":
            flow = Flow("value", 1.0)
        if flow.kind != "fixed" and not flow.of_layers:
            self._reads = True
            self._whole_numbers_read.update(one.answers)
        if one.name != "bool" and flow.kind != "fixed" and len(one.answers) == 1:
            self._counts_read.append((self._first.get(one.given[0], one.given[0]), one.answers[0]))
        if other is not None and len(one.answers) == len(other.answers) == 1:
            is_sum = flow.kind == "value" and flow.degree == 1.0 and flow.divisor is None and not flow.counts_targets
            rule = flows[0].rule or ("sum" if is_sum else "")
            self._rules_read.append((one.answers[0], other.answers[0], rule))
        if (flow.kind in ("value", "coupled") or _is_extreme(flow)) and other is not None:
            both = [*zip(one.answers, other.answers, strict=False)]
            if _is_extreme(flow):
                both = [(mine, its) for mine, its in both if min(abs(mine), abs(its)) >= _NOT_BY_CHANCE]
            if one.name == "size" and len(one.answers) > 1:  # a shape, of which other sizes are fixed
                both = [(mine, its) for mine, its in both if mine != its]
            self._numbers_read += [(mine, its, one, flow) for mine, its in both]

    def _as_values_show(self, number: int, *, of_numbers: bool = False) -> Flow:
        """Return the flow of a tensor that follows from no other one, as its sizes and values show."""
        one = self._whole[number]
        if one.is_parameter:
            return _FIXED
        if number not in self._partner:
            return Flow("unpaired")
        other = self._part[self._partner[number]]
        if one.shape != other.shape:
            return _ROWS
        if one.values is None or other.values is None or _are_alike(one.values, other.values):
            return _FIXED
        if of_numbers and one.values.numel() == 1:
            mine, its = float(one.values), float(other.values)
            if self._read(mine, its) is not None:
                return Flow("value", 1.0)
            if math.isclose(mine, its * self._ratio) and not self._reads:
                return Flow(degree=1.0)
        return Flow("value", None)

    def _of_result(self, number: int, one: Operation, other: Operation | None, flows: list[Flow]) -> Flow:
        if one.name in SHAPED_LIKE and number in self._partner:
            return self._as_values_show(number)
        if (coupled := next((flow for flow in flows if flow.kind == "coupled"), None)) is not None:
            return replace(coupled, rule=self._rule(one, other, flows))
        of_layers = one.is_layer or any(
            flow.of_layers or self._whole[x].is_parameter for x, flow in zip(one.given, flows, strict=True)
        )
        if one.name == "select" and (one.picks or not self._whole_numbers_read.isdisjoint(one.bounds)):
            is_paired = number in self._partner and all(flow == _FIXED for flow in flows)
            if is_paired and self._as_values_show(number) == _FIXED:  # such as of the first sample, in a loop
                return _FIXED
            return Flow("picked", of_layers=of_layers)
        if other is None or number not in self._partner:
            picked = any(flow.kind == "picked" for flow in flows) and one.name not in _PADDING
            return Flow("picked" if picked else "unpaired", of_layers=of_layers)
        if self._chooses and one.name in _JOINING and len(one.given) != len(other.given):
            return Flow("picked", of_layers=of_layers)
        flows = [replace(flow, kind="rows") if flow.kind == "unpaired" else flow for flow in flows]
        found = self._result(number, one, other, flows)
        if found.kind != "rows" and flows:
            found = self._by_rule(found, self._rule(one, other, flows), flows[0])
        return found if found.kind == "fixed" else replace(found, of_layers=of_layers)

    def _rule(self, one: Operation, other: Operation | None, flows: list[Flow]) -> str:
        """Return by which rule parts merge into a result that is not linear; nothing if that is unknown."""
        if len(flows) != 1 or len(one.made) != 1 or one.is_layer or other is None:
            return ""
        [given], number = flows, (*one.operands, None)[1] if len(one.operands) > 1 else None
        if given.kind in ("rows", "picked"):
            return _UNRULED if one.name in _DISTINCT else _EXTREMES.get(one.name, "")
        if (given.kind == "value" and one.name in _COMPARING) or (
            given.rule == _UNRULED and one.name in ("mean", "sum")
        ):
            return _UNRULED
        if given.kind == "value" and given.degree == 0.0:
            return _function_by(one, number)
        if one.name in _CASTING:
            return given.rule
        factor = _factor(one, number) if one.operands == other.operands else None
        function = function_of(given.rule)
        if function in _POWERS and one.name in _LOGARITHMS:
            return _log_by(_POWERS[function] * _LOGARITHMS[one.name])
        if function.endswith("log"):
            return _log_by(float(function.removesuffix("log") or 1.0) * factor) if factor else ""
        return given.rule if factor is not None and factor > 0 else ""

    def _by_rule(self, found: Flow, rule: str, given: Flow) -> Flow:
        """Return ``found``, that parts merge into by ``rule``, with the counts of the mean that it is a function of."""
        if found.kind != "coupled" or not is_of_a_mean(rule):
            return replace(found, rule=rule)
        return replace(
            found, rule=rule, degree=given.degree, divisor=given.divisor, sites=given.sites, nth=given.nth,
            counts_targets=given.counts_targets,
        )  # fmt: skip

    def _result(self, number: int, one: Operation, other: Operation, flows: list[Flow]) -> Flow:
        rows = [flow for flow in flows if flow.kind in ("rows", "picked")]
        values = [flow for flow in flows if flow.kind == "value"]
        if one.is_layer:  # it may take counts, and what other layers give
            floats = [flow for x, flow in zip(one.given, flows, strict=True) if self._whole[x].dtype.is_floating_point]
            values = [flow for flow in floats if flow.kind == "value" and flow.degree is not None]
        if one.name in _GUARDS and not rows:
            return _FIXED
        if not rows and not values:
            if all(flow == _FIXED for flow in flows) or one.is_layer:
                return self._as_values_show(number, of_numbers=one.name in MADE)
            return max(flows, key=lambda flow: (flow.degree or 0.0, flow.why))
        if self._takes_an_extreme(number, one, flows):
            return self._coupled(one, "computes with the largest or smallest whole number of the batch")
        if self._takes_what_was_read(one, other):
            return self._coupled(one, "uses a number that was read from the batch")
        if rows and (one.picks or not self._whole_numbers_read.isdisjoint(one.bounds)):
            return replace(rows[0], kind="picked")
        if self._scales(number, one, flows):
            if not rows and one.name == "arange":  # as many as the tensor says
                return Flow("picked")
            if not rows:
                return self._coupled(one, "broadcasts a value over the batch to its samples")
            return self._of_rows(number, one, other, flows, rows, values)
        if rows:
            return self._reduced(number, one, flows, rows, values)
        return self._of_values(number, one, other, flows, values)

    def _takes_an_extreme(self, number: int, one: Operation, flows: list[Flow]) -> bool:
        """Return whether numbers are computed from samples and from a whole number that is an extreme of the batch.

        Parts may have another one, such as the largest pixel. One that is an index or a size is left to the comparison
        of values, as where padding is cut to the longest sample.
        """
        is_computed = one.name in _COMPUTING and self._whole[number].dtype.is_floating_point
        return is_computed and any(map(_is_extreme, flows))

    def _scales(self, number: int, one: Operation, flows: list[Flow]) -> bool:
        """Return whether a tensor has something of each sample, or of each that was picked, which may be as many."""
        if self._whole[number].shape != self._part[self._partner[number]].shape:
            return True
        picked = [self._whole[x].shape for x, flow in zip(one.given, flows, strict=True) if flow.kind == "picked"]
        return any(len(shape) > 0 and self._whole[number].shape[:1] == shape[:1] for shape in picked)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _of_rows(
        self, number: int, one: Operation, other: Operation, flows: list[Flow], rows: list[Flow], values: list[Flow]
    ) -> Flow:  # fmt: skip
        """Return the flow of a result with rows."""
        if values:
            divided = self._divided(rows[0], values[0], one) if len(values) == 1 else None
            return divided or self._coupled(one, "broadcasts a value over the batch to its samples")
        floats = self._whole[one.given[0]].dtype.is_floating_point
        if floats and any(self._are_samples(one.given[0], dim) for dim in one.along):
            return self._coupled(one, "operates along the batch dimension")
        growth, grows = self._growth(number), [self._growth(x) for x in one.given]
        of_pairs = math.isclose(growth, self._ratio**2) and max(grows) < self._ratio * 1.01
        if of_pairs or one.name in _PAIRING:
            return self._coupled(one, "makes a value for each pair of samples")
        as_samples = flows[0].kind == "rows" and math.isclose(grows[0], self._ratio)
        picks = as_samples and one.name in PICKING and not one.restores
        moves = one.moves or (picks and not self._keeps_samples(one.given[0], number))
        moves |= as_samples and not one.restores and self._bounds_samples(one, other)
        if floats and moves:
            return self._coupled(one, "selects samples by their position in the batch")
        found = self._product(one, rows)
        if found.kind == "coupled":
            return found
        deciding = flows[:1] if one.name in _WRITING else rows
        picked = one.name not in _PADDING and any(flow.kind == "picked" for flow in deciding)
        return self._scaled(replace(found, kind="picked" if picked else "rows"), one, other)

    def _product(self, one: Operation, rows: list[Flow]) -> Flow:
        """Return the flow of what ``one`` makes of several tensors with rows, as far as divisors and degrees go."""
        divided = [flow for flow in rows if flow.divisor is not None]
        if len(divided) > 1 and (one.name not in ("add", "sub") or len({flow.divisor for flow in divided}) > 1):
            return self._coupled(one, "combines means over counts")
        found = divided[0] if divided else rows[0]
        if one.name in ("add", "sub") or len(rows) == 1:
            return found
        degrees = [flow.degree for flow in rows]
        known = [degree for degree in degrees if degree is not None]
        sign = -1.0 if one.name == "div" else 1.0
        total = known[0] + sign * sum(known[1:]) if len(known) == len(degrees) else None
        return replace(found, degree=total)

    def _reduced(
        self, number: int, one: Operation, flows: list[Flow], rows: list[Flow], values: list[Flow]
    ) -> Flow:  # fmt: skip
        """Return the flow of a value over the samples, from their rows."""
        if one.is_layer and self._as_values_show(number) == _FIXED and not self._is_zero(number):
            return _FIXED  # such as an embedding of positions
        if one.is_layer and self._whole[number].dtype.is_floating_point:
            self.reducing_layers.add(one.name)
        if one.name in PICKING:
            fixed = self._as_values_show(number) == _FIXED
            return _FIXED if fixed else self._coupled(one, "selects a sample by its position in the batch")
        if one.name in _NOT_LINEAR:
            if not self._whole[number].dtype.is_floating_point:  # the longest of lengths and the like
                asks = self._whole[number].dtype is torch.bool and self._whole[number].shape == ()  # are there any?
                return Flow(why=one.name) if one.name in _EXTREMES and not asks else _FIXED
            return self._coupled(one, "reduces the batch other than by a mean or sum")
        if values:
            return self._coupled(one, "broadcasts a value over the batch to its samples")
        found = self._product(one, rows)
        if found.kind == "coupled":
            return found
        value = replace(found, kind="value")
        is_mean = one.reduction not in ("", "sum") or one.name in ("mean", "nanmean")
        if one.counts_targets and is_mean:
            shown = self._shown(one, "targets")
            return replace(value, counts_targets=True, sites=shown, nth=self._nth(shown))
        if is_mean:
            if one.name == "nanmean":
                return self._by_counts(value, -1 - number, None, one, _PICKED)
            if one.by_weights:
                return self._by_counts(value, -1 - number, None, one, _DIVIDED)
            if flows[0].kind == "picked":
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
        if name == "where" and alone and flows[0] == _FIXED:
            return _changed(first)
        if one.is_layer:
            return self._as_values_show(number)
        counts = not any(self._whole[x].requires_grad for x in one.given)
        if alone and (name in ("add", "sub") or name in _SUMMING or name in _PASSING):
            added = [x for x in one.operands if type(x) is float] if name in ("add", "sub") else [0.0]
            is_count = counts and first.divisor is None and not first.counts_targets
            keeps = len(added) == 1 and abs(added[0]) < _NEGLIGIBLE
            return replace(first, sites=None) if is_count and not keeps else _changed(first)
        if name in _ADDING or name in _PASSING:
            return self._added(one, values)
        if alone and (name == "mul" or (name == "div" and self._operand(one, 0) is first)):
            return self._scaled(_changed(first), one, other)
        if name in ("mul", "div") and len(values) == 2:
            divided = self._divided(first, values[1], one)
            if divided is None and name == "mul":
                divided = self._divided(values[1], first, one)
            return divided or self._coupled(one, "multiplies or divides two values over the batch")
        if counts:
            if name in _COMPARING:
                return replace(first, degree=None, sites=None)
            if name in ("where", "maximum", "max"):
                return replace(first, sites=None)
            if name == "clamp" and alone:
                return replace(first, sites=None if first.sites else self._shown(one, "at least"))
            numbers = [pair for pair in zip(one.operands, other.operands, strict=False) if type(pair[0]) is float]
            if alone and name in ("reciprocal", "rtruediv", "div") and all(mine == its for mine, its in numbers):
                degree = None if first.degree is None else -first.degree
                return replace(_changed(first), degree=degree, divisor=one.given[flows.index(first)], inverse=True)
        return self._coupled(one, "is applied to a mean or sum over the batch")

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

    def _shown(self, one: Operation, how: How | None) -> frozenset[CountSite] | None:
        """Return what ``one`` shows of a count; None if that is unknown."""
        if how is None or one.place is None:
            return None
        if IN_PLACE.fullmatch(one.called) and how == "at least":  # it would be seen when it is raised already
            return None
        site = CountSite(one.place, one.called, how)
        self.seen_sites[site] += 1
        return frozenset({site})

    def _nth(self, shown: frozenset[CountSite] | None) -> int:
        """Return how many counts the place has shown before this one."""
        return max((self.seen_sites[site] - 1 for site in shown or ()), default=0)

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
        if by is None:
            degree = flow.degree
        else:
            sign = 1.0 if by.inverse else -1.0
            degree = None if flow.degree is None or by.degree is None else flow.degree + sign * by.degree
        sites, shown = flow.sites, self._shown(one, how)
        if shown is None or sites is None:
            sites = None
        elif by is None:
            sites |= shown
        else:
            known = by.sites is not None and by.degree == (-1.0 if by.inverse else 1.0)
            is_number = divisor is None or divisor < 0 or self._whole[divisor].shape == ()
            sites = sites | by.sites | shown if known and is_number and by.sites is not None else None
        divisor = None if divisor is None else self._first.get(divisor, divisor)
        is_in_graph = flow.is_in_graph and any(self._whole[x].requires_grad for x in one.made)
        return replace(
            flow, degree=degree, divisor=divisor, sites=sites, nth=self._nth(shown), is_in_graph=is_in_graph,
            why=_described(one, why), within_model=one.within_model,
        )  # fmt: skip

    def _added(self, one: Operation, values: list[Flow]) -> Flow:
        values = [_changed(flow) for flow in values]
        if len({flow.divisor for flow in values}) > 1 or any(flow.inverse for flow in values):
            return self._coupled(one, "adds means over different counts")
        known = [flow for flow in values if flow.degree is not None]
        if len({flow.degree for flow in known}) > 1:
            return self._coupled(one, "adds a sum over the samples and a mean")
        sites: frozenset[CountSite] | None = frozenset()
        for flow in values:
            sites = None if sites is None or flow.sites is None else sites | flow.sites
        counting = {flow.counts_targets for flow in values}
        found = replace((known or values)[0], sites=sites, counts_targets=True in counting)
        if len(counting) > 1:
            why = _described(one, "adds a mean over samples to one over targets, some of which may be ignored")
            return replace(found, mixing=why, within_model=one.within_model)
        mixed = next((flow for flow in values if flow.mixing), found)
        return replace(found, mixing=mixed.mixing, within_model=mixed.within_model)

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
                powers = [p for p in (0.0, 1.0, -1.0) if math.isclose(mine, its * self._ratio**p)]
                if (read := self._read(mine, its)) is not None:
                    if sign > 0 or flow.counts_targets:
                        return self._coupled(one, "multiplies by a number that was read from the batch")
                    return self._by_a_number(flow, *read, one)
                is_setting = mine is its and one.by_transformers  # whose code computes none of its numbers that are one
                if self._reads and (mine != its or (mine == 1.0 and not is_setting)):
                    return self._by_counts(flow, -1, None, one, "may divide by a number that was read from the batch")
                grows = sign * powers[0] if powers else None
            else:
                continue
            flow = replace(flow, degree=None if flow.degree is None or grows is None else flow.degree + grows)
        return flow

    def sites(self, flow: Flow) -> frozenset[CountSite]:
        """Return how to find the counts that a value is a mean by; nothing if that is unknown.

        A place may call a function several times, for other purposes, too; then it shows nothing.
        """
        is_mean = flow.divisor is not None or flow.counts_targets
        found = flow.sites if flow.degree == 0.0 and is_mean else None
        if not found or any(self._calls[c.place, c.called] != self.seen_sites[c] for c in found):
            return frozenset()
        return found

    def of_logged(self, mine: int | float | None, its: int | float | None) -> Flow:
        """Return the flow of a logged value."""
        if type(mine) is int:
            return self.of(mine)
        if type(mine) is not float or type(its) is not float:
            return _FIXED
        read = self._read(mine, its)
        if read is not None and not (mine.is_integer() and read[1].degree != 0.0):
            return read[1]
        for one, other, _, flow in self._numbers_read:
            is_mean = flow.kind == "value" and flow.degree == 0.0 and one > 0 and other > 0
            if is_mean and (rule := _function_between((one, mine), (other, its))):
                return replace(flow, rule="" if rule == _ITSELF else rule)
        return _FIXED

    def is_fixed(self, mine: int | float | None, its: int | float | None) -> bool:
        """Return whether a logged value does not depend on the samples. Of a zero, later batches show more."""
        if type(mine) is int:
            flow = self.of(mine)
            return flow.kind == "fixed" and not flow.degree and not (self._knows and self._is_from_python(mine))
        return type(mine) is float and mine == its != 0.0 and not self._knows

    def _is_from_python(self, number: int) -> bool:
        """Return whether Python may have decided on the value of a tensor."""
        left, seen = [number], set[int]()
        while left:
            number = left.pop()
            if number in seen or self._whole[number].is_parameter:
                continue
            seen.add(number)
            by = self._made_by.get(number)
            if by is None or by.name in MADE:
                return True
            left += by.given
        return False

    def rules_of_number(
        self, mine: int | float | None, its: int | float | None, *, is_read: bool
    ) -> frozenset[str]:  # fmt: skip
        """Return the rules of which a logged number may be one; nothing if it may be another number by chance.

        Args:
            mine, its: that of the whole, and that of the part.
            is_read: whether it is what Python has read, and not computed of that.
        """
        if type(mine) is not float or type(its) is not float:
            return frozenset()
        found = frozenset(rule for one, other, rule in self._rules_read if (one, other) == (mine, its))
        may_be_ratio = mine in (0.0, 1.0) and "sum" in found and not is_read  # of two counts
        if may_be_ratio and mine:
            may_be_ratio = len({count for count, number in self._counts_read if number == mine}) > 1
        return found if all(found) and not may_be_ratio else frozenset()

    def count_sites(self, flow: Flow) -> frozenset[CountSite]:
        """Return where the count is found that a value is a mean by; nothing if it is none, or by several."""
        counted = self.sites(flow)
        is_mean = flow.kind == "value" and sum(site.how in _COUNTS for site in counted) == 1
        return frozenset(counted) if is_mean else frozenset()

    def is_shown_at(self, number: int, shown: Sequence[CountSite]) -> bool:
        """Return whether a logged tensor is what the operation has given at which its count is seen."""
        by = self._made_by.get(number)
        while by is not None and by.name in ("detach", "alias") and len(by.given) == 1:
            by = self._made_by.get(by.given[0])
        return by is not None and any((by.place, by.called) == (site.place, site.called) for site in shown)

    # -- what is seen -------------------------------------------------------------------------------------------------

    def _operand(self, one: Operation, at: int) -> Flow | None:
        number = one.operands[at] if len(one.operands) > at else None
        return self.of(number) if type(number) is int else None

    def _read(self, mine: float, its: float) -> tuple[Operation, Flow] | None:
        """Return how user code has read these two numbers, and the flow of what from; None if it has not."""
        for one, other, by, flow in self._numbers_read if mine or its else ():
            if math.isclose(one, mine, rel_tol=1e-6) and math.isclose(other, its, rel_tol=1e-6):
                return by, flow
        return None

    def _by_a_number(self, flow: Flow, reading: Operation, by: Flow, one: Operation) -> Flow:
        """Return the flow of a quotient by a number that user code has read."""
        shown = self._shown(reading, "read") if reading.called not in _MANY else None
        known = shown is not None and len(reading.answers) == 1 and not by.sites and by.sites is not None
        number = -1 - self._first.get(reading.given[0], reading.given[0])
        return self._by_counts(flow, number, "divisor", one, _DIVIDED, replace(by, sites=shown if known else None))

    def _takes_what_was_read(self, one: Operation, other: Operation) -> bool:
        """Return whether a number that was read from all samples is an operand, other than to multiply or divide.

        Whole numbers are not looked at, as others are equal to them by chance.
        """
        if one.name in ("mul", "div") or not one.operands:
            return False
        both = zip(one.operands, other.operands, strict=False)
        numbers = [(a, b) for a, b in both if type(a) is float and type(b) is float and not a.is_integer()]
        return any(self._read(mine, its) is not None for mine, its in numbers)

    def _growth(self, number: int) -> float:
        """Return how many times as many elements the tensor has on the whole."""
        if number not in self._partner:
            return 1.0
        one, other = math.prod(self._whole[number].shape), math.prod(self._part[self._partner[number]].shape)
        return one / other if other else 1.0

    def _bounds_samples(self, one: Operation, other: Operation) -> bool:
        """Return whether an index takes no more than so many samples, or leaves so many out, whatever the batch has."""
        both = {*one.ends} & {*other.ends}
        return any(abs(bound) < self._samples and self._are_samples(one.given[0], dim) for dim, bound in both)

    def _keeps_samples(self, given: int, made: int) -> bool:
        """Return whether a result has as many samples, in the same dimension, as what it is taken from."""
        dims = len(self._whole[given].shape)
        along = [d for d in range(dims) if self._are_samples(given, d - dims)]
        kept = True
        for tensors, a, b in (
            (self._whole, given, made),
            (self._part, self._partner[given], self._partner[made]),
        ):
            kept &= all(tensors[a].shape[d] in tensors[b].shape for d in along)
        return kept and bool(along)

    def _are_samples(self, number: int, dim: int) -> bool:
        """Return whether the samples are along dimension ``dim`` of the tensor, counted from the last."""
        if number not in self._partner:
            return False
        one, other = self._whole[number].shape, self._part[self._partner[number]].shape
        of_both = len(one) == len(other) and -dim <= len(one) and other[dim]
        return bool(of_both) and math.isclose(one[dim] / other[dim], self._ratio)

    def _coupled(self, one: Operation, does: str) -> Flow:
        return Flow("coupled", None, why=_described(one, does), within_model=one.within_model)


def _function_by(one: Operation, number: int | float | None) -> str:
    """Return the rule for what ``one`` makes of a mean; ``number`` is its second operand."""
    if one.name in _LOGARITHMS:
        return _log_by(_LOGARITHMS[one.name])
    is_number = type(number) is float and number > 0
    if one.name == "reciprocal" or (one.name == "rtruediv" and is_number):
        return of_mean("reciprocal")
    is_root = one.name == "sqrt" or (one.name == "pow" and number == 0.5)
    return of_mean("exp") if one.name == "exp" else of_mean("root") if is_root else ""


def _log_by(factor: float) -> str:
    return of_mean("log" if factor == 1.0 else f"{factor:.12g} log")


def _factor(one: Operation, number: int | float | None) -> float | None:
    """Return what ``one`` multiplies by; None if it does something else."""
    if one.name == "neg":
        return -1.0
    if one.name not in ("mul", "div") or type(number) is not float or not number:
        return None
    return number if one.name == "mul" else 1.0 / number


def _function_between(one: tuple[float, float], other: tuple[float, float]) -> str:
    """Return the rule for the function that leads from a mean to a number, in both pairs; empty if none is seen."""
    pairs = one, other

    def leads(function: Callable[[float], float]) -> bool:
        return all(math.isclose(function(x), y, rel_tol=_READ_TWICE) for x, y in pairs)

    if not (one[1] and other[1]) or all((x * _SIMPLE).is_integer() for x, _ in pairs):
        return ""  # one may be another one's root by chance
    with contextlib.suppress(OverflowError):
        if any(leads(functools.partial(lambda c, x: math.exp(c * x), c)) for c in _EXPONENTS):
            return of_mean("exp")
    for factor in (base * factor for base in _LOGARITHMS.values() for factor in _FACTORS):
        if leads(functools.partial(lambda c, x: c * math.log(x), factor)):
            return _log_by(factor)
    if leads(lambda x: 1.0 / x):
        return of_mean("reciprocal")
    if leads(math.sqrt):
        return of_mean("root")
    is_seen = not math.isclose(one[0], other[0], rel_tol=_TELLING)  # else any function is nearly linear
    return _ITSELF if is_seen and leads(lambda x: one[1] / one[0] * x) else ""


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values, up to rounding: kernels depend on the number of samples."""
    if one.dtype is not other.dtype or not one.dtype.is_floating_point:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=math.sqrt(torch.finfo(one.dtype).eps), equal_nan=True)


def _is_extreme(flow: Flow) -> bool:
    """Return whether it is that of a whole number that is the largest or smallest of the batch, or follows from one."""
    return flow.kind == "fixed" and bool(flow.why)


def _changed(flow: Flow) -> Flow:
    """Return the flow of a count that is no longer that which a place in user code shows."""
    is_count = flow.divisor is None and not flow.counts_targets
    return replace(flow, sites=None) if is_count and flow.sites else flow


def _described(one: Operation, does: str) -> str:
    name = f"layer {one.name!r}" if one.is_layer else "indexing" if one.called == "__getitem__" else one.name
    return f"{name} in {one.line} {does}" if one.line else f"{name} {does}"
