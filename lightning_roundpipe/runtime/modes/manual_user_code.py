"""User code under manual optimization: it reads weights, differentiates losses, and steps optimizers.

Masters are read as they are, and nothing is weighed. Where everything is computed in low precision, ``training_step``
sees what it sees under automatic optimization: a low-precision copy of each, made anew when the master has changed.
What writes to parameters means masters, and so does all that an optimizer does:

    F.linear(h, weight) ── a copy, whose gradient is added to the master's in its own format ── [1]
    p.clamp_(), p.data ── the master ── [2]
    optimizer.step() ── masters, under torch's default format outside a step; its closure is training_step's ── [3]
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
    """The mode of one step; ``backward`` is ours.

    Args:
        differentiate: what ``loss.backward()`` does.
        touched: is told of a master whose ``.data`` user code gets hold of.
        engine: whose masters are read.
    """

    def __init__(
        self, differentiate: Callable[..., None], touched: Callable[[nn.Parameter], None], engine: EngineContext
    ) -> None:
        formats = engine.model.formats
        seen = engine.model.bucket_of if formats.low is not None else ()
        super().__init__(
            seen, lambda master: master, formats, train=True, accelerator=engine.worker_pool.accelerator,
            devices=engine.worker_pool.devices, buffers=engine.model.buffers,
        )  # fmt: skip
        self._all = engine.model.bucket_of
        self._differentiate = weakref.WeakMethod(differentiate)  # of the run, which holds this
        self._touched = weakref.WeakMethod(touched)
        self._copies: dict[int, tuple[tuple[int, int, bool], Tensor]] = {}
        """Of masters that were read, by id, with what they were then."""
        self._unversioned: set[int] = set()
        """Masters that may be written to without being counted, by id."""
        self._steps = False
        """Whether an optimizer's own code runs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:
            differentiate = self._differentiate()
            assert differentiate is not None
            return differentiate(*args, **(kwargs or {}))
        if func == DATA and isinstance(args[0], nn.Parameter) and id(args[0]) in self._all:
            touched = self._touched()
            assert touched is not None
            touched(args[0])
            self._unversioned.add(id(args[0]))
        if self._steps:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(func, func.__name__, args, kwargs)  # of the whole batch: nothing has to be weighed

    # -- in low precision ---------------------------------------------------------------------------------------------

    def refuse_write(self, does: str, master: nn.Parameter) -> None:
        """Nothing: it is the master that is written to [2]."""

    def stand_in(self, value: Any) -> Any:
        """A copy of ``value`` in low precision, if it is a master that is seen so [1]."""
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
        """Whether it was written to in a way that is not counted."""
        return id(master) in self._unversioned and not torch.equal(master.detach().to(copied.dtype), copied.detach())

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Any optimizer that is stepped meanwhile finds masters [3]."""
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
        """What the optimizer is called with instead."""
        self._stepping(True)
        given = tuple(map(self._in_the_step, args[1:]))
        return (args[0], *given), {key: self._in_the_step(value) for key, value in kwargs.items()}

    def _in_the_step(self, argument: Any) -> Any:
        """A closure that runs as the rest of training_step does."""
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
    """A master in low precision."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, low: torch.dtype, proxies: Proxies) -> Tensor:
        ctx.dtype, ctx.proxies = master.dtype, proxies
        return master.to(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.to(ctx.dtype)
        return grad if ctx.proxies.factor == 1.0 else grad * ctx.proxies.factor, None, None
