"""Out of memory, anywhere: the message says what was resident and which settings help, and training can begin again.

Emulated devices count what they hold; a device that gets smaller when a batch starts runs out of memory at whatever
comes next. What only CUDA reports (a backward, a copy's target) is raised by hand, as torch raises it.
"""

import itertools
import re

import faulty
import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from faulty import CUT, PLANTED, fail, notes

from lightning_roundpipe.devices import DeviceOutOfMemory, StreamError, emulated_streams

REMEDY = "Use smaller microbatches (half the batch size, or twice num_microbatches), shorter sequences"


@pytest.fixture(autouse=True)
def _cleared():
    PLANTED.clear()
    yield
    PLANTED.clear()


class Shrink(pl.Callback):
    """From batch ``batch`` on, devices have room for only ``room`` bytes more than what they hold when it starts."""

    def __init__(self, batch, room):
        self.batch, self.room = batch, room

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            self.batch = -1
            for device in trainer.strategy._engine.context.pool.devices:
                device._ledger.limit = device.resident_bytes() + self.room


@pytest.mark.slow
def test_a_device_that_is_too_small():
    """Whatever the room is, it is enough or there is an error; and with more and more of it, that comes later."""
    seen = []
    for room in itertools.count(0, 176):
        trainer = harness.trainer_of(faulty.strategy(), devices=2, callbacks=[Shrink(2, room)])
        _, error = faulty.fit(trainer)
        if error is None:
            break
        assert isinstance(error, DeviceOutOfMemory)
        said, note = str(error), notes(error)
        assert re.match(r"Emulated CUDA device [01] is out of memory: [\d.]+ \w+ for .+ do not fit, ", said), said
        assert re.search(r"are in use \((weights|gradients).* [\d.]+ KiB", said), said
        assert REMEDY in said and "Or raise memory= of emulation=" in said
        where = re.search(r"^roundpipe: in layer 'model\.\S+', (\w+)( pass)?, microbatch \d, slot \d+", note)
        assert where, note
        what = re.search(r"for (.+) do not fit", said)
        seen.append(f"{where[1]}: {what[1] if what else ''}")
    assert room > 0
    assert seen[0] == "forward: inputs of the running call"
    phases = {text.split(":")[0] for text in seen}
    # A forward runs as its recomputation does, so that a recomputation seldom comes first.
    assert {"forward", "backward"} <= phases <= {"forward", "recomputation", "backward"}, seen
    assert any("saved for backward" in text for text in seen)
    trainer = harness.trainer_of(faulty.strategy(), devices=2, callbacks=[Shrink(2, 0)])
    assert isinstance(faulty.fit(trainer)[1], DeviceOutOfMemory)
    faulty.trains_again(trainer)


@pytest.mark.parametrize(
    ("where", "sample", "time", "phase"),
    [("block 1", 3, 0, "forward"), ("block 1", 3, 1, "recomputation"), ("block 1 backward", 3, 0, "backward")],
)
def test_as_torch_reports_it(where, sample, time, phase):
    """torch says only what it wanted: what the device held, and what helps, is in a second note."""
    error = fail(2, where, sample, time, torch.OutOfMemoryError, again=phase == "backward")
    assert type(error) is torch.OutOfMemoryError
    place, room = error.__notes__
    assert re.search(rf"layer 'model.blocks.1', {phase}( pass)?, microbatch 1", place)
    assert re.match(r"roundpipe: device cpu \(worker [01]\) held (weights|gradients).* [\d.]+ (Ki)?B", room), room
    assert REMEDY in room


@pytest.mark.parametrize("number", [0, 20])
def test_a_copy_that_fails(number):
    """Of weights, boundaries or gradients: a stream has failed, and whoever needs what it should bring says so."""
    copies = itertools.count(-number)
    real = emulated_streams.move

    def move(*args):
        if PLANTED.where == "armed" and next(copies) == 0:
            PLANTED("armed")
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_streams, "move", move)
        callbacks = [faulty.PlantAt(2, "armed")]
        trainer = harness.trainer_of(faulty.strategy(plan=CUT), devices=2, callbacks=callbacks)
        _, error = faulty.fit(trainer, traced=False)
    assert len(PLANTED.raised_at) == 1
    assert isinstance(error, StreamError), "swallowed"
    assert re.match(r"roundpipe-dev[01]-\w+ failed: Boom\('planted'\)", str(error))
    assert type(error.__cause__) is faulty.Boom
    if number == 20:
        faulty.trains_again(trainer)


def test_a_full_device_is_named_in_a_validation_that_is_its_kinds_first():
    """The failing call has times, and is none of those that the batch had made: looking it up hid the error."""
    module, batches = zoo.make_module("mlp"), harness.loader(zoo.make_batches("mlp", 1, samples=600))
    trainer = harness.trainer_of(harness.ours(emulation={"memory": "200KB"}))
    with harness.quiet(), pytest.raises(DeviceOutOfMemory, match="out of memory") as error:
        trainer.validate(module, batches, verbose=False)
    assert "evaluation, microbatch 0, device cpu" in error.value.__notes__[0]
