"""The user's optimizer, stepped a few parameters at a time with the numbers of ``optimizer.step()``.

Which optimizers can be (``independence``), a snapshot of their hyperparameters, the stand-in that does it
(``partial_optimizer``), with fused kernels where there are any (``fused``), called by themselves where that may be
(``direct``), and gradient clipping in pieces (``clipping``).
"""

from __future__ import annotations

from lightning_roundpipe.optim.clipping import Clip
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.independence import stepped_by_parameter
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer

__all__ = ["Clip", "Hyperparameters", "PartialOptimizer", "stepped_by_parameter"]
