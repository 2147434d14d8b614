"""Forward only: one batch of validation, test or prediction, alone.

The user's step runs once, on the calling thread. Each layer call runs on a worker and saves nothing for a backward. A
layer always runs on the same worker, so a key-value cache stays on the device that uses it. Calls may come in any order
(`generate`, beam search). Batches whose calls are known run several at once (`evaluation_pipeline`).

    layer call ── uses the slot that was prefetched, if the prediction was right ── [1]
               ── prefetches the weights of the predicted next layer to that layer's worker ── [2]
               ── runs meanwhile ── [3]
               ── its weights are uploaded before user code goes on, which may write to them ── [4]

A layer that is called where user code wants gradients (forces, adaptation to a test set) runs in place, on the user's
own weights, which are on the host: autograd then sees what it sees in plain Lightning. So does every later call of the
batch, as user code may have stepped an optimizer. On a GPU the inputs are elsewhere, and the call is refused.

A wrong prediction costs one upload. User code must not write to weights while they are being prefetched. A layer call
raises if a version counter shows a write to its weights. Writes through ``.data`` leave the counter alone, so once user
code reads a weight's ``.data``, the rest of the batch prefetches nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.call import Call, Forward
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.delivery import hand_back
from lightning_roundpipe.runtime.core.trace import TracedCall
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.core.worker_pool import WatchedCancelScope
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.faults.notes import FaultPlace, noted
from lightning_roundpipe.runtime.layer_calls.arguments import flatten, flatten_call, is_cache
from lightning_roundpipe.runtime.layer_calls.shared_memory import SharedOutputs
from lightning_roundpipe.runtime.layer_calls.surrounding_modes import Surroundings
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.evaluation_user_code import EvaluationUserCode
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.user_code.interception import calling
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode
from lightning_roundpipe.runtime.user_code.module_state import AttributeView

OFTEN = 64
"""Layer calls between two searches for dead host copies: generating a long text makes thousands of calls in a step."""


class Evaluation:
    """The forward of one batch.

    The class is large because it does alone what a training step divides between `Step`, `MicrobatchTask`, the slots
    and the predictor: one thread, one microbatch and no tape leave a few lines of each.

    Args:
        engine: the context that outlives the batch.
        forwards: the layers' own forwards, by index; None if no call is to run in place.
        cancel_scope: carries its errors; by default a new one.
        index: number of the batch among those in flight.
        recorder: records calls and copies; by default a new one.

    Attributes:
        called: the layers that it has called, in order.
        alone: whether it has done what only a batch alone may do: written to weights, wanted gradients, or called a
            layer again with a key-value cache.
        in_place: whether a layer call has run in place.
        follows_writes: whether user code may write to weights between calls, so that each call refreshes its working
            copies.
        device: the device of the last layer call; None before the first one.
    """

    def __init__(
        self, engine: EngineContext, forwards: Mapping[int, Callable[..., Any]] | None = None,
        cancel_scope: CancelScope | None = None, index: int = 0, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._forwards, self.index = engine, forwards, index
        self.view: AttributeView | None = None
        """What a batch that runs alone has set on modules."""
        self.called: list[HostLayer] = []
        self.alone = self.in_place = self.follows_writes = False
        self.device: Device | None = None
        self._order, self._profiles = engine.learned.order, engine.learned.profiles
        self._ahead = bool(engine.options.prefetch)
        self._foreseen: Slot | None = None
        self._cancelled_uploads: set[Worker] = set()
        """Workers with uploads that no call has waited for."""
        self._cancel_scope = cancel_scope or WatchedCancelScope(engine.worker_pool)
        self.recorder = recorder or Recorder()
        self._activations = ActivationStore(index, self.recorder, engine.worker_pool.staging)
        self._user_code = contextlib.ExitStack()
        self._slot: Slot | None = None
        self.surroundings = Surroundings()
        self._mode: UserCodeMode = EvaluationUserCode(engine, self._stay_behind, self._aside)
        self._executors = engine.executors
        self._watched = SharedOutputs()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``function(*args, **kwargs)``, with its layer calls on the workers."""
        output: Any = None
        scope = self._cancel_scope
        self._order.begin()
        try:
            with calling(self), self._mode, self._user_code, noted(self._place), interrupts_allowed():
                self._user_code.enter_context(self._engine.worker_pool.devices[0].activate())
                self.surroundings = Surroundings()
                self._foresee()
                output = function(*args, **kwargs)
                self._watched.assert_unmodified()
            self._finish_uploads()
        except BaseException as error:
            scope.fail(error)
        given_up = isinstance(scope, WatchedCancelScope) and scope.given_up
        self._engine.worker_pool.rest(scope, given_up=given_up)
        self._activations.move_to(None)
        self._follow_writes()
        scope.raise_error()
        return output

    def _finish_uploads(self) -> None:
        """Wait for uploads that no call has waited for: the caller may write to weights next."""
        self.drop_foreseen()
        for worker in self._cancelled_uploads:
            worker.run(worker.device.weights_up.synchronize, self._cancel_scope)

    def _follow_writes(self) -> None:
        for bucket in self._engine.model.buckets if self.follows_writes else ():
            bucket.refresh()  # user code may have restored the weights that it swapped

    def _place(self) -> FaultPlace:
        return FaultPlace("the code between layers", "evaluation", self.index, self._slot, self.device)

    def _aside(self, wait: Callable[[], Any]) -> Any:
        """Call ``wait``, which waits for a device."""
        return wait()

    def go_on(self, device: Device | None) -> None:
        """Run the following user code in the compute stream of ``device``, which made the newest tensors."""
        if device is not None:
            self._user_code.close()
            self._user_code.enter_context(device.activate())
            self.device = device

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """Return a copy on ``device`` of a parameter that the running layer uses and does not own."""
        return master.to(device, self._engine.model.formats.of(master))

    def passed_by(self, master: nn.Parameter, grad: Tensor) -> bool:
        """Leave a gradient that reached ``master`` itself to autograd, which adds it to ``.grad``."""
        return False

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an intercepted layer on its worker and return its output."""
        if self.in_place or wants_gradients():
            with torch._C.DisableTorchFunction():
                runs_in_place = self._runs_in_place(layer, args, kwargs)
            if runs_in_place is not None:
                return runs_in_place(*args, **kwargs)
        with torch._C.DisableTorchFunction(), interrupts_allowed(False):
            engine = self._engine
            layer.assert_unmodified()
            self.surroundings.refuse(layer.name)
            if not self.alone and layer in self.called and any(map(is_cache, flatten((args, kwargs))[0])):
                self._be_alone()
            slot, number = self._slot_for(layer)
            worker = engine.worker_pool.workers[slot.worker]
            state = layer.state.current()
            leaves, spec = flatten_call(args, kwargs, state.carried if state else {})
            leaves = [self._mode.stand_in(leaf) for leaf in leaves]
            originals = list(leaves)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and (home := self._locate(leaf)) is not worker.device:
                    leaves[i] = self._activations.save(leaf, home)
            call = Call(
                number, layer, self.index, spec, leaves, [False] * len(leaves), layer.trainable(),
                engine.thread_state(), state, None,
                contextvars.copy_context(), originals, lender=self,
            )  # fmt: skip
            self._adapt(call)
            self.called.append(layer)
            if self.follows_writes:
                layer.bucket.refresh()
            with noted(lambda: FaultPlace(layer.title, "evaluation", self.index, slot, worker.device)):
                if self.view is not None:  # others would see here what the step sets and puts back
                    self.view.leave()
                    self.view.enter()
                self._enter(slot, call)
                forward = self._run_forward(slot, call, worker)
            self.go_on(worker.device)
            self._slot = slot
            self._activations.settle()
            if len(self.called) % OFTEN == 0:
                self._activations.forget_dead()
            self._leave(slot, call)
            return self._hand_back(call, forward, args, kwargs)

    def _locate(self, tensor: Tensor) -> Device | None:
        return self._engine.worker_pool.locate(tensor, self.device)

    def _enter(self, slot: Slot, call: Call) -> None:
        """Open the slot of ``call``, and prefetch the weights of the call that is predicted to follow."""
        worker = self._engine.worker_pool.workers[slot.worker]
        worker.run(lambda: worker.open(slot), self._cancel_scope)
        self._order.see(call.layer)
        self._foresee()  # [2]

    def _leave(self, slot: Slot, call: Call) -> None:
        worker = self._engine.worker_pool.workers[slot.worker]
        worker.post(lambda: worker.close_slot(slot), self._cancel_scope)

    def _run_forward(self, slot: Slot, call: Call, worker: Worker) -> Forward:
        """Run the call's forward on the worker's thread, which then waits for the upload [4]."""

        def forward() -> Forward:
            result = self._executors[worker.index].forward(slot, call, self._activations)
            slot.uploaded[call.layer.index].wait()
            return result

        return worker.run(forward, self._cancel_scope)  # [3]

    def _runs_in_place(
        self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """Return the layer's own forward, on the host, if user code wants gradients of the call; else None."""
        if self._forwards is None:
            return None
        leaves = flatten((args, kwargs))[0]
        if not self.in_place and not (
            any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves) or any(layer.trainable())
        ):
            return None
        if not self.in_place:
            self._stay_behind()
            self.in_place = True
        self._engine.model.buffers.settle()
        forward, accelerator = self._forwards[layer.index], self._engine.worker_pool.accelerator
        if accelerator is None:
            return forward
        self._engine.hints.say(
            "gradients",
            f"layer {layer.name!r} is called with gradients (torch.enable_grad) in a validation, test or predict step, "
            "in which GPUs only run forward: from there on, the step's layers run on the CPU.",
        )
        return functools.partial(_run_on_the_host, forward, accelerator)

    def _adapt(self, call: Call) -> None:
        """Take the profile of the layer's last call, if it fits. A rehearsal takes none, but looks at the call."""
        profile = self._profiles.get(call.layer.index)
        if profile is not None and profile.fits(call):
            call.profile = profile

    def _hand_back(self, call: Call, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call.layer.sets_attributes |= any(kind == "attribute" for kind, *_ in forward.side_outputs)
        self._profiles[call.layer.index] = forward.profile
        return hand_back(call, None, TracedCall(call.layer, 0), forward, args, kwargs, self._watched)[0]

    # -- uploading ahead ----------------------------------------------------------------------------------------------

    def worker_of(self, layer: HostLayer) -> Worker:
        """Return the worker that a whole call of ``layer`` runs on."""
        return self._engine.worker_pool.workers[layer.index % len(self._engine.worker_pool.workers)]

    def _new_slot(self, layer: HostLayer) -> Slot:
        return Slot(
            self._engine.worker_pool.next_slot(), self.worker_of(layer).index, 0, "forward", range(0), [layer], {},
            [0], recorder=self.recorder, cancel_scope=self._cancel_scope,
        )  # fmt: skip

    def _slot_for(self, layer: HostLayer) -> tuple[Slot, int]:
        """Return the prefetched slot if it is that of ``layer``, else a new one [1], and the number of the call."""
        foreseen, number = self._foreseen, len(self.called)
        if foreseen is not None and foreseen.layers[0] is layer:
            self._foreseen = None
            return foreseen, number
        self.drop_foreseen()
        return self._new_slot(layer), number

    def _foresee(self) -> None:
        following = self._order.following() if self._ahead else None
        if following is not None:
            slot, worker = self._new_slot(following), self.worker_of(following)
            self._foreseen = slot
            worker.post(lambda: worker.prepare(slot), self._cancel_scope)

    def drop_foreseen(self) -> None:
        """Cancel the prefetch, if there is one. Its upload may still be running."""
        slot, self._foreseen = self._foreseen, None
        if slot is None:
            return
        worker = self._engine.worker_pool.workers[slot.worker]
        worker.post(lambda: worker.cancel(slot), self._cancel_scope)
        self._cancelled_uploads.add(worker)

    def _be_alone(self) -> None:
        """Note that the batch does what only a batch alone may do."""
        self.alone = True

    def _stay_behind(self) -> None:
        """Stop prefetching for the rest of the batch: user code may write to weights without raising their versions."""
        self._be_alone()
        # In a rehearsal with staleness 1, working copies may be what the step computes with, and no longer be masters'.
        self._ahead, self.follows_writes = False, not self._engine.model.lags
        self.drop_foreseen()


def _run_on_the_host(forward: Callable[..., Any], accelerator: str, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward on its masters, with differentiable copies of tensors that are on a GPU."""
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), (args, kwargs))
    enabled, dtype = torch.is_autocast_enabled(accelerator), torch.get_autocast_dtype(accelerator)
    with torch.autocast("cpu", dtype) if enabled else contextlib.nullcontext():
        return forward(*args, **kwargs)


def wants_gradients() -> bool:
    """Return whether the calling code builds graphs: Lightning runs evaluation without them."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
