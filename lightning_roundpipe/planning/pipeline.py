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
    what a turn takes in and gives out travels before all weights and gradients                            [9]
    a step begins, and weights are sent for it, when all losses of the last one are known; a microbatch of  [10]
    it begins when the same one of the last step is over
    one interpreter issues the operations of all workers; where the host waits for the device, nothing is ahead  [11]
    rounds of one microbatch run side by side: the host begins a call when it is through that of the microbatch  [12]
    before, instead of [2] each part of a call's gradients leaves when that of the microbatch before is added, and
    the host adds one part at a time; see `Slot`
    unequal workers have times and links of their own, and a step begins on the first of them                    [13]
    products of carried calls leave behind their forward, at most two calls' of a worker at a time, and come back  [14]
    while the call before runs backward; a recomputation leaves them out

Everything depends only on what has a lower slot, or a lower microbatch in the same slot, so one pass in that order is
the whole simulation. What is left at nothing (links, updates, host time) takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_roundpipe.planning.costs import CallCost, Costs, Phase, for_each
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.links import Lane, Links
from lightning_roundpipe.planning.memory import Memory, reserved_within
from lightning_roundpipe.planning.network import Exchange, Network
from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.planning.shared_seconds import SharedSeconds
from lightning_roundpipe.planning.updates import UpdateModel, Updating

