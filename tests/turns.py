"""Whether a step ran in the order that its plan says, judged by what really ran: the slots and events of ``report()``.

``faults`` knows nothing of how turns are made. It takes the recorded times of calls and copies and says, in words, each
rule that they break:

    slot i on worker i mod N, stage by stage, round by round                                    [1]
    a worker runs one call at a time, and its slots one after another                           [2]
    a slot serves its microbatches in order, one at a time                                      [3]
    a microbatch runs its calls in order, then their backward in reverse, each after the other, [4]
    and recomputes each right in front of its backward, or, if the plan says so, ahead of it
    a call that the plan does not have runs in the turn of its microbatch, beside no other call [5]
    of its worker

Copies are judged by `ordering`.
"""

from collections import defaultdict
from itertools import pairwise

from lightning_roundpipe.planning.schedule import Plan

COMPUTE = ("forward", "recompute", "backward")
KINDS = {"forward": {"forward"}, "fused": {"forward", "backward"}, "backward": {"recompute", "backward"}}
OFF_PLAN = -1
"""The slot of a call that the plan does not have."""


def faults(report):
    """Every rule that the step broke; empty if all is well. A step without a plan has nothing to be judged by."""
    if report["profiled"]:
        return []
    plan = Plan.parse(report["plan"])
    slots = report["slots"]
    found = list(_slots(slots, plan, report["workers"], report["microbatches"]))
    if found:
        return found  # the rest would only repeat it
    compute = sorted((r for r in report["events"] if r["kind"] in COMPUTE), key=_times)
    found += _one_at_a_time(compute, report["workers"])
    compute = [r for r in compute if r["slot"] >= 0]
    found += _places(compute, slots, plan, report["microbatches"])
    found += _workers(compute, report["workers"])
    found += _microbatches_of_slots(compute)
    if plan.recompute_ahead:
        found += _recomputed_ahead([r for r in compute if r["kind"] == "recompute"], compute)
        found += _calls_of_microbatches([r for r in compute if r["kind"] != "recompute"], [])
    else:
        found += _calls_of_microbatches(compute, slots)
    return found


def _times(row):
    return row["start_s"], row["end_s"]


def _shown(row):
    return f"{row['kind']} of call {row['call']} for microbatch {row['microbatch']} in slot {row['slot']}"


def _by(rows, *keys):
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in keys) if len(keys) > 1 else row[keys[0]]].append(row)
    return groups


