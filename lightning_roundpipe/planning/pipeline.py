"""A simulation of steps under a plan, by which plans are judged.

Each rule can be switched on alone:

    slot i runs on worker i mod N, through rounds and steps; slots and microbatches in order               [1]
    a slot of a later round waits until the same stage of the round before is closed (same sums)           [2]
    a turn waits for its microbatch to leave the stage before; ``hop_s`` more on another worker            [3]
    a recomputation waits for what its stage saved, and may run before its gradient is there               [4]
    the fused slot is held from a microbatch's first call until its backward through the stage ends        [5]
    a call waits for its own layer's weights: of the last step (staleness 0) or of the one before (1)      [6]
    weights travel while the slot before runs, layer by layer, as far as they fit beside it; gradients     [7]
    leave call by call, as the last microbatch has run its backward. What comes to a place in the arena waits until
    what was there has left; see `memory`
    an update begins when a layer's gradients are on the host, first layers first; see `async_optimizer`,          [8]
    or `network` where other machines have a part in it
    what a turn takes in and gives out travels before all else                                             [9]
    a step begins, and weights are sent for it, when all losses of the last one are known; a microbatch of  [10]
    it begins when the same one of the last step is over
    one interpreter issues the operations of all workers; where the host waits for the device, nothing is ahead  [11]
    rounds of one microbatch run side by side: the host begins a call when it is through that of the microbatch  [12]
    before, instead of [2] each part of a call's gradients leaves when that of the microbatch before is added, and
    the host adds one part at a time; see `Slot`
    unequal workers have times and links of their own, and a step begins on the first of them                    [13]
    products of carried calls leave behind their forward, in line with gradients, at most two calls' of a worker   [14]
    at a time, and come back while the call before runs backward; a recomputation leaves them out

Everything depends only on what has a lower slot, or a lower microbatch in the same slot, so one pass in that order is
the whole simulation. What is left at nothing (links, updates, host time) takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_roundpipe.planning.costs import CallCost, Costs, for_each
from lightning_roundpipe.planning.links import HostTime, Lane, Links, SharedSeconds
from lightning_roundpipe.planning.memory import Memory, WorkerNeeds, kept_inputs
from lightning_roundpipe.planning.network import Exchange, Network
from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.planning.updates import UpdateModel, Updating

Staleness = Literal[0, 1]
Kind = Literal[
    "forward",
    "fused",
    "recompute",
    "backward",
    "upload_weights",
    "download_gradients",
    "upload_boundary",
    "download_boundary",
    "update",
]
COMPUTE: tuple[Kind, ...] = ("forward", "fused", "recompute", "backward")


class SimulatedEvent(NamedTuple):
    """A simulated interval of work.

    ``worker`` is -1 for the host, and ``microbatch`` is -1 for work of a whole slot. Times are seconds.
    """

    kind: Kind
    worker: int
    step: int
    slot: int
    position: int
    microbatch: int
    start_s: float
    end_s: float


_ALIKE = 1e-12
"""Differences of seconds, relative to those since the start, that are of rounding only."""

_FREE = Links(math.inf, math.inf)
"""A link on which copies take no time."""


@dataclass(frozen=True)
class Rules:
    """What takes time besides computing, and what may overlap.

    Args:
        staleness: 0 or 1.
        host: time of the engine itself.
        links: link of every worker, or of each if workers are unequal; None: copies take no time.
        updates: rate and rules of the optimizer; None: updates take no time.
        sums_per_s: bytes of gradients that the host adds per second; None: sums take no time.
        network: network to other machines, which run the same plan; None: there is one machine.
        memory: bytes of every worker, or of each if workers are unequal; None: all arenas are as large as is of use.
    """

    staleness: Staleness = 0
    host: HostTime = field(default_factory=HostTime)
    links: Links | tuple[Links, ...] | None = None
    updates: UpdateModel | None = None
    sums_per_s: float | None = None
    network: Network | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation. Times are seconds from the start of the first step.

    Attributes:
        events: all intervals of work, in the order of slots.
        losses_s: time at which all losses of each step are known, and the next step may begin.
        ends_s: end of each step's last backward.
    """

    plan: Plan
    workers: int
    events: tuple[SimulatedEvent, ...]
    losses_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the start to the end of the last turn."""
        return max(self.ends_s)

    @property
    def busy_s(self) -> float:
        """Seconds of computing, summed over all workers and steps."""
        return sum(event.end_s - event.start_s for event in self.events if event.kind in COMPUTE)

    def period_s(self, steps: int) -> float:
        """Return the mean seconds of the last ``steps`` steps. The simulation must have at least one more."""
        return period_of_ends(self.ends_s, steps)


def period_of_ends(ends: Sequence[float], steps: int) -> float:
    """Return the mean seconds of the last ``steps`` of steps with these ends. There must be at least one more."""
    return (ends[-1] - ends[-1 - steps]) / steps


def run_steps(
    plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules | None = None, steps: int = 1
) -> SimulatedRun:
    """Simulate ``steps`` of so many ``microbatches`` from idle workers. ``rules`` None: only computing takes time.

    Raises:
        ValueError: the plan does not fit the calls of ``costs``, or a number is too small.
    """
    pipeline = _pipeline(plan, costs, workers, microbatches, rules, steps)
    events: list[SimulatedEvent] = []
    pipeline.events = events
    for _ in range(steps):
        pipeline.step()
    return SimulatedRun(plan, workers, tuple(events), tuple(pipeline.losses), tuple(pipeline.ends))


def step_ends(
    plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules | None = None, steps: int = 1
) -> list[float]:
    """Return the ends of steps as `run_steps` finds them, for comparing many plans.

    Steps follow each other alike after a few of them. Once everything that a step leaves to the next ones is as after
    an earlier step, but for the time, their ends repeat, too, and the simulation is over.

    Raises:
        ValueError: as `run_steps`.
    """
    pipeline = _pipeline(plan, costs, workers, microbatches, rules, steps)
    ends, begins, states = pipeline.ends, pipeline.losses, list[list[float]]()
    while len(ends) < steps:
        pipeline.step()
        state, known = pipeline.state(), len(ends)
        for before in reversed(range(len(states))):
            most = _ALIKE * begins[-1]
            if len(state) == len(states[before]) and all(
                abs(one - other) <= most for one, other in zip(state, states[before], strict=True)
            ):
                cycle, seconds = known - 1 - before, begins[-1] - begins[before]
                while len(ends) < steps:
                    ends.append(ends[-cycle] + seconds)
                break
        states.append(state)
    return ends


def _pipeline(plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules | None, steps: int) -> _Pipeline:
    for name, value in (("workers", workers), ("microbatches", microbatches), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1 to simulate steps.")
    plan.validate(costs.layers)
    costs.check_workers(workers)
    return _Pipeline(plan, costs, workers, microbatches, rules or Rules())


# -- stages ------------------------------------------------------------------------------------------------------------


class _Arriving(NamedTuple):
    """A layer of a stage: its name, bytes of weights up to its end, and seconds of a turn before its first call."""

    layer: str
    come: int
    before_s: float


class _Leaving(NamedTuple):
    """Gradients of a call: bytes as they travel, and seconds of the turn behind its backward."""

    call: int
    layer: str
    nbytes: int
    before_end_s: float


class _Carried(NamedTuple):
    """A call whose products are carried: their bytes, seconds of the turn before the call, and its own.

    ``gives``: bytes of its outputs that leave before them, in forward.
    """

    call: int
    nbytes: int
    gives: int
    before_s: float
    takes_s: float


class _SimulatedStage:
    """Constants of a stage on a worker."""

    def __init__(
        self, stage: Stage, plan: Plan, costs: Costs, kept: Sequence[int], rules: Rules, microbatches: int
    ) -> None:
        costs = plan.costs_in(stage, costs, microbatches)
        calls, host = costs.calls[stage.first : stage.last + 1], rules.host
        trained = [call for call in calls if stage.phase != "forward" and call.needs_backward]
        run = trained if stage.phase == "backward" else calls
        need = costs.stage_bytes(stage.first, stage.last, stage.phase)
        forward, backward = (sum(call.forward_s for call in run), sum(call.backward_s for call in trained))
        self.phase, self.position, self.first, self.trained = stage.phase, stage.position, stage.first, trained
        self.weights, self.gradients, self.resumed = need.weights, need.gradients, need.resumed
        self.arriving = _arriving(calls, stage)
        self.leaving = _leaving(calls, stage)
        self.forward_s, self.backward_s = forward, backward
        self.issue_s = sum(call.issue_s for call in run) + host.turn_s
        self.issue_s += (len(trained) + (len(calls) if stage.phase != "backward" else 0)) * host.call_s
        self.backward_issue_s = sum(call.backward_issue_s for call in trained)
        self.waits_for_device = any(call.is_synchronous for call in run)
        self.lag_s = _lag_s(calls, stage, host)
        after = costs.calls[stage.last + 1].boundary_bytes if stage.last + 1 < len(costs) else 0
        # A backward stage also gets the gradient of what it gave out, and gives out that of what it took in.
        is_backward = stage.phase == "backward"
        self.bytes_in = sum(kept[stage.first : stage.last + 1]) + after if is_backward else calls[0].boundary_bytes
        outputs = [*kept[stage.first + 1 : stage.last + 1], after]
        self.carried = _carried(calls, stage, plan, outputs)
        left = sum(outputs) - sum(one.gives for one in self.carried)
        self.bytes_out = left if stage.phase == "forward" else calls[0].boundary_bytes


def _arriving(calls: Sequence[CallCost], stage: Stage) -> list[_Arriving]:
    arriving, come, passed = dict[str, _Arriving](), 0, 0.0
    for call in calls:
        if call.is_loaded(stage.phase):
            if call.layer not in arriving:
                come += call.weight_bytes
                arriving[call.layer] = _Arriving(call.layer, come, passed)
            passed += call.forward_s
    return [*arriving.values()]


def _leaving(calls: Sequence[CallCost], stage: Stage) -> list[_Leaving]:
    """Return the gradients that leave a stage, in the order of its backward."""
    leaving, left = [], 0.0
    for number, call in enumerate(calls, stage.first):
        if stage.phase != "forward" and call.needs_backward:
            nbytes = call.gradient_bytes if call.reduced_bytes is None else call.reduced_bytes
            leaving.append(_Leaving(number, call.layer, nbytes, left))
            left += call.backward_s
    return leaving[::-1]


def _carried(calls: Sequence[CallCost], stage: Stage, plan: Plan, outputs: Sequence[int]) -> list[_Carried]:
    """Return the carried calls of a stage in the order in which they run. [14]"""
    carry, found, passed = set(plan.carry), [], 0.0
    pairs = [*enumerate(calls, stage.first)] if carry else []
    deepest_first = stage.phase == "backward" and not plan.recompute_ahead
    for number, call in reversed(pairs) if deepest_first else pairs:
        takes = call.forward_s + (call.backward_s if deepest_first else 0.0)
        if number in carry:
            gives = outputs[number - stage.first] if stage.phase == "forward" else 0
            found.append(_Carried(number, call.product_bytes(plan.carry_least), gives, passed, takes))
        passed += takes if call.needs_backward or stage.phase == "forward" else 0.0
    return found


def _lag_s(calls: Sequence[CallCost], stage: Stage, host: HostTime) -> float:
    """Return the seconds that a microbatch stays behind another one beside it: the longest call of the stage.

    A call is over for a host that runs ahead of the device when it is issued.
    """
    longest = 0.0
    for call in calls:
        forward = call.issue_s if host.ahead and not call.is_synchronous else call.forward_s
        backward = call.backward_issue_s if host.ahead else call.backward_s
        if stage.phase != "backward":
            longest = max(longest, forward)
        if stage.phase != "forward" and call.needs_backward:
            longest = max(longest, backward + (forward if stage.phase == "backward" else 0.0))
    return longest + host.call_s


# -- workers -----------------------------------------------------------------------------------------------------------


class _Occupied(NamedTuple):
    """What a slot has in its worker's arena: bytes of weights from one end, then of gradients, and when each left."""

    weights: int = 0
    gradients: int = 0
    end: float = 0.0
    arrived: float = 0.0


