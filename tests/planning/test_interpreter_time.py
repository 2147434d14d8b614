"""One interpreter for all workers: seconds of it are taken once, and turns wait for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.planning import Plan
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.estimate import EXPERT_OPERATIONS, estimate_costs
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.meter import Meter
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.shared_seconds import SharedSeconds


def test_what_is_taken_is_not_taken_again() -> None:
    interpreter = SharedSeconds()
    assert interpreter.take(2, 3) == 5
    assert interpreter.take(0, 1) == 1
    assert interpreter.take(0, 2) == 6, "one second before the first interval, and one behind it"
    assert interpreter.take(3, 0) == 3
    assert interpreter.take(6, 1) == 7
    assert interpreter.take(4, 1) == 8


def test_the_intervals_hold_what_was_taken_and_never_more_than_one_at_a_time() -> None:
    random, interpreter, taken = Random(0), SharedSeconds(), 0.0
    for _ in range(500):
        ready, seconds = random.uniform(0, 50), random.uniform(0, 0.3)
        end = interpreter.take(ready, seconds)
        taken += seconds
        assert end >= ready + seconds - 1e-9
        intervals = list(zip(interpreter._starts, interpreter._ends, strict=True))
        assert all(start < stop for start, stop in intervals)
        assert all(before[1] < after[0] for before, after in pairwise(intervals))
        assert sum(stop - start for start, stop in intervals) == pytest.approx(taken)


def costs(issue_s: float, *, is_synchronous: bool, calls: int = 2) -> Costs:
    call = CallCost("", 1.0, 2.0, 0, 0, 0, 0, True, issue_s=issue_s, is_synchronous=is_synchronous)
    return Costs(tuple(replace(call, layer=str(number)) for number in range(calls)))


ONE, TWO = Plan.parse("forward none; fused 0-1; backward none; round 4"), Plan.per_call(2, 4)


def test_the_interpreter_is_ahead_of_the_workers_until_it_is_slower() -> None:
    """A microbatch takes 6 seconds of one worker, in one turn."""
    assert run_steps(ONE, costs(0.5, is_synchronous=False), 1, 4).makespan_s == 4 * 6
    assert run_steps(ONE, costs(4.0, is_synchronous=False), 1, 4).makespan_s == 4 * 8, "two calls, 4 seconds each"


def test_where_the_host_waits_for_the_device_nothing_is_ahead() -> None:
    assert run_steps(ONE, costs(0.5, is_synchronous=True), 1, 4).makespan_s == 4 * (6 + 2 * 0.5)


def test_workers_share_the_interpreter() -> None:
    """However many there are, a step takes no less than all that is issued: a forward and a recomputation."""
    shared = costs(1.5, is_synchronous=True)
    issued = 4 * (1.5 + 1.5 + 1.5)  # layer 0 forward, the fused layer 1, layer 0 again
    for workers in (1, 2, 3):
        assert run_steps(TWO, shared, workers, 4).makespan_s >= issued
    free = run_steps(TWO, costs(0.0, is_synchronous=True), 3, 4).makespan_s
    assert free < issued, "which is what limits it"


def test_calls_and_turns_take_the_interpreter_where_it_is_shared() -> None:
    plain = costs(0.0, is_synchronous=False)
    hidden = Rules(host=HostTime(call_s=0.5, turn_s=0.25, shared=True))
    assert run_steps(ONE, plain, 1, 4, hidden).makespan_s == 4 * 6
    slow = Rules(host=HostTime(call_s=2.0, turn_s=1.0, shared=True))
    assert run_steps(ONE, plain, 1, 4, slow).makespan_s == 4 * 9, "a turn, two calls and their backwards"


class Experts(nn.Module):
    """Three-dimensional weights, as Hugging Face's fused experts have."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, 8, 8, device="meta"))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.relu(states @ self.weight[0])


class Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = Experts(experts)
        self.last = nn.Linear(8, 8, device="meta")

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts(states))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layer = Layer(experts)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> object:
        class Output:
            loss = self.layer(input_ids).sum()

        return Output


@pytest.mark.parametrize("experts", [1, 5])
def test_experts_in_turn_are_issued_one_after_another(experts: int) -> None:
    model = Model(experts)
    machine = replace(read_machine("rtx4090x8"), issue_s=1.0)
    batch = {"input_ids": torch.empty(4, 8, device="meta")}
    layers = {"layer": model.layer}
    (together,) = estimate_costs(model, layers, batch, machine)
    (apart,) = estimate_costs(model, layers, batch, machine, experts_in_turn=True)
    assert not together.is_synchronous and apart.is_synchronous == (experts > 1)
    assert together.issue_s > 0
    with Meter(machine) as meter, meter.scope() as alone:
        model.layer.experts(batch["input_ids"])
    assert alone.operations >= 3, "a view, a product and its activation"
    assert apart.issue_s - together.issue_s == (experts - 1) * alone.operations
    assert (apart.forward_s, apart.backward_s) == (together.forward_s, together.backward_s)


def test_operations_of_an_expert_are_those_that_were_counted_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(5)
    machine = replace(read_machine("rtx4090x8"), issue_s=1.0)
    batch = {"input_ids": torch.empty(4, 8, device="meta")}
    layers = {"layer": model.layer}
    (together,) = estimate_costs(model, layers, batch, machine)
    with Meter(machine) as meter, meter.scope() as alone:
        model.layer.experts(batch["input_ids"])
    monkeypatch.setitem(EXPERT_OPERATIONS, type(model.layer.experts).__name__, 70)
    (apart,) = estimate_costs(model, layers, batch, machine, experts_in_turn=True)
    assert apart.issue_s - together.issue_s == 5 * 70 - alone.operations


@pytest.mark.parametrize("name", sorted(EXPERT_OPERATIONS))
def test_classes_whose_operations_were_counted_exist(name: str) -> None:
    assert any(hasattr(module, name) for module in (modeling_gpt_oss, modeling_qwen3_moe))
