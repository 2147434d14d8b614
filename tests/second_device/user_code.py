"""User code as the engine runs it between layers, without an engine: under the mode, on a device."""

from types import SimpleNamespace

import torch
from torch import Tensor

from lightning_roundpipe.user_code.mode import UserCodeMode
from second_device import backend

HOME = torch.device(backend.NAME, 0)


def mode(masters=(), *, train=True):
    """The mode of one microbatch, whose host tensors go to ``HOME`` through pinned memory."""

    def host_like(t):
        return torch.empty_like(t, pin_memory=True)

    facade = SimpleNamespace(torch_device=HOME, host_like=host_like, free_after_compute=lambda tensors: None)
    return UserCodeMode(
        {id(p) for p in masters}, lambda master: master, train=train, accelerator=backend.NAME, devices=[facade]
    )


def there(value):
    """``value`` on the device, as what a layer has computed."""
    if isinstance(value, Tensor):
        return value.to(HOME)
    if isinstance(value, dict):
        return {key: there(item) for key, item in value.items()}
    if isinstance(value, list):
        return [there(item) for item in value]
    return value