class _Worker:
    """A worker between two turns: its link, and what its last two slots have in its arena. [7]

    Attributes:
        up, down: directions of its link.
        free: end of its last turn.
        there: the slot before the last one. It lies at the end of the arena that the next slot takes.
        beside: the last slot.
        going_down: when the products of its last two carried calls are on the host. [14]
        ran: when its last turn or carried call began. [14]
    """

    def __init__(self, link: Links, arena: int) -> None:
        self.up, self.down, self.arena = Lane(link.upload), Lane(link.download), arena
        self.free = self.ran = 0.0
        self.there = self.beside = _Occupied()
        self.going_down = (0.0, 0.0)

    def places_free(self, stage: _SimulatedStage, begin: float) -> list[float]:
        """Return when the place in the arena of each layer of a stage is free, ``begin`` or later. See `memory`."""
        there, beside = self.there, self.beside
        room = self.arena - beside.weights - beside.gradients
        free, ready = [], max(begin, there.end)
        for _, come, _ in stage.arriving:
            if come > there.weights:
                ready = max(ready, there.arrived)
            if come > room:
                ready = max(ready, beside.end, beside.arrived)
            free.append(ready)
        return free

    def sums_free(self, stage: _SimulatedStage) -> float:
        """Return when the place in the arena of a stage's gradients is free."""
        there, beside = self.there, self.beside
        ready = there.arrived if there.weights + there.gradients > stage.weights else 0.0
        if stage.weights + stage.gradients + beside.weights + beside.gradients > self.arena:
            ready = max(ready, beside.arrived)
        return ready

    def times(self, begin: float) -> list[float]:
        """Return what later slots may wait for."""
        ends = [time for slot in (self.there, self.beside) for time in (slot.end, slot.arrived)]
        return [self.free, *ends, *self.going_down, self.ran, *self.up.after(begin), *self.down.after(begin)]


