"""Detection of graphs that lead out of a layer by another way than its arguments.

A worker's backward may run into a microbatch's stand-ins for parameters, which collect gradients. A gradient that
reaches user code's graph or a master parameter itself would be lost, so such a graph is an error.
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
    """Walk the graph of a layer's outputs and check where it ends.

    It may end in the layer's inputs and parameters, in leaves created inside the layer, and in stand-ins for
    parameters of other modules.

    Args:
        outputs: tensors that the layer returned.
        detached_inputs: the start of the layer's graph, where the walk stops.
        parameters: the parameters of the worker's replica.
        layer: name of the layer, for errors.
        new: whether the call was expected to have no graph, so that its backward is not planned: then stand-ins are
            an error too.

    Returns:
        Whether the graph ends in a stand-in.

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
    """Raise for a frozen layer, called with inputs that require no grad, that computes with a trained tensor."""
    raise RoundPipeError(
        f"layer {layer!r}, of which nothing is trained, computes with a trained tensor that it has from a hook, a "
        "closure, a cache or an object, and did not when it ran first: its gradient would be lost. Pass the tensor to "
        "the layer, or use it from the first batch on."
    )
