"""An input of a layer call on the host; `activations` makes and keeps them."""

from __future__ import annotations

from torch import Tensor

from lightning_roundpipe.devices import Event


class HostTensor:
    """A tensor on the host.

    Attributes:
        tensor: the tensor.
        ready: end of its download; None if it was not downloaded.
    """

    __slots__ = ("ready", "tensor")

    def __init__(self, tensor: Tensor, ready: Event | None) -> None:
        self.tensor, self.ready = tensor, ready
