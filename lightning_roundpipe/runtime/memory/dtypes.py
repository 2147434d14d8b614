"""In which number format each master travels to the workers and is computed with.

A master keeps its own format: what is trained needs fp32, or small updates would be rounded away. What is sent is a
working copy in the format of the computation, which is half the traffic; layers and user code see nothing but that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_roundpipe.runtime.memory.loss_scale import Scales


@dataclass(eq=False)
class Formats:
    """Of one run.

    Args:
        low: that everything is computed in (``bf16-true``, ``16-true``); None: in the masters' own.
        mixed: whether autocast casts masters where they are used, so that some may be sent cast.
        sets_default: whether torch's default format is another one within a step.
        outside: torch's default format while no step runs. Within a step it is ``low``, if that is given, for the whole
            process.
        scales: what losses are multiplied by.

    Attributes:
        default_matters: whether a layer was seen to go by torch's default format.
    """

    low: torch.dtype | None = None
    mixed: bool = False
    sets_default: bool = False
    outside: torch.dtype = field(default_factory=torch.get_default_dtype)
    scales: Scales = field(default_factory=Scales)
    default_matters: bool = False

    def of(self, master: Tensor) -> torch.dtype:
        """What ``master`` is computed with in."""
        return self.low if self.low is not None and master.is_floating_point() else master.dtype

    def differ(self, master: Tensor) -> bool:
        """Whether ``master`` has a working copy in another format."""
        return self.of(master) is not master.dtype

    def too_narrow(self, masters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``masters`` that are trained and lack a format to be trained in."""
        if self.low is None:
            return []
        return [p for p in masters if p.requires_grad and p.is_floating_point() and p.itemsize < 4]


def widen(master: nn.Parameter) -> None:
    """Give ``master`` the format that it is trained in. It stays who it is."""
    master.data = master.data.float()
