"""What Lightning asks of a strategy for several processes, answered for the only one there is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override


class OneProcess(ParallelStrategy):
    """A strategy with several devices and one process: what would be exchanged stays what it is."""

    @property
    def is_distributed(self) -> bool:
        """False: every sample belongs to this process."""
        return False

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj
