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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.config import OPTIMIZER_STATES
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Costs, StageBytes
from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.planning.updates import PIECE_BYTES

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


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(nbytes: int) -> str:
    """Return a size as settings take it, no less than ``nbytes``: ``24GiB``, or ``1.3GiB`` below ten of a unit."""
    name, unit = next((pair for pair in _UNITS if nbytes >= pair[1]), _UNITS[-1])
    tenths = -(-10 * nbytes // unit)
    return f"{tenths / 10:g}{name}" if tenths < 100 else f"{-(-nbytes // unit)}{name}"


MASTER_BYTES = 4
"""Bytes of an element of master weights and gradients, which are fp32."""


PROCESS_BYTES = 2**29
"""Bytes of a process without a model. Measured: Python has 443 MiB resident when it has imported PyTorch, Lightning,
transformers and PEFT, and a run of a small model on two emulated devices adds less than 40."""
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
    is of use, instead of as small as possible; see `arena_bytes`.
    """
    return arena_bytes(plan, costs, workers, worker)[most] + _beside_arena(plan, costs, workers, worker)


def _beside_arena(plan: Plan, costs: Costs, workers: int, worker: int | None) -> int:
    needs, waiting = _needs(plan, costs), waiting_bytes(plan, costs, workers)
    activations = max(needs[position].activations + waiting[position] for position in of_worker(plan, workers, worker))
    return copies_bytes(plan, costs, workers, worker) + activations + PRODUCTS * product_bytes(plan, costs)


def product_bytes(plan: Plan, costs: Costs) -> int:
    """Return the most bytes of the products of a carried call."""
    return max((costs.calls[call].product_bytes(plan.carry_least) for call in plan.carry), default=0)


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


def arena_bytes(plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> tuple[int, int]:
    """Return the least bytes of a worker's arena, and the most that are of use: of its stages, or of a layer."""
    needs, own, layer = _needs(plan, costs), [*of_worker(plan, workers, worker)], layer_arena(costs)
    weights, gradients = (np.array(sizes) for sizes in zip(*((n.weights, n.gradients) for n in needs), strict=True))
    smallest, largest = (max(layer, int(sizes[own].max())) for sizes in arenas(weights, gradients, workers))
    return smallest, largest


def reserved_within(
    plan: Plan, costs: Costs, workers: int, budget: int | None, lead: int = 0, worker: int | None = None
) -> Reserved:
    """Return what a worker reserves within ``budget``, which ``plan`` has to fit.

    What is brought ahead comes first, then calls in flight. The arena has what is left, up to the most that is of use.

    Args:
        plan: plan of a step.
        costs: costs of its calls.
        workers: number of workers.
        budget: bytes of a worker; None: no limit.
        lead: most bytes of calls in flight that are worth it.
        worker: the worker, if workers are unequal.
    """
    lowest, most = arena_bytes(plan, costs, workers, worker)
    copies = copies_bytes(plan, costs, workers, worker)
    if budget is None:
        return Reserved(most, copies, None, lead)
    left = budget - _beside_arena(plan, costs, workers, worker)
    ahead = ahead_bytes(plan, costs, workers, worker)
    lead = min(lead, max(0, left - lowest - ahead))
    arena = min(most, max(lowest, left - ahead - lead))
    return Reserved(arena, copies, max(0, left - lead - arena), lead)


def copies_bytes(plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> int:
    """Bytes of a worker's arena for the packed weights that stages unpack once."""
    own, stages = of_worker(plan, workers, worker), plan.stages()
    return max((_copies(stages[position], costs) for position in own if stages[position].unpacks_once), default=0)


def _copies(stage: Stage, costs: Costs) -> int:
    return costs.stage_bytes(stage.first, stage.last, stage.phase).copies


def unpacked_within(
    plan: Plan, costs: Costs, workers: int, microbatches: int, budget: Memory | None, *, most: bool = False
) -> Plan:
    """``plan`` with as many of its stages as ``budget`` has room for unpacking packed weights once.

    All of these are faster, but only memory says how many a worker can hold, so without a budget there are none. What
    is brought ahead keeps its room, and with ``most`` so does the largest arena.
    """
    if budget is None:
        return plan
    rounds = min(plan.round_microbatches, microbatches)
    sizes = {stage.position: _copies(stage, costs) for stage in plan.stages() if rounds > 1 or stage.phase != "forward"}
    for largest in sorted({size for size in sizes.values() if size}, reverse=True):
        chosen = tuple(position for position, size in sizes.items() if 0 < size <= largest)
        found = replace(plan, unpack_once=chosen)
        if fits(found, costs, workers, budget, ahead=True, most=most):
            return found
    return plan


def fits(
    plan: Plan, costs: Costs, workers: int, memory: Memory | None, *, ahead: bool = False, most: bool = False
) -> bool:
    """Return whether every worker has the memory that ``plan`` takes, and if ``ahead`` what is brought ahead as well.

    ``memory`` None: no limit. ``most``: as in `device_bytes`.
    """

    def need(worker: int | None) -> int:
        brought = ahead_bytes(plan, costs, workers, worker) if ahead else 0
        return device_bytes(plan, costs, workers, worker, most=most) + brought

    if isinstance(memory, tuple):
        return all(need(worker) <= limit for worker, limit in enumerate(memory))
    return memory is None or need(None) <= memory


def least(memory: Memory | None) -> int | None:
    """Return the bytes of the smallest worker; None: no limit."""
    return min(memory) if isinstance(memory, tuple) else memory


def _needs(plan: Plan, costs: Costs) -> list[StageBytes]:
    return [costs.stage_bytes(s.first, s.last, s.phase, plan.recompute_ahead) for s in plan.stages()]


def waiting(left: Bytes, workers: int, round_microbatches: int) -> Bytes:
    """Return, for each stage, the bytes that other microbatches of the round may hold on its worker meanwhile.

    Each of them has left this stage and waits for the next one, or has left the worker's stage before and waits for the
    stage after that. This is an upper bound: a tensor that the next stage takes on another worker may leave earlier.

    ``left``: bytes of a microbatch that waits behind each stage, (..., stages).
    """
    return (round_microbatches - 1) * np.maximum(left, np.roll(left, workers, axis=-1))


def waiting_bytes(plan: Plan, costs: Costs, workers: int) -> list[int]:
    """Return `waiting` of a plan's stages."""
    forward, backward = waiting_at(costs)
    left = [forward[s.last + 1] if s.phase == "forward" else backward[s.first] for s in plan.stages()]
    return [int(size) for size in waiting(np.array(left), workers, plan.round_microbatches)]


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


def ahead_bytes(plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> int:
    """Return the bytes uploaded to a worker before they are needed.

    These are inputs and carried products of a running microbatch's next call, and all inputs that the next microbatch
    starts from. A single worker has the outputs of its own stages and their gradients already.
    """
    needs, waiting = _needs(plan, costs), waiting_bytes(plan, costs, workers)
    positions = of_worker(plan, workers, worker)
    alone = max(needs[position].activations + waiting[position] for position in positions)
    crowded = max(needs[position].crowded + waiting[position] for position in positions)
    stages = plan.stages()
    inputs = crowded - alone + max(_brought(stages[position], costs, alone=workers == 1) for position in positions)
    return inputs + product_bytes(plan, costs)


def _brought(stage: Stage, costs: Costs, *, alone: bool) -> int:
    """Return the bytes that a worker uploads for the start of a microbatch's turn in ``stage``."""
    if stage.phase != "backward":
        return 0 if alone else costs.calls[stage.first].input_bytes
    taped = [call for call in costs.calls[stage.first : stage.last + 1] if call.needs_backward]
    return taped[-1].input_bytes + (0 if alone else taped[-1].returning_bytes) if taped else 0


def planned_bytes(
    plan: Plan, costs: Costs, workers: int, budget: int | None, lead: int = 0, worker: int | None = None
) -> int:
    """Return the planned peak of a worker: with as much ahead as ``budget`` allows.

    For the arguments see `reserved_within`.
    """
    reserved = reserved_within(plan, costs, workers, budget, lead, worker)
    ahead = ahead_bytes(plan, costs, workers, worker)
    brought = ahead if reserved.room is None else min(ahead, reserved.room)
    return reserved.arena + _beside_arena(plan, costs, workers, worker) + brought + reserved.lead


def ahead_within(plan: Plan, costs: Costs, workers: int, budget: Memory | None) -> Plan:
    """Return ``plan`` with recomputation ahead, if it has backward stages and fits ``budget`` (None: no limit)."""
    ahead = replace(plan, recompute_ahead=bool(plan.backward))
    return ahead if fits(ahead, costs, workers, budget) else plan


def keeping_least(plan: Plan, costs: Costs, workers: int, budget: Memory | None) -> Plan:
    """Return ``plan`` with equal backward stages, the longest that fit when recomputed ahead: the host keeps least.

    ``budget``: bytes of each worker; None: no limit, so that nothing says how long they may be.
    """
    calls = plan.fused.first
    for size in range(calls, 1, -1) if budget is not None else ():
        backward = tuple(Span(max(0, last - size + 1), last) for last in range(calls - 1, -1, -size))
        found = replace(plan, backward=backward, recompute_ahead=True)
        if fits(found, costs, workers, budget):
            return found
    return plan


def device_items(plan: Plan, costs: Costs, workers: int, budget: int | None, worker: int | None = None) -> list[Item]:
    """Return the parts of `planned_bytes`, each with the stage that needs most of it."""
    stages, needs, waiting = plan.stages(), _needs(plan, costs), waiting_bytes(plan, costs, workers)
    arena = reserved_within(plan, costs, workers, budget, worker=worker).arena
    items = _arena_items(plan, needs, arena, workers, worker)
    if copies := copies_bytes(plan, costs, workers, worker):
        items.append(Item("arena for unpacked weights", copies))
    # On a GPU, costs count a forward with its call's backward. So of equals, a backward stage is the one that needs it.
    own = of_worker(plan, workers, worker)
    position = max(own, key=lambda position: (needs[position].activations + waiting[position], position))
    stage, size = stages[position], needs[position].activations
    last = min(costs.calls[-1].activation_bytes, size) if stage.phase == "fused" else 0
    if last:  # of the last call, and the loss that follows it
        items.append(Item(f"loss and activations of {costs.layers[-1]}", last))
    if not last or size > last:
        items.append(Item(f"activations{' of the other calls' if last else ''}, stage {position}", size - last))
    if products := PRODUCTS * product_bytes(plan, costs):
        items.append(Item(f"carried products of {plural(PRODUCTS, 'call')}", products))
    if waiting[position]:
        others = plan.round_microbatches - 1
        wait = f"{plural(others, 'microbatch')} that {'waits' if others == 1 else 'wait'} for the next stage"
        items.append(Item(f"boundary tensors of {wait}", waiting[position]))
    all_but_ahead = arena + _beside_arena(plan, costs, workers, worker)
    if ahead := planned_bytes(plan, costs, workers, budget, worker=worker) - all_but_ahead:
        items.append(Item("boundary tensors that are brought ahead", ahead))
    return items


def _arena_items(plan: Plan, needs: Sequence[StageBytes], arena: int, workers: int, worker: int | None) -> list[Item]:
    """Return the parts of an arena: what the largest stage has in it, and what is left for others beside it."""

    def size(position: int) -> int:
        return needs[position].weights + needs[position].gradients

    position = max(of_worker(plan, workers, worker), key=size)
    if not size(position):
        return [Item("arena, of the largest layer", arena)]
    items = [
        Item(f"weights in the arena, of stage {position}", needs[position].weights),
        Item(f"gradients in the arena, of stage {position}", needs[position].gradients),
        Item("room in the arena for the stages before and after", arena - size(position)),
    ]
    return [item for item in items if item.nbytes]


@dataclass(frozen=True)
class StageRow:
    """Time and memory of a stage.

    Args:
        phase: forward, fused or backward.
        calls: its calls, as a plan writes them.
        ms: milliseconds of one microbatch, on the workers that run the stage.
        weight_bytes: weights uploaded once a round.
        gradient_bytes: gradients downloaded once a round.
        activation_bytes: peak of one microbatch.
        waiting_bytes: tensors of the round's other microbatches meanwhile.
    """

    phase: str
    calls: str
    ms: float
    weight_bytes: int
    gradient_bytes: int
    activation_bytes: int
    waiting_bytes: int


def stage_rows(plan: Plan, costs: Costs, workers: int) -> list[StageRow]:
    """Every stage of ``plan`` in the order in which they run."""

    def seconds(stage: Stage) -> float:
        found = plan.costs_in(stage, _on_its_workers(stage, plan, costs, workers), plan.round_microbatches)
        return found.stage_time_s(stage.first, stage.last, stage.phase)

    parts = zip(plan.stages(), _needs(plan, costs), waiting_bytes(plan, costs, workers), strict=True)
    return [
        StageRow(
            phase=stage.phase,
            calls=str(Span(stage.first, stage.last)),
            ms=1e3 * seconds(stage),
            weight_bytes=need.weights,
            gradient_bytes=need.gradients,
            activation_bytes=need.activations,
            waiting_bytes=waiting,
        )
        for stage, need, waiting in parts
    ]


def _on_its_workers(stage: Stage, plan: Plan, costs: Costs, workers: int) -> Costs:
    """Return the costs on the workers that run the stage if these are alike, else the mean costs."""
    every = math.gcd(len(plan.stages()), workers)
    each = {id(found): found for found in map(costs.on, range(stage.position % every, workers, every))}
    return next(iter(each.values())) if len(each) == 1 else costs


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
    working = size if (size != MASTER_BYTES or parameters.double_buffered) and not parameters.shares else 0
    owned = -(-trained // machines)
    whose = f", 1/{machines} of them" if machines > 1 else ""
    moments = math.ceil(2 * OPTIMIZER_STATES[parameters.optimizer_state] * owned)
    gradients = _gradient_items(plan, costs, parameters, workers, microbatches)
    first = _gradient_items(plan, costs, parameters, workers, microbatches, first_window=True)
    if sum(item.nbytes for item in gradients) + moments < sum(item.nbytes for item in first):
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
    used = (min(largest_sum, 2 * PIECE_BYTES) if parameters.by_layer else largest_sum) if stays else 0
    return [
        Item(f"gradients{when}, {'as they travel' if stays else 'fp32'}", held, locked=stays or not narrow),
        Item("gradients that an update uses, fp32", used),
        Item("gradients as they arrive", (largest if first_window else in_flight) if adds else 0, locked=True),
    ]
