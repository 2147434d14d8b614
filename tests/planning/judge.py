"""How long steps take under a plan given as layers per stage: the rules written down once more, as plainly as can be.

It shares nothing with the package, so that a mistake there is not made here again. All layers are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Times:
    layers: int
    forward: float
    backward: float
    head_forward: float
    head_backward: float
    hop: float


def step_ends(
    times: Times,
    plan: dict[str, Any],
    workers: int,
    microbatches: int,
    steps: int,
    *,
    speeds: Sequence[float] = (),
) -> list[float]:
    """The end of each step, on workers of these ``speeds``, where they are not equal.

    A later round's slot waits for the same stage of the round before. A step waits for all losses of the last one, and
    each microbatch for the end of the same one there.
    """
    t, members = times, plan["round_microbatches"]
    free = [0.0] * workers
    gradients: list[dict[int, float]] = []  # per step and layer; the head is layer t.layers
    slot, ends = 0, []
    losses: list[float] = []
    through: dict[int, float] = {}
    for step in range(steps):
        if len(set(speeds)) > 1:  # all steps begin on the first worker
            slot += -slot % workers
        done: dict[int, float] = {}
        closed: dict[int, float] = {}
        starts = losses[-1] if losses else 0.0
        losses.append(starts)
        for begin in range(0, microbatches, members):
            batch = range(begin, min(begin + members, microbatches))
            left = {m: (max(starts, through.get(m, 0.0)), slot % workers) for m in batch}
            saved: dict[tuple[int, int], tuple[float, int]] = {}  # the input of a layer of a microbatch
            first_slot, low = slot, 0
            kinds = [("forward", n) for n in plan["forward"]] + [("fused", plan["fused"])]
            kinds += [("backward", n) for n in plan["backward"]]
            for kind, n in kinds:
                worker = slot % workers
                speed = speeds[worker] if speeds else 1.0
                layers = range(low - n, low) if kind == "backward" else range(low, low + n)
                if kind == "fused":
                    layers = range(low, t.layers + 1)
                start = max(free[worker], closed.get(slot - first_slot, 0.0))
                if step >= 2:
                    start = max(start, *(gradients[step - 2][layer] for layer in layers))
                for m in batch:
                    at, where = left[m]
                    given = at + (t.hop if where != worker else 0.0)
                    if kind == "forward":
                        start = max(start, given) + n * t.forward / speed
                        saved[m, low + n] = start, worker
                    elif kind == "fused":
                        start = max(start, given) + (n * t.forward + t.head_forward) / speed
                        losses[-1] = max(losses[-1], start)
                        start += (t.head_backward + n * t.backward) / speed
                    else:
                        at, where = saved.get((m, low - n), (0.0, worker))
                        if low - n and (m, low - n) not in saved:  # inside a forward stage: when that has ended
                            at, where = min(v for (mm, x), v in saved.items() if mm == m and x > low - n)
                        there = at + (t.hop if where != worker else 0.0)
                        start = max(max(start, there) + n * t.forward / speed, given) + n * t.backward / speed
                    left[m] = start, worker
                free[worker] = start
                closed[slot - first_slot] = start
                if kind != "forward":
                    for layer in layers:
                        done[layer] = max(done.get(layer, 0.0), start)
                low = low - n if kind == "backward" else low + (n if kind == "forward" else 0)
                slot += 1
            through.update((m, at) for m, (at, _) in left.items())
        gradients.append(done)
        ends.append(max(done.values()))
    return ends
