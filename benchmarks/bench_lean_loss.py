"""The lean loss: operations and temporary memory, as it is and as it was, and what each way takes.

``derived`` lets autograd derive the gradient of the logits from ``cross_entropy``, which takes twice as many passes
over them. ``pieces`` also makes the gradient of the weights in products of 64 MiB, each of which is added to the sum
afterwards. Operations and bytes are counted on tensors without data, which have a GPU's kernels, for the output layer
of a model. Seconds are measured on the CPU, at a size that fits it, all ways in turns, and the shortest counts.

    .venv/bin/python benchmarks/bench_lean_loss.py [--tokens 8192] [--classes 151936] [--features 2048]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.model.lean_loss import PIECE, LossOf, _Chunks
from lightning_roundpipe.planning.meter import Counter as Estimate

MEAN = LossOf((("to", torch.float32),), -100, "mean", 0.0, None)


class Derived(_Chunks):
    """As it was last."""

    def _chunk(self, start: int, chunk: Tensor, target: Tensor, scored: Tensor, how: LossOf) -> Tensor:
        logits = F.linear(chunk, self.weight)
        with torch.enable_grad():
            loss = F.cross_entropy(logits.requires_grad_().float(), target[:, 0], reduction="sum")
            (slope,) = torch.autograd.grad(loss, logits)
        if start == 0:
            for gradient in self.gradients[:2]:
                assert gradient is not None
                gradient.zero_()
        self._add(start, chunk, slope)
        return loss.detach() / len(chunk)


class Pieces(Derived):
    """As it was before that."""

    def _add(self, start: int, chunk: Tensor, slope: Tensor) -> None:
        hidden, weight, _ = self.gradients
        assert hidden is not None and weight is not None
        hidden[start : start + len(chunk)] = slope @ self.weight
        classes = max(1, PIECE // weight.shape[1])
        for part, slopes in zip(torch.split(weight, classes), torch.split(slope, classes, dim=1), strict=True):
            if part.device.type == "cpu":
                part += slopes.t().float() @ chunk.float()
            else:
                part += torch.mm(slopes.t(), chunk, out_dtype=torch.float32)


WAYS: dict[str, type[_Chunks]] = {"pieces": Pieces, "derived": Derived, "now": _Chunks}


class Operations(TorchDispatchMode):
    """Counts what is launched, and the bytes that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            if "empty" not in str(func):
                self.launched["products" if "mm" in str(func) else "others"] += 1
            known = {id(leaf) for leaf in tree_leaves((args, kwargs))}
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and id(leaf) not in known]
            self.nbytes += sum(leaf.nbytes for leaf in made)
        return out


def chunks(kind: type[_Chunks], tokens: int, features: int, classes: int, device: str) -> tuple[_Chunks, Tensor]:
    """The loop over ``tokens``, of random numbers, and its targets."""
    generator = None if device == "meta" else torch.Generator().manual_seed(0)
    hidden = torch.empty(tokens, features, device=device).normal_(generator=generator).bfloat16()
    weight = torch.empty(classes, features, device=device).normal_(0, 0.02, generator=generator).bfloat16()
    target = torch.zeros(tokens, dtype=torch.long, device=device)
    return kind(hidden, weight, None, [True, True, False]), target


def count(kind: type[_Chunks], options: argparse.Namespace) -> tuple[Operations, float]:
    """What is launched, and the seconds that a GPU is estimated to take."""
    made, target = chunks(kind, options.tokens, options.features, options.classes, "meta")
    made.loss(target, MEAN)  # what a device is able to is asked once
    machine = read_machine("rtx4090x8")
    with Operations() as seen:
        made.loss(target, MEAN)
    with Estimate(machine) as estimate:
        made.loss(target, MEAN)
    return seen, estimate.work.seconds


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Seconds on the CPU, an eighth of the tokens and of the classes and half of the features."""
    sizes = options.tokens // 8, options.features // 2, options.classes // 8
    loops = {name: chunks(kind, *sizes, "cpu") for name, kind in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(options.turns + 1):
        for name, (made, target) in loops.items():
            start = time.perf_counter()
            made.loss(target, MEAN)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    for made, _ in loops.values():
        for one, other in zip(loops["now"][0].gradients, made.gradients, strict=True):
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)
    return {name: min(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=151_936)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    measured = measure(options)
    table = Table(title=f"{options.tokens:,} tokens, {options.features:,} features, {options.classes:,} classes, bf16")
    for column in ("way", "products", "other operations", "made, GiB", "estimated, ms", "CPU, s (1/128)"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, kind in WAYS.items():
        seen, seconds = count(kind, options)
        launched = [f"{seen.launched[what]:,}" for what in ("products", "others")]
        table.add_row(name, *launched, f"{seen.nbytes / 2**30:.1f}", f"{1e3 * seconds:.0f}", f"{measured[name]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
