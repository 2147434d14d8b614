"""The optimizer's rate: AdamW as the engine steps it, layer by layer, against one fused step of all parameters.

What the engine runs is measured as it runs it: a step was submitted, its thread waits, and gradients come, here of all
layers at once. The time goes from there until every layer's update has been published. Small layers that are there
together share a call of up to 16 M parameters. That should cost nothing over one step of everything: a goal of 1.0.

More sides are for comparison: with weights that travel in bf16, beside them or in the same memory, where moments may be
packed, too; and ``AdamW(...)`` without ``fused``. The sides take turns in random order.

Beside other work it needs ``OMP_WAIT_POLICY=passive``, or torch's threads wait for cores that others have and each side
takes ten times as long.

    .venv/bin/python benchmarks/bench_optimizer.py [--repeat 21] [--only SmolLM2-135M]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from common import parser_of, show
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_roundpipe.config import OPTIMIZER_STATES, Emulation
from lightning_roundpipe.devices import intraop_threads, make_devices
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.grad_buffers import GradientMemory, HostGradSums, Reduction
from lightning_roundpipe.memory.host_layer import host_layers, make_buckets
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.updates import async_optimizer, bucket_stepper
from lightning_roundpipe.updates.bucket_stepper import BucketStepper
from lightning_roundpipe.updates.current_optimizer import CurrentOptimizer
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.updates.loss_handle import StepGradients

SHAPES = {
    "Qwen3-1.7B": {"hidden": 2048, "inner": 6144, "layers": 6, "vocabulary": 8_000},
    "Qwen3-0.6B": {"hidden": 1024, "inner": 3072, "layers": 16, "vocabulary": 8_000},
    "SmolLM2-135M": {"hidden": 576, "inner": 1536, "layers": 30, "vocabulary": 49_152},
}
"""About these models: all layers of the last one, and of the others those that 8 GiB have room for."""
IDLE = 0.01
"""Seconds before each turn: the optimizer's thread comes to wait for gradients, and torch's threads to rest."""
REFERENCE = "AdamW(fused=True).step()"


def _no_thread(worker: int) -> NoReturn:
    raise AssertionError("gradients come in their own dtype, from one worker: nothing is added on the host")


NOTHING_ADDED = Reduction(None, _no_thread)


def modules(hidden: int, inner: int, layers: int, vocabulary: int) -> dict[str, nn.Module]:
    """An embedding, decoder blocks, the last norm: their parameters."""
    mlp = [(inner, hidden), (inner, hidden), (hidden, inner)]
    block = [*[(hidden, hidden)] * 4, *mlp, (hidden,), (hidden,)]
    shapes = [[(vocabulary, hidden)], *[block] * layers, [(hidden,)]]
    return {str(i): nn.ParameterList([torch.zeros(s) for s in layer]) for i, layer in enumerate(shapes)}


class Engine:
    """The engine's part that steps: host layers with gradients, and the thread that updates them."""

    def __init__(self, shape: dict[str, int]) -> None:
        [self._device] = make_devices("cpu", [torch.device("cpu")], Emulation())
        formats = Formats()
        self.layers = host_layers(modules(**shape), self._device, formats, double_buffered=False, mapped=())
        self.masters = [master for layer in self.layers for master in layer.masters]
        self._buckets = make_buckets(self.layers, self.masters, formats)
        self._optimizer: Optimizer | None = None
        self._memory = GradientMemory(self.layers, self._device, NOTHING_ADDED, workers=1)
        self._memory.pool.keeps = True
        current = CurrentOptimizer(lambda: self._optimizer, self._buckets)
        self._updates = async_optimizer.AsyncOptimizer(BucketStepper(self._buckets, self._memory.pool, current))
        self._came = lambda: None
        gradients = {key: g for sums in self._sums() for key, g in sums.take(1.0).items()}
        for master in self.masters:
            master.grad = gradients[id(master)].normal_()

    def _sums(self) -> list[HostGradSums]:
        sums = [self._memory.begin(layer, ()) for layer in self.layers]
        for each in sums:
            each.make_room(CancelScope(lambda: None))
            each.present = [True] * len(each.present)
        return sums

    def submit(self, optimizer: Optimizer, piece: int, *, cast: bool, form: str | None) -> None:
        """A step whose gradients are still to come.

        Args:
            piece: parameters of one call; 0: one layer.
            cast: whether weights travel in bf16.
            form: how moments are kept, if weights and their copies share memory.
        """
        bucket_stepper.PIECE, self._updates.optimizer.form = piece, form or "fp32"
        share = form is not None
        self._updates.optimizer.release_masters()  # only masters that nothing else refers to share their memory
        for layer in self.layers:
            layer.weights.round(dict.fromkeys(range(len(layer.masters)), torch.bfloat16) if cast else {}, share=share)
            assert all(flat.shares == share for flat in layer.weights.flats)
        intraop_threads.release_intraop_threads()  # or two would make each other slow, as in training
        readiness = GradReadiness(self._buckets)
        batch = StepGradients(self._sums(), [], 1.0, readiness)
        batch.differentiated(1.0)
        self._updates.offer(batch)
        self._optimizer = optimizer
        first = not self._updates.begun  # `submit` waits for it
        self._came = (lambda: None) if first else lambda: readiness.forward_ended(())
        if first:
            readiness.forward_ended(())
        self._updates.submit(None)

    def finish(self) -> None:
        """Gradients come, and everything is updated."""
        self._came()
        self._updates.settle()

    def close(self) -> None:
        self._updates.close()
        self._device.close()


