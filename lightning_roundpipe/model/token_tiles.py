"""Runs named modules over tiles of tokens, so that their largest tensors are never whole.

An MLP computes each token from that token alone. So it may take a long sequence in parts, and the intermediates of one
part are all that is held:

    forward   each tile after the other, in a checkpoint that keeps no intermediates; outputs are concatenated
    backward  each tile's forward once more, and its backward at once

The named module's ``forward`` is replaced for the length of a run, so the strategy, its hooks and the module's
parameters do not change. Names are matched as PEFT matches ``target_modules``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.config import RoundPipeError

USUAL = (
    "mlp", "feed_forward", "experts", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "norm", "q_norm", "k_norm",
)  # fmt: skip
"""Names by which Hugging Face's layers hold what acts on each token alone: the modules that a plain number stands for.

Where a module of one of these names holds another one, as a block with a router holds its experts, only the inner one
runs in tiles: a router's logits may enter a loss over all tokens.
"""


def modules_in_tiles(root: nn.Module, token_tiles: int | Mapping[str, int]) -> dict[str, tuple[nn.Module, int]]:
    """Return the modules in ``root`` that run in tiles, with the number of tokens of a tile, by qualified name.

    Raises:
        ValueError: a name matches no module, or one that is never called.
    """
    if isinstance(token_tiles, int):
        usual = _matching(root, USUAL)
        inner = [n for n in usual if not any(other.startswith(f"{n}.") for other in usual)]
        if not inner:
            raise ValueError(
                f"token_tiles={token_tiles} is for modules named {', '.join(USUAL)}, and {type(root).__name__} has "
                f"none: name those that act on each token alone, such as token_tiles={{'ffn': {token_tiles}}}."
            )
        return {name: (usual[name], token_tiles) for name in inner}
    found: dict[str, tuple[nn.Module, int]] = {}
    for name, tokens in token_tiles.items():
        matching = _matching(root, (name,))
        if not matching:
            raise ValueError(
                f"token_tiles={{{name!r}: {tokens}}} names no module of {type(root).__name__} that is called: give the "
                "last part or parts of a module's qualified name, such as 'mlp'."
            )
        found |= {path: (module, tokens) for path, module in matching.items()}
    return found


def _matching(root: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    ends = tuple(f".{name}" for name in names)
    return {
        path: module
        for path, module in root.named_modules()
        if f".{path}".endswith(ends) and type(module).forward is not nn.Module.forward  # a list of modules has none
    }


def run_in_tiles(root: nn.Module, token_tiles: int | Mapping[str, int] | None) -> Callable[[], None]:
    """Run modules of ``root`` in tiles from now on; None: no module. For arguments and errors see `modules_in_tiles`.

    Returns:
        What gives the modules their own ``forward`` back.
    """
    found = {} if token_tiles is None else modules_in_tiles(root, token_tiles)
    before = [(module, module.__dict__.get("forward")) for module, _ in found.values()]
    for (path, (module, tokens)), (_, own) in zip(found.items(), before, strict=True):
        module.forward = functools.partial(_run, module, own, path, tokens)

    def leave() -> None:
        for module, own in before:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own
        before.clear()

    return leave


def tile_shapes(lead: tuple[int, ...], tokens: int) -> list[tuple[int, ...]]:
    """Return the shapes of tiles of at most ``tokens`` tokens, in the order of the tokens.

    A tile is a part of one row, or several whole rows. In both cases, its tokens are next to each other. ``lead`` is
    (rows, tokens of a row), or (tokens,).
    """
    rows, columns = (1, *lead)[-2:]
    if columns > tokens:
        size = math.ceil(columns / math.ceil(columns / tokens))
        parts = [min(size, columns - start) for start in range(0, columns, size)]
        shapes = [(1, part) for _ in range(rows) for part in parts]
    else:
        size = tokens // max(1, columns)
        shapes = [(min(size, rows - start), columns) for start in range(0, rows, size)]
    return [shape[-len(lead) :] for shape in shapes]


def _run(module: nn.Module, own: Callable[..., Any] | None, path: str, tokens: int, *args: Any, **kwargs: Any) -> Any:
    """Stand in for the ``forward`` of ``module``. ``own``: its instance attribute ``forward``, if it had one."""
    forward = own if own is not None else type(module).forward.__get__(module)
    leaves, form = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    first = leaves[places[0]] if places else None
    lead = () if first is None else tuple(first.shape[:-1][:2])
    if first is None or not lead:
        raise _cannot(path, tokens, "takes", first)
    if math.prod(lead) <= tokens:
        return forward(*args, **kwargs)
    shapes = tile_shapes(lead, tokens)
    sizes = [math.prod(shape) for shape in shapes]
    shaped = [_is_shaped(leaves[i], lead, path, tokens, "takes") for i in places]
    # One split for all tiles: each slice of its own would have a gradient as large as the whole.
    columns = [
        (leaves[i].flatten(0, len(lead) - 1) if is_shaped else leaves[i]).split(sizes)
        for i, is_shaped in zip(places, shaped, strict=True)
    ]

    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # what a checkpoint refers to stays alive

    def one(*parts: Tensor) -> Any:
        given = list(others)
        for place, part in zip(places, parts, strict=True):
            given[place] = part
        args, kwargs = tree_unflatten(given, form)
        return forward(*args, **kwargs)

    made = []
    for shape, parts in zip(shapes, zip(*columns, strict=True), strict=True):
        pieces = [part.reshape(*shape, *part.shape[1:]) if s else part for part, s in zip(parts, shaped, strict=True)]
        made.append(tree_flatten(checkpoint(one, *pieces, use_reentrant=False)))
    outputs = zip(*(values for values, _ in made), strict=True)
    joined = [_joined(values, shapes, lead, path, tokens) for values in outputs]
    return tree_unflatten(joined, made[0][1])


def _joined(values: Sequence[Any], shapes: list[tuple[int, ...]], lead: tuple[int, ...], path: str, tokens: int) -> Any:
    """Return what the whole module returns in place of ``values``, of one tile each."""
    if not isinstance(values[0], Tensor):
        return values[0]
    shaped = [_is_shaped(value, shape, path, tokens, "returns") for value, shape in zip(values, shapes, strict=True)]
    if not shaped[0]:
        return torch.cat(list(values))
    rows = torch.cat([value.flatten(0, len(lead) - 1) for value in values])
    return rows.view(*lead, *rows.shape[1:])


def _is_shaped(tensor: Tensor, lead: tuple[int, ...], path: str, tokens: int, what: str) -> bool:
    """Return whether ``tensor`` is of shape (*lead, ...); else it is of shape (tokens, ...)."""
    if tuple(tensor.shape[: len(lead)]) == lead:
        return True
    if not tensor.ndim or tensor.shape[0] != math.prod(lead):
        raise _cannot(path, tokens, what, tensor)
    return False


def _cannot(path: str, tokens: int, what: str, tensor: Tensor | None) -> RoundPipeError:
    found = "no tensor" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
    return RoundPipeError(
        f"token_tiles={{{path!r}: {tokens}}}: {path} {what} {found}, which has not an entry for each token. Only a "
        "module that computes each token from that token alone can run in tiles: take it out of token_tiles."
    )
