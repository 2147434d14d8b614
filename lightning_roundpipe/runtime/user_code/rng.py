"""Random numbers that depend on what is computed, not on where or when.

Each (step, microbatch, call) and each segment of user code has its own seed. A call that draws is seeded before it runs
and again before it is recomputed, so its dropout mask is the same both times, on any worker and whatever ran in
between. Seeds derive from the global seed and the batch number, never from the generator's state. After a step the
caller's random state is what it was before, for any number of workers and microbatches and any plan.

Emulated devices share one generator with user code. On a GPU there are two: the device's, and the host's, which layers
and user code that draw on the host use. Python's and NumPy's generators belong to the host's everywhere. Sections that
draw hold the generators' locks from seeding to return, the device's before the host's.

The first batch, in which nothing runs concurrently, shows which sections draw. Generators are parked at a fixed state
between sections. A section that starts to draw later leaves its generator in another state and is refused, because its
masks could not be recomputed.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, generators
from lightning_roundpipe.runtime.user_code.process_state import has_forked

_PARKED = 0x5EED

Seed = tuple[int, ...]
"""The integers that a seed is derived from; see `derive`."""


def derive(*keys: int) -> int:
    """Return a 63-bit seed from integers; equal keys give equal seeds on every machine."""
    digest = hashlib.blake2b(b",".join(str(k).encode() for k in keys), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class GlobalRandomState:
    """The state of the caller's generators, saved before a step and restored after it."""

    def __init__(self, devices: list[Device]) -> None:
        self._generators = {id(d.generator): d.generator for d in devices}
        self._generators[id(torch.default_generator)] = torch.default_generator
        self._states = {key: g.get_state() for key, g in self._generators.items()}
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def park(self) -> None:
        for generator in self._generators.values():
            generator.manual_seed(_PARKED)

    def has_moved(self) -> bool:
        """Return whether one of the generators is in another state than saved."""
        return any(
            not torch.equal(g.get_state(), self._states[key]) for key, g in self._generators.items()
        ) or host_state() != _comparable(self._python, self._numpy)

    def restore(self) -> None:
        for key, generator in self._generators.items():
            generator.set_state(self._states[key])
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class Randomness:
    """Knows which segments draw, and seeds them. Lives as long as the trace."""

    def __init__(self) -> None:
        self._torch: set[Hashable] = set()
        self._host: set[Hashable] = set()
        self._parked: dict[int, bytes] = {}
        """States of parked generators, by id of the generator."""
        self.learning = True
        """Whether every segment is assumed to draw, as nothing is known yet."""
        self.comparing = True
        """Whether to find out, while learning, which segments draw. Not needed without a plan."""
        self._draws_in_backward = False

    @property
    def draws_in_backward(self) -> bool:
        """Whether anything draws that runs, or may run again, after training_step has returned."""
        return self._draws_in_backward or has_forked()

    def may_draw(self, key: Hashable) -> bool:
        """Return whether the segment ``key`` is known to draw, or may."""
        return self.learning or key in self._torch or key in self._host

    def needs_seed(self, key: tuple[str, int]) -> None:
        """Seed section ``key`` of user code, which is running in the first batch, as one that draws."""
        if self.learning:
            self._torch |= {key, key[0]}
            self._host |= {key, key[0]}

    def segment(
        self, key: Hashable, seed: Seed, device: Device, what: str, *, backward: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of one call or one section of user code.

        Args:
            key: what is learned to draw or not: a layer, ``("user code", 3)`` for one section, or ``"user code"`` for
                any section, because a microbatch that skips layers has other sections. ``"backward"`` likewise.
            seed: seed of this execution. It is derived only if the segment may draw.
            device: device whose generator it draws from.
            what: description for the error.
            backward: whether this is the backward pass, when the main thread may use the generator. A recomputation
                draws if its forward did.
        """
        if self.learning:
            return self._learning(key, seed, device, backward or not isinstance(key, tuple))
        if key in self._torch or key in self._host:
            return self._drawing(key in self._host, seed, device, what, backward)
        return contextlib.nullcontext() if backward else _Undrawn(self, device, what)

    @contextlib.contextmanager
    def _learning(self, key: Hashable, seed: Seed, device: Device, again: bool) -> Iterator[None]:
        with device.generator_lock, generators.HOST_LOCK:
            self._seed(True, seed, device)
            before = _states(device) if self.comparing else None
            yield
            after = _states(device) if before is not None else None
            _park(device, host=True)
            if before is None or after is None:
                return
            keys = {key, key[0]} if isinstance(key, tuple) else {key}
            if not torch.equal(before[0], after[0]):
                self._torch |= keys
                self._draws_in_backward |= again
            host = _has_two(device) and not torch.equal(before[1], after[1])
            if host or before[2] != after[2]:
                self._host |= keys
                self._draws_in_backward |= again

    @contextlib.contextmanager
    def _drawing(self, host: bool, seed: Seed, device: Device, what: str, backward: bool) -> Iterator[None]:
        with device.generator_lock, generators.HOST_LOCK if host else contextlib.nullcontext():
            self._seed(host, seed, device)
            try:
                yield
            finally:
                _park(device, host=host)
        if not (host or backward) and _has_two(device):
            self._check_host(what)

    @staticmethod
    def _seed(host: bool, keys: Seed, device: Device) -> None:
        seed = derive(*keys)
        device.generator.manual_seed(seed)
        if host:
            if _has_two(device):
                torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)

    def check(self, device: Device, what: str) -> None:
        """Raise if a generator was drawn from where nothing drew in the first batch."""
        if _bytes_of(device.generator) != self._parked.get(id(device.generator)):
            self._check(device.generator, device.generator_lock, what)
        if _has_two(device):
            self._check_host(what)

    def _check_host(self, what: str) -> None:
        self._check(torch.default_generator, generators.HOST_LOCK, what)

    def _check(self, generator: torch.Generator, lock: generators.GeneratorLock, what: str) -> None:
        parked = self._parked.get(id(generator))
        if parked is None:
            reference = torch.Generator(generator.device)
            parked = self._parked[id(generator)] = _bytes_of(reference.manual_seed(_PARKED))
        if _bytes_of(generator) == parked or not lock.acquire(blocking=False):
            return
        try:
            if _bytes_of(generator) != parked:  # with the lock: no section that is known to draw is drawing now
                raise RoundPipeError(
                    f"random numbers were drawn in {what} or beside it, where none were drawn in the first batch: "
                    "their recomputation could not draw the same. Let the model draw from the start (a dropout "
                    "whose rate starts at 0 can start at a tiny rate)."
                )
        finally:
            lock.release()


@contextlib.contextmanager
def yielded(devices: Iterable[Device]) -> Iterator[bool]:
    """Context in which other threads may draw, and draws leave no trace.

    The calling thread gives up the locks of generators that it holds, and their states are put back at the end.

    Yields:
        Whether it has held the lock of the host's generators.
    """
    locks = {id(d.generator_lock): (d.generator_lock, d.generator) for d in devices}
    locks.pop(id(generators.HOST_LOCK), None)
    held = [(lock, generator) for lock, generator in locks.values() if lock.mine]
    host = generators.HOST_LOCK.mine
    if host:
        held.append((generators.HOST_LOCK, torch.default_generator))
    states = [generator.get_state() for _, generator in held]
    for _, generator in held:
        generator.manual_seed(_PARKED)
    depths = [lock.give_up() for lock, _ in reversed(held)][::-1]
    try:
        yield host
    finally:
        for (lock, generator), depth, state in zip(held, depths, states, strict=True):  # the devices' before the host's
            lock.take_back(depth)
            generator.set_state(state)


class _Undrawn:
    """Context of a segment that is not known to draw; checks that it does not."""

    __slots__ = ("_device", "_randomness", "_what")

    def __init__(self, randomness: Randomness, device: Device, what: str) -> None:
        self._randomness, self._device, self._what = randomness, device, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self._randomness.check(self._device, self._what)


def _bytes_of(generator: torch.Generator) -> bytes:
    """Return the state of ``generator``, in a form that is compared eight times as fast as a tensor."""
    return generator.get_state().numpy().tobytes()


def _has_two(device: Device) -> bool:
    """Return whether draws on the host use another generator than draws on ``device``."""
    return device.generator is not torch.default_generator


def _park(device: Device, *, host: bool) -> None:
    device.generator.manual_seed(_PARKED)
    if host and _has_two(device):
        torch.default_generator.manual_seed(_PARKED)


def _states(device: Device) -> tuple[torch.Tensor, torch.Tensor, Any]:
    return device.generator.get_state(), torch.default_generator.get_state(), host_state()


def host_state() -> Any:
    """Return the states of Python's and NumPy's generators, to compare."""
    return _comparable(random.getstate(), np.random.get_state())


def _comparable(python: Any, numpy: Any) -> Any:
    return python, numpy[0], numpy[2], numpy[1].tobytes()
