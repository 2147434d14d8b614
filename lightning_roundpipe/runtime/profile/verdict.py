"""What rehearsals of a batch have shown, and the messages about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_roundpipe.messages import plural
from lightning_roundpipe.runtime.batch.log_rules import Fitting, How, in_both
from lightning_roundpipe.runtime.batch.log_sizes import sizes_in_both
from lightning_roundpipe.runtime.batch.logs import Key
from lightning_roundpipe.runtime.batch.metric_updates import MetricRules
from lightning_roundpipe.runtime.profile.loss_flow import Coupling

_NAMED = 3
"""Attributes that an error names at most."""


@dataclass(frozen=True)
class Difference:
    """A value that differs between the parts and the whole batch.

    Attributes:
        what: describes the value.
        whole: its value on the whole batch, as text; None if ``what`` raised ``parts``.
        parts: its value on the parts, as text, or the exception.
        elsewhere: whether it is a number or a length that a global, a callback or the like keeps.
    """

    what: str
    whole: str | None
    parts: str
    elsewhere: bool = False

    def __str__(self) -> str:
        if self.whole is None:
            return f"{self.what} raises {self.parts}"
        return f"{self.what} is {self.parts} instead of {self.whole}"


@dataclass(frozen=True)
class LeftByLastPart:
    """What the last part of a batch leaves in an attribute inside a layer, which is not what the whole batch leaves.

    Attributes:
        goes_on: whether a part goes on from what it finds: it adds to it, as to sums and lists, or computes with it.
        joined: whether it has a row for each sample, which a step joins, also where a list grows by them. A tensor that
            grows is not joined, and neither is what the layer itself finds in the next step.
    """

    goes_on: bool
    joined: bool


@dataclass
class Verdict:
    """The outcome of the rehearsals.

    Attributes:
        samples: number of samples compared.
        parts: the first difference in parts of the batch; None if there is none.
        coupling: what would make one in other batches, if there is none; None if nothing is known.
        model: the first difference with only the model's calls cut; None if there is none, or that was not tried.
        why_not: why there is no comparison; empty if there is one.
        left: paths of attributes and buffers that training_step changes, if parts differ.
        announced: whether the difference vanishes with batch statistics and layer buffers held fixed; `Hints` warns of
            those.
        raised: whether training_step raises on a part.
        lopsided: whether a part has weight 0 in the loss, so that the comparison shows only the other one.
        mixed: whether the loss adds a mean over samples to one over targets; None if that is unknown.
        losses_inside: layers that compute a mean cross entropy themselves, whose targets are not counted.
        shared: path of shared state that microbatches would disturb, by the code that changes it; see `OutsideWrites`.
        collects: a difference of what globals, callbacks and the like keep, if batches are cut nevertheless.
        rules: per logged value and how it is computed, the ways to merge it that give the whole batch's.
        fixed_sizes: logged values whose ``batch_size`` is the same for a part as for the whole batch.
        size_rules: the rules by which the ``batch_size`` of other values follows from those of the parts.
        metric_rules: how what parts add to metrics is merged; see `MetricRules`.
        uneven_metrics: a state of each metric that parts leave otherwise, though its value may be equal, by its name.
        lost_rows: paths in globals, callbacks and the like where parts leave the last one's rows only.
        of_last_part: the attributes inside layers, or metrics, that the last part leaves otherwise than the whole
            batch, by path.
        keeps: whether training_step changes something outside of layers and metrics.
        open_metrics: whether nothing shows if a metric counts updates.
        open: whether an attribute that it changes is equal as numbers may be by chance.
        kept_rows: paths of attributes that keep something of each sample, of which parts leave their own.
    """

    samples: int
    parts: Difference | None = None
    coupling: Coupling | None = None
    model: Difference | None = None
    why_not: str = ""
    left: list[str] = field(default_factory=list)
    announced: bool = False
    raised: bool = False
    lopsided: bool = False
    mixed: bool | None = None
    losses_inside: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    rules: dict[How, Fitting] = field(default_factory=dict)
    fixed_sizes: set[Key] = field(default_factory=set)
    size_rules: dict[Key, set[str]] = field(default_factory=dict)
    metric_rules: MetricRules = field(default_factory=dict)
    uneven_metrics: dict[str, str] = field(default_factory=dict)
    kept_rows: set[str] = field(default_factory=set)
    lost_rows: list[str] = field(default_factory=list)
    of_last_part: dict[str, LeftByLastPart] = field(default_factory=dict)
    keeps: bool = False
    open: bool = False
    open_metrics: bool = False
    collects: Difference | None = None

    def add_earlier(self, other: Verdict) -> None:
        """Add what an earlier comparison has shown of values that are merged as most fit."""
        self.rules = in_both(other.rules, self.rules)
        self.size_rules = sizes_in_both(other.size_rules, self.size_rules)
        self.fixed_sizes |= other.fixed_sizes
        self.uneven_metrics = other.uneven_metrics | self.uneven_metrics
        self.kept_rows |= other.kept_rows
        self.lost_rows = [*other.lost_rows, *self.lost_rows]
        self.of_last_part = other.of_last_part | self.of_last_part

    @property
    def is_coupled(self) -> bool:
        """Whether there is a coupling, and more comparisons would not show that it is none."""
        return self.coupling is not None and not self.coupling.is_guessed

    def weigh_elsewhere(self, *, tried: bool) -> None:
        """Leave batches in parts if only what globals, callbacks and the like keep differs, and cut calls do not help.

        Hooks inside layers, for instance, run for each part either way.

        Args:
            tried: whether the model's calls were cut.
        """
        if self.parts is not None and self.parts.elsewhere:
            if not tried or self.model is not None:
                self.collects, self.parts, self.model = self.parts, None, None
        elif self.model is not None and self.model.elsewhere:
            self.model = None


def either(one: bool | None, other: bool | None) -> bool | None:
    """Return whether one of two comparisons has shown something; None if neither could have."""
    return other if one is None else one or bool(other)


def described(verdict: Verdict) -> str:
    """Return the difference in parts as text for messages."""
    return f"{verdict.parts or verdict.coupling} (compared on {plural(verdict.samples, 'sample')} of the batch)"


def not_the_whole(what: str, left: Sequence[str], *, auto: bool) -> str:
    """Return the error message for parts that differ from the whole batch.

    Args:
        what: the difference; see `described`.
        left: attributes that training_step changes.
        auto: whether cutting only the model's calls was tried, too.
    """
    tried = ", and neither does cutting the calls of the model alone (microbatch_scope='model')" if auto else ""
    names = ", ".join(map(repr, left[:_NAMED]))
    changed = f" It leaves another value in {names}, which the next part of the batch finds." if left else ""
    scope = (
        "With microbatch_scope='model', the model must treat each sample for itself and return a row for it."
        if auto
        else "If training_step needs all samples at once, or counts how often it runs, set microbatch_scope='model', "
        "which runs it once and cuts the calls of the model: these must return a row for each sample."
    )
    return (
        f"training_step gives something else in parts of the batch than on the whole batch{tried}: {what}.{changed} "
        f"If the loss is a mean with weights of its own, or a sum, set RoundPipeStrategy(loss_weight=...). {scope} "
        "num_microbatches=1 keeps the batch whole."
    )


def undefined_in_parts(value: str, occasion: str, what: str) -> str:
    """Return the error message for a batch of which a part has an undefined loss, which the whole may not have.

    Args:
        value: names what is undefined, the loss or a gradient.
        occasion: why the batch was compared.
        what: the difference; see `described`.
    """
    return (
        f"{value} of a microbatch is infinite or not a number, so the batch is not trained on: {occasion}, and in "
        f"parts of the batch, {what}. A part without targets may divide nothing by nothing, for example. "
        "microbatch_scope='model' or num_microbatches=1 compute the loss on the whole batch."
    )


def calls_are_not_the_whole(what: str) -> str:
    """Return the error message for ``microbatch_scope="model"`` where cut calls differ from whole ones."""
    return (
        f"training_step gives something else where microbatch_scope='model' cuts its calls of the model: {what}. The "
        "model must treat each sample for itself, forward and backward. num_microbatches=1 keeps its calls whole."
    )
