"""Outputs of a layer that share memory with each other or with its inputs, and so must not be written to.

In plain training a write to one of them changes the others, and autograd knows. Behind the boundary they are separate
tensors that may or may not share memory, and autograd does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.memory.arenas import address_of
from lightning_roundpipe.user_code.torch_functions import WatchedTensors


def sharing(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that share memory with another one of them; an input that is returned is not another one."""
    own = set(map(id, inputs))
    made = [t for t in outputs if id(t) not in own]
    there, shared = set(map(address_of, inputs)), set[int]()
    for address in map(address_of, made):
        if address in there:
            shared.add(address)
        there.add(address)
    shared.discard(0)
    return [t for t in (*inputs, *made) if address_of(t) in shared] if shared else []


class SharedOutputs:
    """Tensors that must not be written to until the microbatch's user code is done. Keeps none of their memory."""

    def __init__(self) -> None:
        self._watched = WatchedTensors[str]()

    def add(self, tensors: Iterable[Tensor], layer: str) -> None:
        for tensor in tensors:
            if not tensor.is_inference():  # those have no version
                self._watched.add(layer, tensor)

    def assert_unmodified(self) -> None:
        """Raise `RoundPipeError` if one of the tensors has been written to."""
        for layer in self._watched.written():
            raise RoundPipeError(
                f"layer {layer!r} returned tensors that share memory with each other or with its input, and code "
                "behind it wrote to one of them in place: the others would not follow. Write out of place, or clone "
                "what the layer returns."
            )
