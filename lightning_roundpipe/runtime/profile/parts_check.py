"""Checks on a few samples, before any training, whether training_step gives the same in parts as on the whole batch.

    a few samples as one batch ── loss, outputs, logged values, metrics, what is left on modules ── [1]
    the same samples as two parts, one after the other ── merged as a step merges them ── [2]   same as [1]: cut batches
    training_step once, each call of the model in two parts ── [3]      same as [1]: microbatch_scope="model"
    neither ── an error that names the first value that differs ── [4]

Rehearsals run layers forward only and leave nothing behind; see `rehearsal` and `left_behind`. `comparison` compares
two sides, and `verdict` holds what they have shown.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.cutting import Cutter
from lightning_roundpipe.runtime.batch.joining import join
from lightning_roundpipe.runtime.batch.log_rules import Calls, Way, chosen, in_both, is_guessed
from lightning_roundpipe.runtime.batch.logs import (
    OPEN,
    USUAL,
    Key,
    LogRecorder,
    Said,
    is_returned_number,
    log_returned,
    returned,
    shadowed_log,
    undone_logs,
)
from lightning_roundpipe.runtime.batch.loss_weights import Weighing
from lightning_roundpipe.runtime.batch.losses import are_spread
from lightning_roundpipe.runtime.batch.metric_updates import MetricUpdates
from lightning_roundpipe.runtime.batch.microbatches import detached, loss_of
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.prediction import CallOrder
from lightning_roundpipe.runtime.profile.comparison import LOSS, OUTPUT, TOLERANCE, Comparison, Shown
from lightning_roundpipe.runtime.profile.custom_backward import CustomBackwards
from lightning_roundpipe.runtime.profile.loss_flow import NOT_FOLLOWED, Coupling, LossFlow, flow_in_parts
from lightning_roundpipe.runtime.profile.outside_writes import OutsideWrites
from lightning_roundpipe.runtime.profile.recorded_operations import OperationRecorder
from lightning_roundpipe.runtime.profile.rehearsal import (
    CannotRehearse,
    Rehearsal,
    SameDraws,
    Written,
    seeding_noted,
    without_dropout,
)
from lightning_roundpipe.runtime.profile.unlike_samples import unlike_parts
from lightning_roundpipe.runtime.profile.verdict import Difference, LeftByLastPart, Verdict, either
from lightning_roundpipe.runtime.user_code.interception import Interceptor, ModelInterceptor, intercepted
from lightning_roundpipe.runtime.user_code.left_behind import (
    ABSENT,
    ELSEWHERE,
    MODULES,
    SETTINGS,
    LeftBehind,
    SavedAttributes,
    code_of,
)
from lightning_roundpipe.runtime.user_code.rng import GlobalRandomState, derive
from lightning_roundpipe.runtime.user_code.target_counts import CountSites

FEW = 2
"""Samples of a part in a rehearsal; one more in the first of two parts that are unequal."""
_MOST_IN_CALLS = 4
"""Comparisons of cut calls on samples that are less alike, at most."""
PAIRS = 3
"""Pairs of neighbouring parts to try, while a comparison is not conclusive."""


class StepCall(NamedTuple):
    """What training_step is called with, and the numbers that identify the batch; see `Engine.train_batch`."""

    function: Callable[..., Any]
    batch: Any
    rest: tuple[Any, ...]
    seed: tuple[int, ...]


class PartsCheck:
    """Rehearses one batch whole and in parts, and compares.

    The class is large because everything that a step merges (loss, logs, metrics, outputs, attributes, gradients of
    custom backwards) is produced and compared here, once for each of three ways to run training_step.

    Args:
        engine: the context of the engine. No step may be in flight.
        interceptors: the interceptors of all layers.
        cutter: cuts batches.
        step: the coming step.
        sizes: number of samples of each part that it would cut.
        others: further objects that user code may change, by name.
        again: whether parts of an earlier batch of the kind were compared. Metrics have seen parts by then, so they are
            not compared.
        near: number of a part that has done something for the first time (`NewCode`), so that the rehearsals begin with
            it, and metrics are not compared; None before the batch is trained on.
        asked: whether the user has set ``microbatch_scope="model"``. Then only that is compared with the whole, with
            the result in `Verdict.parts`. Batch statistics are held fixed, and what is left on modules is not
            compared: the user knows that the model's forward runs several times.
    """

    def __init__(
        self, engine: EngineContext, interceptors: Sequence[Interceptor], cutter: Cutter, step: StepCall,
        sizes: list[int], others: Iterable[tuple[str, Any]], *, again: bool, near: int | None, asked: bool,
    ) -> None:  # fmt: skip
        self._again, self._near, self._asked = again, near, asked
        self._engine, self._interceptors, self._cutter = engine, interceptors, cutter
        self._step, self._sizes, self._seed = step, sizes, derive(*step.seed)
        self._root: Any = engine.model.module
        names = {id(p): name for name, p in self._root.named_parameters()}
        self._written = Written(names)
        self._inside = {id(m) for layer in engine.model.layers for m in layer.module.modules()}
        self._modules = dict(self._root.named_modules())
        others = list(others)
        self._left = LeftBehind(self._root, others)
        self._outside = OutsideWrites(self._modules.items(), others, code_of(self._root), self._inside)
        self._order = CallOrder()
        self._flow = LossFlow()
        leaves = tree_leaves(step.batch)
        self._has_numbers = any(type(leaf) in (int, float) for leaf in leaves)
        self._has_values = any(not isinstance(leaf, (Tensor, bool, type(None))) for leaf in leaves)
        self._loss_dtype: torch.dtype | None = None
        """That of the loss, which language models of any dtype compute in single precision."""
        self._looked_into: frozenset[str] = frozenset()
        """Names of layers whose own code is recorded."""
        self._unsteady: set[str] = set()
        """What differs between two runs on the same samples (a time), and is not compared."""
        self._counted = engine.learned.counted
        """What was counted before the comparison."""
        self._fits = engine.learned.log_fits
        """What comparisons have shown of logged values."""
        self._lost: Exception | None = None
        """An error after which the engine cannot go on; None if there was none."""

    # -- what is rehearsed --------------------------------------------------------------------------------------------

    def find_out(self, models: Sequence[ModelInterceptor]) -> Verdict:
        """Rehearse as `_find_out` does, and cut calls on samples that are less alike, if these are to be cut."""
        verdict = self._find_out(models)
        if not models or self._asked or verdict.why_not or verdict.model is not None or verdict.announced:
            return verdict
        if verdict.parts is None and verdict.coupling is None:
            return verdict
        self._asked = True
        try:
            for rows, one in unlike_parts(self._step.batch, sum(self._sizes), (), 0, _MOST_IN_CALLS):
                other = self._rehearse(rows, one, models)
                if self._lost is not None:
                    raise self._lost
                if other.why_not or other.raised or other.parts is None or other.parts.elsewhere:
                    continue
                verdict.model, verdict.parts = other.parts, verdict.parts or other.parts
                break
        finally:
            self._asked = False
        return verdict

    def _find_out(self, models: Sequence[ModelInterceptor]) -> Verdict:
        """Rehearse until a comparison is conclusive.

        Args:
            models: interceptors of the models whose calls to cut; empty to try only parts of the batch.

        Raises:
            Exception: if the engine has lost a thread. What user code raises is part of the verdict.
        """
        found: Verdict | None = None
        for rows, one, full in self._candidates():
            if self._left.stuck:
                return Verdict(len(rows), why_not=f"{self._left.stuck[0]} could not be put back")
            verdict = self._rehearse(rows, one, models)
            if self._lost is not None:
                raise self._lost
            if found is not None and not verdict.why_not:
                verdict.add_earlier(found)
            self._fits = in_both(self._fits, verdict.rules)
            differs = verdict.is_coupled or (verdict.parts is not None and (full or not verdict.raised))
            conclusive = not (verdict.why_not or verdict.raised or verdict.lopsided)
            if conclusive and not differs and verdict.keeps and rows[-1] != rows[0] and len(rows) - one > 1:
                # With the first sample in place of the last one: user code may keep something for each class or user,
                # which parts differ in only where one comes in both. It is not the only comparison, as parts may have
                # equal numbers of targets for it.
                verdict = self._with_others([*rows[:-1], rows[0]], one, models, verdict)
            if conclusive and not differs and self._near is None:
                verdict = self._with_unlike_samples(rows, one, models, verdict)
            if conclusive and not differs and verdict.parts is None and verdict.coupling is not None:
                # With the second part first: what looks like an extreme may be what the first one logs.
                verdict = self._with_others([*rows[one:], *rows[:one]], len(rows) - one, models, verdict)
            is_zero = (not self._again or self._near is not None) and any(
                chosen(fitting) == OPEN for fitting in verdict.rules.values()
            )
            clear = conclusive and verdict.coupling is None and not is_zero and not verdict.open_metrics
            if differs or verdict.is_coupled or (clear and not self._engine.learned.new_code.is_awaited):
                return verdict
            if found is None or conclusive or found.why_not or (found.raised and not verdict.why_not):
                found = verdict
        assert found is not None
        several = len(self._sizes) > 2 and self._near is None
        if found.why_not and several and not self._left.stuck:  # user code may take whole batches only
            verdict = self._rehearse([*range(sum(self._sizes))], sum(self._sizes[:-1]), models)
            found = found if verdict.why_not else verdict
        return found

    def said_in_parts(self) -> Said:
        """Rehearse the batch in its parts, and return what these log; nothing if that is impossible."""
        shown = self._in_its_parts()
        return {} if shown is None else shown.logs.said

    def has_undefined_gradients(self) -> bool:
        """Rehearse the batch in its parts, and return whether a gradient of their losses is infinite or no number."""
        shown = self._in_its_parts()
        if shown is None or shown.backwards is None:
            return False
        arrived = shown.backwards.arrived.items()
        return not all(bool(one.sums.isfinite().all()) for (_, _, zeros), one in arrived if not zeros)

    def _in_its_parts(self) -> Shown | None:
        """Rehearse the batch in its parts, and return what these show; None if that is impossible."""
        samples = sum(self._sizes)
        state = GlobalRandomState(self._engine.worker_pool.devices)
        draws = SameDraws(self._engine.worker_pool.devices, samples, self._seed)
        parts = [self._take([*range(rows.start, rows.stop)]) for rows in microbatches.rows_of(self._sizes)]
        try:
            with without_dropout(), seeding_noted(draws):
                return self._side(parts, self._sizes, draws)
        except Exception:
            if self._lost is not None:
                raise
            return None
        finally:
            state.restore()

    def _with_unlike_samples(
        self, rows: list[int], one: int, models: Sequence[ModelInterceptor], verdict: Verdict
    ) -> Verdict:  # fmt: skip
        """Rehearse once more on samples that are less alike than those that were compared, if the batch has any."""
        for others, first in unlike_parts(self._step.batch, sum(self._sizes), rows, one):
            if verdict.parts is None and not verdict.is_coupled:
                verdict = self._with_others(others, first, models, verdict)
        return verdict

    def _with_others(
        self, rows: list[int], one: int, models: Sequence[ModelInterceptor], verdict: Verdict
    ) -> Verdict:  # fmt: skip
        """Rehearse on ``rows`` and return what this and ``verdict`` have shown together."""
        other = self._rehearse(rows, one, models)
        if self._lost is not None:
            raise self._lost
        if other.why_not or other.raised or (other.lopsided and not other.is_coupled):
            return verdict
        other.add_earlier(verdict)
        self._fits = in_both(self._fits, other.rules)
        other.collects = other.collects or verdict.collects
        other.shared, other.mixed = verdict.shared | other.shared, either(verdict.mixed, other.mixed)
        other.open &= verdict.open
        other.open_metrics &= verdict.open_metrics
        return other

    def _candidates(self) -> Iterator[tuple[list[int], int, bool]]:
        """Yield the samples to compare on, how many of them are in the first part, and whether the parts are full.

        Parts of unequal sizes come first. Full parts follow the first few samples, which may be too few for user code
        or hold no targets.

        A first part of more than a few samples has them twice, as far as it has room. A loss that selects, counts or
        pairs samples (the hardest ones, a weight for each class) may have the same value on parts as on the whole as
        long as no two samples are alike, and few of them seldom are.

        Near a part that has done something for the first time, it and its neighbour come first, and then all of its
        samples, as one of them may be what has done it.
        """
        sizes, ends, near = self._sizes, [*itertools.accumulate(self._sizes)], self._near
        pairs = sorted(range(len(sizes) - 1), key=lambda i: sizes[i] == sizes[i + 1])
        if near is not None:
            pairs = [min(near, len(sizes) - 2)]
        for number, i in enumerate(pairs[:PAIRS]):
            uneven = sizes[i] != sizes[i + 1]
            few = min(sizes[i], FEW + uneven)
            one = min(sizes[i], 2 * few)
            two = min(sizes[i + 1], max(one - uneven, 1))
            first = [*range(ends[i] - few, ends[i])]
            full = few == sizes[i] and two == sizes[i + 1]
            yield [*first, *first[: one - few], *range(ends[i], ends[i] + two)], one, full
            if near is not None and sizes[near] > 1:
                yield [*range(ends[near] - sizes[near], ends[near])], (sizes[near] + 1) // 2, True
            elif number == 0 and not full:
                yield [*range(ends[i] - sizes[i], ends[i + 1])], sizes[i], True

    def _rehearse(self, rows: list[int], one: int, models: Sequence[ModelInterceptor]) -> Verdict:
        samples, sizes = len(rows), [one, len(rows) - one]
        verdict = Verdict(samples)
        state = GlobalRandomState(self._engine.worker_pool.devices)
        draws = SameDraws(self._engine.worker_pool.devices, samples, self._seed)
        try:

            def whole_batch() -> list[Any]:
                return [self._take(rows)]

            def parts() -> list[Any]:
                return [self._take(rows[:one]), self._take(rows[one:])]

            def on_whole(*, steady: bool = False) -> Shown:
                return self._side(whole_batch(), [samples], draws, models, steady=steady)

            def compared(whole: Shown) -> Shown:
                """Compare the parts with it, and return what the whole shows: again, where layers are looked into."""
                while True:
                    verdict.raised = False
                    try:
                        verdict.parts = self._in_parts(whole, whole_batch, parts, sizes, draws, verdict, models)
                    except CannotRehearse:
                        raise
                    except Exception as error:
                        if self._near is not None:
                            raise  # as the step has not, on its parts
                        verdict.parts, verdict.raised = Difference("training_step", None, _named(error)), True
                    if self._flow.reducing_layers <= self._looked_into:
                        return whole
                    self._looked_into |= self._flow.reducing_layers
                    whole = on_whole()

            with without_dropout(), seeding_noted(draws):
                if self._asked:
                    verdict.parts, verdict.raised = self._in_calls(whole_batch, sizes, models, draws, steady=True)
                    if verdict.parts is None:
                        with self._unless_lost():  # training_step may take whole batches only
                            verdict.of_last_part = self._of_last_part(on_whole(), on_whole, parts, sizes, draws)
                    return verdict
                learned = self._engine.learned
                whole, known = compared(on_whole()), learned.counted
                found_out = learned.metric_rules | verdict.metric_rules
                counting = any(found_out[name] != learned.metric_rules.get(name, {}) for name in found_out)
                learned.metric_rules = found_out
                if counting:
                    whole = compared(whole)
                if self._counts_more():
                    whole = compared(whole)
                    if verdict.parts is not None:  # what was counted does not help
                        learned.counted = known
                        whole = compared(whole)
                gathers = verdict.parts is not None and self._layers_gather(whole)
                if gathers:
                    whole = on_whole(steady=True)
                    found = self._in_parts(whole, whole_batch, parts, sizes, draws, verdict, models, steady=True)
                    verdict.parts, verdict.announced = found or verdict.parts, found is None
                if not verdict.raised:
                    verdict.shared = self._shared(parts, sizes, draws)
                    verdict.of_last_part = self._of_last_part(whole, on_whole, parts, sizes, draws)
                if verdict.parts is None and verdict.coupling is not None and self._are_counted(verdict.coupling):
                    verdict.coupling = None
                if verdict.parts is None and verdict.coupling is None:
                    verdict.coupling = self._coupled_log(verdict)
                if (verdict.parts is not None and not verdict.announced) or verdict.coupling is not None:
                    kept = [path.removeprefix("len(").partition("[")[0].rstrip(")") for path in whole.left]
                    verdict.left = [*dict.fromkeys(path for path in (*kept, *whole.settings) if self._counts(path))]
                    if models:
                        verdict.model, _ = self._in_calls(whole_batch, sizes, models, draws, steady=gathers)
                    verdict.weigh_elsewhere(tried=bool(models))
        except CannotRehearse as error:
            verdict.why_not = str(error)
        except Exception as error:
            verdict.why_not = _named(error)
        finally:
            state.restore()
        verdict.losses_inside = list(draws.losses_inside)
        return verdict

    def _counts_more(self) -> bool:
        """Let parts be weighted by the counts by which training_step divides, and return whether that is new."""
        learned, flow = self._engine.learned, self._flow
        known, more = learned.counted, flow.sites
        of_loss = False
        if flow.coupling is not None and not self._cutter.weighs and self._near is None:
            more |= flow.coupling.sites
            of_loss = bool(flow.coupling.sites)
        of_logs = {key: site for key, site in known.of_logs.items() if key not in flow.rules}
        of_logs |= flow.log_counts
        learned.counted = CountSites(known.sites | more, known.of_loss or of_loss, of_logs)
        return learned.counted != known

    def _are_counted(self, coupling: Coupling) -> bool:
        """Return whether the weights of parts are the counts that the loss is a mean by.

        For a batch that was trained on already they are only if these counts were known before.
        """
        if not coupling.by_counts:
            return False
        counted = self._engine.learned.counted if self._near is None else self._counted
        known = bool(coupling.sites) and coupling.sites <= counted.sites
        return known or self._cutter.weighs  # the user's are taken to be

    def _coupled_log(self, verdict: Verdict) -> Coupling | None:
        """Return what keeps a logged value from following from those of the parts; None if nothing does."""
        for coupling in self._flow.coupled_logs.values():
            return coupling
        fits = in_both(self._fits, verdict.rules)
        names = [how[0][0] for how in verdict.rules if is_guessed(fits[how])]
        why = "it fits a sum, the largest or the smallest of two parts, but perhaps by chance"
        return Coupling(why, log=names[0], is_guessed=True) if names else None

    def _take(self, rows: list[int]) -> Any:
        """Return a copy of some samples of the batch: training_step may write to them."""
        first, end = rows[0], rows[-1] + 1
        successive = slice(first, end) if rows == [*range(first, end)] else rows
        return self._cutter.part(self._step.batch, successive, sum(self._sizes))

    # -- sides --------------------------------------------------------------------------------------------------------

    def _in_parts(
        self, whole: Shown, batch: Callable[[], list[Any]], parts: Callable[[], list[Any]], sizes: list[int],
        draws: SameDraws, verdict: Verdict, models: Sequence[ModelInterceptor] = (), *, steady: bool = False,
    ) -> Difference | None:  # fmt: skip
        operations: list[OperationRecorder] = []

        def side(batches: list[Any], sizes: list[int]) -> Shown:
            return self._side(
                batches, sizes, draws, models, whole=whole.backwards, steady=steady, operations=operations
            )

        try:
            shown = side(parts(), sizes)
        finally:
            if operations:
                self._flow = flow_in_parts(
                    whole.operations,
                    operations,
                    sizes,
                    sum(self._sizes),
                    has_numbers=self._has_numbers,
                    has_values=self._has_values,
                )
                verdict.coupling = self._flow.coupling
        verdict.lopsided, flow = 0.0 in shown.weights, self._flow
        known = flow.mixing is not None or (shown.is_mixed and flow.is_over_targets)
        verdict.mixed = flow.mixing is not None if known else None
        if shown.spread and verdict.coupling is None:
            verdict.coupling = flow.mixing if known or not shown.is_mixed else NOT_FOLLOWED
        again = (lambda: side(batch(), [sum(sizes)]), lambda: side(parts(), sizes))
        return self._difference(whole, shown, sizes, again, verdict)

    def _difference(
        self, whole: Shown, shown: Shown, sizes: list[int],
        again: tuple[Callable[[], Shown], Callable[[], Shown]], verdict: Verdict | None = None,
    ) -> Difference | None:  # fmt: skip
        """Return the first difference, without what differs between two runs of one side.

        That is a time, or what another thread does now and then.

        Args:
            whole, shown: the two sides.
            sizes: number of samples of each part.
            again: run on the whole, and in parts, once more.
            verdict: takes what else the comparison shows.

        Raises:
            CannotRehearse: if the loss or the output differs between two runs of one side, or random numbers may be
                the cause, and it is not of what is only kept.
        """
        found = self._compare(whole, shown, sizes, verdict)
        for side, rows, run in ((whole, [sum(sizes)], again[0]), (shown, sizes, again[1])):
            if found is None:
                break
            before = len(self._unsteady)
            self._compare(side, run(), rows, unsteady=self._unsteady)
            if unsteady := sorted(what for what in self._unsteady if what.startswith((LOSS, OUTPUT))):
                raise CannotRehearse(f"{unsteady[0]} differs between two runs on the same samples")
            if len(self._unsteady) > before:
                found = self._compare(whole, shown, sizes, verdict)
        if found is None or (whole.alike and shown.alike):
            return found
        if found.elsewhere:
            return None
        raise CannotRehearse("training_step draws random numbers, which parts cannot be given alike")

    def _shared(self, parts: Callable[[], list[Any]], sizes: list[int], draws: SameDraws) -> dict[str, str]:
        """Return the state that a part must not find as another part left it; see `outside_writes`."""
        outside = self._outside
        if outside.clashes or not outside.found:
            return outside.clashes

        def run(index: int) -> Shown:
            return self._side([parts()[index]], [sizes[index]], draws)

        alone = run(0)
        with outside.recording():
            run(1)
        try:
            with outside.replaying():
                beside = run(0)
        except CannotRehearse:
            raise
        except Exception:
            return outside.found
        comparison = Comparison(self.tolerance(), sizes, self._unsteady)
        comparison.see(LOSS, alone.loss, beside.loss)
        comparison.see_logs(alone, beside)
        comparison.see(OUTPUT, alone.output, beside.output)
        return outside.found if comparison.found else {}

    def _of_last_part(
        self, whole: Shown, on_whole: Callable[[], Shown], parts: Callable[[], list[Any]], sizes: list[int],
        draws: SameDraws,
    ) -> dict[str, LeftByLastPart]:  # fmt: skip
        """Return the attributes inside layers that the last part leaves otherwise than the whole batch, by path.

        Args:
            whole, on_whole: what the whole samples leave, and runs on them once more: times differ then, too.
            parts, sizes, draws: the parts, their numbers of samples, and what supplies the random numbers.
        """
        if not any(map(self._is_kept_in_layer, whole.left)):
            return {}
        comparison = Comparison(self.tolerance(), sizes, self._unsteady)

        def differing(one: Shown, other: Shown, *, rows: bool) -> set[str]:
            paths = filter(self._is_kept_in_layer, {**one.left, **other.left})
            found = (path for path in paths if not comparison.leave_the_same(path, one.left, other.left, rows=rows))
            return set(map(self._attribute_of, found))

        alone = self._side(parts()[-1:], sizes[-1:], draws)
        if not (found := differing(whole, alone, rows=False)):
            return {}
        apart, going_on = self._side(parts(), sizes, draws), found
        with self._unless_lost():
            one_after_another = self._side(parts(), sizes, draws, going_on=True)
            going_on = differing(alone, one_after_another, rows=False)
            comparison.see(LOSS, apart.last_loss, one_after_another.last_loss)
        computes = comparison.found is not None
        beside_rows = differing(whole, alone, rows=True)
        found -= differing(whole, on_whole(), rows=False)
        return {
            path: LeftByLastPart(
                goes_on=computes or path in going_on,
                joined=not (computes or path in beside_rows or (path in going_on and path in whole.left)),
            )
            for path in sorted(found)
        }

    @contextlib.contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Suppress an error of a rehearsal that may go on."""
        try:
            yield
        except CannotRehearse:
            raise
        except Exception:
            if self._lost is not None:
                raise

    def _in_calls(
        self, batch: Callable[[], list[Any]], sizes: list[int], models: Sequence[ModelInterceptor], draws: SameDraws,
        *, steady: bool,
    ) -> tuple[Difference | None, bool]:  # fmt: skip
        """Return the first difference with the model's calls cut, and whether training_step raised instead.

        The run to compare with passes the calls whole through the same graph cuts, so that the two differ only in the
        number of parts.
        """
        samples = sum(sizes)

        def side(cut: Callable[[int], list[int]], whole: CustomBackwards | None = None) -> Shown:
            return self._side(batch(), [samples], draws, models, cut, whole=whole, steady=steady)

        def in_parts(called: int) -> list[int]:
            return sizes if called == samples else microbatches.sizes_of(called, 2, None, 1)

        try:
            whole = side(lambda called: [called])
            cut = side(in_parts, whole.backwards)
        except CannotRehearse:
            raise
        except Exception as error:
            return Difference("training_step", None, _named(error)), True
        again = (lambda: side(lambda called: [called], whole.backwards), lambda: side(in_parts, whole.backwards))
        return self._difference(whole, cut, sizes, again), False

    def _side(
        self, batches: list[Any], sizes: list[int], draws: SameDraws, models: Sequence[ModelInterceptor] = (),
        cut: Callable[[int], list[int]] | None = None, *, whole: CustomBackwards | None = None, steady: bool = False,
        operations: list[OperationRecorder] | None = None, going_on: bool = False,
    ) -> Shown:  # fmt: skip
        """Run training_step on each of ``batches`` [1] [2] [3], and restore everything.

        Args:
            batches: the whole samples, or the parts.
            sizes: number of samples of each.
            draws: supplies the random numbers.
            models: interceptors of the models whose calls ``cut`` applies to.
            cut: returns the sizes that a call of a model is cut into, for its number of samples.
            whole: what the user's own backward code gives for the whole samples, unless these are them.
            steady: whether to hold batch statistics and layer buffers fixed.
            operations: takes what each of the batches has called.
            going_on: whether each finds in the layers' attributes what the one before has left.
        """
        if self._lost is not None:
            raise self._lost
        backwards = CustomBackwards(draws.samples, lambda: draws.rows, whole)
        engine, shown = self._engine, Shown(backwards=backwards)
        runs: list[Rehearsal] = []
        losses: list[Tensor | None] = []
        weighing = Weighing(sizes, self._cutter.given_weights_of(batches) if len(batches) > 1 else None)
        current: list[Rehearsal] = []
        early: list[LogRecorder] = []
        updates = MetricUpdates(engine.learned.metric_rules, every=True)
        thread = threading.get_ident()
        before = {id(m): m._update_count for m in self._modules.values() if isinstance(m, Metric)}
        buffers = [(b, b.clone()) for m in self._layers_modules() for b in m.buffers(recurse=False)] if steady else []
        for module in self._batch_norms() if steady else ():
            module.training = False  # `self._left.put_back` restores it

        def renew() -> None:
            for buffer, value in buffers:
                buffer.copy_(value)

        own, learned = (
            SavedAttributes(self._layers_modules()),
            [(x, x.borrows, x.reaches_out) for x in engine.model.layers],
        )
        try:

            def to_read() -> tuple[LogRecorder, int] | None:
                if len(batches) > 1 or threading.get_ident() != thread or not current[-1].logs.calls:
                    return None  # as in a step: user code that needs the values shows a difference
                early.append(current[-1].logs.take())
                return early[-1], sizes[0]

            with (
                undone_logs(self._root),
                intercepted([*self._interceptors, *models]),
                shadowed_log(
                    self._root,
                    lambda: current[-1].logs,
                    several=len(batches) > 1,
                    to_read=to_read,
                    updates=updates,
                ),
            ):
                for index, (batch, rows) in enumerate(zip(batches, microbatches.rows_of(sizes), strict=True)):
                    run = Rehearsal(
                        engine,
                        index,
                        draws,
                        self._written,
                        self._order,
                        backwards,
                        self._outside,
                        cut,
                        renew,
                        self._looked_into,
                    )
                    current.append(run)
                    draws.begin(rows)
                    if not going_on:  # as in a step, where each microbatch finds a layer's attributes as it began
                        own.put_back()
                    renew()
                    try:
                        output = run.run(self._step.function, (batch, *self._step.rest), {})
                    except Exception as error:
                        engine.model.buffers.drop()
                        self._lost = error if run.lost else None
                        raise
                    shown.alike &= draws.alike
                    loss = loss_of(output)
                    log_returned(run.logs, output)
                    run.mode.judge(loss, sizes[index])
                    run.operations.end(loss)
                    shown.operations = run.operations
                    if operations is not None:
                        operations.append(run.operations)
                    if loss is not None:
                        run.weight, self._loss_dtype = weighing.of(run), loss.dtype
                    run.output = detached(output)
                    engine.model.buffers.settle()
                    runs.append(run)
                    losses.append(loss)
            for taken in reversed(early):
                runs[0].logs.put_back(taken)
            sites = engine.learned.counted.of_logs
            ways = {key: [Way(site=site, rule=USUAL)] for key, site in sites.items()}
            shown.added = updates.added([run.logs for run in runs])
            shown.beside = updates.attributes()
            joined = join(shown, runs, sizes, weighing, ways, mixed=False, updates=updates)
            shares = [weight / sum(joined.weights) for weight in joined.weights]
            if joined.added is not None:
                shares = [one.factor for one in joined.added]
            for run, loss, rows, share in zip(runs, losses, microbatches.rows_of(sizes), shares, strict=False):
                if loss is not None:
                    draws.begin(rows)
                    run.look_back("the loss", [loss], share)
            shown.spread = len(runs) > 1 and are_spread([run.mode for run in runs], sizes)
            shown.is_mixed = any(run.mode.counts.mixed for run in runs)
            for key, (name, _) in returned(joined.logs.said, joined.output).items():
                shown.log(name, joined.output[key])
            engine.learned.new_code.learn_names(name for name, _ in shown.logged)
            shown.logs, shown.weights = joined.logs, joined.weights
            shown.calls = self._calls(runs)
            shown.output, shown.loss = joined.output, joined.loss if joined.losses else None
            shown.last_loss = losses[-1]
            shown.metrics = dict(self._values(before))
            changes = self._left.changes()
            shown.left = changes[MODULES] | self._written.changes()
            shown.settings, shown.elsewhere = changes[SETTINGS], changes[ELSEWHERE]
            self._outside.narrow()
        finally:
            for layer, borrows, reaches_out in learned:
                layer.borrows, layer.reaches_out = borrows, reaches_out
            self._left.put_back()
            self._written.put_back()
        return shown

    def _calls(self, runs: Sequence[Rehearsal]) -> dict[Key, Calls]:
        """Return what user code has called in any of ``runs`` for each logged value."""
        number, found = self._engine.learned.new_code.number, dict[Key, Calls]()
        for run in runs:
            for key, calls in run.operations.led_to().items():
                found[key] = found.get(key, frozenset()) | frozenset(map(number, calls))
        return found

    def _values(self, before: dict[int, int]) -> Iterator[tuple[str, Any]]:
        """Yield the values of metrics that were updated: over the epoch and, if they keep it, of the step.

        They are this machine's own: others may not rehearse, or not as often.
        """
        metrics = {name: metric for name, metric in self._modules.items() if isinstance(metric, Metric)}
        with contextlib.ExitStack() as after:
            for metric in metrics.values():
                after.callback(setattr, metric, "_to_sync", metric._to_sync)
                metric._to_sync = False
            for name, metric in metrics.items():
                if metric._update_count != before[id(metric)]:
                    with contextlib.suppress(Exception):
                        cached = getattr(metric, "_forward_cache", None)
                        if cached is not None:
                            yield f"metric {name!r} of the step", cached
                        yield f"metric {name!r}", metric.compute()

    def _layers_modules(self) -> list[nn.Module]:
        return [m for m in self._modules.values() if id(m) in self._inside]

    def _batch_norms(self) -> list[nn.Module]:
        return [m for m in self._modules.values() if isinstance(m, _BatchNorm) and m.training]

    def _layers_gather(self, whole: Shown) -> bool:
        """Return whether there are batch norms, or changes inside layers or metrics; `Hints` warns of statistics."""
        return bool(self._batch_norms()) or any(not self._counts(path) for path in whole.left)

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _compare(
        self, whole: Shown, parts: Shown, sizes: list[int], verdict: Verdict | None = None,
        unsteady: set[str] | None = None,
    ) -> Difference | None:  # fmt: skip
        comparison = Comparison(self.tolerance(), sizes, self._unsteady, unsteady)
        comparison.see(LOSS, whole.loss, parts.loss)
        comparison.see_logs(whole, parts, self._flow.rules)
        for name in () if self._again or self._near is not None else {**whole.metrics, **parts.metrics}:
            comparison.see(name, whole.metrics.get(name, ABSENT), parts.metrics.get(name, ABSENT))
        if whole.backwards is not None and parts.backwards is not None:
            comparison.see_backwards(whole.backwards, parts.backwards)
        one, other = _without_numbers(whole.output), _without_numbers(parts.output)
        if isinstance(one, dict) and isinstance(other, dict):
            for key in {**one, **other}:
                comparison.see(f"{OUTPUT} as {key!r}", one.get(key, ABSENT), other.get(key, ABSENT))
        else:
            comparison.see(OUTPUT, one, other)
        for path in () if self._asked else {**whole.left, **parts.left}:
            one, other = whole.left.get(path, ABSENT), parts.left.get(path, ABSENT)
            if self._counts(path):
                comparison.see_left(path, one, other)
            else:
                comparison.see_rows(path, one, other)
        for path in () if self._asked else {**whole.settings, **parts.settings}:
            comparison.see_left(path, whole.settings.get(path, ABSENT), parts.settings.get(path, ABSENT), "")
        done = comparison.found is not None and unsteady is None
        for path in () if self._asked or done else {**whole.elsewhere, **parts.elsewhere}:
            comparison.see_elsewhere(path, whole.elsewhere.get(path, ABSENT), parts.elsewhere.get(path, ABSENT))
        if verdict is not None:
            verdict.rules, verdict.fixed_sizes = comparison.rules, comparison.fixed_sizes
            comparison.see_metrics(whole, parts, self._engine.learned.metric_rules)
            verdict.size_rules, verdict.open_metrics = comparison.size_rules, comparison.open_metrics
            verdict.metric_rules, verdict.uneven_metrics = comparison.metric_rules, comparison.uneven_metrics
            verdict.kept_rows = comparison.kept_rows
            verdict.open, verdict.lost_rows = comparison.open or self._flow.is_hidden, comparison.lost_rows
            verdict.keeps = bool(whole.settings or whole.elsewhere or any(map(self._counts, whole.left)))
        return comparison.found

    def tolerance(self) -> float:
        """Return the relative difference between values that rounding may have made."""
        formats = self._engine.model.formats
        low = formats.low
        for device in self._engine.worker_pool.device_types:
            if torch.is_autocast_enabled(device):
                low = torch.get_autocast_dtype(device)
        widest = {p.dtype for p in self._root.parameters() if p.is_floating_point()}
        kinds = [TOLERANCE.get(kind, 1e-4) for kind in (widest or {torch.float32})]
        return max([*kinds, *(TOLERANCE.get(kind, 0.0) for kind in (low, self._loss_dtype) if kind is not None)])

    def _counts(self, path: str) -> bool:
        """Return whether to compare ``path``: not the state of layers, of which `Hints` warns, nor that of metrics."""
        module, _ = self._owner_of(path)
        return not isinstance(module, Metric) and id(module) not in self._inside

    def _is_kept_in_layer(self, path: str) -> bool:
        """Return whether ``path`` is an attribute inside a layer, and neither a buffer nor a parameter."""
        module, name = self._owner_of(path)
        return id(module) in self._inside and not (name in module._buffers or name in module._parameters)

    def _owner_of(self, path: str) -> tuple[nn.Module, str]:
        """Return the module that has the attribute at ``path``, and what follows its name there."""
        owner = path = path.removeprefix("len(")
        while owner and owner not in self._modules:
            owner = owner.rpartition(".")[0]
        return self._modules.get(owner, self._root), path.removeprefix(owner).removeprefix(".")

    def _attribute_of(self, path: str) -> str:
        """Return the path of the attribute inside a layer that ``path`` is in, or of the metric whose state that is."""
        module, name = self._owner_of(path)
        owner, first = path.removeprefix("len(").removesuffix(name), re.split(r"\W", name)[0]
        return owner.removesuffix(".") if isinstance(module, Metric) else owner + first


def _without_numbers(output: Any) -> Any:
    """Return what training_step has returned without the loss and what `log_returned` records."""
    if isinstance(output, dict):
        return {key: value for key, value in output.items() if key != "loss" and not is_returned_number(value)}
    return None if isinstance(output, Tensor) else output


def _named(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
