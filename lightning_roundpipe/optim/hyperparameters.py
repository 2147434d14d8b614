"""The hyperparameters of one optimizer step, as they were when the step was requested.

A learning rate scheduler changes the user's groups right after ``optimizer.step()`` returns, which may be long before
the last layer has been updated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_roundpipe.optim.fused import is_direct, is_open
from lightning_roundpipe.optim.independence import unwrapped

OF_PARAMETERS = frozenset({"params", "param_names"})
"""The keys of a group whose values have one entry per parameter."""


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """A snapshot that shares nothing with the optimizer's groups.

    Attributes:
        groups: all groups, without their per-parameter keys.
        group_of: the number of a parameter's group, by id of the parameter.
        names: the name of a parameter, by id, if the optimizer was given names.
        fused: per group, whether to use a fused kernel where the parameter allows it.
        direct: per group, whether the kernel may be called without the optimizer's ``step()``.
    """

    groups: tuple[Mapping[str, Any], ...]
    group_of: Mapping[int, int]
    names: Mapping[int, str]
    fused: tuple[bool, ...]
    direct: tuple[bool, ...]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Hyperparameters:
        """Take a snapshot of what ``optimizer.step()`` would use now."""
        optimizer = unwrapped(optimizer)
        groups = optimizer.param_groups
        return cls(
            tuple({k: copy.deepcopy(v) for k, v in group.items() if k not in OF_PARAMETERS} for group in groups),
            {id(p): number for number, group in enumerate(groups) for p in group["params"]},
            {
                id(p): name
                for group in groups
                if "param_names" in group
                for p, name in zip(group["params"], group["param_names"], strict=True)
            },
            tuple(is_open(type(optimizer), group) for group in groups),
            tuple(is_direct(optimizer, group) for group in groups),
        )
