"""What is cut: the batch, or the calls of the model in ``training_step``; and how that is found out.

microbatch_scope="model" ── the first batch: do the calls, cut, give what they give whole? ── the calls, or [4]
"step", "auto" ── the first batch that is cut, and the first that is cut unevenly: are parts the whole? ── [1]
                  they are ── the batch ── [2]      they are not, and cut calls are ── the calls ── [3]
                  neither ── an error, once the engine has had its say ── [4]
                  later batches alone, or none can be cut and that was not asked for ── they stay whole ── [5]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.batch.cutting import Cut, Cutter
from lightning_roundpipe.runtime.batch.logs import OPEN, USUAL, Key
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.profile.first_batch import Planner
from lightning_roundpipe.runtime.profile.outside_writes import BETWEEN
from lightning_roundpipe.runtime.profile.parts_check import (
    PartsCheck,
    Verdict,
    calls_are_not_the_whole,
    described,
    in_both,
    not_the_whole,
)
from lightning_roundpipe.runtime.user_code.interception import Interceptor, ModelInterceptor

LOOKS = 3
"""Batches of one kind whose parts are compared with the whole, if one does not tell."""


class Scope:
    """Of one engine.

    Args:
        engine: what outlives steps.
        cutter: cuts the batches.
        planner: forgets what was learned of batches that were cut in another way.
        layers, models: which are called; the models' calls may be cut.
        rehearsal: layers may be called in it as in evaluation; gives, by name, what user code may change that is not
            the module's.

    Attributes:
        cuts_calls: whether calls of the model are cut, and not the batch.
    """

    def __init__(
        self, engine: EngineContext, cutter: Cutter, planner: Planner, layers: list[Interceptor],
        models: list[ModelInterceptor], rehearsal: Callable[[], AbstractContextManager[Iterable[tuple[str, Any]]]],
    ) -> None:  # fmt: skip
        self._engine, self._cutter, self._planner, self._rehearsal = engine, cutter, planner, rehearsal
        self._layers, self._models = layers, models
        self.cuts_calls = engine.options.microbatch_scope == "model"
        self._fitting: dict[Key, list[str]] = {}
        """Of logged values, what all comparisons leave."""
        self._looks: dict[bool, int] = {}
        """How often batches were compared, by whether they are cut unevenly."""
        self._whole: set[bool] = set()
        """Those that stay whole."""
        self._refusal = ""

    @property
    def interceptors(self) -> list[Interceptor | ModelInterceptor]:
        """Of all whose calls are intercepted in a step."""
        return [*self._layers, *(self._models if self.cuts_calls else ())]

    def cut(self, function: Callable[..., Any], batch: Any, rest: tuple[Any, ...], seed: tuple[int, ...]) -> Cut:
        """What ``function`` (training_step) is called with; the arguments are those of `Engine.train_batch`."""
        cut = self._cutter.cut(batch, calls=self.cuts_calls)
        if cut.sizes is None and self._engine.options.microbatch_scope == "model" and not self._looks:
            self._look_at_calls(function, batch, rest, seed)
        if self.cuts_calls or cut.sizes is None or len(cut.sizes) == 1:
            return cut
        uneven, first = len(set(cut.sizes)) > 1, not self._looks
        if self._looks.get(uneven, 0) < LOOKS and uneven not in self._whole:
            self._look(PartsCheck, function, batch, rest, seed, cut.sizes, first=first)
            cut = self._cutter.cut(batch, calls=self.cuts_calls)
        return cut if uneven not in self._whole or cut.sizes is None else Cut([batch], [sum(cut.sizes)])

    def refuse(self) -> None:
        """After the first step: parts of the batch are not the whole [4].

        Raises:
            RoundPipeError: if so, and the engine has refused nothing.
        """
        if self._refusal:
            raise RoundPipeError(self._refusal)

    def _look(
        self, check: type[PartsCheck], function: Callable[..., Any], batch: Any, rest: tuple[Any, ...],
        seed: tuple[int, ...], sizes: list[int], *, first: bool,
    ) -> None:  # fmt: skip
        """Whether parts give what the whole batch gives [1]; ``first``: no batch has been trained in parts yet."""
        engine, options = self._engine, self._engine.options
        uneven = len(set(sizes)) > 1
        auto = options.microbatch_scope == "auto" and options.plan_text is None and not self._cutter.weighs
        again = uneven in self._looks
        with self._rehearsal() as others:  # which lets interrupts through where user code runs
            parts = check(engine, self._layers, self._cutter, function, batch, rest, sizes, seed, others)
            verdict = parts.find_out(self._models if auto and (first or again) else ())
        learned = engine.learned
        learned.mixes |= engine.hints.couples or (verdict.spread and verdict.parts is None and not verdict.why_not)
        self._fitting = in_both(self._fitting, verdict.rules)
        learned.log_rules = {key: _chosen(rules) for key, rules in self._fitting.items()}
        self._looks[uneven] = self._looks.get(uneven, 0) + 1 if OPEN in learned.log_rules.values() else LOOKS
        if verdict.shared and not learned.shares:
            self._keep_in_order(*next(iter(verdict.shared.items())))
        if verdict.losses_inside and not self._cutter.weighs:
            engine.hints.of_a_loss_inside(verdict.losses_inside[0])
        if verdict.why_not:
            engine.hints.of_no_comparison(verdict.why_not)
        elif verdict.parts is not None and not (verdict.announced or engine.hints.couples):
            self._part_ways(verdict, auto=auto, uneven=uneven, first=first or again)

    def _look_at_calls(
        self, function: Callable[..., Any], batch: Any, rest: tuple[Any, ...], seed: tuple[int, ...]
    ) -> None:
        """Whether calls that are cut because the user says so give what whole calls give [2].

        What user code raises in the rehearsal, the step raises as well.
        """
        engine = self._engine
        self._looks[False] = LOOKS
        try:
            sizes = self._cutter.sizes_for(batch)
        except ValueError as error:
            return engine.hints.of_no_comparison(str(error), of_calls=True)
        if len(sizes) == 1:
            return None
        with self._rehearsal() as others:
            check = PartsCheck(
                engine, self._layers, self._cutter, function, batch, rest, sizes, seed, others, asked=True
            )
            verdict = check.find_out(self._models)
        if verdict.why_not:
            engine.hints.of_no_comparison(verdict.why_not, of_calls=True)
        elif verdict.parts is not None and not verdict.raised:
            self._refusal = calls_are_not_the_whole(described(verdict))

    def _keep_in_order(self, place: str, what: str) -> None:
        """The code of ``place`` changes ``what``, which another microbatch would find."""
        self._engine.learned.shares = True
        if self._engine.learned.plan is not None:
            self._planner.forget()
        code = "code between layers" if place == BETWEEN else f"code inside layer {place!r} (a hook, perhaps)"
        self._planner.run_in_order(
            f"{code} changes {what!r}, which microbatches share and read later in the step",
            "leave plan out, or set num_microbatches=1.",
        )

    def _part_ways(self, verdict: Verdict, *, auto: bool, uneven: bool, first: bool) -> None:
        """Parts are not the whole."""
        engine, what = self._engine, described(verdict)
        if engine.options.microbatch_scope == "auto" and self._cutter.weighs:
            engine.hints.of_given_weights(what)
        elif not first and verdict.parts is not None and verdict.parts.what.startswith("metric"):
            engine.hints.of_uneven_metric(what)  # which has seen parts of earlier batches
        elif not first:
            engine.hints.of_later_batches(what, uneven=uneven)
            self._whole.add(uneven)  # [5]
        elif auto and verdict.raised and verdict.model is not None and not engine.options.asks_for_parts:
            engine.hints.of_a_whole_batch(what)
            self._whole = {False, True}  # [5]
        elif verdict.raised and (not auto or verdict.model is not None):
            engine.hints.of_no_comparison(what)  # the step raises the error as well, or shows that parts do not
        elif not auto or verdict.model is not None:
            self._refusal = not_the_whole(what, verdict.left, auto=auto)
        else:
            engine.hints.of_the_scope(what)
            self.cuts_calls = True  # [3]
            self._planner.forget()


def _chosen(fitting: list[str]) -> str:
    """One of the rules for a logged value that the comparisons leave; a value that was always zero may be a sum."""
    zero = {USUAL, "sum", "mean over samples"} <= set(fitting)
    return OPEN if zero else fitting[0] if fitting else USUAL
