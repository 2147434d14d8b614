"""An input of a layer call on the host; `activation_store` makes and keeps them."""

from __future__ import annotations

from torch import Tensor

from lightning_roundpipe.devices import Event


class HostTensor:
    """A tensor on the host.

    Attributes:
        tensor: the tensor.
        ready: end of its download; None if it was not downloaded.
        wanted: how many recorded calls on the tape still need it.
    """

    __slots__ = ("nbytes", "ready", "tensor", "wanted")

    def __init__(self, tensor: Tensor, ready: Event | None) -> None:
        self.tensor = tensor
        self.ready = ready
        self.nbytes = tensor.numel() * tensor.itemsize
        self.wanted = 0
