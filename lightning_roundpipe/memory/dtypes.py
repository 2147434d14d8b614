"""The dtypes in which parameters are stored, uploaded and computed with.

A *master* is the user's ``nn.Parameter`` in host memory. It keeps its own dtype: a trained master needs fp32, or small
updates would round away. Workers and user code compute with a working copy in the dtype of the
computation, which halves the traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_roundpipe.memory.loss_scale import Scales
from lightning_roundpipe.model.quantized import is_stored_as_is


@dataclass(eq=False)
class Formats:
    """The dtypes of one run.

    Args:
        low: dtype of the whole computation (``bf16-true``, ``16-true``). None: each master's own.
        mixed: whether autocast casts masters where they are used, so that some may be uploaded already cast.
        sets_default: whether torch's default dtype, the whole process's, differs within a step.
        outside: torch's default dtype while no step runs. Within a step it is ``low``, if given.
        scales: the factors that losses are multiplied by.

    Attributes:
        hidden: ids of the masters whose values are split (`split_masters`), so that only their buffers know them.
    """

    low: torch.dtype | None = None
    mixed: bool = False
    sets_default: bool = False
    outside: torch.dtype = field(default_factory=torch.get_default_dtype)
    scales: Scales = field(default_factory=Scales)
    hidden: set[int] = field(default_factory=set, init=False)

    def of(self, master: Tensor) -> torch.dtype:
        """Return the dtype of the computation with ``master``."""
        if self.low is None or not master.is_floating_point() or is_stored_as_is(master):
            return master.dtype
        return self.low

    def differ(self, master: Tensor) -> bool:
        """Return whether ``master`` has a working copy in another dtype."""
        return self.of(master) is not master.dtype

    def differ_now(self, master: Tensor) -> bool:
        """Return whether user code reads ``master`` through a copy: it `differ`s, or its values are split."""
        return id(master) in self.hidden or self.differ(master)

    def too_narrow(self, masters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of ``masters`` that are trained but stored in a dtype too narrow for updates."""
        if self.low is None:
            return []
        trained = [p for p in masters if p.requires_grad and not is_stored_as_is(p)]
        return [p for p in trained if p.is_floating_point() and p.itemsize < 4]


def widen(master: nn.Parameter) -> None:
    """Convert ``master`` to fp32 in place. It stays the same ``nn.Parameter``."""
    master.data = master.data.float()
