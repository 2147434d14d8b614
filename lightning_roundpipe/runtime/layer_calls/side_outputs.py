"""The side outputs of a layer: attributes that it sets on its modules, and lists and dicts that it was passed.

On the worker all of these are copies. Comparison before and after the call finds what has changed. The changes become
further outputs, with gradients where required, and user code's thread applies them when the call has returned.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.messages import plural
from lightning_roundpipe.model.attributes import Container, frozen, refill, same, tensors_in
from lightning_roundpipe.model.replica import AttributeSnapshot, Replica
from lightning_roundpipe.runtime.layer_calls.arguments import FlatValue, mutable_parts

Key = tuple[str, int, str]
"""("attribute", number of the module in the layer, name) or ("argument", number of the container, "")."""
SideOutputs = dict[Key, FlatValue]


class SideOutputCollector:
    """Compares a replica and the arguments before and after a call.

    Args:
        replica: the replica.
        arguments: the call's arguments.
        immutable: whether the arguments are known to include no container, and no object with tensors.
    """

    def __init__(self, replica: Replica, arguments: Any, *, immutable: bool) -> None:
        self._replica = replica
        self._before = replica.attributes()
        self._parts = [] if immutable else [(part, frozen(part)) for part in mutable_parts(arguments)]

    def collect(self, given: dict[int, Tensor], layer: str) -> SideOutputs:
        """Return what the call changed, and restore the replica."""
        found: SideOutputs = {}
        for number, (part, before) in enumerate(self._parts):
            if not same(part, before):
                found["argument", number, ""] = FlatValue.of(frozen(part), given)
        return found | collect_attributes(self._replica, self._before, given, layer)


def collect_attributes(
    replica: Replica, before: AttributeSnapshot, given: dict[int, Tensor], layer: str
) -> SideOutputs:
    """Return the attributes that a call has changed since ``before``, and restore the replica."""
    found: SideOutputs = {}
    for module, name, value in replica.written(before):
        if any(isinstance(t, nn.Parameter) for t in tensors_in(value)):
            raise RoundPipeError(
                f"layer {layer!r} sets attribute {name!r} to a parameter of its own during the call. Set it once, "
                "before training."
            )
        found["attribute", module, name] = FlatValue.of(replica.original(value), given)
    if found:
        replica.drop_written()
    return found


def put(modules: list[nn.Module], arguments: Any, values: dict[Key, Any]) -> None:
    """Apply what the layer changed to the user's objects.

    Args:
        modules: modules of the user's layer.
        arguments: the call's arguments as user code passed them.
        values: new values by side output.
    """
    if not values:
        return
    parts = list(mutable_parts(arguments))
    for (kind, number, name), value in values.items():
        if kind == "argument":
            refill(parts[number], value)
            continue
        known = modules[number].__dict__.get(name)
        if isinstance(known, Container) and type(known) is type(value):
            refill(known, value)
        else:
            nn.Module.__setattr__(modules[number], name, value)  # as user code would: see `module_state`


def named(key: Key) -> str:
    """Return a description for messages."""
    return f"attribute {key[2]!r}" if key[0] == "attribute" else f"list or dict {key[1]} among its arguments"


def refuse_new_gradients(side_outputs: SideOutputs, known: dict[Key, Any], layer: str) -> None:
    """Refuse new side outputs that require grad: none did in the first batch, so they were passed on without grad."""
    for key, flat in side_outputs.items():
        if key not in known and any(t.requires_grad for t in flat.tensors()):
            raise RoundPipeError(
                f"layer {layer!r} put a tensor that requires grad into {named(key)}, which it did not do in the first "
                "batch, so its gradient was lost. Return the tensor instead."
            )


def again(side_outputs: SideOutputs, key: Key, count: int, layer: str) -> list[Tensor]:
    """Return the tensors of a side output in a recomputation, of which there must be ``count``."""
    tensors = side_outputs[key].tensors() if key in side_outputs else []
    if len(tensors) != count:
        raise RoundPipeError(
            f"layer {layer!r} put {plural(count, 'tensor')} into {named(key)}, and {len(tensors)} when recomputed: "
            "what it does must not depend on how often it ran. Return the tensors instead."
        )
    return tensors
