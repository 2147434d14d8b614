"""Tensors that a layer holds as plain attributes: neither parameters nor buffers, so that all its replicas share them.

If a layer replaces such a tensor, this shows as an attribute that it sets. If it writes in place, it writes to the
user's own tensor at once, and a recomputation would write again. Buffers are restored before a recomputation. Copying
all of these tensors for each call would be too expensive, so a write is detected and refused. Filling a cache is
allowed: the second time writes the same values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import bits, holds_nothing, tensors_in


class UnregisteredTensors:
    """The tensors among ``attributes``, one dict per module of the layer, except those that are buffers too."""

    def __init__(self, attributes: Iterable[dict[str, Any]], modules: Iterable[nn.Module]) -> None:
        buffers = {id(buffer) for module in modules for buffer in module._buffers.values()}
        self._tensors = [
            (name, tensor)
            for own in attributes
            for name, value in own.items()
            if not holds_nothing(value)
            for tensor in tensors_in(value)
            if type(tensor) is Tensor and tensor.layout is torch.strided and id(tensor) not in buffers
            if not (tensor.is_meta or tensor.is_quantized)
        ]
        self._versions: list[int | None] = [None] * len(self._tensors)

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @contextlib.contextmanager
    def unmoved(self, layer: str) -> Iterator[None]:
        """Return the context of a recomputation of ``layer``. It skips tensors not written to since the last one."""
        watched = [i for i, (_, tensor) in enumerate(self._tensors) if self._versions[i] != _version(tensor)]
        before = [self._tensors[i][1].detach().clone() for i in watched]
        yield
        for i, value in zip(watched, before, strict=True):
            name, tensor = self._tensors[i]
            if not torch.equal(bits(tensor), bits(value)):
                raise RoundPipeError(
                    f"layer {layer!r} writes in place to its attribute {name!r}, a tensor that is not a buffer: "
                    "recomputing the layer writes there once more. Make it one: self.register_buffer(..., "
                    "persistent=False)."
                )
            self._versions[i] = _version(tensor)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
