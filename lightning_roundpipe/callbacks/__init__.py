"""``RoundPipeMonitor``, and the callbacks of ``roundpipe-train``.

They use what a Trainer and its strategy report, and work with any strategy.
"""

from __future__ import annotations

from lightning_roundpipe.callbacks.checkpoints import Checkpoints, Interrupted
from lightning_roundpipe.callbacks.measurements import Measurements
from lightning_roundpipe.callbacks.progress import ProgressLines, progress_bar
from lightning_roundpipe.callbacks.run_folder import RunFolder
from lightning_roundpipe.reports.step_monitor import RoundPipeMonitor

__all__ = [
    "Checkpoints",
    "Interrupted",
    "Measurements",
    "ProgressLines",
    "RoundPipeMonitor",
    "RunFolder",
    "progress_bar",
]