@dataclass(frozen=True)
class Side:
    """One way to step: ``prepare`` is not measured."""

    step: Callable[[], object]
    prepare: Callable[[], None] = lambda: None

    def seconds(self) -> float:
        intraop_threads.release_intraop_threads()
        self.prepare()
        time.sleep(IDLE)
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def sides_of(engine: Engine) -> dict[str, Side]:
    plain, fused = (AdamW(engine.masters, weight_decay=0.1, fused=choice) for choice in (None, True))
    fused.state = plain.state
    packed = {form: AdamW(engine.masters, weight_decay=0.1) for form in OPTIMIZER_STATES}
    as_it_is = bucket_stepper.PIECE

    def prepare() -> None:
        for layer in engine.layers:
            layer.weights.round({})
        torch.zeros(1_000_000).add_(1)  # so that this thread has a team, as it has in plain training

    def ours(piece: int, *, cast: bool = False, form: str | None = None) -> Side:
        optimizer = plain if form is None else packed[form]
        return Side(engine.finish, lambda: engine.submit(optimizer, piece, cast=cast, form=form))

    return {
        "the engine, as it is": ours(as_it_is),
        "the same, with bf16 copies": ours(as_it_is, cast=True),
        **{f"in 4 bytes, moments in {form}": ours(as_it_is, cast=True, form=form) for form in OPTIMIZER_STATES},
        REFERENCE: Side(fused.step, prepare),
        "AdamW().step()": Side(plain.step, prepare),
    }


def measure(name: str, repeat: int) -> None:
    engine = Engine(SHAPES[name])
    sides = sides_of(engine)
    taken: dict[str, list[float]] = {side: [] for side in sides}
    names, order = list(sides), random.Random(0)  # in turn each would always follow the same one
    for turn in range(repeat + 2):
        for side in order.sample(names, len(names)):
            took = sides[side].seconds()
            if turn >= 2:  # the first ones make the state and touch its memory
                taken[side].append(took)
    engine.close()
    sizes = [sum(master.numel() for master in layer.masters) for layer in engine.layers]
    rows = []
    for side, times in taken.items():
        median = statistics.median(times)
        ratios = [mine / theirs for mine, theirs in zip(times, taken[REFERENCE], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        rows.append((side, f"{median:.3f}", f"{sum(sizes) / median:.2e}", f"{ratio:.3f}", f"{low:.2f} to {high:.2f}"))
    title = f"{name}: {sizes[1] / 1e6:.1f} M parameters a layer, {sum(sizes) / 1e6:.1f} M in all"
    show(f"{title}, fp32, {torch.get_num_threads()} threads", ("", "s", "parameters/s", "ratio", "quartiles"), rows)


def main() -> None:
    parser = parser_of(__doc__, repeat=21)
    parser.add_argument("--only", choices=SHAPES)
    options = parser.parse_args()
    for name in SHAPES:
        if options.only in (None, name):
            measure(name, options.repeat)
    print(f"ratio: this side over {REFERENCE}, median of the turns")


if __name__ == "__main__":
    main()
