"""Whether the other machines of a job are alive, and what became of one that is not.

A collective operation waits for all machines. If one has died, hangs or has failed, the others would wait without end,
or raise an error of the network that does not say why. So each machine has two threads. One writes to the job's store
and reads what the others have written. It may block there, so another one draws the conclusions:

    every `BEAT` seconds: my number, what I wait for ── the others' ── [1]
    a machine whose number stands still for half of the timeout hangs or has died, and so has the store's ── [2]
    a machine that fails writes its error; the others say that they have read it ── [3]
    all machines wait, and not for the same thing, or too long for the same: none of them will ever go on ── [4]
    a failure is known, and the main thread does not end: it waits where nothing can reach it; end the process ── [5]
    the process ends after a failure: gloo would wait for what it has sent to the other machine; leave it ── [6]

The store is torch.distributed's. Values are JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.messages import PREFIX, first_line, frames_of_threads

BEAT = 0.5
"""Seconds between two messages of a machine."""
STALL = 15.0
"""Seconds after which machines that wait for different things are taken for stuck."""
BUCKETS = ("the gradients of bucket", "the weights of bucket")
"""How waits for buckets begin. Machines that are all in them wait for the network, whichever buckets these are."""
PATIENCE = 10
"""Timeouts that a message of unbounded size may take, while all machines wait for the same one."""
SILENCE = 8 * BEAT
"""Seconds without a message after which a machine whose connection broke is taken for dead."""
LAST_WORDS = 10.0
"""Seconds that a machine that fails waits for the others to read its error."""
EXIT = 70
"""Exit status of a process that ends itself [5]."""


class MachineError(RoundPipeError):
    """Another machine has failed, does not answer, or waits for something else."""


class Liveness:
    """Watches the other machines in a run of the trainer, from `begin` to `end`, on threads of its own.

    Args:
        store: a connection to the job's store that no other thread uses.
        names: host names of all machines, by number.
        timeout: seconds within which this machine ends after another one has failed.
        leave: ends the process [5].

    Attributes:
        failure: what has happened to another machine; None if nothing has.
    """

    def __init__(
        self, store: Any, rank: int, names: Sequence[str], timeout: float, leave: Callable[[int], object] = os._exit
    ) -> None:
        self.failure: str | None = None
        self._store, self._rank, self._names, self._timeout, self._leave = store, rank, list(names), timeout, leave
        self._waits = _Waits()
        self._run, self._told = 0, False
        """The number of the run, and whether its main thread knows of a failure."""
        self._over = threading.Event()
        self._said: str | None = None
        """Why this machine ends, for the others [3]."""
        self._read = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        """The last number of each other machine, and when it came."""
        self._beats: tuple[dict[int, dict[str, Any]], float] = {}, 0.0
        """The last messages of the others, and when the store answered."""
        self._threads: list[threading.Thread] = []

    @property
    def _others(self) -> list[int]:
        return [other for other in range(len(self._names)) if other != self._rank]

    def name_of(self, rank: int) -> str:
        return f"machine {rank} ({self._names[rank]})"

    # -- the other threads --------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Write a beat of no run. All machines must have done so before the first `begin`."""
        self._store.set(_beat(self._rank), json.dumps({"run": 0, "n": 0, "wait": None, "for": 0.0, "bounded": False}))
        atexit.register(self._at_exit)

    def begin(self) -> None:
        """Begin a run: start the threads. Until `end`, this process must not outlive a failure [5].

        Raises:
            RoundPipeError: an earlier run has failed.
        """
        if self.failure is not None or self._told:
            raise RoundPipeError(
                "an earlier run of this process on several machines has failed, and their connections with it: start "
                "the script again on each machine."
            )
        self._run += 1
        self._over.clear()
        self._beats = {}, time.monotonic()
        for name, work in (("store", self._keep_exchanging), ("liveness", self._watch)):
            self._threads.append(threading.Thread(target=work, name=f"roundpipe-{name}", daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """End the run. After a failure, a thread may stay blocked by the store until the process ends."""
        self._over.set()
        while self._threads:
            self._threads.pop().join(self._timeout / 2 if self.failure is None else 4 * BEAT)

    def waiting(self, label: str, *, bounded: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the calling thread waits for the others, for what ``label`` says.

        ``bounded``: whether that is one message of bounded size, which a network carries within the timeout.
        """
        return self._waits.waiting(label, bounded)

    def check(self) -> None:
        """Raise `MachineError` if another machine has failed."""
        if self.failure is not None:
            if threading.current_thread() is threading.main_thread():
                self._told = True
            raise MachineError(self.failure)

    def says(self) -> str:
        """Return what this machine waits for from the others, as a sentence; empty if it does not."""
        label, since, _ = self._waits.oldest()
        if label is None:
            return ""
        return f"For {time.monotonic() - since:.0f} seconds this machine has waited for {label} from other machines."

    def explain(self, error: BaseException, label: str) -> MachineError:
        """Return the error to raise when the network has failed with ``error``.

        A connection breaks at once when a machine's process ends. Why it has ended shows a little later.
        """
        patience = time.monotonic() + min(LAST_WORDS, self._timeout / 2)
        silent: list[int] = []
        while self.failure is None and not silent and time.monotonic() < patience:
            time.sleep(BEAT / 5)
            silent = [other for other, (_, since) in self._seen.items() if time.monotonic() - since > SILENCE]
        who = " or ".join(self.name_of(other) for other in silent or self._others)
        if silent:
            return self._fail(f"{who} has died: its connection broke when this machine waited for {label}.")
        return self._fail(f"the connection to {who} broke when this machine waited for {label}: {first_line(error)}.")

    def apart(self, exchanges: dict[int, str]) -> MachineError:
        """Return the error to raise when machines are about to exchange different things, each of which is said."""
        return self._fail(self._apart(exchanges))

    def fail(self, error: BaseException) -> None:
        """Tell the other machines that this one ends with ``error`` [3]. Returns when they have read it."""
        self._told = True
        if not isinstance(error, MachineError) and self.failure is None:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._said = " ".join(text.split())
        if self._said is not None:
            self._read.wait(min(LAST_WORDS, self._timeout / 2))
        self.end()

    def _at_exit(self) -> None:
        """End the process without gloo's cleanup, after all that others have registered [6]."""
        if self.failure is None and not self._told:
            return
        atexit.unregister(self._at_exit)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave(1)

    # -- the threads --------------------------------------------------------------------------------------------------

    def _keep_exchanging(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self._beats = self._exchange(number), time.monotonic()
            except Exception as error:  # the machine with the store has ended
                self._fail(f"{self._keeper()} does not answer: {first_line(error)}.")
                self._beats = {}, time.monotonic()
            self._over.wait(BEAT)

    def _keeper(self) -> str:
        return f"{self.name_of(0) if self._rank else 'this machine'}, which keeps the job's store,"

    def _watch(self) -> None:
        seen, knows = self._seen, float("inf")
        seen.update({other: (0, time.monotonic()) for other in self._others})
        while not self._over.is_set():
            (beats, answered), now = self._beats, time.monotonic()
            silent = {self._keeper(): now - answered}
            for other, beat in beats.items():
                if beat["n"] != seen[other][0] or beat["run"] < self._run:
                    seen[other] = beat["n"], now
                elif now - answered < 2 * BEAT:  # while the store answers; without it, nobody is heard of
                    silent[self.name_of(other)] = now - seen[other][1]
            for who, seconds in silent.items():
                if seconds > self._timeout / 2:  # [2]
                    self._fail(
                        f"{who} has not answered for {seconds:.0f} seconds: it has died, hangs, or its network is down "
                        "(machine_timeout says how long to wait)."
                    )
            self._look_for_stuck(beats)
            knows = min(knows, now) if self.failure is not None else knows
            if not self._told and now - knows > self._timeout / 2:  # [5]
                sys.stderr.write(f"{PREFIX}{self.failure} The process ends, as it cannot go on.\n")
                sys.stderr.flush()
                self._leave(EXIT)
                return
            self._over.wait(BEAT)
        self._waits.forget()

    def _exchange(self, number: int) -> dict[int, dict[str, Any]]:
        """Write this machine's beat and error, and read those of the others [1]."""
        if self._said is not None:
            self._store.set(self._key("error", self._rank), json.dumps(self._said[:2000]))
        label, since, bounded = self._waits.oldest()
        waited = time.monotonic() - since if label else 0.0
        beat = {"run": self._run, "n": number, "wait": label, "for": waited, "bounded": bounded}
        self._store.set(_beat(self._rank), json.dumps(beat))
        for other in self._others if self.failure is None else ():
            key = self._key("error", other)
            if self._store.check([key]):
                self._fail(f"{self.name_of(other)} has failed: {json.loads(self._store.get(key))}")
                self._store.set(self._key("read", other, self._rank), "1")
        mine = [self._key("read", self._rank, other) for other in self._others]
        if not self._read.is_set() and self._store.check(mine):
            self._read.set()
        return {other: json.loads(self._store.get(_beat(other))) for other in self._others}

    def _look_for_stuck(self, beats: dict[int, dict[str, Any]]) -> None:
        """Find machines that wait for different things, or for a network that carries nothing [4]."""
        label, since, bounded = self._waits.oldest()
        alone = not beats or any(beat["wait"] is None for beat in beats.values())
        if self.failure is not None or label is None or alone:
            return
        waits = {self._rank: label} | {other: beat["wait"] for other, beat in beats.items()}
        shortest = min(time.monotonic() - since, *(beat["for"] for beat in beats.values()))
        places, text = self._places(waits), ""
        if all(wait.startswith(BUCKETS) for wait in waits.values()) or len(set(waits.values())) == 1:
            bounded = bounded and all(beat["bounded"] for beat in beats.values())
            if shortest > self._timeout * (1 if bounded else PATIENCE):
                text = (
                    f"the network has stalled: all machines answer, and for {shortest:.0f} seconds {places}. Let the "
                    "network pass the connections of gloo, whose interface GLOO_SOCKET_IFNAME names; a network that "
                    "is only slow needs a larger machine_timeout."
                )
        elif shortest > STALL:
            text = f"{self._apart(waits)} If they have these, the network between them has stalled."
        if text:
            self._fail(text)
            self._said = text

    def _places(self, waits: dict[int, str]) -> str:
        return " and ".join(f"{self.name_of(rank)} waits for {wait}" for rank, wait in sorted(waits.items()))

    def _apart(self, waits: dict[int, str]) -> str:
        return (
            f"the machines have come to different places: {self._places(waits)}. Each needs the same number of "
            "batches, and the same hooks; code that only one machine runs must not call the trainer."
        )

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("roundpipe", self._run, *parts)))

    def _fail(self, text: str) -> MachineError:
        if self.failure is None:
            self.failure = text
        return MachineError(self.failure)


class _Waits:
    """What the threads of this machine wait for from others: for us, or in a collective operation of user code."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, float, bool]] = {}
        """What a thread waits for, since when, and whether that is bounded, by the thread's id."""
        self.forget()

    def forget(self) -> None:
        """Keep no frame of user code."""
        self._sampled: tuple[object, float] = (None, 0.0)

    @contextlib.contextmanager
    def waiting(self, label: str, bounded: bool) -> Iterator[None]:
        me = threading.get_ident()
        self._of[me] = label, time.monotonic(), bounded
        try:
            yield
        finally:
            del self._of[me]

    def oldest(self) -> tuple[str | None, float, bool]:
        """Return the wait that began first, when, and whether it is bounded; None if nothing waits."""
        if waits := self._of.copy():
            return min(waits.values(), key=lambda wait: wait[1])
        frame = frames_of_threads().get(threading.main_thread().ident or 0)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            frame = frame.f_back
        if self._sampled[0] is not frame:  # kept, as Python makes another object of a call that nobody keeps
            self._sampled = frame, time.monotonic()
        if frame is None:
            return None, 0.0, False
        return f"torch.distributed.{frame.f_code.co_name}()", self._sampled[1], False


def _beat(rank: int) -> str:
    return f"roundpipe/beat/{rank}"
