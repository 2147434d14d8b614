"""Stages that unpack packed weights once for all their microbatches: the same bits, in memory that the plan counts."""

from collections import Counter

import pytest
from harness import assert_identical
from test_quantized import PLAN, batches, task, trained, with_experts

from lightning_roundpipe.model import quantize_experts, unpacked
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import WorkerNeeds, device_bytes
from lightning_roundpipe.planning.schedule import Plan

ONCE = f"{PLAN}; unpack once 0-4"
DATA = batches(2, 8)
BLOCK = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
"""Bytes of the weights of a block in 32 bits."""


def fit(module, plan, devices=2, **options):
    return trained(module, devices, DATA, plan=plan, **({"num_microbatches": 4} | options))


@pytest.fixture
def unpackings(monkeypatch):
    """How often weights were unpacked: of linear layers to be kept, of experts in any case."""
    found = Counter()
    places = {"dense": (unpacked, "unpack"), "experts": (quantize_experts, "_unpack")}

    def counting(kind, own):
        def unpack(*args, **kwargs):
            found[kind] += 1
            return own(*args, **kwargs)

        return unpack

    for kind, (module, name) in places.items():
        monkeypatch.setattr(module, name, counting(kind, getattr(module, name)))
    return found


@pytest.mark.slow
def test_no_bit_depends_on_how_often_weights_are_unpacked(unpackings):
    module = task("nf4")
    per_use = fit(module, PLAN, 1)
    assert not unpackings
    once = fit(module, ONCE, 1)
    assert_identical(per_use, once)
    # Seven weights of each block, of which a round has two in forward, two in the fused and two in backward stages. The
    # first step has no plan yet.
    steps, rounds = len(DATA) - 1, 2
    assert unpackings == {"dense": steps * rounds * (2 + 2 + 2) * 7}
    check_counted(per_use, once)


def check_counted(per_use, once):
    # The arena is as large as the stage needs that has the most, and the plan and the device both count it.
    for key in ("planned_device_bytes", "peak_device_bytes"):
        most, before = (max(r[key]) if "peak" in key else r[key] for r in (once.report, per_use.report))
        assert most - before == 2 * BLOCK, key


@pytest.mark.parametrize(
    ("devices", "plan"),
    [
        (3, f"{PLAN}; recompute ahead; unpack once 1-4".replace("round 2", "round 4")),
        (3, "forward none; fused 0-6; backward none; round 1; unpack once 0"),
    ],
)
def test_for_all_devices_and_plans(devices, plan):
    module = task()
    careful = {"poison": True, "delay_seed": 1}
    assert_identical(fit(module, PLAN), fit(module, plan, devices, emulation=careful))


@pytest.mark.slow
def test_experts(unpackings):
    module = with_experts()
    per_use = fit(module, PLAN)
    often = unpackings.pop("experts")
    assert_identical(per_use, fit(module, ONCE, emulation={"poison": True}))
    assert 0 < unpackings["experts"] < often


@pytest.mark.slow
def test_mixed_precision():
    """In mixed precision, forward and backward read copies of different formats."""
    module = task()
    assert_identical(*(trained(module, 2, DATA, "bf16-mixed", plan=plan, num_microbatches=4) for plan in (PLAN, ONCE)))


@pytest.mark.slow
def test_a_copy_without_room_is_made_for_each_use(monkeypatch, unpackings):
    module = task()
    per_use = fit(module, PLAN)
    real = WorkerNeeds.reserved
    monkeypatch.setattr(WorkerNeeds, "reserved", lambda *given: real(*given)._replace(copies=BLOCK))
    assert_identical(per_use, fit(module, ONCE))
    # Of a stage with two blocks, only the first has room.
    assert unpackings["dense"] > 2 * 6 * 7


@pytest.mark.slow
def test_the_planner_unpacks_once_where_a_budget_has_room_for_it():
    module = task()
    found = {}
    for budget in (None, "64MiB", "250KiB"):
        report = fit(module, "static", memory_budget=budget).report
        assert report is not None
        found[budget] = Plan.parse(report["plan"]).unpack_once
        assert max(report["peak_device_bytes"]) <= report["planned_device_bytes"]
    assert found["64MiB"] and not found[None] and not found["250KiB"], found


@pytest.mark.slow
def test_a_plan_by_hand_whose_copies_do_not_fit_is_refused():
    small = fit(task(), PLAN).report
    assert small is not None
    budget = device_bytes(Plan.parse(PLAN), Costs.from_dict(small["costs"]), small["workers"]) + BLOCK
    with pytest.raises(ValueError, match=r"leave out '; unpack once 0-4'"):
        fit(task(), ONCE, memory_budget=budget)
