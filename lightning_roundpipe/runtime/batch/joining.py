"""Joins what the microbatches of a batch returned and logged, and their losses, into the result of the whole batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.batch.log_rules import Calls, Settled, Ways, settled
from lightning_roundpipe.runtime.batch.logs import OPEN, USUAL, Key, LogRecorder, issue, merged_by, returned
from lightning_roundpipe.runtime.batch.loss_weights import Weighed, Weighing
from lightning_roundpipe.runtime.batch.losses import check_counts
from lightning_roundpipe.runtime.batch.metric_updates import MetricUpdates
from lightning_roundpipe.runtime.batch.microbatches import (
    Addend,
    RaisedCount,
    combined,
    counted,
    loss_of,
    merge,
    total_of,
)


class MicrobatchResult(Weighed, Protocol):
    """One microbatch on which training_step has run."""

    output: Any
    weight: float
    logs: LogRecorder


@dataclass
class Joined:
    """The result of the whole batch.

    Attributes:
        output: what training_step would have returned; None if it skips the batch.
        losses: losses of the microbatches that have one.
        weights: how much each microbatch counts.
        added: the losses, if they are added; None if they are averaged by ``weights``.
        logs: what the microbatches logged, and how it is merged.
        recorders: of the microbatches.
        updates: those of metrics.
        ran: what they have called; None if that is unknown.
    """

    output: Any = None
    losses: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    added: list[Addend] | None = None
    logs: Settled = field(default_factory=Settled)
    recorders: list[LogRecorder] = field(default_factory=list)
    updates: MetricUpdates | None = None
    ran: Calls | None = None

    @property
    def loss(self) -> Tensor:
        """The loss of the batch."""
        return combined(self.losses, self.weights, self.added)


def join(
    module: Any, runs: Sequence[MicrobatchResult], sizes: list[int], weighing: Weighing,
    ways: Ways, ran: Calls | None = None, *, mixed: bool | None = None, fixed_sizes: Collection[Key] = (),
    updates: MetricUpdates | None = None, size_rules: Mapping[Key, Collection[str]] | None = None,
) -> Joined:  # fmt: skip
    """Join the results of ``runs``, which have ``sizes`` samples, and call ``module.log`` with what they logged.

    ``ways`` and ``ran`` are the arguments of `settled`, ``fixed_sizes`` and ``size_rules`` are two of `issue`.
    ``updates`` has recorded the updates of metrics.
    """
    outputs = [run.output for run in runs]
    missing = [m for m, output in enumerate(outputs) if output is None]
    if missing and len(missing) < len(outputs):
        raise RoundPipeError(
            f"training_step returned None for microbatch {missing[0]} but not for all of this batch: skip whole "
            "batches, or set num_microbatches=1."
        )
    if weighing.given is None and not missing:
        check_counts([run.mode for run in runs], sizes, mixed=mixed)
    divisors = [run.weight for run in runs]
    weights = counted(divisors)
    if not any(weights):
        weights = [float(size) for size in sizes]
    elif not sum(weights):
        raise RoundPipeError(
            f"training_step divides its loss by numbers that add up to zero over the microbatches ({weights}), so the "
            "loss of the whole batch is not defined: set microbatch_scope='model' or num_microbatches=1, which compute "
            "the loss on the whole batch as it stands."
        )
    losses = [loss for output in outputs if (loss := loss_of(output)) is not None]
    added = _added(losses, divisors, adds=weighing.adds(runs[0])) if len(losses) == len(outputs) else None
    recorders = [run.logs for run in runs]
    if updates is not None:
        updates.correct(recorders, weights, sizes)
    logs = settled(recorders, ways, ran)
    said, rules = logs.said, logs.rules
    all_losses = losses if len(losses) == len(outputs) else None
    issue(
        module, said, sizes, weights, all_losses, rules, added=added, fixed_sizes=fixed_sizes,
        astray=logs.astray, size_rules=size_rules,
    )  # fmt: skip
    if missing:
        return Joined(logs=logs)
    output = merge(outputs, sizes, weights, added)
    for key, name in returned(said, output).items():
        rule = rules.get(name, USUAL)
        if rule not in (USUAL, OPEN) and len(said[name]) == len(runs) > 1:
            output[key] = _like(merged_by(rule, said[name], sizes, weights, added), outputs[0][key])
    return Joined(output, losses, weights, added, logs, recorders, updates, ran)


def _added(losses: Sequence[Tensor], divisors: Sequence[float], *, adds: bool) -> list[Addend] | None:
    """Return the losses as what the loss of the batch is the sum of; None if it is their mean by ``divisors``."""
    if adds:
        return [Addend(loss) for loss in losses]
    if not any(isinstance(divisor, RaisedCount) for divisor in divisors):
        return None
    total = total_of(divisors)
    return [Addend(loss, divisor / total) for loss, divisor in zip(losses, divisors, strict=True)]


def _like(merged: Tensor, one: Any) -> Any:
    """Return the batch's value as that of a microbatch, whole if these are and it is."""
    if isinstance(one, Tensor):
        is_whole = not one.is_floating_point() and bool(merged == merged.round())
        return merged.to(one.dtype) if is_whole else merged
    value = float(merged)
    return int(value) if isinstance(one, int) and value.is_integer() else value
