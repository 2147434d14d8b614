"""Graphs that lead out of a layer by a way that its arguments are not.

A worker's backward would walk into the glue, or into the masters on the host, and what arrives there is lost.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.inlet import Inlet


def refuse_foreign_graph(outputs: list[Tensor], inlet: Inlet, parameters: list[nn.Parameter], layer: str) -> None:
    """Walk the graph of a layer's ``outputs``: it may end in its inputs, its parameters and leaves made inside."""
    nodes: list[Any] = [t.grad_fn for t in outputs]
    seen: set[Any] = set()
    own = set(map(id, parameters))
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or getattr(node, "inlet", None) is inlet:
            continue
        seen.add(node)
        if getattr(node, "entry", None) is not None or getattr(node, "sink", None) is not None:
            raise RoundPipeError(
                f"layer {layer!r} uses a tensor that it was not given as an argument (through a closure, a global or "
                "an object), and gradients cannot flow there. Pass it to the layer."
            )
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and id(variable) not in own:
            raise RoundPipeError(
                f"layer {layer!r} uses a parameter of shape {tuple(variable.shape)} that is not its own, held by a "
                "list, a closure or an object: its gradient would be lost. Pass it to the layer, or make the module "
                "that holds both a layer: RoundPipeStrategy(layers=[...])."
            )
        nodes += [following for following, _ in node.next_functions]
