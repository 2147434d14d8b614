"""A layer's parameters in host memory, and their upload to a worker.

Where masters are computed with in their own dtype and staleness is 0, uploads read the masters. With staleness 1 the
optimizer writes to trained masters while they are uploaded, so these have a working copy beside them. It is refreshed
between the last upload of a step and the first one of the next. Masters that are computed with in another dtype have a
working copy too. Uploads of a frozen master that stays in its file read it there, one parameter at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices import Device, Stream
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.flat_buffer import FlatBuffer
from lightning_roundpipe.memory.flat_params import ParamSlice, aligned
from lightning_roundpipe.model.quantized import aliases, follow
from lightning_roundpipe.model.replica import unique_parameters

Owned = dict[int, tuple[FlatBuffer, int]]
"""Buffer and index of parameters, by id."""


class LayerWeights:
    """The masters of one layer in flat host buffers, and their places in a worker's arena.

    Args:
        device: any device; allocates host memory that copies asynchronously.
        owned: the parameters of earlier layers, to which this one may be tied. Updated.
        double_buffered: whether the optimizer writes to masters while they are uploaded.
        mapped: ids of masters that stay in their files.

    Attributes:
        flats: the buffers of the masters that no earlier layer has.
        nbytes: size of an upload.
        rounded: positions of masters whose uploads are rounded copies.
        shared: ids of those that other layers have, too.
    """

    def __init__(
        self, module: nn.Module, device: Device, owned: Owned, formats: Formats, *, double_buffered: bool,
        mapped: Container[int],
    ) -> None:  # fmt: skip
        self.masters = masters = unique_parameters(module)
        self.rounded: frozenset[int] = frozenset()
        self.shared: set[int] = set()
        mine = [p for p in masters if id(p) not in owned]
        trained = [p for p in mine if p.requires_grad]
        self.flats = [FlatBuffer(trained, device, formats, double_buffered=double_buffered)] if trained else []
        for in_place in (False, True):
            if held := [p for p in mine if not p.requires_grad and (id(p) in mapped) is in_place]:
                self.flats.append(FlatBuffer(held, device, formats, double_buffered=False, in_place=in_place))
        owned.update({id(p): (flat, i) for flat in self.flats for i, p in enumerate(flat.masters)})
        self._held = {id(p): owned[id(p)] for p in masters}
        self._aliases = aliases(module)
        follow(self._aliases)
        self.place()

    def place(self) -> None:
        """Lay the parameters out in a worker's arena."""
        base, places = 0, {}
        for flat in self.flats:
            for master, segment in zip(flat.masters, flat.places, strict=True):
                places[id(master)] = dataclasses.replace(segment, offset=base + segment.offset)
            base += flat.nbytes
        tied = [p for p in self.masters if id(p) not in places]
        for master in tied:
            flat, index = self._held[id(master)]
            places[id(master)] = dataclasses.replace(flat.places[index], offset=base)
            base += aligned(places[id(master)].nbytes)
        self._places = [places[id(p)] for p in self.masters]
        self.nbytes = base
        self._tied: list[tuple[nn.Parameter, ParamSlice]] = [(p, places[id(p)]) for p in tied]

    def round(self, formats: Mapping[int, torch.dtype], *, share: bool = False) -> None:
        """Upload copies of some masters from now on that are rounded to ``formats``, by position.

        Masters shared with another layer, or in a file, are left as they are. ``share``: whether masters and their
        copies share memory, where they can.
        """
        mine = {id(self.masters[i]): dtype for i, dtype in formats.items() if id(self.masters[i]) not in self.shared}
        for flat in self.flats:
            here = {} if flat.in_place else {i: mine[id(p)] for i, p in enumerate(flat.masters) if id(p) in mine}
            flat.round(here, share=share)
        self.place()
        self.rounded = frozenset(
            i
            for i, (p, place) in enumerate(zip(self.masters, self._places, strict=True))
            if place.dtype is not self.read(p).dtype
        )

    def reattach(self) -> None:
        """Before a step: move values that user code has put in place of masters into the flat buffers."""
        for flat in self.flats:
            flat.reattach()
        follow(self._aliases)

    def written(self) -> list[tuple[int, int]]:
        """Return a value that changes when user code writes to a master or replaces its memory."""
        return [(master._version, master.data_ptr()) for master in self.masters]

    @property
    def copied(self) -> bool:
        """Whether uploads read working copies of some masters, which must be refreshed after each write."""
        return any(flat.copied for flat in self.flats)

    def trainable(self) -> tuple[bool, ...]:
        return tuple([p.requires_grad for p in self.masters])

    def upload(self, stream: Stream, segment: Tensor) -> None:
        """Enqueue the upload of all weights into ``segment`` (uint8, ``nbytes`` long) of a worker's arena."""
        base = 0
        for flat in self.flats:
            flat.upload(stream, segment[base : base + flat.nbytes])
            base += flat.nbytes
        for master, place in self._tied:
            stream.copy(place.view(segment), self.read(master))

    def read(self, master: nn.Parameter) -> Tensor:
        """Return what layers compute with for ``master``. What is uploaded may be a rounded copy of it."""
        flat, index = self._held[id(master)]
        return flat.read(index)

    def views(self, segment: Tensor) -> list[Tensor]:
        """Return the parameters' views into ``segment`` of an arena, in the order of the masters."""
        return [place.view(segment) for place in self._places]
