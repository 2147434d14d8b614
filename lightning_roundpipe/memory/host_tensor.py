"""An input of a layer call on the host; `activations` makes and keeps them."""

from __future__ import annotations

from torch import Tensor

from lightning_roundpipe.devices import Event


class HostTensor:
    """A tensor on the host. ``ready``: the end of its download, if it was downloaded."""

    __slots__ = ("ready", "tensor")

    def __init__(self, tensor: Tensor, ready: Event | None) -> None:
        self.tensor, self.ready = tensor, ready
