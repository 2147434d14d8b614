"""User code under manual optimization: it reads weights, runs backward, and steps optimizers.

It reads masters themselves, and losses are not weighted. Under a ``*-true`` precision of 16 bits ``training_step``
reads a low-precision copy of each master instead, as under automatic optimization, made anew when the master has
changed. Writes, and everything that an optimizer does, go to the masters:

    F.linear(h, weight) ── a copy; its gradient is added to the master's, in the master's dtype ── [1]
    p.clamp_(), p.data ── the master ── [2]
    optimizer.step() ── masters, under the default dtype outside a step; its closure runs as training_step does ── [3]
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.user_code.mode import DATA, Proxies, UserCodeMode


class ManualUserCode(UserCodeMode):
    """The torch function mode of one manual step. It replaces ``Tensor.backward``.

    Args:
        differentiate: a bound method that runs in place of ``loss.backward()``; referenced weakly.
        touched: a bound method called with each master whose ``.data`` user code reads; referenced weakly.
        engine: the context of the engine.
        unversioned: takes the ids of these masters, whose versions do not show all writes.
    """

    def __init__(
        self, differentiate: Callable[..., None], touched: Callable[[nn.Parameter], None], engine: EngineContext,
        unversioned: set[int],
    ) -> None:  # fmt: skip
        formats = engine.model.formats
        seen = engine.model.bucket_of if formats.low is not None else ()
        super().__init__(
            seen, lambda master: master, formats, train=True, accelerator=engine.worker_pool.accelerator,
            devices=engine.worker_pool.devices, buffers=engine.model.buffers,
        )  # fmt: skip
        self._all = engine.model.bucket_of
        self._differentiate = weakref.WeakMethod(differentiate)  # of a `ManualRun`, which owns this mode
        self._touched = weakref.WeakMethod(touched)
        self._copies: dict[int, tuple[tuple[int, int, bool], Tensor]] = {}
        """Low-precision copies by id of the master, with its version, address and ``requires_grad`` at that time."""
        self._unversioned = unversioned
        self._steps = False
        """Whether an optimizer's own code is running."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:
            differentiate = self._differentiate()
            assert differentiate is not None
            return differentiate(*args, **(kwargs or {}))
        if func == DATA and isinstance(args[0], nn.Parameter) and id(args[0]) in self._all:
            self._unversioned.add(id(args[0]))
            touched = self._touched()
            assert touched is not None
            touched(args[0])
        if self._steps:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(func, func.__name__, args, kwargs)  # of the whole batch, so there are no targets to count

    # -- in low precision ---------------------------------------------------------------------------------------------

    def refuse_write(self, does: str, master: nn.Parameter) -> None:
        """Allow it: the write goes to the master itself [2]."""

    def stand_in(self, value: Any) -> Any:
        """Return a low-precision copy if ``value`` is a master that is read as one [1], else ``value``."""
        if not (isinstance(value, nn.Parameter) and id(value) in self._masters and self._formats.differ(value)):
            return value
        now = (value._version, value.data_ptr(), value.requires_grad)
        known = self._copies.get(id(value))
        if known is not None and known[0] == now and not self._has_moved(value, known[1]):
            return known[1]
        with torch.inference_mode(False), torch.enable_grad():
            copied = _Seen.apply(value, self._formats.of(value), self.proxies)  # type: ignore[no-untyped-call]
        self._copies[id(value)] = (now, copied)
        return copied

    def _has_moved(self, master: nn.Parameter, copied: Tensor) -> bool:
        """Return whether ``master`` has changed without raising its version since the copy was made."""
        return id(master) in self._unversioned and not torch.equal(master.detach().to(copied.dtype), copied.detach())

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Let optimizers that are stepped meanwhile work on masters, in the dtypes of plain code [3]."""
        if self._formats.low is None:
            yield
            return
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(lambda *_: self._stepping(False))
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._steps = False

    def _stepping(self, steps: bool) -> None:
        self._steps = steps
        assert self._formats.low is not None
        torch.set_default_dtype(self._formats.outside if steps else self._formats.low)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Enter the optimizer's code, and return its arguments with closures wrapped."""
        self._stepping(True)
        given = tuple(map(self._in_the_step, args[1:]))
        return (args[0], *given), {key: self._in_the_step(value) for key, value in kwargs.items()}

    def _in_the_step(self, argument: Any) -> Any:
        """Wrap a closure so that it runs as the rest of training_step does."""
        if not callable(argument):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            self._stepping(False)
            try:
                return argument(*args, **kwargs)
            finally:
                self._stepping(True)

        return closure


class _Seen(torch.autograd.Function):
    """Cast a master to low precision; cast its gradient back, and multiply it by the pending ``Proxies.factor``."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, low: torch.dtype, proxies: Proxies) -> Tensor:
        ctx.dtype, ctx.proxies = master.dtype, proxies
        return master.to(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.to(ctx.dtype)
        return grad if ctx.proxies.factor == 1.0 else grad * ctx.proxies.factor, None, None
