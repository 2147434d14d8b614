"""What several machines must have in common, each value under a name that a message can say.

Machines whose settings differ train on, to numbers that are those of neither: the owner of a layer updates it with its
own learning rate, and another activation gives gradients of another function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (bool, int, float, str, type(None))


def of_trainer(trainer: Trainer) -> dict[str, str]:
    """Return the arguments of the trainer that it keeps as numbers or text, except the folder, which may differ."""
    names = inspect.signature(Trainer.__init__).parameters.keys() - {"self", "default_root_dir"}
    kept = {name: getattr(trainer, name, None) for name in sorted(names)}
    time = getattr(trainer, "_val_check_time_interval", None)  # in seconds; then ``val_check_interval`` is missing
    return {name: _said(value) for name, value in kept.items() if isinstance(value, _PLAIN)} | (
        {} if time is None else {"val_check_interval": f"{time} s"}
    )


def of_modules(module: nn.Module) -> dict[str, str]:
    """Return the class of each module, and the settings that it shows in ``extra_repr``."""
    return {
        f"module {name!r}": f"{type(inner).__name__}({_said(inner.extra_repr())})"
        for name, inner in module.named_modules()
    }


def of_optimizers(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of all parameter groups, and of schedulers."""
    found: dict[str, Any] = {"the optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers]}
    for at, group in _groups(trainer.optimizers):
        found[f"the number of parameters in {at}"] = len(group["params"])
        found |= {f"{name} of {at}": _said(value) for name, value in group.items() if name != "params"}
    for config in trainer.lr_scheduler_configs:
        kind = type(config.scheduler).__name__
        found |= {f"{name} of {kind}": _said(getattr(config, name)) for name in ("interval", "frequency", "monitor")}
        found |= {f"{name} of {kind}": _said(value) for name, value in config.scheduler.state_dict().items()}
    return found


def learning_rates(optimizers: Sequence[Optimizer], steps: int) -> dict[str, float]:
    """Return what schedulers, or user code, have made of the learning rates after so many ``steps``.

    Nothing else of a group: some optimizers count in it, on a thread of their own.
    """
    return {f"lr of {at}, after step {steps}": float(group["lr"]) for at, group in _groups(optimizers) if "lr" in group}


def _groups(optimizers: Sequence[Optimizer]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"group {number} of {type(optimizer).__name__}", group)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
    ]


def _said(value: Any) -> str:
    """Return a value as text that is the same in each process."""
    return _ADDRESS.sub(
        "", value if isinstance(value, str) else str(value.tolist() if isinstance(value, Tensor) else value)
    )
