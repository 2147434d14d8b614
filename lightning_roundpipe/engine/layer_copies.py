"""A worker's copies of layers: modules whose parameters are views of a slot's weights.

A copy is made at the layer's first call on the worker, and bound to the weights of the slot of each call. What a
layer's code changes in a copy is lost with it. So the code may set attributes, which are taken over, and write to
buffers; writing to parameters and registering anything is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.base import NOTHING
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.memory.arenas import Arena
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.module_buffers import ReplicaBuffers
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.user_code.bypassed_gradients import Borrowing, Lender


@dataclass(slots=True, eq=False)
class LayerCopy:
    """One of them.

    Attributes:
        segment: the weights that it is bound to; None if it is bound to none.
    """

    layer: HostLayer
    replica: Replica
    buffers: ReplicaBuffers
    segment: Tensor | None = None

    def borrowing(self, lender: Lender, masters: Container[int]) -> AbstractContextManager[Any]:
        """Return the mode that lends stand-ins for ``masters`` of other modules. Most layers were seen to need none."""
        seen, replica = self.layer.seen, self.replica
        if seen.borrows == [] and not seen.reads_data:
            return NOTHING
        return Borrowing(masters, lender, replica.device, seen.borrows or [], replica.parameters)

    def check(self, versions: Sequence[int], borrowing: object, trained: tuple[bool, ...] | None) -> None:
        """Note what the layer's code has used of other modules, and refuse what it has changed in the copy.

        Args:
            versions: those of the parameters before.
            borrowing: the mode that it ran under.
            trained: which parameters were trained; None without grad.
        """
        layer, replica = self.layer, self.replica
        now = zip(replica.parameters, versions, strict=True)
        written = {i for i, (parameter, before) in enumerate(now) if parameter._version != before}
        if isinstance(borrowing, Borrowing):
            layer.seen.borrows = borrowing.found
            layer.seen.reads_data |= borrowing.reads_data
            written |= borrowing.written_by_data()
        if written:
            self._refuse_written(written)
        if replica.registrations.have_changed():
            self._refuse_registered()
        if trained is not None and replica.trains_more(trained):
            raise RoundPipeError(
                f"layer {layer.name!r} switches on requires_grad of its own parameters while it runs; on a worker that "
                "is lost. Set requires_grad between steps, for example in on_train_batch_start."
            )

    def release(self, held: dict[tuple[int, str], Any], written: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Let go of what the copy holds only for one call: attributes that it ``held``, and those that were written.

        Returns the containers that are attributes and that the layer's code has filled: the user's and the copy's.
        """
        attributes, modules = self.replica.attributes, self.layer.state.modules
        filled = [(modules[i].__dict__.get(name), mine) for (i, name), mine in attributes.changed_contents()]
        if written:
            attributes.drop_written()
        elif held:
            attributes.release(held)
        return filled

    def _refuse_written(self, positions: Collection[int]) -> None:
        """Raise if the layer has changed its own parameters.

        A write that leaves the same values is allowed: registering and removing a parametrization does that.
        """
        if all(self._is_master(self.replica.parameters[i], i) for i in positions):
            return
        raise RoundPipeError(
            f"layer {self.layer.name!r} writes to its own parameters while it runs; on a worker that is lost. Write to "
            "them between steps (in a hook of the LightningModule), or keep what changes in a buffer."
        )

    def _refuse_registered(self) -> None:
        """Raise if the layer has registered or removed parameters or modules.

        A parameter that is not trained may be replaced by an equal one, as PEFT does where it unpacks base weights.
        """
        for module, name, before, now in self.replica.registrations.changed():
            if isinstance(before, Tensor) and isinstance(now, Tensor):
                position = next(i for i, p in enumerate(self.replica.parameters) if p is before)
                trains = self.layer.masters[position].requires_grad or now.requires_grad
                if not trains and self._is_master(now, position):
                    continue
            what = "parameter" if isinstance(before, Tensor) or isinstance(now, Tensor) else "module"
            raise RoundPipeError(
                f"layer {self.layer.name!r} registers, replaces or removes the {what} {name!r} of its {module} while "
                "it runs; on a worker that is lost. Do it between steps (in a hook of the LightningModule), or keep "
                "what changes in a buffer, which a layer may register."
            )

    def _is_master(self, value: Tensor, position: int) -> bool:
        """Return whether ``value`` equals what layers compute with for a master."""
        master = self.layer.masters[position]
        return torch.equal(value.detach().to(master.device), self.layer.weights.read(master))


