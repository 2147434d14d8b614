"""What several machines must have in common, each value under a name that a message can say.

Machines whose settings differ train on, to numbers that are those of neither: the owner of a layer updates it with its
own learning rate, and another activation gives gradients of another function.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_TRAINER = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "reload_dataloaders_every_n_epochs",
)
"""Attributes of the trainer with the names of its settings."""


def of_trainer(trainer: Trainer) -> dict[str, str]:
    """Return the trainer's settings that decide what it calls, and when."""
    found = {name: _said(getattr(trainer, name)) for name in _TRAINER}
    time = getattr(trainer, "_val_check_time_interval", None)  # in seconds; then the other is missing
    return found | {"val_check_interval": _said(trainer.val_check_interval if time is None else f"{time} s")}


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
