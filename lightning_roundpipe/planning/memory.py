"""Memory of a plan on each worker and on the host, before anything is allocated.

A worker holds one arena for weights and gradients, another one for what a stage unpacks once, the activations of the
running stage, and tensors between stages: those that user code still holds of microbatches which wait for their next
stage, and those that were brought for the microbatch whose turn is next. Under a plan that carries, the products of two
calls come to these. Workers that have equal memory reserve the same, whatever stages come to them. Where each has a
budget of its own, it reserves what its own stages need, and what a layer at a time takes (`of_worker`).

Stages lie at the two ends of the arena in turn: weights from the end inwards, then gradients::

    [ weights of k | gradients of k |    ...    | gradients of k - 1 | weights of k + 1 ]

The weights of the next stage come while stage k runs, and the gradients of the one before are on their way down. Where
the arena is smaller than all of that, the weights that do not fit beside stage k come when its gradients have left.

The host holds what outlives a stage: weights, gradients, the optimizer's state, inputs for recomputation, and carried
products.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.config import OPTIMIZER_STATES
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.schedule import Plan, Span, Stage

BESIDE = 2
"""Stages that the largest arena holds at once: one runs while the next one's weights come."""

PRODUCTS = 2
"""Calls whose carried products a worker holds at once, without those that are brought ahead."""

Memory = int | tuple[int, ...]
"""Bytes of every worker, or of each if workers are unequal."""

Bytes = NDArray[np.int64]


class Reserved(NamedTuple):
    """What a plan has a worker reserve.

    Attributes:
        arena: bytes of the arena for weights and gradients.
        copies: bytes of the arena for unpacked weights.
        room: bytes that are left for tensors brought ahead; None: no limit.
        lead: bytes of calls that the host may enqueue before the device reaches them.
    """

    arena: int
    copies: int = 0
    room: int | None = 0
    lead: int = 0


@dataclass(frozen=True)
class Item:
    """A named part of memory. ``locked``: it is page-locked, because devices copy from or to it."""

    name: str
    nbytes: int
    locked: bool = False


@dataclass(frozen=True)
class Parameters:
    """Numbers of a model's parameters. Tied parameters count once.

    Args:
        trained: number of trained elements.
        frozen: number of frozen elements.
        compute_bytes: bytes of an element in the compute dtype.
        double_buffered: whether updates run while a step computes with a copy of the weights (staleness 1).
        packed: number of frozen elements in few bits.
        packed_bytes: bytes of the packed weights, scales included.
        packed_as: their format in words.
        packed_experts: whether weights of experts are packed.
        machines: number of machines that share the optimizer's state.
        optimizer_state: form of AdamW's moments, one of `config.OPTIMIZER_STATES`.
        shares: whether masters and their copies in compute precision share memory (`optim.split_masters`).
        by_layer: whether one machine updates a layer as its gradients are complete, so that they need memory only until
            then.
        process: bytes of the process itself, see `process_bytes`.
    """

    trained: int
    frozen: int
    compute_bytes: int
    double_buffered: bool = False
    packed: int = 0
    packed_bytes: int = 0
    packed_as: str = ""
    packed_experts: bool = False
    machines: int = 1
    optimizer_state: str = "fp32"
    shares: bool = False
    by_layer: bool = False
    process: int = 0

    @property
    def working_bytes(self) -> int:
        """Bytes of an element of the working copies that lie beside trained weights."""
        beside = (self.compute_bytes != MASTER_BYTES or self.double_buffered) and not self.shares
        return self.compute_bytes if beside else 0


