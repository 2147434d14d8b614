"""Buffers of a layer's copy: loaded before a call, written back after it, and as they were for a recomputation.

A running mean must see each microbatch once, in order, and a recomputation must see what its forward saw, yet change
nothing. Most buffers never change, so a copy is made only of those that the first batch saw changing.

Meanwhile glue may write to them as well: hooks of the layer itself run there, for the next microbatch already. So what
a call has changed is what differs from what was loaded for it, not from what the layer holds by now.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.runtime.weights import HostLayer


class _Loaded(NamedTuple):
    """The layer's buffer and its version, its value at that time, and what the copy was given."""

    host: Tensor | None
    version: int
    given: Tensor | None
    here: Tensor | None
    here_version: int


class Buffers:
    """The buffers of one layer's copy on one worker."""

    def __init__(self, layer: HostLayer, replica: Replica) -> None:
        self._layer = layer
        self._replica = replica
        self.places = [
            (original, copy, name)
            for original, copy in zip(replica.originals, replica.modules, strict=True)
            for name in original._buffers
        ]
        self._loaded: list[_Loaded | None] = [None] * len(self.places)

    def load(self, saved: dict[int, Tensor] | None = None) -> None:
        """Bring the copy's buffers to what the layer's are now, or to ``saved`` where given."""
        for index, (original, copy, name) in enumerate(self.places):
            host = original._buffers.get(name)
            if saved is not None and index in saved:
                host = saved[index]
            known, version = self._loaded[index], _version(host)
            if known is not None and known.host is host and known.version == version:
                continue
            with torch.inference_mode(False):
                given = None if host is None else host.detach().clone()
                here = None if given is None else given.to(self._replica.device, copy=True)
            copy._buffers[name] = here
            self._loaded[index] = _Loaded(host, version, given, here, _version(here))

    def snapshot(self, thorough: bool) -> dict[int, Tensor]:
        """Copies of the layer's buffers that a forward may change (all, if ``thorough``), for its recomputation."""
        wanted = range(len(self.places)) if thorough else self._layer.mutable_buffers
        found = {}
        for index in wanted:
            original, _, name = self.places[index]
            host = original._buffers.get(name)
            if host is not None:
                found[index] = host.detach().clone()
        return found

    def changed(self, thorough: bool) -> list[int]:
        """Which buffers the call has changed.

        Versions do not tell all: batch norm moves its running statistics without moving their versions. So values are
        compared too, of buffers that are known to change, and of all if ``thorough``.
        """
        found = []
        for index, (_, copy, name) in enumerate(self.places):
            loaded = self._loaded[index]
            now = copy._buffers.get(name)
            if loaded is None or now is not loaded.here or _version(now) != loaded.here_version:
                found.append(index)
            elif now is not None and (thorough or index in self._layer.mutable_buffers):
                assert loaded.given is not None
                if not torch.equal(now.cpu(), loaded.given):
                    found.append(index)
        return found

    def write_back(self, saved: dict[int, Tensor] | None, thorough: bool) -> None:
        """Give the layer what a forward changed. ``saved`` is its snapshot, None where nothing is recomputed."""
        for index in self.changed(thorough):
            original, copy, name = self.places[index]
            if saved is not None and index not in saved:
                raise RoundPipeError(
                    f"buffer {name!r} of {type(original).__name__} in layer {self._layer.name!r} changed during a "
                    "forward pass, which it did not do in the first batch, so its recomputation cannot be exact."
                )
            self._layer.mutable_buffers[index] = (original, name)
            _assign(original, name, copy._buffers.get(name))
            self._loaded[index] = None

    def discard(self, *, thorough: bool = False) -> None:
        """Forget what a recomputation changed, or a forward that does not count."""
        for index in {*self.changed(thorough), *self._layer.mutable_buffers}:
            self._loaded[index] = None


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _assign(module: nn.Module, name: str, value: Tensor | None) -> None:
    host = module._buffers.get(name)
    if host is not None and value is not None and host.shape == value.shape and host.dtype == value.dtype:
        with torch.no_grad():
            host.copy_(value)
    else:
        module._buffers[name] = None if value is None else value.detach().cpu()
