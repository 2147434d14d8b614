"""Which unit's gradients are there, and when."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from patience import join, start
from torch import nn

from lightning_roundpipe.devices import StreamAborted
from lightning_roundpipe.runtime.arrivals import Arrivals, Dropped
from lightning_roundpipe.runtime.slots import Slot
from lightning_roundpipe.runtime.units import Unit
from lightning_roundpipe.runtime.updates import Updates


def units(count: int) -> list[Unit]:
    return [Unit(index, [nn.Parameter()]) for index in range(count)]


def slot(*held: Unit, adds: tuple[Unit, ...] = ()) -> Slot:
    layers: list[Any] = [SimpleNamespace(unit=unit) for unit in held]
    sums: Any = {call: SimpleNamespace(layer=SimpleNamespace(unit=unit)) for call, unit in enumerate(adds)}
    return Slot(0, 0, 0, "backward", range(1), layers, sums, [0])


def there(arrivals: Arrivals) -> list[int]:
    return [unit.index for unit in arrivals.take(wait=False)]


def test_a_unit_comes_when_all_slots_that_hold_it_are_closed() -> None:
    a, b, c = units(3)
    slots = [slot(a), slot(b, c), slot(b), slot(adds=(a,))]
    arrivals = Arrivals([a, b, c])
    arrivals.expect(slots)
    arrivals.passed(())
    assert there(arrivals) == []
    arrivals.closed(slots[1])
    assert there(arrivals) == [2]
    arrivals.closed(slots[0])
    assert there(arrivals) == []
    arrivals.closed(slots[3])
    arrivals.closed(slots[2])
    assert there(arrivals) == [0, 1]
    arrivals.ended()
    assert there(arrivals) == []


class Upload:
    """An event that notes that it was waited for."""

    def __init__(self, name: str, notes: list[str], error: Exception | None = None) -> None:
        self.name, self.notes, self.error = name, notes, error

    def wait(self) -> None:
        self.notes.append(self.name)
        if self.error is not None:
            raise self.error


def test_a_unit_is_sent_when_its_uploads_are_over() -> None:
    a, b = units(2)
    slots, notes = [slot(a), slot(b), slot(a)], list[str]()
    arrivals = Arrivals([a, b])
    arrivals.expect(slots)
    send = functools.partial(arrivals.take, wait=False, sent=lambda unit: notes.append(f"unit {unit.index}"))
    arrivals.uploading(b, Upload("b", notes))  # type: ignore[arg-type]
    arrivals.uploading(a, Upload("a", notes))  # type: ignore[arg-type]
    assert send() == [] and notes == []  # glue may still read them, before all losses
    arrivals.passed([b])
    assert send() == [] and notes == []  # a is to be uploaded once more, and glue has read b
    arrivals.uploading(a, Upload("a again", notes))  # type: ignore[arg-type]
    assert send() == [] and notes == ["a", "a again", "unit 0"]
    arrivals.ended()
    assert send() == [] and notes[3:] == ["b", "unit 1"]
    for each in slots:
        arrivals.closed(each)
    assert send() == [b, a] and len(notes) == 5


def test_an_upload_that_fails_sends_nothing() -> None:
    """The devices are stopped by the step behind, or this one fails, which is said in another way."""
    [a] = units(1)
    held, notes = slot(a), list[str]()
    arrivals = Arrivals([a])
    arrivals.expect([held])
    arrivals.passed(())
    arrivals.uploading(a, Upload("a", notes, StreamAborted("aborted")))  # type: ignore[arg-type]
    assert arrivals.take(wait=False, sent=lambda unit: notes.append("sent")) == []
    arrivals.closed(held)
    assert arrivals.take(wait=True) == [a]
    assert notes == ["a"]


def test_before_all_losses_nothing_comes() -> None:
    """Glue may still read any of them."""
    a, b = units(2)
    held = slot(a)
    arrivals = Arrivals([a, b])
    arrivals.expect([held])
    arrivals.closed(held)
    assert there(arrivals) == []
    arrivals.passed(())
    assert sorted(there(arrivals)) == [0, 1]


@pytest.mark.parametrize("ends_first", [False, True])
def test_what_glue_reads_comes_when_all_microbatches_have_ended(ends_first: bool) -> None:
    a, b = units(2)
    held = slot(a)
    arrivals = Arrivals([a, b])
    arrivals.expect([held])
    steps = [lambda: arrivals.passed([a]), arrivals.ended]
    (steps.reverse if ends_first else list)()
    arrivals.closed(held)
    steps[0]()
    assert 0 not in there(arrivals)
    steps[1]()
    assert 0 in there(arrivals)


def test_who_waits_is_woken() -> None:
    (a,) = units(1)
    arrivals = Arrivals([a])
    taken: list[Unit] = []
    threads = start(lambda: taken.extend(arrivals.take(wait=True)))
    arrivals.passed(())
    join(threads)
    assert taken == [a]


def test_what_has_failed_does_not_come() -> None:
    arrivals = Arrivals(units(1))
    left: list[bool] = []

    def take() -> None:
        with pytest.raises(Dropped):
            arrivals.take(wait=True)
        left.append(True)

    threads = start(take)
    arrivals.fail()
    join(threads)
    assert left == [True]


def test_small_units_are_stepped_together_and_the_first_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_roundpipe.runtime import updates as module

    sizes = [10, 10, 30, 5, 5, 5]
    made = [Unit(index, [nn.Parameter(nn.Linear(size, 1, bias=False).weight)]) for index, size in enumerate(sizes)]
    updates = Updates(made)
    monkeypatch.setattr(module, "PIECE", 20)
    came: list[int] = []
    pieces = [[unit.index for unit in piece] for piece in updates._as_they_come(None, lambda u: came.append(u.index))]
    updates.close()
    assert came == [0, 1, 2, 3, 4, 5]
    assert pieces == [[0, 1], [2], [3, 4, 5]]
