"""The precision plugin: which number formats the layers and the glue compute in.

Masters stay in fp32. ``bf16-mixed`` is torch's autocast, entered around the step on the calling thread, captured with
each layer call and entered again wherever the layer runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer
from typing_extensions import override

from lightning_roundpipe.config import PRECISIONS
from lightning_roundpipe.optim.clipping import Clip

_OF_THE_FLAG = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
"""What Lightning makes of ``Trainer(precision=...)`` alone; anything else is a plugin with hooks of its own."""

_ALIASES = {"32": "32-true", "bf16": "bf16-mixed"}


class RoundPipePrecision(Precision):
    """``32-true`` or ``bf16-mixed`` under ``RoundPipeStrategy``.

    Args:
        precision: Lightning's flag; the Trainer's ``precision=`` becomes this plugin by itself.

    Raises:
        ValueError: for a precision that is not built yet.
    """

    def __init__(self, precision: str = "32-true") -> None:
        precision = _ALIASES.get(str(precision), str(precision))
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision={precision!r} is not supported by the roundpipe strategy; use {' or '.join(PRECISIONS)}."
            )
        self.precision: Any = precision
        self.clipping: Callable[[Clip], None] | None = None
        """Told how gradients are to be clipped, where they are not in ``.grad``; the strategy sets it."""
        self.device = "cpu"
        """The device type that layers run on; the strategy sets it."""

    @classmethod
    def of(cls, plugin: Precision | None) -> RoundPipePrecision:
        """The plugin that stands for whatever Lightning chose from the Trainer's flag.

        Raises:
            ValueError: for a plugin that the flag does not make, because its hooks would be lost.
        """
        if isinstance(plugin, cls):
            return plugin
        if plugin is None:
            return cls()
        if type(plugin) not in _OF_THE_FLAG:
            raise ValueError(
                f"plugins=[{type(plugin).__name__}(...)] brings a precision plugin, and the roundpipe strategy has its "
                f"own: take it out and set precision= to {' or '.join(PRECISIONS)}."
            )
        return cls(str(plugin.precision))

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.precision != "bf16-mixed":
            yield
            return
        with contextlib.ExitStack() as stack:
            # Glue may compute on the host too; there it must see the same formats.
            for device in sorted({"cpu", self.device}):
                stack.enter_context(torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False))
            yield

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.clipping is None:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0:
            self.clipping(Clip(GradClipAlgorithmType(gradient_clip_algorithm).value, float(clip_val)))
