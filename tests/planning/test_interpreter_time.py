"""One interpreter for all workers: seconds of it are taken once, and turns wait for them."""

from dataclasses import replace

from lightning_roundpipe.planning import Plan
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.pipeline import run_steps


def costs(issue_s, *, is_synchronous, calls=2):
    call = CallCost("", 1.0, 2.0, 0, 0, 0, 0, True, issue_s=issue_s, is_synchronous=is_synchronous)
    return Costs(tuple(replace(call, layer=str(number)) for number in range(calls)))


ONE, TWO = Plan.parse("forward none; fused 0-1; backward none; round 4"), Plan.per_call(2, 4)


def test_the_interpreter_is_ahead_of_the_workers_until_it_is_slower():
    """A microbatch takes 6 seconds of one worker, in one turn."""
    assert run_steps(ONE, costs(0.5, is_synchronous=False), 1, 4).makespan_s == 4 * 6
    assert run_steps(ONE, costs(4.0, is_synchronous=False), 1, 4).makespan_s == 4 * 8, "two calls, 4 seconds each"


def test_where_the_host_waits_for_the_device_nothing_is_ahead():
    assert run_steps(ONE, costs(0.5, is_synchronous=True), 1, 4).makespan_s == 4 * (6 + 2 * 0.5)


def test_workers_share_the_interpreter():
    """However many there are, a step takes no less than all that is issued: a forward and a recomputation."""
    shared = costs(6.0, is_synchronous=True)
    issued = 4 * (6.0 + 6.0 + 6.0)  # layer 0 forward, the fused layer 1, layer 0 again
    for workers in (1, 2, 3):
        assert run_steps(TWO, shared, workers, 4).makespan_s >= issued
    free = run_steps(TWO, costs(0.0, is_synchronous=True), 3, 4).makespan_s
    assert free < issued, "which is what limits it"