def _workers(plan: Plan, costs: Costs, workers: int, rules: Rules) -> list[_Worker]:
    links = rules.links if isinstance(rules.links, tuple) else (rules.links or _FREE,) * workers
    if len(links) != workers:
        raise ValueError(f"links={links!r} must be one for all workers, or one for each of {workers}.")
    if isinstance(rules.memory, tuple):
        each = enumerate(rules.memory)
        sizes = [WorkerNeeds(plan, costs, workers, worker).reserved(memory).arena for worker, memory in each]
    else:
        sizes = [WorkerNeeds(plan, costs, workers).reserved(rules.memory).arena] * workers
    return [_Worker(link, arena) for link, arena in zip(links, sizes, strict=True)]


# -- steps -------------------------------------------------------------------------------------------------------------


class _Pipeline:
    """The state of a simulation between two turns."""

    def __init__(self, plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules) -> None:
        self._plan, self._costs, self._microbatches, self._rules = plan, costs, microbatches, rules
        self._side_by_side = plan.side_by_side(workers, microbatches)
        self._workers = _workers(plan, costs, workers, rules)
        kept = kept_inputs(plan, costs)
        self._stages = for_each(  # by worker, what every stage is on it [13]
            [costs.on(worker) for worker in range(workers)],
            lambda one: [_SimulatedStage(stage, plan, one, kept, rules, microbatches) for stage in plan.stages()],
        )
        self._last_backward = {call.layer: stage.position for stage in self._stages[0] for call in stage.trained}
        self._interpreter, self._adding = SharedSeconds(), SharedSeconds()
        self._updating = Updating(rules.updates, costs)
        self._exchange = None if rules.network is None else Exchange(rules.network, costs, rules.updates)
        self._published: list[dict[str, float]] = []
        self._slot = 0
        self._left: dict[int, tuple[float, int]] = {}
        """By microbatch, when and where it left its last stage."""
        self._added: dict[int, float] = {}
        """By call, when its gradients of the microbatch before are added. [12]"""
        self._products: dict[tuple[int, int], float] = {}
        """When the products of a microbatch's call are on the host. [14]"""
        self.events: list[SimulatedEvent] | None = None
        """Intervals of work; None: they are not kept."""
        self.losses: list[float] = []
        self.ends: list[float] = []

    def step(self) -> None:
        self._begin = self._loss = self.losses[-1] if self.losses else 0.0  # [10]
        workers, size = len(self._workers), self._plan.round_microbatches
        if self._costs.unequal:
            self._slot += -self._slot % workers  # [13]
        self._saved: dict[tuple[int, int], tuple[float, int]] = {}
        """By microbatch and forward stage, when and where it left it."""
        self._behind: dict[int, tuple[float, float]] = {}
        """By stage, when the next microbatch may begin beside the last one, and end. [12]"""
        self._arrived: dict[str, float] = {}
        closed = [0.0] * len(self._stages[0])
        for begin in range(0, self._microbatches, size):
            members = range(begin, min(begin + size, self._microbatches))
            for position in range(len(closed)):
                closed[position] = self._run_slot(position, members, closed[position])
        self.losses.append(self._loss)
        self.ends.append(max(closed))
        if self._exchange is not None:  # of all machines' optimizers, which are not drawn
            self._published.append(self._exchange.step(self._arrived))
            return
        updates = self._updating.step(self._arrived)
        self._published.append(self._updating.published(updates))
        if self.events is not None:
            at = len(self.ends) - 1, self._slot - 1
            self.events += [
                SimulatedEvent("update", -1, *at, self._last_backward[layer], -1, start, end)
                for layer, start, end in updates
                if end > start
            ]

    def state(self) -> list[float]:
        """Return seconds from the next step's begin until all that it may wait for is over; 0 for what is before.

        Their order does not depend on which of equal workers is next.
        """
        begin, workers = self.losses[-1], self._workers
        alike = not self._costs.unequal and not isinstance(self._rules.links, tuple)
        first = self._slot % len(workers)
        times = [left for left, _ in self._left.values()]
        times += self._added.values()
        for worker in [*workers[first:], *workers[:first]] if alike else workers:
            times += worker.times(begin)
        times += [*self._interpreter.after(begin), *self._adding.after(begin), self._updating.free]
        for published in self._published[-1 - self._rules.staleness :]:
            times += [published[layer] for layer in sorted(published)]  # not in the order of updates
        if self._exchange is not None:
            times += self._exchange.busy_until
        seconds = [] if alike else [float(first)]
        return seconds + [max(0.0, time - begin) for time in times]

    def _run_slot(self, position: int, members: range, closed: float) -> float:
        self._number = self._slot % len(self._workers)  # [1]
        worker = self._worker = self._workers[self._number]
        stage = self._stage = self._stages[self._number][position]  # [13]
        if not self._side_by_side:
            worker.free = max(worker.free, closed)  # [2]
        loaded = self._load()
        summed = worker.sums_free(stage) if stage.gradients else 0.0
        if members.start and not self._side_by_side and stage.resumed:  # sums of earlier rounds follow the weights [7]
            summed = max(summed, self._note("upload_weights", -1, *worker.up.copy_behind(summed, stage.resumed)))
        for microbatch in members:
            self._take_turn(microbatch, loaded, summed)
        last = worker.free
        if self._side_by_side:
            added = (self._added[one.call] for one in stage.leaving if one.call in self._added)
            worker.free = max(last, *added, 0.0)  # [12]
        arrived = self._unload(last, is_complete=members.stop == self._microbatches)
        worker.there, worker.beside = worker.beside, _Occupied(stage.weights, stage.gradients, worker.free, arrived)
        self._slot += 1
        return worker.free

    def _load(self) -> float:
        """Return when the first turn may begin, given that its weights arrive layer by layer. [6] [7]"""
        worker, stage, arriving, age = self._worker, self._stage, self._stage.arriving, 1 + self._rules.staleness
        published = self._published[-age] if len(self._published) >= age else {}
        if self._rules.links is None:  # else the upload waits for the updates of all the layers
            lead = stage.phase != "backward"
            ready = [published.get(one.layer, 0.0) - (one.before_s if lead else 0.0) for one in arriving]
            return max(ready, default=0.0)
        updated = max((published[one.layer] for one in arriving if one.layer in published), default=0.0)
        ready = worker.places_free(stage, max(updated, self._begin))
        loaded, sent, at = 0.0, 0, 0
        while at < len(arriving):  # layers that wait equally long travel as one copy
            behind = next((later for later in range(at, len(arriving)) if ready[later] > ready[at]), len(arriving))
            size = arriving[behind - 1].come - sent
            start, end = worker.up.copy_behind(ready[at], size)
            self._note("upload_weights", -1, start, end)
            share = (end - start) / size if size else 0.0
            loaded = max(loaded, max(start + (one.come - sent) * share - one.before_s for one in arriving[at:behind]))
            sent, at = sent + size, behind
        return loaded

    def _unload(self, last: float, *, is_complete: bool) -> float:
        """Send gradients to the host behind the last turn, and return when they have arrived. [7]

        If they are complete, the optimizer gets them.
        """
        arrived = self._worker.free
        for gradients in self._stage.leaving:
            there = last - gradients.before_end_s
            if self._side_by_side:
                landed, there = self._add(gradients, there)
            else:
                landed = there = self._download(gradients.nbytes, there)
            arrived = max(arrived, landed)
            if is_complete:
                self._arrived[gradients.layer] = max(self._arrived.get(gradients.layer, 0.0), there)
        return arrived

    def _download(self, nbytes: float, ready: float) -> float:
        """Return when gradients that may leave at ``ready`` are on the host."""
        return self._note("download_gradients", -1, *self._worker.down.copy_behind(ready, nbytes))

    def _add(self, gradients: _Leaving, ready: float) -> tuple[float, float]:
        """Return when gradients are on the host, and when it has added them to those of microbatches before. [12]"""
        landed = self._download(gradients.nbytes, max(ready, self._added.get(gradients.call, 0.0)))
        rate = self._rules.sums_per_s
        added = landed if rate is None else self._adding.take(landed, gradients.nbytes / rate)
        self._added[gradients.call] = added
        return landed, added

    def _take_turn(self, microbatch: int, loaded: float, summed: float) -> None:
        """Run a microbatch through a slot, whose weights and place for sums are there at ``loaded`` and ``summed``."""
        worker, stage, is_backward = self._worker, self._stage, self._stage.phase == "backward"
        given = self._given(microbatch)
        beside = self._behind.get(stage.position, (0.0, 0.0)) if self._side_by_side else (0.0, 0.0)  # [12] [13]
        begin = max(worker.free, loaded, summed - stage.forward_s, beside[0])
        if is_backward:
            saved = self._inputs(microbatch)
            begin = max(begin, saved, 0.0 if self._plan.recompute_ahead else given)  # [4]
            worker.ran = worker.ran if stage.carried else max(worker.ran, begin)
            begin += self._bring(microbatch, begin)
            recomputed = self._computed(begin, stage.forward_s)
            self._note("recompute", microbatch, recomputed - stage.forward_s, recomputed)
            start = max(recomputed, given)
            end = max(start + stage.backward_s, self._interpreter.take(start, stage.backward_issue_s))
        else:
            begin = max(begin, given)  # [3]
            end = self._computed(begin, stage.forward_s + stage.backward_s)  # [5]
            worker.ran = begin
            end += self._carry(microbatch, begin)
            if stage.phase == "fused":
                end = max(end, self._interpreter.take(begin, stage.backward_issue_s))
                self._loss = max(self._loss, end - stage.backward_s)
            start = end - stage.forward_s - stage.backward_s
        self._note(stage.phase, microbatch, start, end)
        worker.free = end = max(end, beside[1])
        self._behind[stage.position] = begin + stage.lag_s, end
        left = self._note("download_boundary", microbatch, *worker.down.copy_before(end, stage.bytes_out))
        self._left[microbatch] = left, self._number
        if stage.phase == "forward":
            self._saved[microbatch, stage.position] = left, self._number

    def _carry(self, microbatch: int, begin: float) -> float:
        """Send the products of a forward turn to the host, and return the seconds that calls wait for it. [14]"""
        worker, waited = self._worker, 0.0
        for one in self._stage.carried:
            before, last = worker.going_down
            waited = max(waited, before - begin - one.before_s)
            made = begin + one.before_s + waited + one.takes_s
            self._note("download_boundary", microbatch, *worker.down.copy_before(made, one.gives))
            end = self._note("download_boundary", microbatch, *worker.down.copy_behind(made, one.nbytes))
            worker.going_down = last, end
            self._products[microbatch, one.call] = end
        return waited

    def _bring(self, microbatch: int, begin: float) -> float:
        """Bring the products of a backward turn while the call before runs, and return how long calls wait. [14]"""
        worker, waited = self._worker, 0.0
        for one in self._stage.carried:
            ready = max(worker.ran, self._products.pop((microbatch, one.call)))
            ready = self._note("upload_boundary", microbatch, *worker.up.copy_between(ready, one.nbytes))
            waited = max(waited, ready - begin - one.before_s)
            worker.ran = begin + one.before_s + waited
        return waited

    def _computed(self, begin: float, compute_s: float) -> float:
        """Return the end of a forward or a recomputation that begins at ``begin``. [11]"""
        issued = self._interpreter.take(begin, self._stage.issue_s)
        return issued + compute_s if self._stage.waits_for_device else max(begin + compute_s, issued)

    def _inputs(self, microbatch: int) -> float:
        """Return when a backward turn has its saved inputs."""
        stage = self._stage
        if not stage.first or not stage.trained:
            return 0.0
        left, where = self._saved[microbatch, self._plan.stage_of_forward[stage.first - 1]]
        return left + self._hop(where)

    def _given(self, microbatch: int) -> float:
        """Return when the outputs of the stage before are on this worker. [3] [9] [10]"""
        left, where = self._left.get(microbatch, (0.0, self._number))
        if not self._stage.position:
            left, where = max(self._begin, left), self._number
        if where != self._number or not self._stage.position:
            copied = self._worker.up.copy_before(left, self._stage.bytes_in)
            left = self._note("upload_boundary", microbatch, *copied)
        return left + self._hop(where)

    def _hop(self, source: int) -> float:
        return self._rules.host.hop_s if source != self._number else 0.0

    def _note(self, kind: Kind, microbatch: int, start: float, end: float) -> float:
        """Keep an interval of work of the running slot, and return its end."""
        if self.events is not None and end > start:
            at = self._number, len(self.ends), self._slot, self._stage.position
            self.events.append(SimulatedEvent(kind, *at, microbatch, start, end))
        return end
