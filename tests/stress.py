"""One small model that has everything a schedule can get wrong, and one run of it that looks at everything.

`Case` is a run: plan, workers, microbatches, batches and what the emulated devices do to make it hard. `check` trains
it and compares it, to the bit, with the same run on one kind worker; and it judges the turns of every step (`turns`),
the order of all accesses to memory (`ordering`), what the user's code saw, and the peak of every device.
"""

import contextlib
import functools
import math
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
import turns
from harness import Learner, Result, arenas_of, ours, run, seeded
from ordering import Ordering
from patience import PATIENCE_S
from torch import nn

from lightning_roundpipe.devices.ledger import Ledger
from lightning_roundpipe.engine import report as engine_report
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import WorkerNeeds, device_bytes
from lightning_roundpipe.planning.schedule import Plan, Span

CALLS = 6
WIDTH, CLASSES = 8, 5
LAYERS = ["Linear", "Block"]
WATCHDOG = PATIENCE_S
"""Seconds: a hang is a failure that shows all stacks. Nothing here takes one."""
GLUE_S = 0.0005
"""Seconds that each section of user code takes."""


# ------------------------------------------------------------------------------------------------------------ the model


class Block(nn.Module):
    def __init__(self, drop, writes=False):
        super().__init__()
        self.writes = writes
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, h, keep):
        if self.writes:
            h.clamp_(-1.5, 1.5)
        return self.drop(torch.tanh(self.lin(h))) * keep


class Network(nn.Module):
    """A layer that is used twice, a frozen one, one that writes to its input; one mask for all of them; user code that
    writes in place, draws, and has weights, in front of the first layer too.

    Plain autograd takes the writes: of what a layer was given, only a frozen one's is written to.
    """

    def __init__(self, drops):
        super().__init__()
        self.drops = drops
        self.embed = nn.Linear(6, WIDTH)
        self.twice = Block(0.2 * drops)
        self.frozen = Block(0.0).requires_grad_(False)
        self.last = Block(0.1 * drops, writes=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.first = nn.Parameter(torch.ones(6))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, user_code, skips, extra=0):
        with user_code.alone():
            keep = (x[:, :1] > -2).to(x.dtype) * 1.25
        h = self.embed(x * self.first)  # call 0
        h += self.twice(-h, keep)  # 1
        with user_code.alone():
            h = F.dropout(h, 0.1 * self.drops) * self.scale
        if extra == 1:
            h = self.embed(h[:, :6] * self.first)
        h += self.frozen(h, keep)  # 2
        with user_code.alone():
            h = h.neg()
        h = h + 0.5 * self.twice(h, keep)  # 3
        if extra == 2:
            h = F.dropout(h + self.twice(h, keep), 0.1 * self.drops)
        for _ in range(4 * (extra == 3)):  # with the weights of the present stage
            h = h + 0.1 * self.twice(h, keep)
        if not skips:
            h = self.last(h, keep)  # 4
        return self.head(h)  # 5


class UserCode:
    """Sees whether two microbatches are in user code at once, and in which order they begin and end."""

    def __init__(self):
        self.faults = []
        self.began = []
        self.ended = []
        self._inside = threading.Lock()

    def __deepcopy__(self, memo):
        return self

    @contextlib.contextmanager
    def alone(self):
        if not self._inside.acquire(blocking=False):
            self.faults.append("two microbatches are in user code at once")
            yield
            return
        time.sleep(GLUE_S)
        try:
            yield
        finally:
            self._inside.release()


class StressModule(Learner, optimizer=torch.optim.AdamW, lr=0.05):
    def __init__(self, drops=True):
        super().__init__()
        with seeded(3):
            self.net = Network(drops)
        user_code = UserCode()
        self._instrument = lambda: user_code
        """Behind a function, where it is no state of the module: it sees how often user code runs."""

    @property
    def user_code(self):
        return self._instrument()

    def training_step(self, batch, batch_idx):
        first = int(batch["id"][0])
        with self.user_code.alone():
            self.user_code.began.append(first)
        out = self.net(batch["x"], self.user_code, bool(batch["skips"][0] == 1), int(batch["extra"][0]))
        with self.user_code.alone():
            self.user_code.ended.append(first)
            loss = F.cross_entropy(out, batch["y"])
            self.log("loss", loss)
        return loss