Staleness = Literal[0, 1]
Kind = Literal[
    "forward",
    "fused",
    "recompute",
    "backward",
    "host",
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
        plan: the plan.
        workers: number of workers (N).
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
    """Simulate steps from idle workers.

    Args:
        plan: the plan of each step.
        costs: costs of the calls.
        workers: number of workers (N).
        microbatches: microbatches of a step (M).
        rules: what takes time besides computing; None: nothing does.
        steps: number of steps.

    Raises:
        ValueError: the plan does not fit the calls of ``costs``, or a number is too small.
    """
    pipeline = _pipeline(plan, costs, workers, microbatches, rules, steps, records=True)
    for _ in range(steps):
        pipeline.step()
    return SimulatedRun(plan, workers, tuple(pipeline.events), tuple(pipeline.losses), tuple(pipeline.ends))


def step_ends(
    plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules | None = None, steps: int = 1
) -> list[float]:
    """Return the ends of steps as `run_steps` finds them, for comparing many plans.

    Steps follow each other alike after a few of them. Once everything that a step leaves to the next ones is as after
    an earlier step, but for the time, their ends repeat, too, and the simulation is over.

    Raises:
        ValueError: as `run_steps`.
    """
    pipeline = _pipeline(plan, costs, workers, microbatches, rules, steps, records=False)
    ends, states = pipeline.ends, list[_StepState]()
    while len(ends) < steps:
        pipeline.step()
        state = pipeline.state()
        if (before := next((one for one in reversed(states) if one.is_like(state)), None)) is not None:
            cycle, seconds = state.step - before.step, state.time_s - before.time_s
            while len(ends) < steps:
                ends.append(ends[-cycle] + seconds)
        states.append(state)
    return ends


def _pipeline(
    plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules | None, steps: int, *, records: bool
) -> _Pipeline:
    for name, value in (("workers", workers), ("microbatches", microbatches), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1 to simulate steps.")
    plan.validate(costs.layers)
    costs.check_workers(workers)
    return _Pipeline(plan, costs, workers, microbatches, rules or Rules(), records=records)


class _StepState(NamedTuple):
    """What a step leaves to the next ones.

    Attributes:
        step: number of steps so far.
        time_s: start of the next step.
        seconds: from there, when all that the next steps may wait for is over; 0 for what is over before they begin.
    """

    step: int
    time_s: float
    seconds: list[float]

    def is_like(self, other: _StepState) -> bool:
        """Return whether what follows is the same but for the time."""
        most = _ALIKE * other.time_s
        return len(self.seconds) == len(other.seconds) and all(
            abs(one - another) <= most for one, another in zip(self.seconds, other.seconds, strict=True)
        )


class _Occupied(NamedTuple):
    """What a slot has in its worker's arena.

    Attributes:
        weights: bytes of weights, from one end of the arena.
        gradients: bytes of gradients, behind the weights.
        end: when the weights have left.
        arrived: when the gradients have.
    """

    weights: int
    gradients: int
    end: float
    arrived: float

    @property
    def nbytes(self) -> int:
        return self.weights + self.gradients


class _Leaving(NamedTuple):
    """A call's gradients, which leave a worker.

    Attributes:
        call: the call's number.
        layer: its layer.
        nbytes: bytes of the gradients as they travel.
        parts: number of parts in which they do.
        before_end_s: seconds between the end of its backward and that of the turn.
    """

    call: int
    layer: str
    nbytes: int
    parts: int
    before_end_s: float


class _Carried(NamedTuple):
    """A call of a turn whose products are carried.

    Attributes:
        call: the call's number.
        nbytes: bytes of its products.
        before_s: seconds of the turn before it.
        takes_s: its own.
    """

    call: int
    nbytes: int
    before_s: float
    takes_s: float


class _SimulatedStage:
    """Constants of a stage on a worker."""

    def __init__(self, stage: Stage, plan: Plan, costs: Costs, rules: Rules) -> None:
        calls = costs.calls[stage.first : stage.last + 1]
        self.phase, self.position, self.first, self.last = stage.phase, stage.position, stage.first, stage.last
        self.leads = _leads(calls, stage.phase, rules)
        self.trained = [call for call in calls if stage.phase != "forward" and call.needs_backward]
        need = costs.stage_bytes(stage.first, stage.last, stage.phase)
        self.weights, self.gradients = need.weights, need.gradients
        self.arrivals = _arrivals(calls, stage.phase)
        self.resumed = need.resumed
        self.leaving = _leaving(calls, stage, rules.updates)
        forward = sum(call.forward_s for call in calls)
        self.carried = _carried(calls, stage, plan)
        self.recompute_s = sum(call.forward_s for call in self.trained) if stage.phase == "backward" else 0.0
        backward = sum(call.backward_s for call in self.trained)
        self.before_gradients_s = self.recompute_s if stage.phase == "backward" else forward
        """Of a turn, what runs before the first gradient is summed."""
        self.compute_s = {"forward": forward, "fused": forward + backward, "backward": backward}[stage.phase]
        host = rules.host.turn_s + _calls_made(costs, stage) * rules.host.call_s
        self.lag_s = _lag_s(costs, stage, rules.host)
        run = self.trained if stage.phase == "backward" else calls
        self.host_s = 0.0 if rules.host.shared else host
        self.issue_s = sum(call.issue_s for call in run) + (host if rules.host.shared else 0.0)
        self.backward_issue_s = sum(call.backward_issue_s for call in self.trained)
        self.waits_for_device = any(call.is_synchronous for call in run)
        # What a fused turn still does when the loss is known.
        self.behind_loss_s = backward + (0.0 if rules.host.shared else len(self.trained) * rules.host.call_s)
        inputs = sum(call.boundary_bytes for call in (self.trained if stage.phase == "backward" else calls[:1]))
        after = costs.calls[stage.last + 1].boundary_bytes if stage.last + 1 < len(costs) else 0
        # A backward stage also gets the gradient of what it gave out, and gives out that of what it took in.
        self.bytes_in = inputs + (after if stage.phase == "backward" else 0)
        outputs = sum(call.boundary_bytes for call in calls[1:]) + after
        self.bytes_out = outputs if stage.phase == "forward" else calls[0].boundary_bytes


def _carried(calls: Sequence[CallCost], stage: Stage, plan: Plan) -> list[_Carried]:
    """Return the carried calls of a stage in the order in which they run. [14]"""
    carry, found, passed = set(plan.carry), [], 0.0
    pairs = [*enumerate(calls, stage.first)] if carry else []
    deepest_first = stage.phase == "backward" and not plan.recompute_ahead
    for number, call in reversed(pairs) if deepest_first else pairs:
        takes = call.forward_s + (call.backward_s if deepest_first else 0.0)
        if number in carry:
            found.append(_Carried(number, call.product_bytes, passed, takes))
        passed += takes if call.needs_backward or stage.phase == "forward" else 0.0
    return found


def _costs_in(stage: Stage, plan: Plan, costs: Costs, microbatches: int) -> Costs:
    """Return the costs of calls in ``stage``: a microbatch bears its share of what is unpacked once for the round.

    In a backward stage, a recomputation lacks carried products.
    """
    found = costs.unpacked_once(min(plan.round_microbatches, microbatches)) if stage.unpacks_once else costs
    return found.carrying(plan.carry) if stage.phase == "backward" else found


def _lag_s(costs: Costs, stage: Stage, host: HostTime) -> float:
    """Return the seconds that a microbatch stays behind another one beside it: the longest call of the stage.

    A call is over for a host that runs ahead of the device when it is issued.
    """
    calls = costs.calls[stage.first : stage.last + 1]
    again = 1.0 if stage.phase == "backward" else 0.0

    def seconds(call: CallCost) -> Iterator[float]:
        forward = call.issue_s if host.shared and not call.is_synchronous else call.forward_s
        backward = call.backward_issue_s if host.shared else call.backward_s
        if stage.phase != "backward":
            yield forward
        if stage.phase != "forward" and call.needs_backward:
            yield again * forward + backward

    return max((one for call in calls for one in seconds(call)), default=0.0) + host.call_s


def _calls_made(costs: Costs, stage: Stage) -> int:
    """Return the number of calls of a turn. In a fused stage, a call and its backward count as two."""
    calls = costs.calls[stage.first : stage.last + 1]
    backward = sum(call.needs_backward for call in calls)
    if stage.phase == "forward":
        return len(calls)
    return backward + (len(calls) if stage.phase == "fused" else 0)


def _arrivals(calls: Sequence[CallCost], phase: Phase) -> list[tuple[int, float]]:
    """Return, for each layer, the bytes of weights up to it, and the seconds of the turn before it."""
    arrivals, seen = [], set[str]()
    come, passed = 0, 0.0
    for call in calls:
        if call.is_loaded(phase):
            if call.layer not in seen:
                seen.add(call.layer)
                come += call.weight_bytes
                arrivals.append((come, passed))
            passed += call.forward_s
    return arrivals


def _leaving(calls: Sequence[CallCost], stage: Stage, updates: UpdateModel | None) -> list[_Leaving]:
    """Return the gradients that leave a stage, in the order of its backward."""
    leaving, left = [], 0.0
    for number, call in enumerate(calls, stage.first):
        if stage.phase != "forward" and call.needs_backward:
            nbytes = call.gradient_bytes if call.reduced_bytes is None else call.reduced_bytes
            parts = updates.parts_of(nbytes) if updates is not None else 1
            leaving.append(_Leaving(number, call.layer, nbytes, parts, left))
            left += call.backward_s
    return leaving[::-1]


def _leads(calls: Sequence[CallCost], phase: Phase, rules: Rules) -> dict[str, float]:
    """Return, for each layer of a stage, the seconds of its first turn before that layer.

    They are 0 if links take time: then the stage's upload waits for the updates of all its layers.
    """
    leads: dict[str, float] = {}
    passed = 0.0
    for call in calls:
        if call.is_loaded(phase):
            leads.setdefault(call.layer, passed)
        if phase != "backward" and rules.links is None:
            passed += call.forward_s
    return leads


def _stages_of(plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules) -> list[list[_SimulatedStage]]:
    """By worker, what every stage is on it. Equal workers share one list. [13]"""

    def stages(one: Costs) -> list[_SimulatedStage]:
        return [
            _SimulatedStage(stage, plan, _costs_in(stage, plan, one, microbatches), rules) for stage in plan.stages()
        ]

    return for_each([costs.on(worker) for worker in range(workers)], stages)


def _arenas_of(plan: Plan, costs: Costs, workers: int, rules: Rules) -> list[int]:
    """Return the bytes of every worker's arena. [7]"""
    memory = rules.memory
    if rules.links is None:  # nothing waits for a place in it
        return [0] * workers
    if not isinstance(memory, tuple):
        return [reserved_within(plan, costs, workers, memory).arena] * workers
    each = enumerate(memory)
    return [reserved_within(plan, costs, workers, limit, worker=worker).arena for worker, limit in each]


def _fastest(links: Sequence[Links] | None) -> Links | None:
    """Return the highest rates, for weights and gradients of a layer whose worker is not known."""
    return Links(max(link.upload for link in links), max(link.download for link in links)) if links else None


class _Pipeline:
    """The state of a simulation between two turns."""

    def __init__(
        self, plan: Plan, costs: Costs, workers: int, microbatches: int, rules: Rules, *, records: bool
    ) -> None:
        self._records = records
        """Whether intervals are kept."""
        self._costs, self._workers, self._microbatches, self._rules = costs, workers, microbatches, rules
        self._round = plan.round_microbatches
        self._side_by_side = plan.side_by_side(workers, microbatches)
        self._behind: dict[int, tuple[float, float]] = {}
        """By stage, when the next microbatch may begin beside the last one, and end. [12]"""
        self._added: dict[int, list[float]] = {}
        """By call, when each part of its gradients of the microbatch before is added. [12]"""
        self._adding = SharedSeconds()
        self._ahead = plan.recompute_ahead
        self._stages = _stages_of(plan, costs, workers, microbatches, rules)
        self._forward_of = plan.stage_of_forward
        self._last_backward = {  # per layer, the last stage that adds to its gradients
            call.layer: stage.position for stage in self._stages[0] for call in stage.trained
        }
        self._free = [0.0] * workers
        self._summed = 0.0
        self._interpreter = SharedSeconds()
        self._closed: dict[int, float] = {}
        links = (rules.links,) * workers if isinstance(rules.links, Links) else rules.links  # [13]
        self._products: dict[tuple[int, int], float] = {}
        """When the products of a microbatch's call are on the host. [14]"""
        self._going_down = [(0.0, 0.0)] * workers
        """By worker, when the last two carried calls' products are on the host. [14]"""
        self._ran = [0.0] * workers
        """By worker, when its last turn or carried call began. [14]"""
        if links is not None and len(links) != workers:
            raise ValueError(f"links={links!r} must be one for all workers, or one for each of {workers}.")
        self._up = [Lane(link.upload) for link in links] if links else None
        self._down = [Lane(link.download) for link in links] if links else None
        self._arena = _arenas_of(plan, costs, workers, rules)
        self._occupied = [[_Occupied(0, 0, 0.0, 0.0)] * 2 for _ in range(workers)]
        """By worker, its last two slots, the older one first: that lies at the end of the arena of the next slot."""
        self._updating = Updating(rules.updates, costs, _fastest(links))
        self._exchange = None
        if rules.network is not None:
            updates = rules.updates
            rate = updates.bytes_per_s if updates else None
            together = updates is not None and (updates.clipping or updates.blocking)
            self._exchange = Exchange(rules.network, costs, rate, together=together)
        self._published: list[dict[str, float]] = []
        self._slot = 0
        self.events: list[SimulatedEvent] = []
        self.losses: list[float] = []
        self.ends: list[float] = []
        self._left: dict[int, tuple[float, int]] = {}  # per microbatch, when and where it left its last stage

    def step(self) -> None:
        self._begin = self.losses[-1] if self.losses else 0.0  # [10]
        if self._costs.unequal:
            self._slot += -self._slot % self._workers  # [13]
        self._loss = self._begin
        self._saved: dict[tuple[int, int], tuple[float, int]] = {}  # likewise each forward stage
        self._behind.clear()
        self._arrived: dict[str, float] = {}
        closed: dict[int, float] = {}
        for members in self._rounds():
            for position in range(len(self._stages[0])):
                stage = self._stages[self._slot % self._workers][position]  # [1] [13]
                closed[position] = self._run_slot(stage, members, closed.get(position, 0.0))
        self.losses.append(self._loss)
        self.ends.append(max(closed.values()))
        updates: list[tuple[str, float, float]] = []
        if self._exchange is not None:  # of all machines' optimizers, which are not drawn
            published = self._exchange.step(self._arrived)
        else:
            updates = self._updating.step(self._arrived)
            published = self._updating.published(updates)
        self._published.append(published)
        if not self._records:
            return
        step = len(self.ends) - 1
        self.events.extend(
            SimulatedEvent("update", -1, step, self._slot - 1, self._last_backward[layer], -1, start, end)
            for layer, start, end in updates
            if end > start
        )

    def state(self) -> _StepState:
        """Return the state between two steps, in an order that does not depend on which of equal workers is next."""
        begin, workers = self.losses[-1], range(self._workers)
        alike = not self._costs.unequal and not isinstance(self._rules.links, tuple)
        first = self._slot % self._workers
        seconds = [] if alike else [float(first)]
        in_turn = [(first + worker) % self._workers for worker in workers] if alike else workers
        times = [left for left, _ in self._left.values()]
        times += [time for added in self._added.values() for time in added]
        for worker in in_turn:
            times.append(self._free[worker])
            times += [time for slot in self._occupied[worker] for time in (slot.end, slot.arrived)]
            times += self._going_down[worker]
            times.append(self._ran[worker])
            for lanes in (self._up, self._down):
                if lanes is not None:
                    times += lanes[worker].after(begin)
        times += [*self._interpreter.after(begin), *self._adding.after(begin)]
        for published in self._published[-1 - self._rules.staleness :]:
            times += [published[layer] for layer in sorted(published)]  # not in the order of updates
        if self._exchange is not None:
            times += self._exchange.busy_until
        if self._rules.updates is not None:
            seconds.append(self._updating.free - begin)  # an update may begin before its layer's last gradients come
        seconds += [max(0.0, time - begin) for time in times]
        return _StepState(len(self.ends), begin, seconds)

    def _rounds(self) -> Iterator[range]:
        for begin in range(0, self._microbatches, self._round):
            yield range(begin, min(begin + self._round, self._microbatches))

    def _run_slot(self, stage: _SimulatedStage, members: range, closed: float) -> float:
        worker = self._slot % self._workers
        if not self._side_by_side:
            self._free[worker] = max(self._free[worker], closed)  # [2]
        updated = self._updated(stage)
        loaded = self._load(stage, worker, updated)
        self._summed = self._sums_free(stage, worker) if stage.gradients else 0.0
        if members.start and not self._side_by_side:
            self._summed = max(self._summed, self._load_sums(stage, worker))
        for microbatch in members:
            self._take_turn(stage, worker, microbatch, loaded)
        last = self._free[worker]
        if self._side_by_side:
            added = (self._added[one.call][-1] for one in stage.leaving if one.call in self._added)
            self._free[worker] = max(last, *added, 0.0)  # [12]
        end = self._free[worker]
        if members.stop == self._microbatches or self._down is not None or self._side_by_side:
            self._unload(stage, worker, last, end, is_complete=members.stop == self._microbatches)
        self._slot += 1
        return end

    def _updated(self, stage: _SimulatedStage) -> float:
        """Return when the stage may begin, given when its weights are updated. [6]"""
        age = 1 + self._rules.staleness
        if len(self._published) < age:
            return 0.0
        published = self._published[-age]
        return max((published[layer] - lead for layer, lead in stage.leads.items() if layer in published), default=0.0)

    def _load_sums(self, stage: _SimulatedStage, worker: int) -> float:
        """Return when the sums of earlier rounds are on the worker. They follow the stage's weights. [7]"""
        if self._up is None or not stage.resumed:
            return 0.0
        start, end = self._up[worker].copy_behind(self._summed, stage.resumed)
        self._note("upload_weights", worker, stage, -1, start, end)
        return end

    def _load(self, stage: _SimulatedStage, worker: int, updated: float) -> float:
        """Return when the first turn may begin, given that its weights arrive layer by layer. [7]"""
        if self._up is None:
            return updated
        arrivals = stage.arrivals
        ready = self._places_free(stage, worker, max(updated, self._begin))
        loaded, sent, at = 0.0, 0, 0
        while at < len(arrivals):  # layers that wait equally long travel as one copy
            behind = next((later for later in range(at, len(arrivals)) if ready[later] > ready[at]), len(arrivals))
            size = arrivals[behind - 1][0] - sent
            start, end = self._up[worker].copy_behind(ready[at], size)
            self._note("upload_weights", worker, stage, -1, start, end)
            share = (end - start) / size if size else 0.0
            loaded = max(loaded, max(start + (come - sent) * share - before for come, before in arrivals[at:behind]))
            sent, at = sent + size, behind
        return loaded

    def _places_free(self, stage: _SimulatedStage, worker: int, begin: float) -> list[float]:
        """Return when the place in the arena of each layer of a stage is free, ``begin`` or later. See `memory`. [7]"""
        there, beside = self._occupied[worker]
        free, ready = [], max(begin, there.end)
        for come, _ in stage.arrivals:
            if come > there.weights:
                ready = max(ready, there.arrived)
            if come + beside.nbytes > self._arena[worker]:
                ready = max(ready, beside.end, beside.arrived)
            free.append(ready)
        return free

    def _sums_free(self, stage: _SimulatedStage, worker: int) -> float:
        """Return when the place in the arena of a stage's gradients is free. [7]"""
        there, beside = self._occupied[worker]
        ready = there.arrived if there.nbytes > stage.weights else 0.0
        if stage.weights + stage.gradients + beside.nbytes > self._arena[worker]:
            ready = max(ready, beside.arrived)
        return ready

    def _unload(self, stage: _SimulatedStage, worker: int, last: float, end: float, *, is_complete: bool) -> None:
        """Send gradients to the host, and free the place in the arena. [7]

        Args:
            stage: the slot's stage.
            worker: its worker.
            last: end of the last turn.
            end: end of the slot.
            is_complete: whether the gradients are complete, so that the optimizer gets them.
        """
        arrived = end
        for gradients in stage.leaving:
            there = last - gradients.before_end_s
            if self._side_by_side:
                landed, there = self._land(gradients, stage, worker, there)
            else:
                landed = there = self._download(gradients.nbytes, stage, worker, there)
            if self._down is not None:
                arrived = max(arrived, landed)
            if is_complete:
                self._arrived[gradients.layer] = max(self._arrived.get(gradients.layer, 0.0), there)
        self._occupied[worker] = [self._occupied[worker][1], _Occupied(stage.weights, stage.gradients, end, arrived)]

    def _download(self, nbytes: float, stage: _SimulatedStage, worker: int, ready: float) -> float:
        """Return when gradients that may leave at ``ready`` are on the host."""
        if self._down is None:
            return ready
        start, there = self._down[worker].copy_behind(ready, nbytes)
        self._note("download_gradients", worker, stage, -1, start, there)
        return there

    def _land(self, gradients: _Leaving, stage: _SimulatedStage, worker: int, ready: float) -> tuple[float, float]:
        """Return when gradients are on the host, and when it has added them to those of microbatches before. [12]"""
        before, added = self._added.get(gradients.call, [0.0] * gradients.parts), []
        nbytes, rate, landed = gradients.nbytes / gradients.parts, self._rules.sums_per_s, ready
        for free in before:
            landed = self._download(nbytes, stage, worker, max(ready, free))
            added.append(landed if rate is None else self._adding.take(landed, nbytes / rate))
        self._added[gradients.call] = added
        return landed, added[-1]

    def _take_turn(self, stage: _SimulatedStage, worker: int, microbatch: int, loaded: float) -> None:
        free = self._free[worker]
        hosted = stage.host_s
        ready = max(loaded, self._summed - stage.before_gradients_s)
        if stage.phase == "backward":
            saved, given = self._inputs(stage, worker, microbatch)
            behind = 0.0 if self._ahead else given
            begin = max(free, saved, behind, ready, self._turn_behind(stage)[0])  # [4]
            self._ran[worker] = max(self._ran[worker], begin) if not stage.carried else self._ran[worker]
            begin += self._bring(stage, worker, microbatch, begin)
            recomputed = self._computed(stage, begin, stage.recompute_s)
            start = max(recomputed, given)
            self._note("recompute", worker, stage, microbatch, recomputed - stage.recompute_s, recomputed)
            self._note("host", worker, stage, microbatch, start, start + hosted)
            issued = self._interpreter.take(start, stage.backward_issue_s)
            end = max(start + hosted + stage.compute_s, issued)
            self._note("backward", worker, stage, microbatch, start + hosted, end)
        else:
            given = self._given(stage, worker, microbatch)
            begin = max(free, given, ready, self._turn_behind(stage)[0])  # [3]
            end = self._computed(stage, begin, hosted + stage.compute_s)  # [5]
            self._ran[worker] = begin
            end += self._carry(stage, worker, microbatch, begin)
            if stage.phase == "fused":
                end = max(end, self._interpreter.take(begin, stage.backward_issue_s))
            self._note("host", worker, stage, microbatch, begin, begin + hosted)
            self._note(stage.phase, worker, stage, microbatch, end - stage.compute_s, end)
            if stage.phase == "fused":
                self._loss = max(self._loss, end - stage.behind_loss_s)
        end = max(end, self._turn_behind(stage)[1])
        self._behind[stage.position] = begin + stage.lag_s, end
        self._free[worker] = end
        left = self._give_out(stage, worker, microbatch, end)
        self._left[microbatch] = left, worker
        if stage.phase == "forward":
            self._saved[microbatch, stage.position] = left, worker

    def _carry(self, stage: _SimulatedStage, worker: int, microbatch: int, begin: float) -> float:
        """Send the products of a forward turn to the host, and return the seconds that calls wait for it. [14]"""
        waited = 0.0
        for one in stage.carried:
            if self._down is None:
                self._products[microbatch, one.call] = 0.0
                continue
            before, last = self._going_down[worker]
            waited = max(waited, before - begin - one.before_s)
            made = begin + one.before_s + waited + one.takes_s
            start, end = self._down[worker].copy_between(made, one.nbytes)
            self._note("download_boundary", worker, stage, microbatch, start, end)
            self._going_down[worker] = last, end
            self._products[microbatch, one.call] = end
        return waited

    def _bring(self, stage: _SimulatedStage, worker: int, microbatch: int, begin: float) -> float:
        """Bring the products of a backward turn while the call before runs, and return how long calls wait. [14]"""
        waited = 0.0
        for one in stage.carried:
            ready = max(self._ran[worker], self._products.pop((microbatch, one.call)))
            if self._up is not None:
                start, ready = self._up[worker].copy_between(ready, one.nbytes)
                self._note("upload_boundary", worker, stage, microbatch, start, ready)
            waited = max(waited, ready - begin - one.before_s)
            self._ran[worker] = begin + one.before_s + waited
        return waited

    def _turn_behind(self, stage: _SimulatedStage) -> tuple[float, float]:
        """Return when a turn may begin and when it may end, behind the microbatch beside it. [12]

        A microbatch on a faster worker stays behind, too. [13]
        """
        return self._behind.get(stage.position, (0.0, 0.0)) if self._side_by_side else (0.0, 0.0)

    def _computed(self, stage: _SimulatedStage, begin: float, compute_s: float) -> float:
        """Return the end of a forward or a recomputation that begins at ``begin``. [11]"""
        issued = self._interpreter.take(begin, stage.issue_s)
        return issued + compute_s if stage.waits_for_device else max(begin + compute_s, issued)

    def _inputs(self, stage: _SimulatedStage, worker: int, microbatch: int) -> tuple[float, float]:
        """Return when a backward turn has its saved inputs, and when it has its gradient."""
        given = self._given(stage, worker, microbatch)
        if not stage.first or not stage.trained:
            return 0.0, given
        left, where = self._saved[microbatch, self._forward_of[stage.first - 1]]
        return left + self._hop(where, worker), given

    def _given(self, stage: _SimulatedStage, worker: int, microbatch: int) -> float:
        """Return when the outputs of the stage before are on this worker. [3] [9] [10]"""
        if not stage.position:
            left, where = max(self._begin, self._left.get(microbatch, (0.0, worker))[0]), worker
        else:
            left, where = self._left[microbatch]
        if self._up is not None and (where != worker or not stage.position):
            start, end = self._up[worker].copy_before(left, stage.bytes_in)
            self._note("upload_boundary", worker, stage, microbatch, start, end)
            left = end
        return left + self._hop(where, worker)

    def _give_out(self, stage: _SimulatedStage, worker: int, microbatch: int, end: float) -> float:
        if self._down is None:
            return end
        start, there = self._down[worker].copy_before(end, stage.bytes_out)
        self._note("download_boundary", worker, stage, microbatch, start, there)
        return there

    def _hop(self, source: int, target: int) -> float:
        return self._rules.host.hop_s if source != target else 0.0

    def _note(self, kind: Kind, worker: int, stage: _SimulatedStage, microbatch: int, start: float, end: float) -> None:
        if self._records and end > start:
            self.events.append(
                SimulatedEvent(kind, worker, len(self.ends), self._slot, stage.position, microbatch, start, end)
            )