def _slots(slots, plan, workers, microbatches):
    """[1]"""
    stages = plan.stages()
    rounds = -(-microbatches // plan.round_microbatches)
    if len(slots) != rounds * len(stages):
        yield f"{len(slots)} slots ran, not {rounds} rounds of {len(stages)} stages"
        return
    for position, slot in enumerate(slots):
        if slot["slot"] != slots[0]["slot"] + position:
            yield f"slot {slot['slot']} stands at place {position} after slot {slots[0]['slot']}"
        if slot["worker"] != slot["slot"] % workers:
            yield f"slot {slot['slot']} ran on worker {slot['worker']} of {workers}"
        if (slot["round"], slot["phase"]) != (position // len(stages), stages[position % len(stages)].phase):
            yield f"slot {slot['slot']} is a {slot['phase']} stage of round {slot['round']}, out of the plan's order"


def _places(compute, slots, plan, microbatches):
    """Each call in a slot of its own stage and round, with its layer there."""
    stages, size = plan.stages(), plan.round_microbatches
    for row in compute:
        position = row["slot"] - slots[0]["slot"]
        if not 0 <= position < len(slots):
            yield f"{_shown(row)} is in no slot of the step"
            continue
        slot, stage = slots[position], stages[position % len(stages)]
        if row["worker"] != slot["worker"]:
            yield f"{_shown(row)} ran on worker {row['worker']}"
        if row["kind"] not in KINDS[slot["phase"]] or not stage.first <= row["call"] <= stage.last:
            yield f"{_shown(row)} has no place in the {slot['phase']} stage {stage.first}-{stage.last}"
        if not slot["round"] * size <= row["microbatch"] < min((slot["round"] + 1) * size, microbatches):
            yield f"{_shown(row)} belongs to another round than {slot['round']}"
        if row["layer"] not in slot["layers"]:
            yield f"{_shown(row)}: layer {row['layer']!r} was not loaded"


def _one_at_a_time(compute, workers):
    """[2], [5]"""
    for worker in range(workers):
        mine = [r for r in compute if r["worker"] == worker]
        for before, after in pairwise(mine):
            if after["start_s"] < before["end_s"]:
                yield f"{_shown(after)} began on worker {worker} before the end of {_shown(before)}"
        turn = None
        between = []
        for row in mine:
            if row["slot"] == OFF_PLAN:
                between.append(row)
                continue
            if turn == (row["slot"], row["microbatch"]):
                for other in between:
                    if other["microbatch"] != row["microbatch"]:
                        yield f"{_shown(other)} is in the turn of {_shown(row)}"
            turn, between = (row["slot"], row["microbatch"]), []


def _workers(compute, workers):
    """[2]"""
    for worker in range(workers):
        for before, after in pairwise(r for r in compute if r["worker"] == worker):
            if after["slot"] < before["slot"]:
                yield f"{_shown(after)} came after slot {before['slot']} on worker {worker}"


def _microbatches_of_slots(compute):
    """[3]"""
    for slot, rows in _by(compute, "slot").items():
        served = [r["microbatch"] for r in rows]
        if served != sorted(served):
            yield f"slot {slot} served microbatches {served}"


def _calls_of_microbatches(compute, slots):
    """[4]"""
    backwards = {}
    for microbatch, rows in _by(compute, "microbatch").items():
        for before, after in pairwise(rows):
            if after["start_s"] < before["end_s"]:
                yield f"{_shown(after)} began before the end of {_shown(before)}"
        made = [(r["kind"], r["call"]) for r in rows]
        forward = [call for kind, call in made if kind == "forward"]
        backward = [call for kind, call in made if kind == "backward"]
        phases = {s["slot"]: s["phase"] for s in slots}
        if forward != sorted(set(forward)) or made[: len(forward)] != [("forward", c) for c in forward]:
            yield f"microbatch {microbatch} ran forward {forward}, in {made}"
        expected = [
            (kind, r["call"])
            for r in rows
            if r["kind"] == "backward"
            for kind in (("recompute", "backward") if phases.get(r["slot"]) == "backward" else ("backward",))
        ]
        if backward != sorted(set(backward), reverse=True) or made[len(forward) :] != expected:
            yield f"microbatch {microbatch} ran backward {made[len(forward) :]}"
        if not set(backward) <= set(forward):
            yield f"microbatch {microbatch} ran backward {backward} of forward {forward}"
        if backward and backwards.setdefault(tuple(forward), tuple(backward)) != tuple(backward):
            yield f"microbatch {microbatch} ran the backward of {backward}, another one that of {backwards[*forward,]}"


def _recomputed_ahead(recomputed, compute):
    """[4]"""
    runs = {(r["kind"], r["microbatch"], r["call"]): r for r in compute}
    if len(recomputed) != len({(r["microbatch"], r["call"]) for r in recomputed}):
        yield "some call was recomputed twice for one microbatch"
    for row in recomputed:
        what = row["microbatch"], row["call"]
        if row["start_s"] < runs["forward", *what]["end_s"]:
            yield f"{_shown(row)} began before its forward was over"
        backward = runs.get(("backward", *what))
        if backward is not None and (backward["start_s"] < row["end_s"] or backward["slot"] != row["slot"]):
            yield f"{_shown(backward)} began before its recomputation was over, or elsewhere"
    for (kind, *what), row in runs.items():
        if kind == "backward" and ("recompute", *what) not in runs and row["slot"] != runs["forward", *what]["slot"]:
            yield f"{_shown(row)} was not recomputed"
