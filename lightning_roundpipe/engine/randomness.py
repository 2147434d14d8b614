"""Random numbers depend on seed, step, microbatch and call alone.

Each call of a layer that draws, and each section of user code if any draws, is seeded before it runs; a recomputation
with the seed of its forward. Emulated devices share the host's generator with user code, so what draws keeps the baton
meanwhile, and parks the generator in a fixed state afterwards.

The first window, which runs one microbatch after another, shows what draws. Where something else draws later, the
generator is not in its parked state, and the step is refused: a recomputation could not draw the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device

_PARKED = 0x5EED

Seed = tuple[int, ...]
"""The integers that a seed is derived from; see `derive`."""
USER_CODE = -1
"""Stands for user code among the numbers of layers."""


def derive(*keys: int) -> int:
    """Return a 63-bit seed from integers; equal keys give equal seeds on every machine."""
    digest = hashlib.blake2b(b",".join(str(k).encode() for k in keys), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Randomness:
    """Seeds what runs, and knows what draws.

    Attributes:
        learning: whether the first window runs, where everything is seeded.
        draws: numbers of the layers that draw, and `USER_CODE`.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._generators = _generators_of(devices)
        self.learning = True
        self.draws: set[int] = set()
        self._host: set[int] = set()
        """Those of them that use Python's or NumPy's generators."""
        self._before: Any = None

    def begin(self, who: int, device: Device | None, seed: Seed) -> bool:
        """Seed a call of a layer, or a section of user code, if it may draw.

        Returns whether it may. The caller then keeps the baton until `end`.
        """
        if not (self.learning or who in self.draws):
            return False
        number = derive(*seed)
        torch.default_generator.manual_seed(number)
        if device is not None and device.generator is not torch.default_generator:
            device.generator.manual_seed(number)
        if self.learning or who in self._host:
            random.seed(number)
            np.random.seed(number & 0xFFFFFFFF)
        if self.learning:
            self._before = [g.get_state() for g in self._generators], host_state()
        return True

    def end(self, who: int) -> None:
        """End a section for which `begin` returned True."""
        if self.learning and self._before is not None:
            states, host = self._before
            self._before = None
            if host != host_state():
                self._host.add(who)
                self.draws.add(who)
            if any(not torch.equal(a, g.get_state()) for a, g in zip(states, self._generators, strict=True)):
                self.draws.add(who)
        self.park()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let everything draw from the caller's generators, as evaluation does. Nothing else runs."""
        before = self.learning, self.draws
        self.learning, self.draws = False, set()
        try:
            yield
        finally:
            self.learning, self.draws = before

    def park(self) -> None:
        """Leave the generators as they are when nothing draws."""
        for generator in self._generators:
            generator.manual_seed(_PARKED)

    def check(self) -> None:
        """Check that nothing has drawn that is not known to. The caller holds the baton.

        Raises `RoundPipeError` if something has.
        """
        for generator in self._generators:
            if generator.initial_seed() != _PARKED or not _is_parked(generator):
                raise RoundPipeError(
                    "random numbers were drawn where none were drawn in the first batch: their recomputation could not "
                    "draw the same. Let the model draw from the start (a dropout whose rate starts at 0 can start at a "
                    "tiny rate)."
                )


def _generators_of(devices: Sequence[Device]) -> list[torch.Generator]:
    """Return those of the devices, and the host's."""
    return [*dict.fromkeys((*(device.generator for device in devices), torch.default_generator))]


def _is_parked(generator: torch.Generator) -> bool:
    parked = torch.Generator(generator.device).manual_seed(_PARKED)
    return torch.equal(parked.get_state(), generator.get_state())


class CallerRandomState:
    """The state of the caller's generators, saved before a step and restored after it."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._states = [(g, g.get_state()) for g in _generators_of(devices)]
        self._host, self._seen = (random.getstate(), np.random.get_state()), host_state()

    @property
    def has_moved(self) -> bool:
        """Whether anything has drawn from the generators since."""
        return self._seen != host_state() or any(not torch.equal(g.get_state(), s) for g, s in self._states)

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)
        random.setstate(self._host[0])
        np.random.set_state(self._host[1])


def host_state() -> Any:
    """Return the states of Python's and NumPy's generators, to compare."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[0], numpy[2], numpy[1].tobytes()
