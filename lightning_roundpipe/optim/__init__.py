"""Steps the user's optimizer a few parameters at a time, with the numbers of ``optimizer.step()``.

``independence`` decides which optimizers allow that. ``hyperparameters`` takes a snapshot of their groups.
``partial_optimizer`` steps some of the parameters, with fused kernels where possible (``fused``), and calls these
without ``step()`` where that gives the same result (``direct``). ``clipping`` clips gradients as they arrive.
"""

from __future__ import annotations

from lightning_roundpipe.optim.clipping import Clip
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.independence import stepped_by_parameter
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer

__all__ = ["Clip", "Hyperparameters", "PartialOptimizer", "stepped_by_parameter"]
