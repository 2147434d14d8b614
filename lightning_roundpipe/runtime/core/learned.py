"""What earlier batches have shown about the model and user code. Later steps rely on it."""

from __future__ import annotations

import re

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.batch.log_rules import Fitting, How, Way
from lightning_roundpipe.runtime.batch.logs import Key
from lightning_roundpipe.runtime.batch.metric_updates import MetricRules
from lightning_roundpipe.runtime.batch.output_columns import OutputColumns
from lightning_roundpipe.runtime.core.call import CallProfile
from lightning_roundpipe.runtime.core.prediction import CallOrder
from lightning_roundpipe.runtime.core.trace import Kind, Trace, TracedCall
from lightning_roundpipe.runtime.memory.host_model import HostModel
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket
from lightning_roundpipe.runtime.user_code.module_state import ModuleStateIsolation
from lightning_roundpipe.runtime.user_code.names_in_code import ANY
from lightning_roundpipe.runtime.user_code.new_code import NewCode
from lightning_roundpipe.runtime.user_code.rng import Randomness
from lightning_roundpipe.runtime.user_code.target_counts import CountSites

MOST_LEARNED_AGAIN = 64
"""Batches to learn at most because microbatches have left the plan."""


class Learned:
    """One engine's knowledge about its model. The threads of a step read it and add to it.

    It has many attributes because what the first batches show is forgotten together. Each attribute belongs to the
    module that sets it.

    Args:
        model: the model that is trained.

    Attributes:
        trace: the calls of a microbatch, merged from the batches that a plan is made from; None before the first one.
        unseen: the calls of microbatches that have left the plan, as long as ``trace`` does not contain them.
        recent: the calls of the last batch that was one microbatch, used to predict those of the next one.
        plan: the plan that steps run under; None while there is none.
        costs: the costs from which the plan was made.
        offloads: whether the plan fits only if outputs leave their worker while a microbatch waits for another one.
        plans: whether a plan is to be made from the running step.
        shares: whether user code computes with state that microbatches share.
        in_order: whether microbatches run one after another in every step.
        order: which call followed which, for steps that call layers in any order.
        profiles: of each layer's last call in an evaluation, by the layer's index; None if it was not plain.
        module_state: attributes that microbatches set on modules.
        randomness: which calls and sections of user code draw random numbers.
        read_by_user_code: buckets that user code reads. The next step waits for them before it takes the user-code
            lock.
        logs_in_backward: whether user code logs in backward.
        log_fits: what comparisons have shown of logged values.
        log_tolerance: the relative difference that these see.
        log_ways: how logged values are computed, and how those of microbatches are merged then.
        fixed_sizes: logged values whose ``batch_size`` is not counted; see `Verdict`.
        size_rules: the rules by which the ``batch_size`` of other values may follow from those of microbatches.
        metric_rules: how what microbatches add to metrics is merged; see `MetricRules`.
        counted: where training_step divides its loss, and logged values, by counts of its own.
        kept_rows: paths of the attributes that keep something of each sample; a step leaves there what all microbatches
            have left, if user code runs before the next one.
        read_between_steps: the names that such code reads; empty if none runs.
        columns: how many columns outputs of the model have had in rehearsals.
        new_code: what user code has done in earlier batches, and what it has done for the first time.
        mixed: whether the loss adds a mean over samples to one over targets; None if comparisons have not shown. False
            also where the user is warned of it anyway.
    """

    def __init__(self, model: HostModel) -> None:
        self._model = model
        self.plans = self.shares = self.logs_in_backward = False
        self.read_between_steps: frozenset[str] = frozenset()
        self.mixed: bool | None = None
        self.order = CallOrder()
        self.read_by_user_code: frozenset[ParamBucket] = frozenset()
        self._learned_again = 0
        """Batches that were learned once more because of ``unseen``."""
        self.log_fits: dict[How, Fitting] = {}
        self.log_ways: dict[Key, list[Way]] = {}
        self.log_tolerance = 0.0
        self.fixed_sizes: set[Key] = set()
        self.size_rules: dict[Key, set[str]] = {}
        self.metric_rules: MetricRules = {}
        self.counted = CountSites()
        self.kept_rows: set[str] = set()
        self.columns = OutputColumns()
        self.new_code = NewCode()
        self.forget()

    def forget(self) -> None:
        """Drop traces, plans and what was learned with them: the next batch learns the model anew."""
        self.trace: Trace | None = None
        self.unseen: list[list[Kind]] = []
        self.recent: Trace | None = None
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.offloads = False
        self.in_order = self.shares
        self.profiles: dict[int, CallProfile | None] = {}
        self.module_state = ModuleStateIsolation(self._model.module, self._model.layers)
        self.randomness = Randomness()
        self._walked: set[tuple[int, int]] = set()

    def may_be_read(self, path: str) -> bool:
        """Return whether user code between steps may read what is at ``path``, as it reads a name in it."""
        return not self.read_between_steps.isdisjoint([ANY, *re.split(r"\W", path)])

    def awaits_calls(self) -> bool:
        """Return whether to learn one more batch before a plan is made, as `unseen` calls may come again."""
        assert self.trace is not None
        self.unseen = [called for called in self.unseen if not self.trace.contains(called)]
        self._learned_again += bool(self.unseen)
        if not self.learns_again:
            self.unseen = []
        return bool(self.unseen)

    @property
    def learns_again(self) -> bool:
        """Whether calls that the plan does not have are learned: they may change for ever."""
        return self._learned_again < MOST_LEARNED_AGAIN

    def walks(self, call: TracedCall) -> bool:
        """Return whether to search the graph of ``call`` for paths that lead out of the layer, and remember it.

        That is so for all calls of a step from which a plan is made, and else once for each layer and use.
        """
        key = (call.layer.index, call.use)
        if key in self._walked:
            return self.plans
        self._walked.add(key)
        return True
