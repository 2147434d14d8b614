"""Decides what is cut: the batch, or only the calls of the model in ``training_step``.

microbatch_scope="model" ── the first batch: do cut calls give what whole calls give? ── yes: cut the calls; no: [3]
"step", "auto" ── the first batch that is cut, and the first that is cut unevenly: do parts give the same? ── [1]
                  parts do ── cut the batch               only cut calls do ── cut the calls ("auto") ── [2]
                  neither ── an error, unless the step itself raises a more specific one ── [3]
                  only later batches differ, or no parts were asked for and none work ── keep them whole ── [4]
a later batch has samples that differ as those of none before ── the same, before its training ── [6]
                  only cut calls do ── cut the calls    neither ── keep batches whole, with a warning
                  calls are cut already, and do not ── keep batches whole, with a warning, or refuse a given plan
a later batch does something for the first time, or is one of `COMPARED_LATER` ── the same, after its training ── [5]
                  only cut calls do ── cut the calls from the next batch on; neither ── a warning
                  a part's loss or gradient is not a number, and parts may be why ── an error, before the update
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.messages import plural
from lightning_roundpipe.runtime.batch.cutting import Cut, Cutter
from lightning_roundpipe.runtime.batch.joining import Joined
from lightning_roundpipe.runtime.batch.log_rules import Ways, in_both, merged_otherwise, settled, undecided, ways_of
from lightning_roundpipe.runtime.batch.log_sizes import LARGEST, sizes_in_both
from lightning_roundpipe.runtime.batch.logs import OPEN, Said
from lightning_roundpipe.runtime.batch.samples import batch_size
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.profile.first_batch import Planner
from lightning_roundpipe.runtime.profile.loss_flow import Coupling
from lightning_roundpipe.runtime.profile.outside_writes import BETWEEN
from lightning_roundpipe.runtime.profile.parts_check import PartsCheck, StepCall
from lightning_roundpipe.runtime.profile.unlike_samples import AlikeSamples
from lightning_roundpipe.runtime.profile.verdict import (
    Verdict,
    calls_are_not_the_whole,
    described,
    either,
    not_the_whole,
    undefined_in_parts,
)
from lightning_roundpipe.runtime.user_code.interception import Interceptor, ModelInterceptor

LOOKS = 3
"""Batches of one kind (cut evenly, or unevenly) to compare at most while the rule of a logged value is `OPEN`, or while
something that training_step keeps may be equal by chance (`Verdict.open`)."""


MOST_FIRST_TIMES = 16
"""Batches to compare at most because they do something for the first time."""

COMPARED_LATER = frozenset(4**n for n in range(2, 16))
"""Batches to compare anyway, by how many were cut: a weight may have been zero, and another argument harmless."""


class Scope:
    """Decides what to cut, for the batches of one engine.

    It has many collaborators because it runs the comparisons that may decide so, and sets up the engine's cutter,
    planner and interceptors for what they say.

    Args:
        engine: the context of the engine.
        cutter: cuts the batches.
        planner: forgets traces and plan when batches are cut in another way.
        layers: the interceptors of all layers.
        models: the interceptors of the models, whose calls may be cut.
        rehearsal: returns a context in which layers may be called as in evaluation. It yields further objects that user
            code may change, by name.
        settings: returns the numbers among the settings of optimizers and schedulers, by name.

    Attributes:
        cuts_calls: whether the calls of the model are cut instead of the batch.
    """

    def __init__(
        self, engine: EngineContext, cutter: Cutter, planner: Planner, layers: list[Interceptor],
        models: list[ModelInterceptor], rehearsal: Callable[[], AbstractContextManager[Iterable[tuple[str, Any]]]],
        settings: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self._engine, self._cutter, self._planner, self._rehearsal = engine, cutter, planner, rehearsal
        self._settings, self._set = settings, dict[str, Any]()
        self._layers, self._models = layers, models
        self.cuts_calls = engine.options.microbatch_scope == "model"
        self._looks: dict[bool, int] = {}
        """Number of comparisons, by whether the batch is cut unevenly; `LOOKS` once no more are needed."""
        self._alike = AlikeSamples()
        self._whole: set[bool] = set()
        """The kinds of batches that stay whole: False for those that are cut evenly, True for others."""
        self._first_times = 0
        """Number of comparisons because a batch has done something for the first time."""
        self._cut = 0
        """Number of batches that were trained on in parts."""
        self._updated: set[str] = set()
        """The metrics that such batches have updated before anything showed whether they count updates."""
        self._tensors: list[tuple[Tensor, int]] = []
        """The tensors of the coming batch's parts, and how often each has been written to."""
        self._writes = False
        """Whether training_step has written to a batch. What it would do on that once more says nothing."""
        self._unwritten: Any = None
        """A copy of the coming batch, if ``_writes``."""
        self._refusal = ""
        """The error that `refuse` raises; empty if none."""

    @property
    def interceptors(self) -> list[Interceptor | ModelInterceptor]:
        """The interceptors to install during a step."""
        return [*self._layers, *(self._models if self.cuts_calls else ())]

    def cut(self, function: Callable[..., Any], batch: Any, rest: tuple[Any, ...], seed: tuple[int, ...]) -> Cut:
        """Cut ``batch``, after a rehearsal if one is due. The arguments are those of `Engine.train_batch`."""
        cut = self._cut_of(StepCall(function, batch, rest, seed))
        self._tensors, self._unwritten = [], None
        if cut.sizes is not None and len(cut.sizes) > 1 and self._engine.learned.new_code.watched:
            tensors = (x for x in tree_iter(cut.parts) if isinstance(x, Tensor) and not x.is_inference())
            self._tensors = [(tensor, tensor._version) for tensor in tensors]
            self._set = self._settings()
            if self._writes:
                self._unwritten = self._cutter.part(batch, slice(0, sum(cut.sizes)), sum(cut.sizes))
        return cut

    def _cut_of(self, step: StepCall) -> Cut:
        batch = step.batch
        cut = self._cutter.cut(batch, calls=self.cuts_calls)
        if cut.sizes is None and self._engine.options.microbatch_scope == "model" and not self._looks:
            self._look_at_calls(step)
        elif cut.sizes is None and self._begins_to_differ(step):
            cut = self._cutter.cut(batch, calls=self.cuts_calls)
        if self.cuts_calls or (sizes := cut.sizes) is None or len(sizes) == 1:
            return cut
        uneven, first = len(set(sizes)) > 1, not self._looks
        if self._looks.get(uneven, 0) < LOOKS and uneven not in self._whole:
            self._alike.begin(batch, sum(sizes))
            self._look(step, sizes, first=first)
            cut = self._cutter.cut(batch, calls=self.cuts_calls)
        elif uneven not in self._whole and self._alike.begin_to_differ_in(batch, sum(sizes)):
            self._look(step, sizes, first=False, unlike=True)  # [6]
            cut = self._cutter.cut(batch, calls=self.cuts_calls)
        return cut if uneven not in self._whole or cut.sizes is None else Cut([batch], [sum(cut.sizes)])

    def look_again(
        self, function: Callable[..., Any], batch: Any, rest: tuple[Any, ...], seed: tuple[int, ...], sizes: list[int],
        joined: Joined,
    ) -> None:  # fmt: skip
        """Compare ``batch``, which was trained on in parts of ``sizes``, if it may show something else [5].

        Its result was ``joined`` of theirs.
        """
        new_code = self._engine.learned.new_code
        new_code.note_branches()
        if new_code.watched:
            new_code.note_attributes((key for key, value in self._settings().items() if self._set.get(key) != value), 0)
        self._cut += 1
        updated = set[str]()
        if joined.updates is not None:
            updated = joined.updates.updated()
            self._engine.hints.of_metrics_reset(joined.updates.lost())
        try:
            self._compare_again(StepCall(function, batch, rest, seed), sizes, joined, updated)
        finally:
            self._updated |= updated - self._engine.learned.metric_rules.keys()

    def _compare_again(self, step: StepCall, sizes: list[int], joined: Joined, updated: set[str]) -> None:
        """Compare ``step``, see `look_again`. It has ``updated`` metrics of which nothing was known."""
        new_code = self._engine.learned.new_code
        written, unwritten = any(x._version != before for x, before in self._tensors), self._unwritten
        self._writes, self._tensors, self._unwritten = self._writes or written, [], None
        doubtful = set() if joined.updates is None else joined.updates.doubtful
        unknown = sorted((updated - self._engine.learned.metric_rules.keys()) | doubtful)
        adds = new_code.watched and bool(unknown)
        if not new_code.found and not adds and not (new_code.watched and self._cut in COMPARED_LATER):
            return
        if unwritten is not None:
            step = step._replace(batch=unwritten)
        elif written:
            self._engine.hints.of_logs(new_code.unknown, [])
            return new_code.accept()
        self._first_times += bool(new_code.found) or adds
        anyway = (f"after {plural(self._cut, 'batch')}, training_step was compared again", 0)
        if adds and joined.updates is not None:
            part = joined.updates.first_part(unknown[0], joined.recorders)
            anyway = (f"the metric {unknown[0]!r} was given a value", part)
        occasion, near = next(iter(new_code.found.items()), anyway)
        weighed = enumerate(zip(joined.losses, joined.weights, strict=False))
        undefined = [part for part, (loss, weight) in weighed if weight and not bool(loss.isfinite().all())]
        known, known_metrics = self._engine.learned.log_ways, self._engine.learned.metric_rules
        try:
            near = undefined[0] if undefined else near
            self._look(step, sizes, first=False, occasion=occasion, near=near, undefined=bool(undefined))
            if not self.cuts_calls:
                if joined.updates is not None:
                    late = {
                        name: rules
                        for name, rules in self._engine.learned.metric_rules.items()
                        if name in doubtful or (name in updated - self._updated and not known_metrics.get(name))
                    }
                    joined.updates.correct(joined.recorders, joined.weights, sizes, late)
                    self._engine.hints.of_doubtful_metrics(sorted(joined.updates.doubtful))

                def counted() -> Said:
                    with self._checking(step, sizes) as check:
                        return check.said_in_parts()

                self._tell_of_logs(joined, sizes, known, counted)
        finally:
            new_code.accept()
            new_code.watched &= self._first_times < MOST_FIRST_TIMES and not self.cuts_calls

    def refuse(self) -> None:
        """Refuse parts that differ from the whole batch [3].

        Called after the step, so that an error of the step itself, which is more specific, comes first.

        Raises:
            RoundPipeError: if the rehearsal has found such a difference.
        """
        if self._refusal:
            raise RoundPipeError(self._refusal)

    @contextlib.contextmanager
    def _checking(
        self, step: StepCall, sizes: list[int], *, again: bool = False, near: int | None = None, asked: bool = False
    ) -> Iterator[PartsCheck]:
        """Yield the check of a step while layers may be called as in evaluation; see `PartsCheck` for the arguments."""
        with self._rehearsal() as others:  # `Evaluation.run` lets interrupts through where user code runs
            yield PartsCheck(
                self._engine, self._layers, self._cutter, step, sizes, others, again=again, near=near, asked=asked
            )

    def _look(
        self, step: StepCall, sizes: list[int], *, first: bool, occasion: str = "", near: int | None = None,
        unlike: bool = False, undefined: bool = False,
    ) -> None:  # fmt: skip
        """Rehearse the batch in parts, and act on the verdict [1].

        Args:
            step, sizes: see `PartsCheck`.
            first: whether no batch has been compared before.
            occasion: why it is compared although it was trained on already, such as what it has done for the first
                time; empty before it is.
            near: the part that has.
            unlike: whether its samples differ as those of no batch before.
            undefined: whether the loss of a part is infinite or not a number.

        Raises:
            RoundPipeError: if a loss or its gradient is undefined, and parts of the batch may be the reason.
        """
        engine, options = self._engine, self._engine.options
        uneven = len(set(sizes)) > 1
        auto = options.microbatch_scope == "auto" and options.plan_text is None and not self._cutter.weighs
        again = uneven in self._looks
        known = engine.learned.metric_rules
        with self._checking(step, sizes, again=again, near=near) as check:
            verdict = check.find_out(self._models if auto and (first or again or occasion) else ())
            differs = (verdict.parts is not None and not verdict.announced) or verdict.coupling is not None
            if occasion and differs and not verdict.why_not:
                what = "the loss" if undefined else "a gradient" if check.has_undefined_gradients() else ""
                if what:
                    raise RoundPipeError(undefined_in_parts(what, occasion, described(verdict)))
        learned = engine.learned
        for name, fit in learned.metric_rules.items():
            if fit and not known.get(name) and name in self._updated | known.keys():
                engine.hints.of_a_late_counting_metric(name)
        learned.kept_rows |= verdict.kept_rows
        learned.fixed_sizes |= verdict.fixed_sizes
        if verdict.parts is None and not verdict.why_not:
            for name, state in verdict.uneven_metrics.items():
                engine.hints.of_a_counting_metric(name, state)
            learned.size_rules = sizes_in_both(learned.size_rules, verdict.size_rules)
            learned.fixed_sizes -= {key for key, fit in learned.size_rules.items() if LARGEST not in fit}
            engine.hints.of_batch_sizes(sorted({name for (name, _), fit in learned.size_rules.items() if not fit}))
        learned.mixed = False if engine.hints.couples else either(learned.mixed, verdict.mixed)
        learned.log_fits = in_both(learned.log_fits, verdict.rules)
        learned.log_tolerance, learned.log_ways = check.tolerance(), ways_of(learned.log_fits)
        learned.new_code.follows = any(len(ways) > 1 for ways in learned.log_ways.values())
        if not occasion:
            is_open = (
                verdict.open
                or verdict.open_metrics
                or any(way.rule == OPEN for ways in learned.log_ways.values() for way in ways)
            )
            self._looks[uneven] = self._looks.get(uneven, 0) + 1 if is_open else LOOKS
        if verdict.shared and not learned.shares:
            place, changed = next(iter(verdict.shared.items()))
            if occasion and options.plan_text is not None:
                engine.hints.of_a_late_difference(
                    occasion, f"{changed!r} is what another part has left there", switches=False
                )
            else:
                self._keep_in_order(place, changed)
        if lost := [*filter(learned.may_be_read, verdict.lost_rows)]:
            engine.hints.of_lost_rows(lost[0])
        if verdict.losses_inside and not self._cutter.weighs:
            engine.hints.of_a_loss_inside(verdict.losses_inside[0])
        if verdict.announced:
            engine.hints.coupled_by = str(verdict.parts)
        if verdict.why_not:
            engine.hints.of_no_comparison(verdict.why_not)
            learned.new_code.watched = False  # nor could what is new be compared
        elif verdict.parts is not None and not (verdict.announced or engine.hints.couples):
            self._part_ways(verdict, auto=auto, uneven=uneven, first=first or again, occasion=occasion, unlike=unlike)
        else:
            if verdict.collects is not None:
                engine.hints.of_what_is_collected(str(verdict.collects))
            if verdict.coupling is not None and not engine.hints.couples:
                self._part_if_coupled(verdict, verdict.coupling, auto=auto, occasion=occasion)
        if not (learned.shares or uneven in self._whole):  # parts find what others have left, or there are none
            self._tell_of_the_last_part(verdict)

    def _tell_of_the_last_part(self, verdict: Verdict) -> None:
        """Warn of what layers leave that is only the last microbatch's, if that may be read."""
        learned = self._engine.learned
        lost = [(path, left) for path, left in verdict.of_last_part.items() if self.cuts_calls or not left.joined]
        for adds_up in (True, False):
            paths = [path for path, left in lost if left.goes_on is adds_up]
            if paths := [path for path in paths if adds_up or learned.may_be_read(path.rpartition(".")[2])]:
                self._engine.hints.of_the_last_part(paths, adds_up=adds_up)

    def _tell_of_logs(self, joined: Joined, sizes: list[int], known: Ways, counted: Callable[[], Said]) -> None:
        """Warn of logged values of the batch that are merged otherwise from now on, or of which nothing is known yet.

        Args:
            joined: the result of the batch.
            sizes: samples of its parts.
            known: how values were computed, as far as that was known when they were merged.
            counted: returns what the parts log, with counts that the batch had, but that nobody has looked at.
        """
        learned, hints = self._engine.learned, self._engine.hints
        now, tolerance = settled(joined.recorders, learned.log_ways, joined.ran), learned.log_tolerance
        weights, losses = joined.weights, joined.losses
        found = {
            key: way
            for key in now.astray
            for way in learned.log_ways.get(key, ())
            if way.site is not None and way not in known.get(key, ()) and way.calls <= (joined.ran or frozenset())
        }
        if found.keys() & {(name, 0) for name in undecided(now, learned.log_ways, sizes, weights, tolerance, losses)}:
            now = now.counted(found, counted())
        still = undecided(now, learned.log_ways, sizes, weights, tolerance, losses)
        differ = merged_otherwise(joined.logs, now, sizes, weights, tolerance, losses, joined.added)
        for key in differ:
            is_open, is_new = joined.logs.rules.get(key, OPEN) == OPEN, key in joined.logs.astray
            hints.of_a_new_log(
                key[0], now.ways[key].rule, is_known=(key[0], 0) in known, is_new=is_new, is_open=is_open
            )
        hints.of_logs([name for name in learned.new_code.unknown if name in still], [])

    def _look_at_calls(self, step: StepCall) -> None:
        """Rehearse calls that are cut because the user has set ``microbatch_scope="model"``.

        An error that user code raises in the rehearsal is ignored: the step raises it again.
        """
        engine = self._engine
        self._looks[False] = LOOKS
        try:
            sizes = self._cutter.sizes_for(step.batch)
        except ValueError as error:
            return engine.hints.of_no_comparison(str(error), of_calls=True)
        if len(sizes) == 1:
            return None
        self._alike.begin(step.batch, sum(sizes))
        with self._checking(step, sizes, asked=True) as check:
            verdict = check.find_out(self._models)
        self._tell_of_the_last_part(verdict)
        if verdict.why_not:
            engine.hints.of_no_comparison(verdict.why_not, of_calls=True)
        elif verdict.parts is not None and not verdict.raised:
            self._refusal = calls_are_not_the_whole(described(verdict))

    def _begins_to_differ(self, step: StepCall) -> bool:
        """Return whether calls stay whole from now on: samples begin to differ, and cut calls show something else [6].

        A layer may compute with the lengths of all samples, which nothing shows as long as these are equal.
        """
        engine = self._engine
        try:
            sizes = self._cutter.sizes_of(batch_size(step.batch))
        except ValueError:
            return False
        if len(sizes) == 1 or not self._alike.begin_to_differ_in(step.batch, sum(sizes)):
            return False
        with self._checking(step, sizes, asked=True) as check:
            verdict = check.find_out(self._models)
        if verdict.why_not or verdict.parts is None or verdict.raised or verdict.parts.elsewhere:
            return False
        if engine.options.plan_text is not None:
            self._refusal = calls_are_not_the_whole(described(verdict))
            return False
        engine.hints.of_unlike_samples(described(verdict), of_calls=True)
        self.cuts_calls, self._whole = False, {False, True}
        self._planner.forget()
        return True

    def _keep_in_order(self, place: str, what: str) -> None:
        """Run microbatches one after another, because the code of ``place`` changes ``what``, which they share."""
        self._engine.learned.shares = True
        code = "code between layers" if place == BETWEEN else f"code inside layer {place!r} (a hook, perhaps)"
        self._planner.run_in_order(
            f"{code} changes {what!r}, which microbatches share and read later in the step",
            "leave plan out, or set num_microbatches=1.",
        )

    def _part_ways(
        self, verdict: Verdict, *, auto: bool, uneven: bool, first: bool, occasion: str, unlike: bool
    ) -> None:  # fmt: skip
        """Choose a hint, a wider scope or an error, as parts differ from the whole batch."""
        engine, what = self._engine, described(verdict)
        if occasion:
            switches = auto and verdict.model is None
            engine.hints.of_a_late_difference(occasion, what, switches=switches)
            if switches:
                self.cuts_calls = True
                self._planner.forget()
            return
        if engine.options.microbatch_scope == "auto" and self._cutter.weighs:
            engine.hints.of_given_weights(what)
        elif not first and verdict.parts is not None and verdict.parts.what.startswith("metric"):
            engine.hints.of_uneven_metric(what)  # the metric has seen parts of earlier batches, so only warn
        elif not first:
            engine.hints.of_later_batches(what, uneven=uneven)
            self._whole.add(uneven)  # [4]
        elif unlike and not verdict.raised and not (auto and verdict.model is None):
            engine.hints.of_unlike_samples(what)
            self._whole = {False, True}  # [6]
        elif auto and verdict.raised and verdict.model is not None and not engine.options.asks_for_parts:
            engine.hints.of_a_whole_batch(what)
            self._whole = {False, True}  # [4]
        elif verdict.raised and (not auto or verdict.model is not None):
            engine.hints.of_no_comparison(what)  # the step raises it as well, or shows that full parts do not
        elif not auto or verdict.model is not None:
            self._refusal = not_the_whole(what, verdict.left, auto=auto)
        else:
            engine.hints.of_the_scope(what)
            self.cuts_calls = True  # [2]
            self._planner.forget()

    def _part_if_coupled(self, verdict: Verdict, coupling: Coupling, *, auto: bool, occasion: str) -> None:
        """Cut the calls of the model, if that gives the loss of any batch; else warn."""
        hints, switches = self._engine.hints, auto and verdict.model is None and not coupling.within_model
        if occasion:
            hints.of_a_late_difference(occasion, described(verdict), switches=switches)
        elif switches:
            hints.of_the_scope(described(verdict))
        else:
            hints.of_a_coupling(described(verdict), of_a_log=bool(coupling.log))
        if switches:
            self.cuts_calls = True
            self._planner.forget()
