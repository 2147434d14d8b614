"""What batches have shown so far of the model and of user code, which later steps go by."""

from __future__ import annotations

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.batch.logs import Key
from lightning_roundpipe.runtime.core.prediction import CallOrder
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall
from lightning_roundpipe.runtime.memory.host_model import HostModel
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket
from lightning_roundpipe.runtime.user_code.module_state import ModuleStateIsolation
from lightning_roundpipe.runtime.user_code.rng import Randomness


class Learned:
    """Of one engine; threads of a step read it, and add to it.

    Args:
        model: whose batches they are.

    Attributes:
        trace: what microbatches call, once a plan is made, or as far as it is known.
        recent: what the last batch of one microbatch called, as a guess at what the next one calls.
        plans: whether the running step is one that a plan is made from.
        shares: whether user code computes with state that microbatches share.
        in_order: whether microbatches run one after another in every step.
        order: what was called after what, where calls come in any order.
        read_by_user_code: what the next step's user code waits for before it takes the lock.
        logs_in_backward: whether user code logs in backward.
        log_rules: how logged values of parts are merged, where that is not as a mean; see `logs.RULES`.
        mixes: whether targets that are spread unlike the samples were seen to make no difference.
    """

    def __init__(self, model: HostModel) -> None:
        self._model = model
        self.plans = self.shares = self.logs_in_backward = self.mixes = False
        self.order = CallOrder()
        self.read_by_user_code: frozenset[ParamBucket] = frozenset()
        self.log_rules: dict[Key, str] = {}
        self.forget()

    def forget(self) -> None:
        """Other parameters are trained now, or weights are used otherwise: traces and plans hold no more."""
        self.trace: Trace | None = None
        self.recent: Trace | None = None
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.in_order = self.shares
        self.module_state = ModuleStateIsolation(self._model.module, self._model.layers)
        self.randomness = Randomness()
        self._probed: set[tuple[int, int]] = set()
        self._walked: set[tuple[int, int]] = set()

    def probes(self, call: TracedCall) -> bool:
        """Whether ``call`` is to be run without grad as well: a plan is made from this step, and it is the first one of
        its layer and use.
        """
        key = (call.layer.index, call.use)
        if not self.plans or key in self._probed:
            return False
        self._probed.add(key)
        return True

    def walks(self, call: TracedCall) -> bool:
        """Whether the graph of ``call`` is looked at: in all of what a plan is made from, else once."""
        key = (call.layer.index, call.use)
        if key in self._walked:
            return self.plans
        self._walked.add(key)
        return True
