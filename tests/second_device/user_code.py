"""User code as the engine runs it between layers, without an engine: under the mode, on a device."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.user_code.mode import UserCodeMode
from second_device import backend

HOME = torch.device(backend.NAME, 0)


def mode(masters: Iterable[nn.Parameter] = (), *, train: bool = True) -> UserCodeMode:
    """The mode of one microbatch, whose host tensors go to ``HOME`` through pinned memory."""

    def host_like(t: Tensor) -> Tensor:
        return torch.empty_like(t, pin_memory=True)

    facade: Any = SimpleNamespace(torch_device=HOME, host_like=host_like, free_after_compute=lambda tensors: None)
    return UserCodeMode(
        {id(p) for p in masters}, lambda master: master, train=train, accelerator=backend.NAME, devices=[facade]
    )


def there(value: Any) -> Any:
    """``value`` on the device, as what a layer has computed."""
    if isinstance(value, Tensor):
        return value.to(HOME)
    if isinstance(value, dict):
        return {key: there(item) for key, item in value.items()}
    if isinstance(value, list):
        return [there(item) for item in value]
    return value
