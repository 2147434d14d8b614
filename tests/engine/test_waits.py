"""Each wait of a step, taken out: numbers, turns or the order of accesses to memory show that it is missing.

A wait that can be left out unnoticed is either not needed or not tested. `Ordering` needs no luck for this: it takes
nothing from timing. Waits between threads show in the numbers, in an error, or in a step that hangs.
"""

import functools
import time

import harness
import pytest
import stress
from ordering import Ordering
from patience import longer_each_try
from stress import CALLS, Case
from without import take_out

from lightning_roundpipe.updates import bucket_stepper
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

CUT = Case(harness.per_call(CALLS, 2), 2, 4, (6, 6, 6), drops=False)
"""Two rounds, a cut at every call: gradients travel up and down, and inputs between the workers."""
EMPTY = Case("forward 0-4; fused 5; backward 3-4 1-2 0; round 1", 1, 3, (6, 6, 6), empty=(1, 2), drops=False)
"""The last round has no backward: its slots close without one."""
CARRYING = Case("forward 0-1 2-3; fused 4-5; backward 2-3 0-1; round 2; carry 0-3 from 1", 2, 4, (6, 6, 6), drops=False)
"""Products travel behind gradients."""
CASES = {"cut": CUT, "empty": EMPTY, "carrying": CARRYING}

WAITS = [
    ("engine.activations:Activations._downloaded", "stream.wait(ready)"),
    ("engine.activations:Activations._upload", "stream.wait(saved.ready)"),
    ("engine.carrying:download_parts", "stream.wait(home.compute.record())"),
    ("engine.layer_calls:Tape.moved", "pool.workers[to.index].follow(event)"),
    ("engine.step_slots:Turns.wait_for", "self.context.pool.baton.wait(functools.partial(what.when, version))"),
    ("engine.microbatch:CallingThread.run", "baton.wait(self._after.then)"),
    ("engine.step:Step._wait_for_outputs", "self.context.pool.wait_for(microbatch.ready, self.spec.scope)"),
    ("engine.step:Step._wait_for_outputs", "event.wait()"),
    ("engine.uploads:SlotMemory._upload", "stream.wait(event)"),
    ("engine.uploads:SlotMemory.open_gradients", "stream.wait(event)"),
    ("engine.worker:GradientSender._send", "stream.wait(end)"),
    ("engine.worker:Worker._wait_for_gradients", "self.device.compute.wait(event)"),
    ("engine.worker:Worker.close_slot", "compute.wait(slot.weights.uploads[layer.index].end)"),
    ("engine.worker:Worker.close_slot", "self._wait_for_gradients(slot)  # a slot may close without a backward"),
    ("engine.worker:Worker.follow", "self.device.compute.wait(event)"),
    ("engine.worker:Worker.gradients_of", "self._wait_for_gradients(slot)"),
    ("engine.worker:Worker.bring_in", "self._baton.wait(upload.enqueued.then)"),
    ("engine.worker:Worker.bring_in", "self.follow(upload.end)"),
    ("engine.worker:Worker.arrived", "self.follow(event)"),
]


@pytest.fixture(autouse=True)
def late(monkeypatch):
    """Updates are late, bucket by bucket: by so many seconds."""
    seconds = [0.02]
    real = BucketStepper._apply

    def apply(*args):
        time.sleep(seconds[0])
        real(*args)

    monkeypatch.setattr(bucket_stepper, "PIECE", 0)
    monkeypatch.setattr(BucketStepper, "_apply", apply)
    return seconds


def noticed(case, where="", line=""):
    """What the checks say of a run without ``line``."""
    expected = stress.reference(case)
    with pytest.MonkeyPatch.context() as patch:
        if where:
            take_out(patch, where, line)
            patch.setattr(stress, "WATCHDOG", 10.0)  # a step that hangs is noticed
        try:
            with Ordering() as ordering:
                run = stress.train(case)
        except Exception as error:
            return [repr(error)]
    return [*ordering.faults, *stress.wrong(run, expected)]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_noticed_while_all_are_there(case):
    """Or the test below would say nothing."""
    assert noticed(CASES[case]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("where", "line"), WAITS)
@functools.partial(longer_each_try, each=(1.0, 4.0, 16.0))
def test_a_wait_that_is_missing_is_noticed(where, line, late, times):
    late[0] = 0.02 * times
    assert any(noticed(case, where, line) for case in CASES.values()), "nothing shows"
