"""The bytes that the estimate counts for a call are those that live at once where the call really runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.planning.estimate import estimate_costs

GPU = read_machine("rtx4090x8")
ROWS, WIDTH, INNER = 64, 16, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Chain(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, use_cache: bool = False) -> Any:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.square().mean())


def layers_of(model: Chain) -> dict[str, nn.Module]:
    return {f"blocks.{number}": block for number, block in enumerate(model.blocks)}


class Alive(TorchDispatchMode):
    """Bytes of real storages, as an allocator counts them that is told of each operation's results."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self.peak = known, 0
        self._refs: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                storage = leaf.untyped_storage()
                self._refs[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._refs = {key: pair for key, pair in self._refs.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._refs.values()))
        return out


def test_a_call_takes_what_lives_at_once_where_it_really_runs() -> None:
    """Backward frees what the forward has kept, node by node: a peak in the middle of it counts only what is left."""
    with torch.device("meta"):
        shape = Chain()
    (first, _) = estimate_costs(shape, layers_of(shape), {"x": torch.empty(ROWS, WIDTH, device="meta")}, GPU).calls
    block, x = Block(), torch.randn(ROWS, WIDTH)
    alive = Alive({t.untyped_storage()._cdata for t in (*block.parameters(), x)})
    for weight in block.parameters():
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with alive:
        out = block(x)
        gradient, edge = torch.empty_like(out), get_gradient_edge(out)
        del out  # as the engine does
        torch.autograd.backward(edge, gradient)
    assert first.activation_bytes == x.nbytes + alive.peak
