"""The paper's five schedules: its own figures, schedules counted by hand, and rules that hold for every case."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its files import each other by their names

from paper_bubble import find_bubble
from paper_cases import FIGURES, Case, read_cases
from paper_schedules import MOST_OPERATIONS, PaperRun, StageOperation, run_case

PAPER = read_cases()


def case_of(schedule: Any, workers: int, microbatches: int, forward: Iterable[int], **change: Any) -> Case:
    """Forward takes 1 ms a layer, backward 2, the head 3 and 4, a hop nothing, unless ``change`` says otherwise."""
    stages = tuple(forward)
    backward = tuple(change.pop("backward", ()))
    layers = sum(backward) if backward else sum(stages)
    times = {"forward_ms": 1, "backward_ms": 2, "head_forward_ms": 3, "head_backward_ms": 4, "hop_ms": 0} | change
    return Case("m", schedule, workers, microbatches, layers, **times, forward_stages=stages, backward_stages=backward)


def rows(run: PaperRun, worker: int) -> list[tuple[str, float, float]]:
    """What a worker does: direction, stage and microbatch; begin and end in milliseconds."""
    return [
        (f"{op.direction}{op.stage} m{op.microbatch}", op.start / run.ticks_per_ms, op.end / run.ticks_per_ms)
        for op in run.operations
        if op.worker == worker
    ]


def order(run: PaperRun, worker: int) -> str:
    """Direction and microbatch, as in ``F0 F1 B0``; of later stages with a dash for each time round the workers."""
    return " ".join(
        f"{op.direction}{op.microbatch}{chr(39) * (op.stage // run.case.workers)}"
        for op in run.operations
        if op.worker == worker
    )


@pytest.mark.parametrize("case", PAPER, ids=lambda case: f"{case.model}-{case.schedule}")
def test_the_papers_figures(case: Case) -> None:
    """To the last digit that the paper's simulator prints; cases without figures must run all the same."""
    bubble = find_bubble(run_case(case))
    for name, value in (case.expected or {}).items():
        unit = 0.0005 if name.endswith("_ms") else 0.00005
        assert getattr(bubble, name) == pytest.approx(value, abs=1.001 * unit), name
    assert case.expected is None or set(case.expected) == set(FIGURES)


# -- counted by hand -------------------------------------------------------------------------------------------------


def test_gpipe_with_hops_and_the_heads_own_order() -> None:
    run = run_case(case_of("gpipe", 2, 2, [1, 2], hop_ms=0.5))
    assert rows(run, 0) == [("F0 m0", 0, 1), ("F0 m1", 1, 2), ("B0 m0", 22, 25), ("B0 m1", 32, 35)]
    assert rows(run, 1) == [("F1 m0", 1.5, 6.5), ("F1 m1", 6.5, 11.5), ("B1 m0", 11.5, 21.5), ("B1 m1", 21.5, 31.5)]
    assert run.parts["F", 1] == (("forward", 4), ("head forward", 6))  # in ticks of half a millisecond
    assert run.parts["B", 1] == (("head backward", 8), ("recompute", 4), ("backward", 8))
    bubble = find_bubble(run)
    assert bubble.makespan_ms == 35
    # Worker 0 idles 20 ms at the turn and 7 between its backwards, worker 1 1.5 before and 3.5 after.
    assert bubble.switch_pct == pytest.approx(100 * 20 / 70)
    assert bubble.intra_pct == pytest.approx(100 * 7 / 70)
    assert bubble.fill_pct == pytest.approx(100 * 1.5 / 70)
    assert bubble.drain_pct == pytest.approx(100 * 3.5 / 70)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "orders"),
    [
        ("1f1b", 2, 4, ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("gpipe", 2, 3, ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]),
        ("looped-bfs", 4, 2, ["F0 F1 F0' F1' B1' B0' B1 B0", "F0 F1 F0' F1' B1' B0' B1 B0"]),
        ("interleaved-1f1b", 4, 2, ["F0 F1 F0' F1' B0' B1' B0 B1", "F0 F1 F0' B0' F1' B1' B0 B1"]),
    ],
)
def test_orders(schedule: str, stages: int, microbatches: int, orders: list[str]) -> None:
    run = run_case(case_of(schedule, 2, microbatches, [1] * stages))
    assert [order(run, worker) for worker in range(2)] == orders


def test_roundpipe() -> None:
    """Two blocks of two and one microbatches; 1 + 3 slots on two workers, so the second block begins on worker 0."""
    stages = {"backward": [1, 1, 1]}
    run = run_case(case_of("roundpipe", 2, 3, [2], **stages, hop_ms=1))
    assert run.parts["B", 0] == (("forward", 1), ("head forward", 3), ("head backward", 4), ("backward", 2))
    assert run.parts["B", 1] == (("recompute", 1), ("backward", 2))
    # B0 is the fused stage: 4 ms of forward, which the model lets begin before its input is there, and 6 ms after.
    assert rows(run, 1)[:2] == [("B0 m0", 0, 10), ("B0 m1", 10, 20)]
    assert rows(run, 0)[:4] == [("F0 m0", 0, 2), ("F0 m1", 2, 4), ("B1 m0", 10, 13), ("B1 m1", 20, 23)]
    assert rows(run, 1)[2:4] == [("B2 m0", 20, 23), ("B2 m1", 23, 26)]
    assert rows(run, 0)[4:] == [("F0 m2", 23, 25), ("B1 m2", 36, 39)]
    assert rows(run, 1)[4:] == [("B0 m2", 26, 36), ("B2 m2", 39, 42)]


