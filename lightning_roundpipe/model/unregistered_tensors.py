"""Tensors that a layer holds as plain attributes: no parameters, and no buffers, so that all its copies share them.

What a layer writes there by replacing the tensor is found as an attribute that it sets. What it writes in place is in
the user's own tensor at once, and would be there twice after a recomputation. A buffer is put back before one; of
these nobody knows which will be written to, and copying all of them for each call would be dear. So it is refused when
it shows. Filling a cache is no such case: the second time it is filled with the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import bits, tensors_in


class UnregisteredTensors:
    """Those among ``attributes``, a dict for each of the layer's ``modules``. Some stand for a buffer as well."""

    def __init__(self, attributes: Iterable[dict[str, Any]], modules: Iterable[nn.Module]) -> None:
        buffers = {id(buffer) for module in modules for buffer in module._buffers.values()}
        self._tensors = [
            (name, tensor)
            for own in attributes
            for name, value in own.items()
            for tensor in tensors_in(value)
            if type(tensor) is Tensor and tensor.layout is torch.strided and id(tensor) not in buffers
            if not (tensor.is_meta or tensor.is_quantized)
        ]
        self._versions: list[int | None] = [None] * len(self._tensors)

    def unmoved(self, layer: str) -> contextlib.AbstractContextManager[None]:
        """A recomputation of ``layer``. What nobody has written to since the last one is not looked at."""
        return self._unmoved(layer) if self._tensors else contextlib.nullcontext()

    @contextlib.contextmanager
    def _unmoved(self, layer: str) -> Iterator[None]:
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
