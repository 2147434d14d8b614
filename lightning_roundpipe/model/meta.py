"""Parameters and buffers without values: those of modules built on the meta device, to be filled from a checkpoint.

``load_state_dict`` would copy into them, which does nothing; with ``assign=True`` it would put a separate parameter in
each place, which unties tied parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn


def without_values(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers on the meta device, each once."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [name for name, tensor in tensors.items() if tensor.is_meta]


def make_room(module: nn.Module, names: Container[str]) -> None:
    """Allocate the parameters and buffers on the meta device that have one of these ``names``. Tied ones stay tied."""
    filled = {id(tensor) for _, _, name, tensor in _places(module) if tensor.is_meta and name in names}
    made: dict[int, Tensor] = {}
    for held, key, _, tensor in list(_places(module)):
        if id(tensor) in filled:
            if id(tensor) not in made:
                empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            held[key] = made[id(tensor)]


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, str, Tensor]]:
    """Yield every place of a parameter or buffer: the dictionary, its key, the qualified name, and the tensor."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for held in (inner._parameters, inner._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    yield held, key, f"{prefix}.{key}" if prefix else key, tensor