# -- rules that hold for every case ----------------------------------------------------------------------------------


def cuts(draw: st.DrawFn, layers: int, stages: int) -> tuple[int, ...]:
    ends = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return tuple(after - before for before, after in pairwise([0, *ends, layers]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule = draw(st.sampled_from(["1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "roundpipe"]))
    workers, microbatches, layers = draw(st.integers(1, 5)), draw(st.integers(1, 11)), draw(st.integers(1, 9))
    backward: tuple[int, ...] = ()
    if schedule == "roundpipe":
        backward = cuts(draw, layers, draw(st.integers(1, 12)))
        ahead = layers - backward[0]
        forward = cuts(draw, ahead, draw(st.integers(1, 12))) if ahead or draw(st.booleans()) else ()
    elif schedule == "interleaved-1f1b":
        local = draw(st.integers(1, 3))
        forward = cuts(draw, layers, workers * local)
        if local > 1:
            microbatches -= microbatches % max(microbatches // workers, 1)
    else:
        forward = cuts(draw, layers, draw(st.integers(1, 12 if schedule == "looped-bfs" else workers)))
    time = st.sampled_from([0, 0.1, 0.7, 1, 3.25, 40.0])
    times = [draw(time) for _ in range(5)]
    return Case("m", schedule, workers, microbatches, layers, *times, forward, backward)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=cases())
@example(case=case_of("interleaved-1f1b", 4, 2, [1] * 12))  # fewer microbatches than workers
@example(case=case_of("interleaved-1f1b", 4, 7, [0] * 11 + [1]))
@example(case=case_of("roundpipe", 8, 3, [1], backward=[0, 1]))  # workers without any slot
@example(case=case_of("roundpipe", 2, 5, [], backward=[3]))  # everything is fused
def test_what_holds_for_every_schedule(case: Case) -> None:
    run = run_case(case)
    hop, last = Fraction(str(case.hop_ms)) * run.ticks_per_ms, len(case.forward_stages) - 1
    done = {(op.direction, op.stage, op.microbatch): op for op in run.operations}
    both_ways = len(case.backward_stages) or len(case.forward_stages)
    assert len(done) == len(run.operations) == case.microbatches * (len(case.forward_stages) + both_ways)

    of_worker: dict[int, list[StageOperation]] = defaultdict(list)
    for op in run.operations:
        of_worker[op.worker].append(op)
        assert op.end - op.start == sum(length for _, length in run.parts[op.direction, op.stage])
    for operations in of_worker.values():
        assert all(before.end <= after.start for before, after in pairwise(operations)), "two at a time"

    for op in run.operations:
        ready = op.start
        if op.direction == "F":
            needs = [("F", op.stage - 1)] if op.stage else []
        elif case.schedule == "roundpipe":
            needs = [("B", op.stage - 1)] if op.stage else [("F", last)] if last >= 0 else []
            ahead = [length for kind, length in run.parts["B", op.stage] if "backward" not in kind]
            ready += sum(ahead)
        else:
            needs = [("F", op.stage)] + ([("B", op.stage + 1)] if op.stage < last else [])
        for direction, stage in needs:
            before = done[direction, stage, op.microbatch]  # type: ignore[index]
            assert ready >= before.end + (hop if before.worker != op.worker else 0), (op, before)

    work = sum(op.end - op.start for op in run.operations)
    per_microbatch = (
        case.layers * (2 * case.forward_ms + case.backward_ms) + case.head_forward_ms + case.head_backward_ms
    )
    fused = case.backward_stages[0] * case.forward_ms if case.backward_stages else 0  # its forward is not repeated
    assert work / run.ticks_per_ms == pytest.approx(case.microbatches * (per_microbatch - fused))
    assert run.makespan * case.workers >= work

    bubble = find_bubble(run)
    shares = [bubble.fill_pct, bubble.switch_pct, bubble.drain_pct, bubble.intra_pct]
    assert all(share >= 0 for share in shares)
    assert bubble.bubble_pct == pytest.approx(sum(shares), abs=1e-9)
    idle = 100 * (1 - work / (run.makespan * case.workers)) if run.makespan else 0
    assert bubble.bubble_pct == pytest.approx(idle, abs=1e-9)


# -- what a schedule cannot run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (case_of("1f1b", 2, 2, [1, 1, 1]), "1f1b runs one stage on each worker: at most workers=2, not 3"),
        (
            case_of("interleaved-1f1b", 2, 5, [1] * 4),
            "cannot cut microbatches=5 into equal rounds: there are 2 .* a multiple of 2",
        ),
        (case_of("looped-bfs", 1, 10**6, [1]), f"too many to simulate: at most {MOST_OPERATIONS:,}"),
    ],
)
def test_what_a_schedule_cannot_run(case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_case(case)
