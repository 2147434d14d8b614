"""Changes to the whole process: the first context makes them, and the last one takes them back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_roundpipe.devices.process_context import shared_context


def test_the_last_to_exit_takes_the_change_back() -> None:
    seen: list[str] = []

    @shared_context
    def change(name: str) -> Iterator[None]:
        seen.append(f"{name} begins")
        yield
        seen.append(f"{name} ends")

    entered, exits = threading.Event(), threading.Event()

    def stay() -> None:
        with change("the second"):
            entered.set()
            exits.wait(10)

    thread = threading.Thread(target=stay)
    with pytest.raises(ZeroDivisionError), change("the first"):
        thread.start()
        assert entered.wait(10)
        raise ZeroDivisionError
    assert seen == ["the first begins"]
    exits.set()
    thread.join(10)
    assert seen == ["the first begins", "the first ends"]
    with change("the third"):
        assert seen[2:] == ["the third begins"]
    assert seen[2:] == ["the third begins", "the third ends"]


def test_a_change_that_fails_is_tried_again() -> None:
    tries: list[int] = []

    @shared_context
    def change() -> Iterator[None]:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError
        yield

    with pytest.raises(ValueError), change():
        raise AssertionError("it is not entered")
    with change():
        assert len(tries) == 2
