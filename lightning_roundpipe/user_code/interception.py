"""Interception of layer calls during a step: calling a layer hands the call to a worker.

Each layer gets an instance attribute ``forward`` that asks the calling thread's context what to do. It exists only
while a step runs, so that checkpoints, copies and callbacks see the user's module unchanged. Forward hooks on the layer
itself run around it, in user code, as in plain training.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.thread_owner import context_of_thread
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.host_model import HostModel
from lightning_roundpipe.user_code.bypassed_gradients import Accumulators
from lightning_roundpipe.user_code.host_metrics import HostMetrics
from lightning_roundpipe.user_code.layer_attributes import LayerAttributes
from lightning_roundpipe.user_code.module_state import SharedAttributes
from lightning_roundpipe.user_code.thread_state import TorchThreadState, thread_locals_of


class Interceptor:
    """Stands in for one layer's ``forward``, which it asks the thread's context, a microbatch, to `call`.

    ``own`` is the module's own instance attribute ``forward``, if it was patched; restored after the step.
    """

    is_interceptor = True

    def __init__(self, layer: HostLayer) -> None:
        self.own: Any = None
        self._layer, self._module = layer, layer.module
        self._fail: Callable[[BaseException], None] | None = None
        self._ask = self._hand_over

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module for user code: within a step, the copy is an ordinary module."""
        own = copy.deepcopy(self.own, memo)
        return own or types.MethodType(type(self._module).forward, copy.deepcopy(self._module, memo))

    def _hand_over(self, *args: Any, **kwargs: Any) -> Any:
        context = context_of_thread()
        if context is not None:
            if context.runner.inside is not None:
                raise RoundPipeError(
                    f"layer {self._layer.name!r} was called by code inside layer {context.runner.inside[0]!r}, which "
                    "runs on another device. Make the module that calls both a layer: RoundPipeStrategy(layers=[...])."
                )
            return context.call(self._layer, args, kwargs)
        if self._fail is not None:
            error = RoundPipeError(
                f"layer {self._layer.name!r} was called from a thread that user code has started: its gradients would "
                "be lost. Call layers from training_step's own thread."
            )
            self._fail(error)
            raise error
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward`` in place."""
        own = self.own or types.MethodType(type(self._module).forward, self._module)
        return own(*args, **kwargs)

    def install(self, fail: Callable[[BaseException], None] | None) -> None:
        """Replace ``forward``. ``fail`` is told of calls from foreign threads; None (evaluation) runs them in place."""
        self._fail = fail
        # Compiled user code must not be traced through the engine. Compiling it has imported dynamo by now.
        if "torch._dynamo" in sys.modules and self._ask == self._hand_over:
            self._ask = torch.compiler.disable(self._hand_over)  # type: ignore[no-untyped-call]
        self.own = self._module.__dict__.get("forward")
        self._module.__dict__["forward"] = self

    def remove(self) -> None:
        self._fail = None
        if self.own is not None:
            self._module.__dict__["forward"] = self.own  # in its place: attributes are compared in order
        else:
            self._module.__dict__.pop("forward", None)


class InterceptedModule:
    """The user's module as long as an engine has it: calls of its layers, its attributes and accumulators, its metrics.

    Args:
        device_types: the types of the host and of the devices that its steps run on.

    Attributes:
        attributes: how the attributes of its layers differ from those of copies.
        shared: the attributes that microbatches of training set.
    """

    def __init__(self, model: HostModel, device_types: tuple[str, ...]) -> None:
        self._module, self._masters, self._device_types = model.module, model.masters, device_types
        self._interceptors = [Interceptor(layer) for layer in model.layers]
        self._accumulators = Accumulators()
        self._metrics = HostMetrics(model.module if device_types != ("cpu",) else nn.Module())
        self._thread_locals = thread_locals_of(model.module)
        self.attributes = LayerAttributes(model.layers)
        self.shared = self.shared_attributes()

    def shared_attributes(self) -> SharedAttributes:
        """Return the attributes, as views that run side by side set them."""
        return SharedAttributes(self._module, self.attributes.touched)

    def thread_state(self) -> TorchThreadState:
        """Capture the calling thread's torch modes, and its values of the user code's thread-local objects."""
        return TorchThreadState.capture(self._device_types, self._thread_locals)

    @contextlib.contextmanager
    def intercepted(self, fail: Callable[[BaseException], None] | None = None) -> Iterator[None]:
        """Begin a step, and intercept calls within this context; see `Interceptor.install`."""
        self.attributes.begin()
        self.shared.begin()
        for interceptor in self._interceptors:
            interceptor.install(fail)
        try:
            yield
        finally:
            for interceptor in self._interceptors:
                interceptor.remove()

    def run_in_place(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer's own ``forward`` on the user's weights."""
        return self._interceptors[layer.index].run(*args, **kwargs)

    def watch_gradients(self) -> None:
        """Before a batch: see the gradients that come to masters themselves; see `Accumulators`."""
        self._accumulators.watch(self._masters)

    def bring_metrics_to_host(self) -> None:
        """After a step; see `HostMetrics`."""
        self._metrics.bring_to_host()

    def end(self) -> None:
        """Leave the module as it was."""
        self._accumulators.end()
        self._metrics.end()


@contextlib.contextmanager
def without_caches(root: nn.Module) -> Iterator[list[str]]:
    """Switch off key-value caches and gradient checkpointing of Hugging Face models, and yield the settings' names.

    A recomputation would fill a cache a second time, and checkpointing would repeat what is recomputed anyway.
    """
    configs = {
        id(config): config for module in root.modules() if (config := getattr(module, "config", None)) is not None
    }
    on: list[tuple[Any, str]] = [(c, "use_cache") for c in configs.values() if getattr(c, "use_cache", False) is True]
    name = "gradient_checkpointing"
    on += [(module, name) for module in root.modules() if getattr(module, name, False) is True]
    for owner, name in on:
        setattr(owner, name, False)
    try:
        yield sorted({name for _, name in on})
    finally:
        for owner, name in on:
            setattr(owner, name, True)
