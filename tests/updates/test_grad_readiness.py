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


def slot(*held, adds=()):
    layers = [Layer(bucket) for bucket in held]
    sums = {call: SimpleNamespace(layer=Layer(bucket)) for call, bucket in enumerate(adds)}
    return made_slot(0, layers, sums)


def made_slot(index, layers, sums):
    spec = SimpleNamespace(scope=CancelScope(), readiness=None)
    return Slot(index, 0, "fused", range(5), layers, [0], spec, SlotGradients(sums))


def there(readiness):
    return [bucket.index for bucket in readiness.take(wait=False)]


class Upload:
    """An event that notes that it was waited for."""

    def __init__(self, name, notes, error=None):
        self.name, self.notes, self.error = name, notes, error

    def wait(self):
        self.notes.append(self.name)
        if self.error is not None:
            raise self.error


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
