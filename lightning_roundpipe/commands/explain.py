"""``explain=memory``: all tensors that are alive at the peak of a worker's memory, and its other parts.

A worker holds arenas, boundary tensors, the tensors of one call, and what graphs of other calls of its stage keep. The
plan counts the same call, so the rows add up to the plan's count to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_roundpipe.commands.plan_model import Longest, Outlook, find_longest, plan_of_longest, shape_of
from lightning_roundpipe.commands.plan_shape import TILE, ModelShape
from lightning_roundpipe.planning.census import CallMemory, Part, StorageLifetime
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import Item, device_items, worst_stage
from lightning_roundpipe.planning.schedule import Plan


@dataclass(frozen=True)
class Line:
    """Equal storages of a call.

    Args:
        part: part of the call in which they are made.
        module: module that makes them, named within the layer.
        operation: operation that makes them, or the name of an input.
        shape, dtype: shape and dtype of each.
        count: number of storages.
        nbytes: bytes of all of them.
    """

    part: Part
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Explained:
    """A worker's memory at its peak.

    Attributes:
        subject: the plan, or the longest sequence.
        tokens: tokens of a microbatch.
        stage: position of the stage at the peak.
        phase: phase of that stage.
        limit: bytes of a worker; None: no limit.
        items: parts of the planned memory.
        call: memory of the call at the peak, over its time.
        lines: tensors of that call at the peak.
        kept: bytes that graphs of the stage's other calls keep.
    """

    subject: str
    tokens: int
    stage: int
    phase: str
    limit: int | None
    items: tuple[Item, ...]
    call: CallMemory
    lines: tuple[Line, ...]
    kept: int

    @property
    def activations(self) -> int:
        """Planned bytes of activations of the stage at the peak."""
        return self.kept + sum(line.nbytes for line in self.lines)

    @property
    def needed(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True)
class InTiles:
    """Estimate with tiles of tokens, for MLPs, norms and experts.

    Attributes:
        tile: tokens of a tile.
        longest: longest sequence with tiles.
        slowdown: additional time of a microbatch of ``tokens`` tokens; 0.1 is 10 %.
        tokens: tokens of the longest sequence without tiles.
    """

    tile: int
    longest: Longest
    slowdown: float
    tokens: int


def in_tiles(found: Outlook) -> InTiles | None:
    """Return the estimate with tiles; None if no sequence fits, the plan has tiles already, or there is no MLP."""
    if found.wish.token_tiles is not None:
        return None
    if found.longest is None or not found.longest.tokens:
        return None
    whole = shape_of(found.wish, found.hardware)
    try:
        tiled, tokens = whole.in_tiles(), found.longest.tokens
    except ValueError:
        return None
    before, after = (sum(_seconds(call) for call in shape.costs(1, tokens)) for shape in (whole, tiled))
    longest = find_longest(tiled, found.workers, found.microbatches, found.memory, found.wish.min_round)
    return InTiles(TILE, longest, after / before - 1, tokens)


def _seconds(call: CallCost) -> float:
    """Return the seconds of forward, recomputation and backward."""
    return call.time_s("forward") + call.time_s("backward")


def explain(found: Outlook) -> list[Explained]:
    """Return a worker's memory under the plan, and for the longest sequence if that is another one."""
    wish = found.wish
    shape = shape_of(wish, found.hardware)
    size, length = found.microbatch_size, found.sequence_length
    of_plan = f"the plan, {size} x {length:,} tokens a microbatch"
    made = [_explained(of_plan, shape, found.plan, found.costs, size, length, found)]
    if found.longest is not None and found.longest.tokens and (size, length) != (1, found.longest.tokens):
        tokens = found.longest.tokens
        costs = shape.costs(1, tokens)
        plan = plan_of_longest(costs, shape, found.workers, found.microbatches, found.memory, wish.min_round)
        made.append(_explained(f"the longest sequence, {tokens:,} tokens", shape, plan, costs, 1, tokens, found))
    return made


def _explained(
    subject: str, shape: ModelShape, plan: Plan, costs: Costs, size: int, length: int, found: Outlook
) -> Explained:
    stage = plan.stages()[worst_stage(plan, costs, found.workers, found.worker)]
    need = costs.stage_bytes(stage.first, stage.last, stage.phase, plan.recompute_ahead)
    call = shape.memories(size, length)[stage.first + need.worst]
    return Explained(
        subject=subject,
        tokens=size * length,
        stage=stage.position,
        phase=stage.phase,
        limit=found.memory,
        items=tuple(device_items(plan, costs, found.workers, found.memory, found.worker)),
        call=call,
        lines=tuple(_lines(call)),
        kept=need.activations - need.of_worst,
    )


def _lines(call: CallMemory) -> list[Line]:
    """Return the tensors at the peak, equal ones as one line, the largest first."""
    counts: Counter[Line] = Counter()
    for row in call.at_worst:
        counts[_line(row)] += 1
    lines = [replace(line, count=count, nbytes=count * line.nbytes) for line, count in counts.items()]
    return sorted(lines, key=lambda line: -line.nbytes)


def _line(row: StorageLifetime) -> Line:
    module, operation, shape, dtype = row.name
    return Line(row.part, module, operation, shape, str(dtype).removeprefix("torch."), 1, row.nbytes)


def as_list(found: Sequence[Explained]) -> list[dict[str, Any]]:
    """Return the answer of ``format=json``."""
    return [
        {
            "subject": one.subject,
            "tokens": one.tokens,
            "stage": one.stage,
            "phase": one.phase,
            "call": one.call.layer,
            "limit_bytes": one.limit,
            "needed_bytes": one.needed,
            "items": [{"name": item.name, "bytes": item.nbytes} for item in one.items],
            "activation_bytes": one.activations,
            "kept_by_other_calls_bytes": one.kept,
            "tensors": [
                {
                    "part": line.part,
                    "module": line.module,
                    "operation": line.operation,
                    "shape": list(line.shape),
                    "dtype": line.dtype,
                    "count": line.count,
                    "bytes": line.nbytes,
                    "bytes_per_token": line.nbytes / one.tokens,
                }
                for line in one.lines
            ],
        }
        for one in found
    ]
