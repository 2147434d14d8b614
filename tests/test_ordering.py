"""The checkers of the stress tests see what is wrong, and nothing where nothing is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import turns
from ordering import Ordering

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import Device, make_devices

# ---------------------------------------------------------------------------------------------------------------- turns


def report(rounds: Sequence[Sequence[int]] = ((0,), (1,))) -> dict[str, Any]:
    """A step of two calls, on two workers, as it should be: two microbatches side by side, or ``rounds`` in turn."""
    slots, events = [], []
    clock = 0.0

    def event(kind: str, slot: int, call: int, microbatch: int) -> None:
        nonlocal clock
        phase = slots[slot]["phase"]
        row = {"kind": kind, "phase": phase, "worker": slot % 2, "slot": slot, "call": call, "layer": f"layer{call}"}
        events.append(row | {"microbatch": microbatch, "nbytes": 1, "start_s": clock, "end_s": clock + 1})
        clock += 1

    for number, members in enumerate(rounds):
        first = 3 * number
        for phase, call in (("forward", 0), ("fused", 1), ("backward", 0)):
            slot = {"slot": len(slots), "worker": len(slots) % 2, "round": number, "phase": phase}
            slots.append(slot | {"layers": [f"layer{call}"]})
        stages = ((0, ["forward"]), (1, ["forward", "backward"]), (0, ["recompute", "backward"]))
        for slot, (call, kinds) in enumerate(stages, first):
            for microbatch in members:
                for kind in kinds:
                    event(kind, slot, call, microbatch)
    plan = f"forward 0; fused 1; backward 0; round {len(rounds[0])}"
    count = sum(map(len, rounds))
    return {"profiled": False, "plan": plan, "workers": 2, "microbatches": count, "slots": slots, "events": events}


IN_TURN = (0, 1), (2,)


def find(rows: list[Any], **what: Any) -> Any:
    [row] = [r for r in rows if all(r[k] == v for k, v in what.items())]
    return row


def move(row: Any, start: float) -> None:
    row["end_s"] += start - row["start_s"]
    row["start_s"] = start


def test_a_good_step_has_no_faults() -> None:
    assert turns.faults(report()) == []
    assert turns.faults(report(IN_TURN)) == []


Damage = Callable[[dict[str, Any], list[Any]], Any]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a slot is missing": (lambda r, e: r["slots"].pop(), "5 slots ran"),
    "a slot on another worker": (lambda r, e: r["slots"][2].update(worker=1), "slot 2 ran on worker 1"),
    "stages exchanged": (lambda r, e: r["slots"][1].update(phase="backward"), "out of the plan's order"),
    "a call on another worker": (lambda r, e: find(e, kind="forward", slot=0).update(worker=1), "ran on worker 1"),
    "a call in another stage": (lambda r, e: find(e, kind="forward", slot=0).update(call=1), "has no place"),
    "a microbatch of another round": (
        lambda r, e: find(e, kind="forward", slot=0).update(microbatch=1),
        "belongs to another round",
    ),
    "an overlap on a worker": (
        lambda r, e: move(find(e, kind="recompute", slot=2), find(e, kind="forward", slot=0)["start_s"] + 0.5),
        "began on worker 0 before the end",
    ),
    "a later slot first": (
        lambda r, e: move(find(e, kind="forward", slot=4), -5),
        "came after slot 4",
    ),
    "microbatches out of order": (
        lambda r, e: (
            r.update(plan=r["plan"].replace("round 1", "round 2"), slots=r["slots"][:3]),
            [row.update(slot=row["slot"] % 3, worker=row["slot"] % 3 % 2) for row in e],
            [row.update(microbatch=1 - row["microbatch"]) for row in e if row["microbatch"] >= 0],
        ),
        "served microbatches",
    ),
    "backward before forward": (
        lambda r, e: move(find(e, kind="backward", slot=1), find(e, kind="forward", slot=1)["start_s"] - 2),
        "microbatch 0 ran",
    ),
    "no recomputation": (lambda r, e: e.remove(find(e, kind="recompute", slot=2)), "ran backward"),
    "a call outside of the plan in another's turn": (
        lambda r, e: e.append(find(e, kind="recompute", slot=2) | {"slot": -1, "microbatch": 1, "start_s": 3.5}),
        "in slot -1 is in the turn of backward of call 0 for microbatch 0 in slot 2",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_rule_can_be_broken(name: str) -> None:
    damage, words = DAMAGES[name]
    step = copy.deepcopy(report())
    damage(step, step["events"])
    found = turns.faults(step)
    assert any(words in text for text in found), found


# ------------------------------------------------------------------------------------------------------------- ordering


def on_two(work: Callable[[Device, Device, torch.Tensor], None]) -> list[str]:
    """The faults of ``work`` on two devices and a tensor."""
    devices = make_devices("cpu", [torch.device("cpu")] * 2, Emulation(poison=True))
    with Ordering() as ordering:
        work(*devices, torch.ones(100))
    for device in devices:
        for stream in device.streams:
            stream.synchronize()
        device.close()
    return ordering.faults


def test_a_copy_that_waits_is_in_order() -> None:
    def work(a: Device, b: Device, t: torch.Tensor) -> None:
        there, back = torch.empty(100), torch.empty(100)
        a.weights_up.copy(there, t)
        b.activations_down.wait(a.weights_up.record())
        b.activations_down.copy(back, there)
        b.activations_down.synchronize()
        back.sum()

    assert on_two(work) == []


@pytest.mark.parametrize("missing", ["stream", "host"])
def test_a_copy_that_does_not_wait_is_a_fault(missing: str) -> None:
    def work(a: Device, b: Device, t: torch.Tensor) -> None:
        there, back = torch.empty(100), torch.empty(100)
        a.weights_up.copy(there, t)
        if missing == "host":
            b.activations_down.wait(a.weights_up.record())
        b.activations_down.copy(back, there)
        if missing == "stream":
            b.activations_down.synchronize()
        back.sum()

    [fault] = on_two(work)
    assert ("aten::sum on host" if missing == "host" else "a copy on roundpipe-dev1-activations_down") in fault


def test_computing_is_late_however_soon_it_is_done() -> None:
    """The download reads the right values on an emulated device, and it may not rely on that."""

    def work(a: Device, b: Device, t: torch.Tensor) -> None:
        there = torch.empty(100)
        a.weights_up.copy(there, t)
        with a.activate():
            a.compute.wait(a.weights_up.record())
            there.mul_(2)
        a.activations_down.copy(torch.empty(100), there)

    [fault] = on_two(work)
    assert fault == "a copy on roundpipe-dev0-activations_down does not wait for aten::mul_ on roundpipe-dev0-compute"