# ---------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        plan: text, with its round; None with one microbatch: a slot per call as it comes.
        sizes: samples of each batch, the first one included (which is learned from).
        empty: (batch, microbatch) without a single target: it has no backward.
        skips: (batch, microbatch) that leaves a layer out. Not in the first window.
        extra: (batch, microbatch, place) that calls a layer once more, or at place 3 four times more, which the plan
            does not have. Likewise.
        accumulate: batches per optimizer step.
        blocking: whether somebody looks at gradients, so that they are handed to ``.grad``.
        drops: whether layers and user code draw random numbers. If not, a step's backward goes on when the next one
            begins.
        arena: share of the largest arena beyond the smallest one.
        emulation: options of the emulated devices, but for the memory.
        staleness, reduce_dtype, optimizer_state: as in the strategy.
        precision: as in the Trainer.
    """

    plan: str | None
    devices: int = 2
    microbatches: int = 4
    sizes: tuple[int, ...] = (8, 7, 8)
    empty: tuple[int, int] | None = None
    skips: tuple[int, int] | None = None
    extra: tuple[int, int, int] | None = None
    accumulate: int = 1
    drops: bool = True
    blocking: bool = False
    prefetch: int = 1
    arena: float = 1.0
    emulation: dict[str, Any] = field(default_factory=lambda: {"poison": True, "delay_seed": 0}, hash=False)
    staleness: int = 0
    reduce_dtype: str | None = None
    optimizer_state: str = "fp32"
    precision: str = "32-true"


NO_GRADIENTS = Case(
    plan="forward 0-1 2-3; fused 4-5; backward 3 1-2 0; round 1", devices=2, microbatches=5, sizes=(3, 2, 5),
    empty=(2, 1), extra=(2, 2, 1), drops=False, emulation={"poison": True, "delay_seed": 4, "latency": 3e-4},
)  # fmt: skip
"""A microbatch without a loss, in a round of its own: its slots have a place for gradients, and download none."""

INPUTS_AHEAD = Case(plan="forward none; fused 0-5; backward none; round 2", devices=1, sizes=(4, 4, 4))
"""A single worker gets the inputs of the first call ahead, too: no stage of its own has made them."""


def random_plan(draw, microbatches):
    """Any cuts of the forward pass, any others of the backward pass, any round. ``draw``: a `random.Random`."""
    first = draw.randrange(CALLS)

    def cuts():
        ends = [0, *(c for c in range(1, first) if draw.random() < 0.5), first]
        return tuple(Span(a, b - 1) for a, b in pairwise(ends)) if first else ()

    rounds, ahead, least = draw.randint(1, microbatches), draw.random() < 0.5, draw.choice([0, 0, 1, 2])
    carry = tuple(call for call in range(first) if draw.random() < 0.5)
    return Plan(cuts(), Span(first, CALLS - 1), cuts()[::-1], rounds, ahead, carry=carry, carry_least=least)


def batches(case):
    made = []
    for index, size in enumerate(case.sizes):
        generator = torch.Generator().manual_seed(index)
        y = torch.randint(CLASSES, (size,), generator=generator)
        x = torch.randn(size, 6, generator=generator)
        parts = parts_of(size, case.microbatches)
        skips, extra = torch.zeros(size), torch.zeros(size)
        if size > 2:
            y[1] = -100
        if case.empty is not None and case.empty[0] == index and case.empty[1] < len(parts) > 1:
            y[parts[case.empty[1]]] = -100
        if case.skips is not None and case.skips[0] == index and case.skips[1] < len(parts):
            skips[parts[case.skips[1]]] = 1.0
        if case.extra is not None and case.extra[0] == index and case.extra[1] < len(parts):
            extra[torch.cat(parts[case.extra[1] :: 2])] = float(case.extra[2])
        made.append({"x": x, "y": y, "id": torch.arange(size), "skips": skips, "extra": extra})
    return made


def parts_of(size, microbatches):
    """The samples of each microbatch."""
    return torch.arange(size).tensor_split(min(microbatches, size))


@dataclass
class Run:
    case: Case
    result: Result
    reports: list[dict[str, Any]]
    user_code: UserCode
    peak: int


def train(case, callbacks=(), **options):
    """Run ``case``; ``options`` go to the strategy in place of its own."""
    module = StressModule(case.drops)
    given = ("plan", "prefetch", "emulation", "staleness", "reduce_dtype", "optimizer_state")
    given = {name: getattr(case, name) for name in given} | {"num_microbatches": case.microbatches}
    strategy = ours(**given | {"loss_weight": "targets", "layers": LAYERS, "watchdog_timeout": WATCHDOG} | options)
    with all_reports() as reports, _highest(reports) as peaks, arenas_of(case.arena):
        result = run(
            strategy,
            module,
            batches(case),
            devices=case.devices,
            callbacks=callbacks,
            accumulate_grad_batches=case.accumulate,
            blocking=case.blocking,
            precision=case.precision,
        )
    return Run(case, result, [report() for report in reports], module.user_code, max(peaks))


@contextlib.contextmanager
def all_reports():
    """The report of each step, also of those that are over when the next one has begun."""
    made = []
    real = engine_report.report_of

    def noted(*args):
        made.append(real(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_report, "report_of", noted)
        yield made


@contextlib.contextmanager
def _highest(reports):
    """The peaks of all devices, over all steps but the first, which has no plan."""
    peaks, real = [0], Ledger.add

    def add(self, *args):
        real(self, *args)
        if reports:
            with self._lock:
                self._settle()
                peaks.append(self._total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "add", add)
        yield peaks


def reference(case):
    """One worker without nuisances, everything in one stage."""
    # Gradients that travel narrowed are rounded once a round. In other formats no round changes a bit.
    round_ = Plan.parse(case.plan).round_microbatches if case.plan is not None and case.reduce_dtype else 1
    return _reference(replace(case, plan=harness.single(CALLS, round_), devices=1, prefetch=1, arena=1.0, emulation={}))


@functools.lru_cache(maxsize=64)
def _reference(case):
    return train(case).result


def faults(case):
    """All that is wrong with ``case``, on kind devices and on hard ones that have just enough memory.

    A hang, an error or too little memory is raised.
    """
    expected = reference(case)
    easy = train(replace(case, plan=_not_ahead(case.plan), emulation={}))
    enough = _enough(case, easy)
    with Ordering() as ordering:
        hard = train(case, emulation=case.emulation | {"memory": 2 * enough})
    assert ordering.accesses > 100, "nothing was followed"
    found = [f"{name} run, {text}" for name, run in (("easy", easy), ("hard", hard)) for text in wrong(run, expected)]
    if hard.peak > enough and case.extra is None:  # nothing is planned for a call that the plan does not have
        found.append(f"a device held {hard.peak} bytes, {enough} are needed")
    return found + ordering.faults


def _not_ahead(plan):
    return None if plan is None else str(replace(Plan.parse(plan), recompute_ahead=False))


def _enough(case, easy):
    """What the plan says that a device needs at the most, in bytes, whoever is late.

    Costs are those of the first batch, and later ones may have larger microbatches.
    """
    costs = easy.reports[-1]["costs"]
    if case.plan is None or costs is None:
        return easy.peak
    largest = [max(map(len, parts_of(size, case.microbatches))) for size in case.sizes]
    plan, made = Plan.parse(case.plan), Costs.from_dict(costs)
    least, most = WorkerNeeds(plan, made, case.devices).arena
    need = device_bytes(plan, made, case.devices) + int(case.arena * (most - least))
    need += WorkerNeeds(plan, made, case.devices).ahead
    return math.ceil(need * max(largest) / largest[0])


def wrong(run, expected):
    """What one run shows by itself: other bits, turns out of order, user code out of order."""
    found = [f"step {i}: {text}" for i, r in enumerate(run.reports) for text in turns.faults(r)]
    try:
        harness.assert_identical(expected, run.result, rng=True)
    except AssertionError as error:
        found.append(str(error))
    return found + run.user_code.faults + _in_order(run)


def check(case):
    if found := faults(case):
        raise AssertionError("\n".join([f"{case}:", *found[:12]]))


def _in_order(run):
    """User code begins and ends microbatch by microbatch."""
    case, user_code = run.case, run.user_code
    order = [int(part[0]) for batch in batches(case) for part in parts_of(len(batch["id"]), case.microbatches)]
    seen = {"began": user_code.began, "ended": user_code.ended}
    return [f"user code {what} in order {came}" for what, came in seen.items() if came != order]
