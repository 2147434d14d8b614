"""Graphs that lead out of a layer by a way that its arguments are not.

A worker's backward may walk as far as a microbatch's stand-ins for parameters: there gradients belong. What arrives at
the user code behind a layer, or at a master, is lost.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.user_code.mode import is_stand_in


def reaches_out(
    outputs: list[Tensor],
    detached_inputs: DetachedInputs,
    parameters: list[nn.Parameter],
    layer: str,
    *,
    new: bool = False,
) -> bool:
    """Walk the graph of a layer's ``outputs``: it may end in its inputs, its parameters and leaves made inside.

    Args:
        new: whether there was none when the layer ran first, so that its backward is not expected.

    Returns:
        Whether it also ends in stand-ins for other parameters.

    Raises:
        RoundPipeError: if it leads anywhere else.
    """
    nodes: list[Any] = [t.grad_fn for t in outputs]
    seen: set[Any] = set()
    own = set(map(id, parameters))
    found = False
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or getattr(node, "detached_inputs", None) is detached_inputs:
            continue
        seen.add(node)
        user_code = getattr(node, "graph_cut", None) is not None or getattr(node, "sink", None) is not None
        variable = getattr(node, "variable", None)
        foreign = isinstance(variable, nn.Parameter) and id(variable) not in own
        if new and (user_code or foreign or is_stand_in(variable)):
            _refuse_new(layer)
        if user_code:
            raise RoundPipeError(
                f"layer {layer!r} uses a tensor that it was not given as an argument (through a closure, a global or "
                "an object), and gradients cannot flow there. Pass it to the layer."
            )
        if foreign and variable is not None:
            raise RoundPipeError(
                f"layer {layer!r} uses a parameter of shape {tuple(variable.shape)} that is not its own, held by a "
                "list, a closure or an object, by another way than a torch function: its gradient would be lost. Pass "
                "it to the layer, or use parameter.clone()."
            )
        found = found or is_stand_in(variable)
        nodes += [following for following, _ in node.next_functions]
    return found


def _refuse_new(layer: str) -> NoReturn:
    """A frozen layer, whose inputs require no grad either, computes with something that is trained."""
    raise RoundPipeError(
        f"layer {layer!r}, of which nothing is trained, computes with a trained tensor that it has from a hook, a "
        "closure, a cache or an object, and did not when it ran first: its gradient would be lost. Pass the tensor to "
        "the layer, or use it from the first batch on."
    )