def total(items: Iterable[Item]) -> int:
    """Return the bytes of all items together."""
    return sum(item.nbytes for item in items)


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(nbytes: int) -> str:
    """Return a size as settings take it, no less than ``nbytes``: ``24GiB``, or ``1.3GiB`` below ten of a unit."""
    name, unit = next((pair for pair in _UNITS if nbytes >= pair[1]), _UNITS[-1])
    tenths = -(-10 * nbytes // unit)
    return f"{tenths / 10:g}{name}" if tenths < 100 else f"{-(-nbytes // unit)}{name}"


MASTER_BYTES = 4
"""Bytes of an element of master weights and gradients, which are fp32."""


PROCESS_BYTES = 480 * 2**20
"""Bytes of a process without a model. Measured (`benchmarks/bench_memory.py`): 360 MiB when PyTorch, Lightning,
transformers and PEFT are imported, and 45 to 125 more for a run's modules, their replicas and other Python objects."""
CONTEXT_BYTES = 2**28
"""Bytes that a GPU's CUDA context and libraries take of the host. Assumed: one tensor on an RTX 3090 takes 114 MiB
(github.com/pytorch/pytorch/issues/113326), without libraries of matrix products."""
PAGE_SHARE = 64
"""Linux has a record of 64 bytes for each page of 4 KiB: 4 of 256 GiB."""
SYSTEM_BYTES = 2**30
"""Bytes of the operating system beside these records. Assumed: its kernel, services and caches of files in use."""


def process_bytes(gpus: int) -> int:
    """Return the bytes that the process takes of the host, whatever it trains."""
    return PROCESS_BYTES + gpus * CONTEXT_BYTES


def system_bytes(host_memory: int) -> int:
    """Return the bytes of a host's memory that the operating system takes."""
    return host_memory // PAGE_SHARE + SYSTEM_BYTES


def layers_in_flight(workers: int) -> int:
    """Return of how many layers gradients are on the host at most, where updates go layer by layer.

    While one layer's gradients arrive from each worker, the optimizer uses one, and has another one to go on with.
    """
    return workers + 2


def device_bytes(plan: Plan, costs: Costs, workers: int, worker: int | None = None, *, most: bool = False) -> int:
    """Return the peak bytes of ``plan`` on each worker, without tensors uploaded ahead of their turn.

    ``worker``: the worker, if workers are unequal; None: the largest need. ``most``: whether the arena is as large as
    is of use, instead of as small as possible.
    """
    needs = WorkerNeeds(plan, costs, workers, worker)
    return needs.arena[most] + needs.beside


def carried_bytes(plan: Plan, costs: Costs, workers: int) -> int:
    """Return the most bytes of carried products on the host.

    They are there from a call's forward to its backward. N slots run at a time, of which the first may be the last ones
    of the round before.
    """
    ahead, sizes = plan.stage_of_forward, [costs.calls[call].product_bytes(plan.carry_least) for call in plan.carry]
    ends = {call: s.position for s in plan.stages() if s.phase == "backward" for call in range(s.first, s.last + 1)}
    count = len(plan.stages())

    def held(first: int) -> int:
        last = first + workers - 1
        times = ((ahead[call] <= last and ends[call] >= first) + (ahead[call] + count <= last) for call in plan.carry)
        return sum(n * size for n, size in zip(times, sizes, strict=True))

    return plan.round_microbatches * max(map(held, range(count)), default=0)


def of_worker(plan: Plan, workers: int, worker: int | None = None) -> range:
    """Return the positions of the stages that a worker runs, in any round or step; None: of all stages."""
    stages = len(plan.stages())
    if worker is None:
        return range(stages)
    every = math.gcd(stages, workers)
    return range(worker % every, stages, every)


def layer_arena(costs: Costs) -> int:
    """Return the bytes of an arena for single layers, which any worker may run without a plan: it is at least so large.

    The first batch and evaluation do so.
    """
    gradients = max((call.gradient_bytes for call in costs if call.needs_backward), default=0)
    return max(call.weight_bytes for call in costs) + gradients


def arenas(weights: Bytes, gradients: Bytes, workers: int) -> tuple[Bytes, Bytes]:
    """Return the bytes of an arena for each stage, (..., stages): the least, and the most that are of use.

    The least are the stage's own weights and gradients. In the largest, no stage's weights have to wait for the end of
    the stage before.
    """
    sizes = weights + gradients
    leaving = np.where(gradients > 0, sizes, 0)
    return sizes, sizes + np.maximum(np.roll(weights, -workers, axis=-1), np.roll(leaving, workers, axis=-1))


def copies_of(stage: Stage, costs: Costs) -> int:
    return costs.stage_bytes(stage.first, stage.last, stage.phase).copies


def fits(
    plan: Plan, costs: Costs, workers: int, memory: Memory | None, *, ahead: bool = False, most: bool = False
) -> bool:
    """Return whether every worker has the memory that ``plan`` takes, and if ``ahead`` what is brought ahead as well.

    ``memory`` None: no limit. ``most``: as in `device_bytes`.
    """
    limits = enumerate(memory) if isinstance(memory, tuple) else [] if memory is None else [(None, memory)]
    each = ((WorkerNeeds(plan, costs, workers, worker), limit) for worker, limit in limits)
    return all(one.arena[most] + one.beside + (one.ahead if ahead else 0) <= limit for one, limit in each)


def least(memory: Memory | None) -> int | None:
    """Return the bytes of the smallest worker; None: no limit."""
    return min(memory) if isinstance(memory, tuple) else memory


def waiting(left: Bytes, workers: int, round_microbatches: int) -> Bytes:
    """Return, for each stage, the bytes that other microbatches of the round may hold on its worker meanwhile.

    Each of them has left this stage and waits for the next one, or has left the worker's stage before and waits for the
    stage after that. This is an upper bound: a tensor that the next stage takes on another worker may leave earlier.

    ``left``: bytes of a microbatch that waits behind each stage, (..., stages).
    """
    return (round_microbatches - 1) * np.maximum(left, np.roll(left, workers, axis=-1))


def waiting_at(costs: Costs) -> tuple[list[int], list[int]]:
    """Return the bytes of a microbatch that waits in forward, and in backward, before each call and behind the last.

    They are outputs in forward, and in backward gradients and the outputs that user code's graph still holds, for the
    nearest call before that needs a backward.
    """
    backward = [0]
    for call in costs:
        waits = call.returning_bytes + call.backward_held_bytes if call.needs_backward else backward[-1]
        backward.append(waits)
    return [*(call.waiting_bytes for call in costs), 0], backward


def between_bytes(costs: Costs, workers: int) -> int:
    """Return the most bytes of user code on a worker that runs any stage meanwhile.

    A microbatch waits in front of the first call, while the one before it has its turn. And user code may have its
    backward on the worker where it ran. A single worker has that in the turn of the stage behind it, which counts it.
    """
    return costs.calls[0].waiting_bytes + (max(call.handing_bytes for call in costs) if workers > 1 else 0)


def _brought(stage: Stage, costs: Costs, *, alone: bool) -> int:
    """Return the bytes that a worker uploads for the start of a microbatch's turn in ``stage``.

    ``alone``: it is the only worker, and has the outputs of its own stages and their gradients already.
    """
    if stage.phase != "backward":
        return 0 if alone and stage.first else costs.calls[stage.first].input_bytes
    taped = [call for call in costs.calls[stage.first : stage.last + 1] if call.needs_backward]
    return taped[-1].input_bytes + (0 if alone else taped[-1].returning_bytes) if taped else 0


class WorkerNeeds:
    """What ``plan`` takes on a worker, if workers are unequal, or on the ones that need most (``worker`` None).

    Attributes:
        stages: all stages.
        needs: bytes that each stage needs.
        waiting: bytes that other microbatches hold meanwhile; see `waiting`.
        own: positions of the stages that the worker runs.
        copies: bytes of the arena for the packed weights that stages unpack once.
        products: most bytes of the products of a carried call.
        between: bytes of user code beside a stage; see `between_bytes`.
        beside: bytes beside the arena, without what is brought ahead.
    """

    def __init__(self, plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> None:
        self._plan, self._costs, self._workers, self.stages = plan, costs, workers, plan.stages()
        self.needs = [costs.stage_bytes(s.first, s.last, s.phase, plan.recompute_ahead) for s in self.stages]
        forward, backward = waiting_at(costs)
        left = [forward[s.last + 1] if s.phase == "forward" else backward[s.first] for s in self.stages]
        self.waiting = [int(size) for size in waiting(np.array(left), workers, plan.round_microbatches)]
        self.own = of_worker(plan, workers, worker)
        unpacking = (self.stages[position] for position in self.own if self.stages[position].unpacks_once)
        self.copies = max((copies_of(stage, costs) for stage in unpacking), default=0)
        self.products = max((costs.calls[call].product_bytes(plan.carry_least) for call in plan.carry), default=0)
        self._activations = max(self.needs[at].activations + self.waiting[at] for at in self.own)
        self.between = between_bytes(costs, workers)
        self.beside = self.copies + self._activations + self.between + PRODUCTS * self.products

    @cached_property
    def arena(self) -> tuple[int, int]:
        """The least bytes of the arena, and the most that are of use: of the worker's stages, or of a layer."""
        weights, gradients = (
            np.array(sizes) for sizes in zip(*((n.weights, n.gradients) for n in self.needs), strict=True)
        )
        own, layer = [*self.own], layer_arena(self._costs)
        smallest, largest = (max(layer, int(sizes[own].max())) for sizes in arenas(weights, gradients, self._workers))
        return smallest, largest

    @cached_property
    def ahead(self) -> int:
        """Bytes uploaded before they are needed.

        These are inputs and carried products of a running microbatch's next call, and all inputs that the next
        microbatch starts from.
        """
        crowded, alone = max(self.needs[at].crowded + self.waiting[at] for at in self.own), self._workers == 1
        brought = max(_brought(self.stages[at], self._costs, alone=alone) for at in self.own)
        return crowded - self._activations + brought + self.products

    def reserved(self, budget: int | None, lead: int = 0) -> Reserved:
        """Return what the worker reserves within ``budget``, which the plan has to fit (None: no limit).

        What is brought ahead comes first, then calls in flight, of which at most ``lead`` bytes are worth it. The arena
        has what is left, up to the most that is of use.
        """
        lowest, most = self.arena
        if budget is None:
            return Reserved(most, self.copies, None, lead)
        left = budget - self.beside
        lead = min(lead, max(0, left - lowest - self.ahead))
        arena = min(most, max(lowest, left - self.ahead - lead))
        return Reserved(arena, self.copies, max(0, left - lead - arena), lead)

    def planned(self, budget: int | None, lead: int = 0) -> int:
        """Return the planned peak: with as much ahead as ``budget`` allows; see `reserved`."""
        reserved = self.reserved(budget, lead)
        brought = self.ahead if reserved.room is None else min(self.ahead, reserved.room)
        return reserved.arena + self.beside + brought + reserved.lead

    def items(self, budget: int | None) -> list[Item]:
        """Return the parts of `planned`, each with the stage that needs most of it."""
        needs, waiting, arena = self.needs, self.waiting, self.reserved(budget).arena
        # On a GPU, costs count a forward with its call's backward. So of equals, a backward stage needs it.
        position = max(self.own, key=lambda position: (needs[position].activations + waiting[position], position))
        stage, size = self.stages[position], needs[position].activations
        last = min(self._costs.calls[-1].activation_bytes, size) if stage.phase == "fused" else 0
        others = self._plan.round_microbatches - 1
        wait = f"{plural(others, 'microbatch')} that {'waits' if others == 1 else 'wait'} for the next stage"
        items = [
            *self._arena_items(arena),
            Item("arena for unpacked weights", self.copies),
            Item(f"loss and activations of {self._costs.layers[-1]}", last),  # of the last call, and the loss behind it
            Item(f"activations{' of the other calls' if last else ''}, stage {position}", size - last),
            Item("code between layers, beside the stage", self.between),
            Item(f"carried products of {plural(PRODUCTS, 'call')}", PRODUCTS * self.products),
            Item(f"boundary tensors of {wait}", waiting[position]),
            Item("boundary tensors that are brought ahead", self.planned(budget) - arena - self.beside),
        ]
        return [item for item in items if item.nbytes]

    def _arena_items(self, arena: int) -> list[Item]:
        """Return the parts of an arena: what the largest stage has in it, and what is left for others beside it."""

        def size(position: int) -> int:
            return self.needs[position].weights + self.needs[position].gradients

        position = max(self.own, key=size)
        if not size(position):
            return [Item("arena, of the largest layer", arena)]
        return [
            Item(f"weights in the arena, of stage {position}", self.needs[position].weights),
            Item(f"gradients in the arena, of stage {position}", self.needs[position].gradients),
            Item("room in the arena for the stages before and after", arena - size(position)),
        ]


def stage_rows(plan: Plan, costs: Costs, workers: int) -> list[dict[str, Any]]:
    """Return time and memory of every stage of ``plan``, in the order in which they run.

    Milliseconds are those of one microbatch on the workers that run the stage. Weights and gradients travel once a
    round; ``activation_bytes`` is the peak of one microbatch, and the round's others hold ``waiting_bytes`` meanwhile.
    """

    every = math.gcd(len(plan.stages()), workers)

    def seconds(stage: Stage) -> float:
        each = {id(own): own for own in map(costs.on, range(stage.position % every, workers, every))}
        own = next(iter(each.values())) if len(each) == 1 else costs  # the mean, if its workers differ
        found = plan.costs_in(stage, own, plan.round_microbatches)
        return found.stage_time_s(stage.first, stage.last, stage.phase)

    of_all = WorkerNeeds(plan, costs, workers)
    return [
        {
            "phase": stage.phase,
            "calls": str(Span(stage.first, stage.last)),
            "ms": 1e3 * seconds(stage),
            "weight_bytes": need.weights,
            "gradient_bytes": need.gradients,
            "activation_bytes": need.activations,
            "waiting_bytes": waiting,
        }
        for stage, need, waiting in zip(of_all.stages, of_all.needs, of_all.waiting, strict=True)
    ]


def kept_inputs(plan: Plan, costs: Costs) -> list[int]:
    """Return the bytes of each call's inputs that are kept on the host from its forward to its backward.

    A backward stage that is recomputed ahead makes outputs of its calls again, for those of its calls that take them.
    """
    kept = [call.boundary_bytes if call.needs_backward else 0 for call in costs]
    for stage in plan.backward if plan.recompute_ahead else ():
        for number in range(stage.first, stage.last + 1):
            for before, behind, size in costs.calls[number].recomputable:
                span = costs.calls[number - before : number + behind + 1]
                inside = stage.first <= number - before and number + behind <= stage.last
                kept[number] -= size if inside and all(c.gradient_bytes for c in span if c.needs_backward) else 0
    return kept


def boundary_bytes(plan: Plan, costs: Costs) -> int:
    """Return the bytes of boundary tensors on the host, for one round. The fused stage saves none."""
    return plan.round_microbatches * sum(kept_inputs(plan, costs)[: plan.fused.first])


def host_items(plan: Plan, costs: Costs, parameters: Parameters, workers: int = 1, microbatches: int = 1) -> list[Item]:
    """Return what the host of each machine holds under AdamW.

    Gradients are summed call by call, so a weight that several layers share, or a layer that is called twice, has
    several gradients. In the first window there are gradients of all layers and no moments yet. That counts if it is
    more than later.
    """
    trained, frozen, size = parameters.trained, parameters.frozen, parameters.compute_bytes
    machines = parameters.machines
    working = parameters.working_bytes
    owned = -(-trained // machines)
    whose = f", 1/{machines} of them" if machines > 1 else ""
    moments = math.ceil(2 * OPTIMIZER_STATES[parameters.optimizer_state] * owned)
    gradients = _gradient_items(plan, costs, parameters, workers, microbatches)
    first = _gradient_items(plan, costs, parameters, workers, microbatches, first_window=True)
    if total(gradients) + moments < total(first):
        gradients, moments = first, 0
    items = [
        Item(
            f"trained weights, fp32{', with their working copy' if parameters.shares else ''}",
            MASTER_BYTES * trained,
            locked=not working,
        ),
        Item("their working copy in compute precision", working * trained, locked=True),
        Item(f"frozen weights, {parameters.packed_as}", parameters.packed_bytes, locked=True),
        Item("frozen weights in compute precision", size * (frozen - parameters.packed), locked=True),
        *gradients,
        Item(f"AdamW's two moments, {parameters.optimizer_state}{whose}", moments),
        Item(f"boundary tensors of {plural(plan.round_microbatches, 'microbatch')}", boundary_bytes(plan, costs), True),
        Item(f"carried products of {plural(len(plan.carry), 'call')}", carried_bytes(plan, costs, workers), True),
        Item("the process itself: Python, PyTorch, CUDA", parameters.process),
    ]
    return [item for item in items if item.nbytes]


def _gradient_items(
    plan: Plan, costs: Costs, parameters: Parameters, workers: int, microbatches: int, *, first_window: bool = False
) -> list[Item]:
    """Return what gradients take: sums that the optimizer has not used, and what arrives to be added to them.

    A sum is as narrow as it has come if nothing is added to it, and has its own dtype otherwise and while it is used.
    In the first window, microbatches come one after another, and what arrives is added before more does.
    """
    trains = [call for call in costs.calls if call.needs_backward]
    own = max(MASTER_BYTES * parameters.trained, sum(call.gradient_bytes for call in trains))
    sizes = [call.gradient_bytes if call.reduced_bytes is None else call.reduced_bytes for call in trains]
    narrow = any(call.reduced_bytes is not None for call in trains)
    one_round = microbatches <= (1 if first_window else plan.round_microbatches)
    adds = not one_round and (narrow or (plan.side_by_side(workers, microbatches) and not first_window))
    in_flight, largest = (sum(heapq.nlargest(n, sizes)) for n in (layers_in_flight(workers), 1))
    by_layer = parameters.by_layer and parameters.machines == 1 and one_round and not first_window
    stays = narrow and one_round and parameters.machines == 1
    when = " of the first window" if first_window else " in flight" if by_layer else ""
    held = min(own, in_flight) if by_layer else sum(sizes) if stays else own
    largest_sum = max((call.gradient_bytes for call in trains), default=0)
    used = largest_sum if stays and not parameters.by_layer else 0
    return [
        Item(f"gradients{when}, {'as they travel' if stays else 'fp32'}", held, locked=stays or not narrow),
        Item("gradients that an update uses, fp32", used),
        Item("gradients as they arrive", (largest if first_window else in_flight) if adds else 0, locked=True),
    ]
