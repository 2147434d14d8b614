"""The main thread beside a step in flight.

Generators and torch's default dtype are the whole process's. A step whose microbatches depend on them shares them:

    the outputs are there ── the main thread takes the baton, with its own state ── Lightning's loop, hooks, data ── [1]
    it comes back to the engine ── its state is put away, and the baton handed on ── microbatches go on ── [2]

Other steps go on while Lightning's loop runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from lightning_roundpipe.devices import Device
from lightning_roundpipe.engine.randomness import CallerRandomState, Randomness
from lightning_roundpipe.engine.sync import Baton, CancelScope, Runner


class MainThread:
    """See above.

    ``wait`` waits for the baton on behalf of a runner, under the watchdog.

    Attributes:
        holds: whether it holds the baton.
    """

    def __init__(
        self, baton: Baton, devices: Sequence[Device], randomness: Randomness,
        wait: Callable[[Runner, CancelScope], None],
    ) -> None:  # fmt: skip
        self._baton, self._devices, self._randomness, self._wait = baton, devices, randomness, wait
        self.holds = False
        self._dtype = torch.get_default_dtype()
        """That of the step in flight."""

    def take(self, scope: CancelScope, *, exclusive: bool = True) -> None:
        """Take the baton, with the step's state, which the caller replaces [1]. If it raises, the baton is not held.

        ``exclusive``: whether no thread computes without it from then on.
        """
        runner = Runner(scope, -1)
        acquire = self._baton.acquire_exclusive if exclusive else self._baton.acquire
        acquire(runner, lambda: self._wait(runner, scope))
        self.holds, self._dtype = True, torch.get_default_dtype()

    @contextlib.contextmanager
    def holding(self, scope: CancelScope) -> Iterator[None]:
        """Hold the baton in a block, beside threads that compute without it."""
        if self.holds:
            yield
            return
        self.take(scope, exclusive=False)
        try:
            yield
        finally:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand the baton on, if it is held. The step has failed, or its state is in place."""
        held, self.holds = self.holds, False
        if held:
            self._baton.release()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Let microbatches run in a block, behind which the baton is held again, or none of them needs it [2]."""
        caller, dtype = CallerRandomState(self._devices), torch.get_default_dtype()
        self._randomness.park()
        if self.holds:
            torch.set_default_dtype(self._dtype)
        self.hand_on()
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            caller.restore()
