"""Evaluation: forward only, with the newest weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.engine.activations import Activations, Arriving
from lightning_roundpipe.engine.arguments import Arguments
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.executor import LayerCall
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.sync import CancelScope, Runner
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.faults.notes import FaultPlace, noted
from lightning_roundpipe.runtime.layer_calls.output_collectors import hand_over
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.threads.caller_modes import without_caller_modes
from lightning_roundpipe.runtime.user_code.interception import Inside, calling
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode


class Evaluation:
    """A batch that runs alone on the calling thread; each call has a slot of its own.

    Args:
        context: the engine's parts.
        version: version of the weights.
    """

    def __init__(self, context: Context, version: int) -> None:
        self._context, self._version = context, version
        self.recorder = Recorder()
        self._scope = CancelScope(lambda: context.pool.fail(self._scope))
        self._runner = Runner(self._scope)
        self._activations = Activations(-1, self.recorder, context.pool.devices[0])
        self._device: Device | None = None
        self._calls = 0
        self._mode = UserCodeMode(
            context.model.bucket_of, self._read, context.model.formats, train=False,
            accelerator=context.pool.accelerator, devices=context.pool.devices, buffers=context.model.buffers,
        )  # fmt: skip

    def _read(self, master: Any) -> Tensor:
        return self._context.model.bucket_of[id(master)].read(master)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return what ``function(*args)`` returns."""
        baton = self._context.pool.baton
        baton.acquire(self._runner)
        device = self._context.pool.devices[0]
        try:
            with device.activate(), calling(self), self._mode, self._noted(), interrupts_allowed():
                return function(*args)
        except BaseException as error:
            self._scope.fail(error)
            raise
        finally:
            baton.release()
            self._context.pool.rest(self._scope, (), given_up=False)

    def _noted(self) -> noted:
        return noted(lambda: FaultPlace("the code between layers", "evaluation", -1, None, self._device))

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call on a worker."""
        context = self._context
        with torch._C.DisableTorchFunction(), interrupts_allowed(False):
            number = self._calls % len(context.pool.workers)
            self._calls += 1
            context.attributes.touched(layer.module)
            state = context.attributes.of(layer)
            carried = state.carried if state is not None else {}
            call = LayerCall(layer, self._calls, -1, (0,), state, context.thread_state())
            containers = context.attributes.containers(layer)
            call.arguments = Arguments((args, kwargs, carried, containers), self._mode.stand_in)
            given = call.tensors
            call.needs = [False] * len(given)
            worker, home = context.pool.workers[number], self._device
            slot = Slot(-1, number, "forward", [0], [layer], {}, [0], self._version, self.recorder, self._scope)
            worker.open(slot, worker.planned, self._runner)
            try:
                inputs = [
                    Arriving(t, None) if home is worker.device
                    else self._activations.bring(self._activations.save(t, home), worker.device)
                    for t in given
                ]  # fmt: skip
                place = FaultPlace(layer.title, "evaluation", -1, slot, worker.device)
                with noted(lambda: place), without_caller_modes():
                    result, run = context.executors[number].forward(
                        call, slot, inputs, self._runner, Inside(layer.name), keep_graph=False, evaluates=True
                    )
            finally:
                worker.close_slot(slot, worker.planned)
            self._device = worker.device
            context.executors[number].deliver(call, run, given)
            return hand_over(result)


class Evaluations:
    """Batches of an evaluation that are in flight together. So far each runs alone."""

    def knows(self, kind: Hashable) -> bool:
        return False

    def end(self) -> None:
        """End what is in flight."""
