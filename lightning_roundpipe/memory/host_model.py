"""A module with its parameters in host memory: its layers and parameter buckets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices import Device
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.host_layer import host_layers, make_buckets
from lightning_roundpipe.memory.mapped_files import mapped_weights
from lightning_roundpipe.memory.module_buffers import HostBuffers
from lightning_roundpipe.model.structure import Structure


class HostModel:
    """The user's LightningModule as the engine holds it.

    Args:
        module: the module, with its weights on the CPU.
        layers: the modules that run on workers, by name.
        device: any device; allocates host memory that copies asynchronously.
        double_buffered: whether the optimizer writes to masters while they are uploaded.

    Attributes:
        bucket_of: bucket by id of the master.
        structure: its modules and parameters at the start.
        undisturbed: whether no update of any master is pending.
    """

    def __init__(
        self, module: nn.Module, layers: Mapping[str, nn.Module], device: Device, formats: Formats, *,
        double_buffered: bool,
    ) -> None:  # fmt: skip
        self.module, self.formats = module, formats
        mapped = mapped_weights(module.parameters(), device, formats)
        self.layers = host_layers(layers, device, formats, double_buffered=double_buffered, mapped=mapped)
        self.buffers = self.layers[0].buffers.host if self.layers else HostBuffers()
        self.buckets = make_buckets(self.layers, module.parameters(), formats, double_buffered=double_buffered)
        self.bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.masters}
        self.masters = [p for bucket in self.buckets for p in bucket.masters]
        self.undisturbed = True
        self.structure = Structure(module, layers.values())

    def name_of(self, master: nn.Parameter) -> str:
        """Return the qualified name of a parameter, for messages."""
        return next((name for name, p in self.module.named_parameters() if p is master), "")

    def values(self, master: nn.Parameter) -> Tensor:
        """Return the values of ``master`` in the dtype of the computation."""
        if id(master) in self.formats.hidden:
            return self.bucket_of[id(master)].read(master)
        return master.to(self.formats.of(master))

    def join(self) -> None:
        """Give all masters their values, until uploads are to read them again (`ParamBucket.refresh`)."""
        with torch._C.DisableTorchFunction():  # user code may call this, in its torch function mode
            for bucket in self.buckets:
                bucket.join()

    def trainable(self) -> list[bool]:
        """Return per parameter of each layer whether it is trained now."""
        return [p.requires_grad for layer in self.layers for p in layer.masters]