class LayerCopies:
    """Those of one worker.

    Attributes:
        unpacked: memory for packed weights that the open slot unpacks once.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.unpacked = Arena(device, "unpacked weights")
        self._known: dict[int, LayerCopy] = {}

    def of(self, slot: Slot, layer: HostLayer) -> LayerCopy:
        """Return the copy of ``layer`` with the weights of ``slot``, which is open.

        A call outside of the plan may have bound it to weights of its own meanwhile.
        """
        segment = slot.weights.uploads[layer.index].segment
        assert segment is not None, "the slot is open"
        if (known := self._known.get(layer.index)) is None:
            with torch.inference_mode(False):
                replica = Replica(
                    layer.module, self._device.torch_device, layer.state, layer.weights.rounded,
                    layer.seen.copies_wanted,
                )  # fmt: skip
            known = LayerCopy(layer, replica, ReplicaBuffers(layer.buffers, replica, self._device))
            self._known[layer.index] = known
        if known.segment is not segment:
            weights = layer.weights
            whole = functools.partial(self._whole, layer)
            with torch.inference_mode(False):  # or the weights were no tensors of the parameters' kind
                known.replica.bind(weights.views(segment), weights.trainable(), whole)
            known.segment = segment
        return known

    def _whole(self, layer: HostLayer, position: int) -> Tensor:
        """Return the unrounded values of a weight that was uploaded rounded, for a use other than autocast's cast."""
        layer.seen.uses.otherwise([position])
        master = layer.masters[position]
        if layer.bucket.double_buffered and master.requires_grad:
            name = next(name for name, parameter in layer.module.named_parameters() if parameter is master)
            raise RoundPipeError(
                f"layer {layer.name!r} uses its weight {name!r} otherwise than in the first batch, where autocast cast "
                "it each time, so that it is sent cast; and with staleness=1 it may have changed since. Set "
                "staleness=0, or let the first batch use it so, too."
            )
        return layer.weights.read(master).detach().to(self._device.torch_device, copy=True)

    def begin_unpacking(self, slot: Slot) -> None:
        """Let the layers of an open slot unpack packed weights once for all its microbatches."""
        if not slot.weights.unpacks_once or self.unpacked.buffer is None:
            return
        left, sizes = self.unpacked.buffer.numel(), []
        for layer in slot.layers:  # those that have come to want more since the plan was made find what is left
            sizes.append(min(left, layer.seen.copies_nbytes))
            left -= sizes[-1]
        for layer, room in zip(slot.layers, self.unpacked.cut(sizes), strict=True):
            self.of(slot, layer).replica.copies.open(room)

    def end_unpacking(self, slot: Slot) -> None:
        """Let a slot that is closed give that memory back."""
        if not slot.weights.unpacks_once or self.unpacked.buffer is None:
            return
        for layer in slot.layers:
            self.of(slot, layer).replica.copies.open(None)
        self._device.compute.poison(self.unpacked.buffer)
        self.unpacked.last_use = self._device.compute.record()

    def unbind(self) -> None:
        """Let go of the arenas."""
        for copy in self._known.values():
            copy.replica.unbind()
            copy.segment = None

    def forget(self) -> None:
        """Drop all copies."""
        self.unbind()
        self._known.clear()
