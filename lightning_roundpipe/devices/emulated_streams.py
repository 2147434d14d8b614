"""Streams of emulated devices: layers run in the calling thread, copies in threads of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import POISON, Event, Stream, check_copy
from lightning_roundpipe.devices.copy_priority import chunks
from lightning_roundpipe.devices.emulated_link import Link, move
from lightning_roundpipe.devices.queued import QueuedStream
from lightning_roundpipe.devices.thread_event import ThreadEvent

SMALL_BYTES = 256 << 10
"""Largest copy that the calling thread makes itself: some 30 µs, as long as waking the stream's thread takes."""


Delays = Callable[[], float]
"""Returns the next random pause, in seconds."""


def _fail(error: Exception) -> NoReturn:
    raise error


def _overwrite(buffer: Tensor) -> None:
    with torch.inference_mode():  # which may write inference tensors and others
        buffer.data.view(-1).view(torch.uint8).fill_(POISON)


class InlineStream(Stream):
    """``compute``: the calling thread itself. Work is done when the call that enqueues it returns."""

    def __init__(self, name: str, switch: AbortSwitch, poisons: bool, delays: Delays | None) -> None:
        self.name = name
        self._switch, self._poisons, self._delays = switch, poisons, delays
        self._reached = ThreadEvent(name, switch, timed=False, reached=0.0)

    def record(self, *, timed: bool = False) -> Event:
        # No delay where a call is timed: the thread holds a core permit there, and layers have their own delay.
        if self._delays is not None and not timed:
            self._switch.sleep(self._delays())
        if self._switch.why is not None:
            self._switch.check()
        return ThreadEvent(self.name, self._switch, True, time.perf_counter()) if timed else self._reached

    def wait(self, event: Event) -> None:
        assert type(event) is ThreadEvent
        event.wait_on_behalf_of(self._switch)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._switch.check()
        move(*check_copy(dst, src))

    def poison(self, buffer: Tensor) -> None:
        if self._poisons:
            self._switch.check()
            _overwrite(buffer)


class ThreadStream(QueuedStream):
    """A copy stream with a thread of its own.

    The calling thread makes small copies on an idle stream itself, unless the emulation makes copies take time: waking
    the stream's thread takes longer than the copy.

    Args:
        name: of the stream and its thread.
        link: the link that it shares with another stream.
        switch: the device's abort switch.
        poisons: whether `poison` overwrites buffers.
        delays: pauses before each copy.
        first: whether its copies have priority on the link, and go whole. Other copies go in chunks.
    """

    def __init__(
        self, name: str, link: Link, switch: AbortSwitch, poisons: bool, delays: Delays | None, *, first: bool
    ) -> None:
        super().__init__(name, switch)
        self._link, self._poisons, self._delays, self._first = link, poisons, delays, first
        self._at_once = delays is None and link.takes_no_time

    def record(self, *, timed: bool = False) -> Event:
        if self._at_once and self._is_idle:
            return ThreadEvent(self.name, self._switch, timed, time.perf_counter())
        event = ThreadEvent(self.name, self._switch, timed)
        self._enqueue(lambda: event.settle(self._error))
        return event

    def wait(self, event: Event) -> None:
        assert type(event) is ThreadEvent
        if not (event.is_reached and self._is_idle):
            self._enqueue(partial(self._attempt, event.wait_on_behalf_of, self._switch))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        to, of = check_copy(dst, src)
        if self._at_once and of.nbytes <= SMALL_BYTES and self._is_idle:
            try:
                move(to, of)
            except Exception as error:
                # The stream keeps the error, as it does its thread's. It drops the callers' frames and their tensors.
                self._enqueue(partial(self._attempt, _fail, error.with_traceback(None)))
        else:
            self._enqueue(partial(self._attempt, self._transfer, to, of))

    def _transfer(self, to: Tensor, of: Tensor) -> None:
        if self._delays is not None:
            self._switch.sleep(self._delays())
        asked = self._link.arise()
        for there, here in [(to, of)] if self._first else chunks(to, of, self._link.chunk_bytes):
            asked = self._link.carry(here.nbytes, partial(move, there, here), asked, first=self._first)

    def settle(self) -> None:
        super().settle()
        self._link.clear()  # the last of its streams leaves it unused

    def poison(self, buffer: Tensor) -> None:
        if self._poisons:
            self._enqueue(partial(self._attempt, _overwrite, buffer))
