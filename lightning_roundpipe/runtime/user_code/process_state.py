"""Locks around torch's process-wide state, which layers on several threads would change at the same time.

* The level of forward-mode differentiation and the nesting depth of `torch.func.jvp`. Two layers at once would find
  each other's level, and be refused as nested or compute with the wrong tangents.
* The host's generator within `torch.random.fork_rng`, which checkpoints inside a layer use in their backward. Other
  layers would draw from the state that is put in, and the fork would undo their draws.

A layer shows too late that it does so to be scheduled apart, so torch's functions are replaced by ones that take a
lock, for as long as there are workers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from lightning_roundpipe.devices import Device, generators
from lightning_roundpipe.devices.generators import GeneratorLock
from lightning_roundpipe.devices.process_context import shared_context
from lightning_roundpipe.runtime.user_code.interception import current

PATIENCE_S = 60.0
"""Seconds to wait for the lock. After that torch reports the error: a thread has entered a level and not left it."""
SURPRISE_S = 1.0
"""Seconds to wait for the lock of a generator, if a layer forks that did not in the first batch."""

_LEVELS = (
    (forward_ad, "enter_dual_level", "exit_dual_level"),
    (eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting"),
)
_local = threading.local()
_own: dict[tuple[Any, str], Any] = {}
"""torch's functions while they are replaced."""
_forked: set[str] = set()
"""Names of the layers that fork."""


@shared_context
def one_at_a_time(devices: Iterable[Device]) -> Iterator[None]:
    """Replace torch's functions, until the last context of several has exited.

    Args:
        devices: devices on which layers run.
    """
    _forked.clear()
    lock = threading.RLock()  # a new one: a thread that is stuck in a layer may hold the previous one forever
    for module, enter, leave in _LEVELS:
        _replace(module, enter, functools.partial(_entering, lock=lock))
        _replace(module, leave, functools.partial(_leaving, lock=lock))
    locks = {device.torch_device: device.generator_lock for device in devices}
    _replace(torch.random, "fork_rng", functools.partial(_forking, locks=locks))
    yield
    while _own:
        (module, name), own = _own.popitem()
        setattr(module, name, own)


def under_forward_mode() -> bool:
    """Return whether the calling thread is in forward mode; torch's level alone may be another thread's."""
    return forward_ad._current_level >= 0 and (not _own or _depth() > 0)


def has_forked() -> bool:
    """Return whether a layer or user code has forked a generator."""
    return bool(_forked)


def alone(layer: str, device: Device) -> contextlib.AbstractContextManager[object]:
    """Context for the backward of ``layer``. If the layer forks, it holds the generators' locks before all others.

    A thread that draws takes these locks before its share of the device. In the opposite order two threads would
    deadlock.
    """
    return holding_generators(device) if layer in _forked else contextlib.nullcontext()


@contextlib.contextmanager
def holding_generators(device: Device) -> Iterator[None]:
    """Hold the generators of ``device`` and the host, in this order: another order would deadlock."""
    with device.generator_lock, generators.HOST_LOCK:
        yield


def _replace(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    _own[module, name] = getattr(module, name)
    setattr(module, name, wrap(_own[module, name]))


def _depth() -> int:
    return getattr(_local, "depth", 0)


def _entering(own: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:
    @functools.wraps(own)
    def enter(*args: Any, **kwargs: Any) -> Any:
        if lock.acquire(timeout=PATIENCE_S):
            _local.depth = _depth() + 1
        return own(*args, **kwargs)

    return enter


def _leaving(own: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:
    @functools.wraps(own)
    def leave(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        finally:
            if _depth():
                _local.depth -= 1
                lock.release()

    return leave


def _forking(own: Callable[..., Any], locks: dict[torch.device, GeneratorLock]) -> Callable[..., Any]:
    @functools.wraps(own)
    @contextlib.contextmanager
    def fork(devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not enabled or current() is None:
            with own(devices, enabled, *args, **kwargs):
                yield
            return
        _forked.add(getattr(current(), "name", ""))
        if devices is None and torch.cuda.is_available():  # would fork all GPUs, but others draw on those
            devices = [torch.cuda.current_device()]
        with contextlib.ExitStack() as held:
            for device, lock in locks.items():  # before the host's lock, in the order of `holding_generators`
                if device.type != "cpu" and device.index in (devices or ()):
                    _take(lock, held)
            _take(generators.HOST_LOCK, held)
            held.enter_context(own(devices, enabled, *args, **kwargs))
            yield

    return fork


def _take(lock: GeneratorLock, held: contextlib.ExitStack) -> None:
    """Acquire ``lock`` unless it takes too long: its holder may wait for the device that this layer occupies."""
    if lock.acquire(timeout=SURPRISE_S):
        held.callback(lock.release)
