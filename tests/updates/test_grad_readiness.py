"""Which bucket's gradients are there, and when."""

import functools
from types import SimpleNamespace

from torch import nn

from lightning_roundpipe.engine.slots import Slot, SlotGradients
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.updates.grad_readiness import GradReadiness


def buckets(count):
    return [ParamBucket(index, [nn.Parameter()]) for index in range(count)]


class Layer:
    index = 0

    def __init__(self, bucket):
        self.bucket = bucket


def slot(bucket):
    spec = SimpleNamespace(scope=CancelScope(), readiness=None)
    return Slot(0, 0, "fused", range(5), [Layer(bucket)], [0], spec, SlotGradients())


class Upload:
    """An event that notes that it was waited for."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def wait(self):
        self.notes.append(self.name)


def test_a_unit_is_sent_when_its_uploads_are_over():
    a, b = buckets(2)
    slots, notes = [slot(a), slot(b), slot(a)], list[str]()
    readiness = GradReadiness([a, b], reports_uploads=True)
    for each in slots:
        each.spec.readiness = readiness
        each.report_coming()
    send = functools.partial(readiness.take, wait=False, uploaded=lambda bucket: notes.append(f"unit {bucket.index}"))
    readiness.uploading(b, Upload("b", notes))
    readiness.uploading(a, Upload("a", notes))
    assert send() == [] and notes == []  # user code may still read them, before all losses
    readiness.forward_ended([b])
    assert send() == [] and notes == []  # a is to be uploaded once more, and user code has read b
    readiness.uploading(a, Upload("a again", notes))
    assert send() == [] and notes == ["a", "a again", "unit 0"]
    readiness.ended()
    assert send() == [] and notes[3:] == ["b", "unit 1"]
    for each in slots:
        each.report_closed()
    assert send() == [b, a] and len(notes) == 5
