"""User code of one microbatch, between its layer calls, and the weights that this code reads and writes.

    enter ── with the baton; its own view of modules, a seed of its own, the device of the last call ── [1]
    exit ── a layer is called, or user code is over ── others run ── [2]
    a wait within user code ── others run, as long as it draws no random numbers ── [3]

A step of one microbatch may write to the weights of a layer that has no call on the tape, as momentum teachers do. A
write that every microbatch would repeat is an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.batches.weights import TargetCounts
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.caller_modes import Surroundings
from lightning_roundpipe.engine.executor import LayerCall
from lightning_roundpipe.engine.measured import MeasuredMemory
from lightning_roundpipe.engine.randomness import USER_CODE, Seed
from lightning_roundpipe.engine.step_slots import Turns
from lightning_roundpipe.engine.sync import GivenUp, Signal
from lightning_roundpipe.faults.notes import FaultPlace, noted
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.memory.version_waits import Versioned
from lightning_roundpipe.user_code.mode import UserCodeMode
from lightning_roundpipe.user_code.module_state import AttributeView, observe


class UserSections:
    """The sections of user code of one microbatch.

    Args:
        attributes: its view of modules; None if the step has no other microbatch.
        behind: what the last section, which has no turn, waits for; None: nothing.

    Attributes:
        phase: "forward", "backward" once the loss is there, or "evaluation".
        last: which code runs, as errors name it.
        number: number of the present section, or of the last one.
        begun: reached when the first section is over, and the call behind it has its turn in the first slot, or leaves
            that out.
        saved: context for all sections and their backward, in which what autograd saves counts on their devices.
        memory: measures memory, in the first window.
        surroundings: torch's modes where user code began.
    """

    def __init__(self, turns: Turns, attributes: AttributeView | None, behind: Signal | None = None) -> None:
        self.turns, self.context, self.spec = turns, turns.context, turns.slots.spec
        self.attributes, self.behind = attributes, behind
        self.phase = "forward"
        self.last, self.number = "before the first layer", -1
        self.begun = Signal()
        self.saved = self.context.pool.devices[0].saved_between_layers(lambda: turns.device)
        self.memory = MeasuredMemory(self.context.pool) if self.spec.measures else None
        self.surroundings: Surroundings | None = None
        self._draws = False
        self._activated: contextlib.AbstractContextManager[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether user code runs."""
        return self._activated is not None

    def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function``, the user's step, from its first section on."""
        self.enter()
        self.surroundings = Surroundings()
        self.measure()
        with self.noted():
            return function()

    def noted(self) -> noted:
        """Return a context that adds the place of user code to errors."""
        turns = self.turns
        return noted(
            lambda: FaultPlace(f"the code {self.last}", self.phase, turns.microbatch, turns.slot, turns.device)
        )

    def enter(self, section: int | None = None) -> None:
        """Enter the next section [1], or ``section`` again."""
        context, spec, turns = self.context, self.spec, self.turns
        if self.behind is not None and not turns.ended_early:
            turns.release()
            context.pool.baton.wait(self.behind.then)
        if turns.predecessor_progress is not None and self.phase != "backward":
            turns.wait_for(turns.predecessor_progress, turns.next + 1)
        for bucket in context.learned.read_by_user_code:
            turns.wait_for(bucket, spec.version)
        if self.attributes is None:
            observe(context.user.attributes)
        elif self.phase != "backward" or not spec.overlaps:
            self.attributes.enter()
        if context.model.buffers.replaced:
            context.model.buffers.settle()
        device = turns.device or context.pool.devices[0]
        activated = device.activate()
        activated.__enter__()
        self._activated = activated
        self.number += section is None
        self._draws = context.pool.randomness.begin(
            USER_CODE, device, self.seed_of(self.number if section is None else section)
        )

    def measure(self) -> None:
        """Measure the memory of this section from here on, if that is asked for."""
        if self.memory is not None:
            self.memory.enter(self.turns.device)

    def seed_of(self, section: int) -> Seed:
        """Return the seed of a section. Call number i of the forward ends section i."""
        return self.spec.seed_of(self.turns.microbatch, -1 - section)

    def exit(self) -> None:
        """Leave the section, if there is one [2]."""
        activated, self._activated = self._activated, None
        if activated is None:
            return
        if self.memory is not None:
            self.memory.exit()
        if self._draws:
            self.context.pool.randomness.end(USER_CODE)
        if self.attributes is not None:
            self.attributes.exit()
        else:
            observe(None)
        activated.__exit__(None, None, None)

    def release_successors(self) -> None:
        """Let other microbatches go past."""
        self.begun.set()
        self.turns.progress.publish(sys.maxsize)

    # -- waits --------------------------------------------------------------------------------------------------------

    def wait_for(self, what: Versioned, version: int) -> None:
        """Wait for a version of weights [3]. Raises `RoundPipeError` if the code draws random numbers."""
        if what.has(version):
            return
        if self._draws:
            raise RoundPipeError(
                "code between layers draws random numbers and reads weights that it did not read in the first batch, "
                "while the optimizer is changing them. Let it read them from the first batch on."
            )
        with self._outside():
            self.turns.wait_for(what, version)

    def run_unlocked(self, wait: Callable[[], Any]) -> Any:
        """Wait for a device while others run. A microbatch behind this one cannot come to the same code meanwhile."""
        if self._draws or not self.is_open:
            return wait()
        with self._outside(), GivenUp(self.context.pool.baton):
            return wait()

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Leave the section for a wait."""
        if self.attributes is not None:
            self.attributes.exit()
        try:
            yield
        finally:
            if self.attributes is not None:
                self.attributes.enter()


class WeightGuard:
    """Which weights user code may read and write now, and which a call computes with. Lends weights to layers.

    Args:
        mode: the torch function mode of the user code; None: that of a training step.

    Attributes:
        tape: the calls whose backward is still to come, in order.
    """

    def __init__(self, sections: UserSections, mode: UserCodeMode | None = None) -> None:
        self.context, self.spec, self.sections = sections.context, sections.spec, sections
        self.tape: list[LayerCall] = []
        self.read: set[ParamBucket] = set()
        self._written: list[nn.Parameter] = []
        """Parameters that user code has written to by their ``.data``, and that no call was made with since."""
        self.mode = mode or self._mode_of_training()

    def _mode_of_training(self) -> UserCodeMode:
        model, pool = self.context.model, self.context.pool
        return UserCodeMode(
            model.bucket_of, self.values_of, model.formats, train=True, accelerator=pool.accelerator,
            devices=pool.devices, run_unlocked=self.sections.run_unlocked, buffers=model.buffers,
            targets=TargetCounts() if self.spec.loss_weights.counts_targets else None, copies=self.spec.copies,
        )  # fmt: skip

    def values_of(self, master: nn.Parameter) -> Tensor:
        """Return the values of a master that this step computes with."""
        bucket, spec = self.context.model.bucket_of[id(master)], self.spec
        known = self.context.learned.read_by_user_code
        if self.sections.phase == "backward" and spec.overlaps and bucket not in known:
            raise RoundPipeError(
                f"code that runs in backward reads parameter {self.context.model.name_of(master)!r}, which no earlier "
                "batch read between layers, while the optimizer may be changing it. Let it read it from the first "
                "batch on."
            )
        self.read.add(bucket)
        self.sections.wait_for(bucket, spec.version)
        return bucket.read(master)

    def check(self, layer: HostLayer) -> None:
        """Make sure that a call computes with the weights that ``layer`` has now.

        If user code has written to them, all further calls of the layer run outside of the plan.
        """
        if self.spec.several:
            self._refuse_own_writes()
            layer.check.assert_unmodified()
            return
        self._written += self.mode.written_by_data()
        mine = [master for master in layer.masters if any(master is other for other in self._written)]
        if not (mine or layer.check.is_written()):
            layer.check.assert_unmodified()
            return
        self._refuse_taped(layer)
        model = self.context.model
        if (
            self.context.options.staleness
            or model.formats.low is not None
            or any(id(p) in model.formats.hidden for p in mine)
        ):
            torch.autograd.graph.increment_version(mine)
            layer.check.assert_unmodified()
        if (updates := self.spec.updates) is not None:
            self.sections.run_unlocked(updates.settle)
        layer.weights.reattach()
        layer.bucket.refresh()
        layer.check.snapshot()
        self.sections.turns.outside.add(layer.index)
        self._written = [master for master in self._written if not any(master is other for other in mine)]

    def note_call(self, call: LayerCall) -> bool:
        """Note a call. Return whether the host waits for its upload, as user code behind it may write to the weights.

        If a backward follows, it may not.
        """
        return not (self.spec.several or call.output_kinds)

    def check_after(self) -> None:
        """Check for writes to weights after ``training_step`` has returned."""
        if self.spec.several:
            self._refuse_own_writes()
            return
        self._written += self.mode.written_by_data()
        for layer in {call.layer.index: call.layer for call in self.tape}.values():
            if layer.check.is_written() or any(master is other for master in layer.masters for other in self._written):
                self._refuse_taped(layer)

    def _refuse_own_writes(self) -> None:
        if written := self.mode.written_by_data():
            raise RoundPipeError(
                f"training_step writes to parameter {self.context.model.name_of(written[0])!r} by its .data, while "
                "microbatches compute with it. Write to parameters between steps, for example in on_train_batch_end."
            )

    def _refuse_taped(self, layer: HostLayer) -> None:
        """Raise if a call of ``layer`` is on the tape: its recomputation would use other weights than its forward."""
        if any(call.layer is layer for call in self.tape):
            raise RoundPipeError(
                f"parameters of layer {layer.name!r} were written to within training_step, after a call whose backward "
                "computes it once more. Write to them between steps, for example in on_train_batch_end."
            )

    def refuse_late(self) -> None:
        """Raise if user code has registered a parameter and computed with it: the optimizer does not know it."""
        if not self.mode.met_others:
            return
        model = self.context.model
        late = (n for n, p in model.module.named_parameters() if p.requires_grad and id(p) not in model.bucket_of)
        if name := next(late, None):
            raise RoundPipeError(
                f"training_step registered parameter {name!r} and computes with it, but the strategy finds parameters "
                "before a step. Register it between steps, for example in on_train_batch_start."
            )

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """Return the stand-in of ``master`` for a layer on ``device``."""
        if not self.context.model.bucket_of[id(master)].has(self.spec.version):
            raise RoundPipeError(
                f"a layer computes with parameter {self.context.model.name_of(master)!r} of another module, which it "
                "did not in the first batch, while the optimizer is changing it. Let it do so from the first batch on."
            )
        proxy = self.mode.proxies.of(master)
        return proxy if proxy.device == device else self.mode.proxies.on(proxy, device)

    def take_bypassed_grad(self, master: nn.Parameter, grad: Tensor, layer: str = "") -> bool:
        """Take a gradient that autograd is about to accumulate into ``master`` itself; see `bypassed_gradients`.

        ``layer``: the layer whose backward this is; "": that of user code.
        """
        bucket = self.context.model.bucket_of[id(master)]
        known = self.spec.undisturbed or bucket in self.context.learned.read_by_user_code
        if bucket.read(master) is not master or master._backward_hooks or not known:
            name = self.context.model.name_of(master)
            raise RoundPipeError(
                f"layer {layer!r} computes with parameter {name!r} of another module, which did not show in the first "
                "batch. Pass the parameter to the layer."
                if layer
                else f"code uses parameter {name!r} itself, by another way than a torch function, while the step "
                "computes with a copy of it, the optimizer may change it, or a hook on it waits for its whole "
                "gradient. Give it parameter.clone() instead."
            )
        self.read.add(bucket)
        self.mode.proxies.add_bypassed(master, grad)
        return True
