"""The parts of a strategy that concern several processes, for the only one there is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override


class OneProcess(ParallelStrategy):
    """A strategy with several devices and one process. Collective operations return their input."""

    @property
    @override
    def world_size(self) -> int:
        """The environment's world size, so that several processes are refused; 1 where it has none."""
        try:
            return int(super().world_size)
        except KeyError:  # SLURMEnvironment outside a SLURM task
            return 1

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    def is_distributed(self) -> bool:
        """False: all samples belong to this process."""
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
