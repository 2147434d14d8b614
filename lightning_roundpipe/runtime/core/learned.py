"""What earlier windows have shown about the model and user code. Later steps rely on it."""

from __future__ import annotations

from torch import nn

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.core.call import CallProfile
from lightning_roundpipe.runtime.core.prediction import CallOrder
from lightning_roundpipe.runtime.core.trace import Kind, Trace, TracedCall
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket
from lightning_roundpipe.runtime.user_code.module_state import SharedAttributes
from lightning_roundpipe.runtime.user_code.rng import Randomness

MOST_LEARNED_AGAIN = 64
"""Windows to learn at most because microbatches have left the plan."""


class Learned:
    """One engine's knowledge about its model. The threads of a step read it and add to it.

    It has many attributes because what the first windows show is forgotten together. Each attribute belongs to the
    module that sets it.

    Args:
        module: the user's module.
        in_order: whether microbatches run one after another in every step.

    Attributes:
        trace: the calls of a microbatch, merged from the windows that a plan is made from; None before the first one.
        unseen: the calls of microbatches that have left the plan, as long as ``trace`` does not contain them.
        recent: the calls of the last window that was one microbatch, used to predict those of the next one.
        plan: the plan that steps run under; None while there is none.
        costs: the costs from which the plan was made.
        offloads: whether the plan fits only if outputs leave their worker while a microbatch waits for another one.
        plans: whether a plan is to be made from the running step.
        in_order: see above; also where a plan would change the order of calls and user code that change one buffer.
        order: which call followed which, for steps that call layers in any order.
        profiles: of each layer's last call in an evaluation, by the layer's index; None if it was not plain.
        module_state: attributes that microbatches set on modules.
        randomness: which calls and sections of user code draw random numbers.
        read_by_user_code: buckets that user code reads. The next step waits for them before it takes the user-code
            lock.
        logs_in_backward: whether user code logs in backward.
    """

    def __init__(self, module: nn.Module, *, in_order: bool) -> None:
        self._module, self._in_order = module, in_order
        self.plans = self.logs_in_backward = False
        self.order = CallOrder()
        self.read_by_user_code: frozenset[ParamBucket] = frozenset()
        self._learned_again = 0
        """Windows that were learned once more because of ``unseen``."""
        self.forget()

    def forget(self) -> None:
        """Drop traces, plans and what was learned with them: the next window learns the model anew."""
        self.trace: Trace | None = None
        self.unseen: list[list[Kind]] = []
        self.recent: Trace | None = None
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.offloads = False
        self.in_order = self._in_order
        self.profiles: dict[int, CallProfile | None] = {}
        self.module_state = SharedAttributes(self._module)
        self.randomness = Randomness()
        self._walked: set[tuple[int, int]] = set()

    def awaits_calls(self) -> bool:
        """Return whether to learn one more window before a plan is made, as `unseen` calls may come again."""
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
