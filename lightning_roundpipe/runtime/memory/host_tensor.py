"""A tensor that a call takes, on the host; `activation_store` keeps them."""

from __future__ import annotations

from torch import Tensor

from lightning_roundpipe.devices import Event


class HostTensor:
    """A tensor on the host.

    Attributes:
        tensor: it.
        ready: the end of its download, if it has been downloaded.
        wanted: how many calls on the tape start from it.
    """

    __slots__ = ("nbytes", "ready", "tensor", "wanted")

    def __init__(self, tensor: Tensor, ready: Event | None) -> None:
        self.tensor = tensor
        self.ready = ready
        self.nbytes = tensor.numel() * tensor.element_size()
        self.wanted = 0
