"""The optimizer that user code has now, which it may replace between steps, and the masters that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.optim.packed_moments import FP32
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer, Place
from lightning_roundpipe.optim.split_masters import SplitTensor


class CurrentOptimizer:
    """See above.

    Args:
        get: returns the optimizer that the next step will use; None if there is none.
        form: how moments are kept, one of `config.OPTIMIZER_STATES`.
        places: see `PartialOptimizer`.

    Attributes:
        mapped: ids of the masters whose state lies in the file of a checkpoint, until their first update.
    """

    def __init__(
        self, get: Callable[[], Optimizer | None], buckets: Sequence[ParamBucket], form: str = FP32,
        places: Sequence[Place] = (),
    ) -> None:  # fmt: skip
        self.get, self.form, self.places = get, form, places
        self.mapped: set[int] = set()
        self._masters = {id(master): master for bucket in buckets for master in bucket.masters}
        self._bucket_of = {id(master): bucket for bucket in buckets for master in bucket.masters}
        self._partial: tuple[Optimizer, PartialOptimizer] | None = None

    def partial(self, optimizer: Optimizer) -> PartialOptimizer:
        """Return what steps some of the parameters of ``optimizer``."""
        if self._partial is None or self._partial[0] is not optimizer:
            masters = list(self._masters.values())
            made = PartialOptimizer(optimizer, masters, self._memory, self.form, self.mapped, self.places)
            self._partial = optimizer, made
        return self._partial[1]

    def _memory(self, master: nn.Parameter) -> Tensor | SplitTensor:
        return self._bucket_of[id(master)].memory(master)

    def release_masters(self) -> None:
        """Drop all references to the memory of masters."""
        if self._partial is not None:
            self._partial[1].release()

    def outside(self) -> AbstractSet[int]:
        """Return the ids of the masters that the optimizer does not hold now, which a parameter group may change."""
        if (optimizer := self.get()) is None:
            return frozenset()
        return self._masters.keys() - {id(master) for group in optimizer.param_groups for master in group["params"]}
