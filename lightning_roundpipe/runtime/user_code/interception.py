"""For the time of a step, calling a layer hands it to a worker.

Each layer gets an instance attribute ``forward`` that asks the calling thread's context what to do. It is there only
while a step runs: checkpoints, copies and callbacks see the user's module as it was written. Forward hooks on the layer
itself run around it, in the user code, as they do in plain training.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.thread_owner import behalf, working
from lightning_roundpipe.runtime.memory.host_layer import HostLayer


class CallContext(Protocol):
    """What a thread does with the layer calls that it makes."""

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


def calling(context: CallContext) -> contextlib.AbstractContextManager[None]:
    """Layer calls on this thread, and on those on which autograd runs its backward, go to ``context``."""
    return working(context)


def current() -> Any:
    """The calling thread's context; None on a thread that is not ours."""
    found = behalf()
    return None if found is None else found.context


class Interceptor:
    """Stands in for one layer's ``forward``.

    Attributes:
        own: the layer's own ``forward`` if it was patched, which is found again when the step is over.
    """

    is_interceptor = True

    def __init__(self, layer: HostLayer) -> None:
        self._layer = layer
        self.own: Any = None
        self._fail: Callable[[BaseException], None] | None = None
        self._ask = self._hand_over

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(*args, **kwargs)

    def _hand_over(self, *args: Any, **kwargs: Any) -> Any:
        context = current()
        if context is not None:
            return context.call(self._layer, args, kwargs)
        if self._fail is not None:
            error = RoundPipeError(
                f"layer {self._layer.name!r} was called from a thread that does not run a step (one that user code "
                "started, or autograd's, for torch.utils.checkpoint): its gradients would be lost. Call layers from "
                "training_step's own thread, and without a checkpoint around them."
            )
            self._fail(error)
            raise error
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self._layer.module).forward(self._layer.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer that user code makes within a step is a module like any other."""
        module: Any = self._layer.module
        copied = copy.deepcopy(module, memo)
        return copy.deepcopy(self.own, memo) if self.own is not None else types.MethodType(type(module).forward, copied)

    def install(self, fail: Callable[[BaseException], None] | None) -> None:
        """``fail`` is told of calls from foreign threads; None lets them run where they are, as evaluation may."""
        self._fail = fail
        self.own = self._layer.module.__dict__.get("forward")
        # User code that is compiled must not trace through the engine; who compiles has imported dynamo by now.
        if "torch._dynamo" in sys.modules and self._ask == self._hand_over:
            self._ask = torch.compiler.disable(self._hand_over)  # type: ignore[no-untyped-call]
        self._layer.module.__dict__["forward"] = self

    def remove(self) -> None:
        self._fail = None
        if self.own is not None:
            self._layer.module.__dict__["forward"] = self.own
        else:
            self._layer.module.__dict__.pop("forward", None)


class ModelInterceptor:
    """Stands in for the ``forward`` of a module that has layers in it.

    Attributes:
        name: its qualified name, or that of its class if it is the root.
        own: the module's own ``forward`` if it was patched.
    """

    is_interceptor = True

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name or type(module).__name__
        self.own: Any = None
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call_model = getattr(current(), "call_model", None)  # None within the model, which runs as it is written
        if call_model is None:
            return self.run(*args, **kwargs)
        return call_model(self.name, self.run, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Models look at what their own ``forward`` takes."""
        return inspect.signature(self.own if self.own is not None else types.MethodType(self._forward, self._module))

    @property
    def _forward(self) -> Callable[..., Any]:
        return type(self._module).forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's ``forward`` does."""
        return self.own(*args, **kwargs) if self.own is not None else self._forward(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo) or types.MethodType(self._forward, copy.deepcopy(self._module, memo))

    def install(self, fail: Callable[[BaseException], None] | None) -> None:
        self.own = self._module.__dict__.get("forward")
        self._module.__dict__["forward"] = self

    def remove(self) -> None:
        self._module.__dict__.pop("forward", None)
        if self.own is not None:
            self._module.__dict__["forward"] = self.own


def models_in(root: nn.Module, layers: Iterable[nn.Module]) -> list[ModelInterceptor]:
    """One for each module of ``root``, itself included, that has ``layers`` in it."""
    inner = {id(layer) for layer in layers}
    holding: dict[int, bool] = {}

    def holds(module: nn.Module) -> bool:
        if id(module) not in holding:
            holding[id(module)] = id(module) not in inner and any(
                id(child) in inner or holds(child) for child in module.children()
            )
        return holding[id(module)]

    return [ModelInterceptor(name, module) for name, module in root.named_modules() if holds(module)]


class Inside:
    """The context of a worker that runs a layer: there are no layers inside layers, only calls to others of them.

    Args:
        name: of the layer.
        passed_by: of the microbatch, in a backward.
    """

    def __init__(self, name: str, passed_by: Callable[[nn.Parameter, Tensor], bool] | None = None) -> None:
        self.name = name
        self._passed_by = passed_by

    def passed_by(self, master: nn.Parameter, grad: Tensor) -> bool:
        """Take a gradient that autograd is about to put into ``master`` itself; see `bypassed_gradients`."""
        if self._passed_by is None:
            raise RoundPipeError(
                f"layer {self.name!r} runs a backward in its forward that reaches a parameter of shape "
                f"{tuple(master.shape)} which is not its own. Pass the parameter to the layer, or detach it."
            )
        return self._passed_by(master, grad)

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RoundPipeError(
            f"layer {layer.name!r} was called by code inside layer {self.name!r}, which runs on another device. Make "
            "the module that calls both a layer: RoundPipeStrategy(layers=[...])."
        )


@contextlib.contextmanager
def intercepted(
    interceptors: Sequence[Interceptor | ModelInterceptor], fail: Callable[[BaseException], None] | None = None
) -> Iterator[None]:
    """Layer calls are handed over; see `Interceptor.install`."""
    for interceptor in interceptors:
        interceptor.install(fail)
    try:
        yield
    finally:
        for interceptor in interceptors:
            interceptor.remove()


class _Off(int):
    """``False`` in place of a configuration's ``use_cache``, with a note of being asked.

    Encoders have the setting too and never look at it, and a caller may say ``use_cache=False`` anyway. Only where the
    model asks for it has something been switched off.
    """

    asked: list[str]

    def __bool__(self) -> bool:
        if "use_cache" not in self.asked:
            self.asked.append("use_cache")
        return False


@contextlib.contextmanager
def without_caches(root: nn.Module) -> Iterator[list[str]]:
    """Hugging Face models train without key-value caches and without their own checkpointing, for the time of a step.

    A cache would be filled a second time by the recomputation; checkpointing would recompute what is recomputed anyway.
    Yields what was switched off; complete when the step is over.
    """
    configs = [getattr(m, "config", None) for m in root.modules()]
    caches: dict[int, Any] = {id(c): c for c in configs if getattr(c, "use_cache", False) is True}
    checkpointed: list[Any] = [m for m in root.modules() if getattr(m, "gradient_checkpointing", False) is True]
    switched_off = ["gradient_checkpointing"] * bool(checkpointed)
    off = _Off()
    off.asked = switched_off
    for config in caches.values():
        object.__setattr__(config, "use_cache", off)  # configurations check what is set, and this is no bool
    for module in checkpointed:
        module.gradient_checkpointing = False
    try:
        yield switched_off
    finally:
        for config in caches.values():
            config.use_cache = True
        for module in checkpointed:
            module.gradient_checkpointing = True
