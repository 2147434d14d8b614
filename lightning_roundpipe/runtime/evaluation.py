"""Forward only: validation, test and predict.

The user's step runs once, on the calling thread, on the whole batch; each layer call goes to a worker with the layer's
weights and leaves nothing behind. A layer always goes to the same worker, so that a key-value cache that it fills in
one call is where the next one needs it, and calls may come in any order (`generate`, beam search).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.arguments import flatten_call
from lightning_roundpipe.runtime.boundary import Boundaries
from lightning_roundpipe.runtime.calls import Call
from lightning_roundpipe.runtime.context import Ambient
from lightning_roundpipe.runtime.crew import WatchedControl
from lightning_roundpipe.runtime.events import Recorder
from lightning_roundpipe.runtime.glue import GlueMode
from lightning_roundpipe.runtime.handing import hand_back
from lightning_roundpipe.runtime.interception import calling
from lightning_roundpipe.runtime.interrupts import allowed
from lightning_roundpipe.runtime.notes import Place, noted
from lightning_roundpipe.runtime.overlaps import Watched
from lightning_roundpipe.runtime.slots import Slot
from lightning_roundpipe.runtime.surroundings import Surroundings
from lightning_roundpipe.runtime.trace import TracedCall
from lightning_roundpipe.runtime.weights import HostLayer

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.engine import Engine


class Evaluation:
    """One batch's forward."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._control = WatchedControl(engine.crew)
        self.recorder = Recorder()
        self._boundaries = Boundaries(-1, self.recorder)
        self._device: Device | None = None
        self._glue = contextlib.ExitStack()
        self._calls = 0
        self._slot: Slot | None = None
        self._surroundings = Surroundings()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` with its layer calls on the workers."""
        follow = GlueMode((), lambda master: master, train=False, accelerator=self._engine.accelerator)
        # Where host and device are the same there is nothing to follow, and user code keeps its speed.
        mode = follow if self._engine.accelerator else contextlib.nullcontext()
        output: Any = None
        try:
            with calling(self), mode, self._glue, noted(self._place), allowed():
                self._glue.enter_context(self._engine.devices[0].activate())
                self._surroundings = Surroundings()
                output = function(*args, **kwargs)
        except BaseException as error:
            self._control.fail(error)
        crew = self._engine.crew
        crew.rest(self._control, given_up=self._control.given_up)
        self._control.raise_error()
        return output

    def _place(self) -> Place:
        return Place("glue", "evaluation", 0, self._slot, self._device)

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the intercepted layer does instead of running."""
        with torch._C.DisableTorchFunction(), allowed(False):
            engine = self._engine
            layer.check()
            self._surroundings.refuse(layer.name)
            worker = engine.workers[layer.index % len(engine.workers)]
            state = layer.state.current()
            leaves, spec = flatten_call(args, kwargs, state.carried if state else {})
            originals = list(leaves)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and engine.locate(leaf, self._device) is not worker.device:
                    leaves[i] = self._boundaries.save(leaf, engine.locate(leaf, self._device))
            call = Call(
                self._calls, layer, 0, spec, leaves, [False] * len(leaves), layer.trainable(),
                Ambient.capture(engine.device_types), state, None, contextvars.copy_context(), originals,
            )  # fmt: skip
            self._calls += 1
            slot = Slot(
                engine.next_slot(), worker.index, 0, "forward", range(0), [layer], {}, [0],
                recorder=self.recorder, control=self._control,
            )  # fmt: skip
            with noted(lambda: Place(f"layer {layer.name!r}", "evaluation", 0, slot, worker.device)):
                worker.run(lambda: worker.open(slot), self._control)
                forward = worker.run(
                    lambda: engine.runners[worker.index].forward(slot, call, self._boundaries), self._control
                )
            # Glue goes on in the stream that made the newest tensors.
            self._glue.close()
            self._glue.enter_context(worker.device.activate())
            self._device, self._slot = worker.device, slot
            self._boundaries.settle()
            worker.post(lambda: worker.close_slot(slot), self._control)
            return hand_back(call, None, TracedCall(layer, 0), forward, args, kwargs, Watched())[0]
