"""RoundPipe for PyTorch Lightning: ``Trainer(strategy="roundpipe")``.

Importing this package only registers the strategy's name with Lightning. It imports neither torch nor Lightning,
because torch itself imports it at the end of ``import torch`` (see `lightning_roundpipe.registration`): their import
would be circular there, and an error would make torch unusable. The public names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.registration import autoload

if TYPE_CHECKING:
    from lightning_roundpipe.batches.cutting import Microbatches
    from lightning_roundpipe.messages import RoundPipeWarning
    from lightning_roundpipe.precision import RoundPipePrecision
    from lightning_roundpipe.reports.step_monitor import RoundPipeMonitor
    from lightning_roundpipe.strategy import RoundPipeStrategy

__version__ = "0.1.0"

__all__ = [
    "Microbatches",
    "RoundPipeMonitor",
    "RoundPipePrecision",
    "RoundPipeStrategy",
    "RoundPipeWarning",
    "__version__",
]

_HOMES = {
    "Microbatches": "lightning_roundpipe.batches.cutting",
    "RoundPipeMonitor": "lightning_roundpipe.reports.step_monitor",
    "RoundPipePrecision": "lightning_roundpipe.precision",
    "RoundPipeStrategy": "lightning_roundpipe.strategy",
    "RoundPipeWarning": "lightning_roundpipe.messages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


autoload()
