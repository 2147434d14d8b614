"""How the user's optimizer is stepped under Lightning: on its own thread, or blocking, as in plain training.

    first batch ── are gradients needed within the step? ── [1]         if so, the step blocks, and a message says why
    optimizer_step: closure, hooks, optimizer.step() with no .grad anywhere ── [2]
                    ── submitted to the thread ── [3]
    a hook, a checkpoint or an evaluation that looks at weights ── updates are finished first ── [4]

[2] lets everything that counts or profiles steps see one. [3] performs the update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch import nn
from torch.optim import Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.optim.clipping import Clip
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.independence import goes_by_default_format, unwrapped
from lightning_roundpipe.optim.packed_moments import FP32
from lightning_roundpipe.optim.partial_optimizer import bytes_elsewhere, copy_state
from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.trainer.hook_audit import (
    DECLARE,
    FlushOptimizer,
    Settle,
    finds_last_gradients,
    listening,
    looks_at_weights,
    needs_gradients,
    reads_gradients,
    sees_each_batch,
    slowed_by,
)


class Stepping:
    """The stepping of one fit.

    Args:
        trainer: its callbacks are audited.
        module: the module in training.
        optimizers: what ``configure_optimizers`` returned.
        engine: the engine that trains.
        inform: prints a message to the user.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        engine: Engine,
        inform: Callable[[str], None],
    ) -> None:
        self._trainer, self._module, self._optimizers = trainer, module, list(optimizers)
        self._engine = engine
        self._inform = inform
        self._parameters = list(module.parameters())
        self._state_is_mapped = False
        """Whether the optimizer's state may lie in the file of a checkpoint."""
        self._listening: list[object] | None = None
        """The state of `listening` for which the way of stepping was chosen."""
        self._window = range(0)
        """The batches of the window that began last, by the number of batches processed before each."""
        self._stepped = False
        """Whether the optimizer's thread was given a step since the window that began last."""
        self._settle = FlushOptimizer(self._finish)
        self._hooks = contextlib.ExitStack()
        self._watch()

    def _watch(self) -> None:
        """Finish updates before anything looks at weights or optimizer state [4]."""
        self._settle.install(self._trainer)
        settle = Settle(self._engine.settle)  # a copy of the module must not copy the engine
        hooks: list[Any] = [self._module.register_state_dict_pre_hook(settle)]  # type: ignore[no-untyped-call]
        hooks += [optimizer.register_state_dict_pre_hook(settle) for optimizer in self._optimizers]
        for hook in hooks:
            self._hooks.callback(hook.remove)
        loop = self._trainer.fit_loop.epoch_loop.val_loop  # its data loader may run the model, before all hooks
        vars(loop)["run"] = functools.partial(_run_settled, Settle(self._finish), loop)
        self._hooks.callback(vars(loop).pop, "run", None)

    def _finish(self) -> None:
        """Finish pending updates, and put gradients where plain training leaves them."""
        self._engine.settle()
        if self._engine.updates is not None and not self.is_within_window():
            # Lightning drops the last step's gradients before it validates, and keeps those of an open window.
            self._engine.updates.gradients.show(after_step=not self._trainer.validating)

    def refuse_open_window(self) -> None:
        """Finish pending updates; raise if gradients accumulate, before the strategy is set up again without them."""
        self._engine.settle()
        updates, trainer = self._engine.updates, self._trainer
        is_open = updates is not None and updates.gradients.is_open
        if is_open or self.is_within_window() or (trainer.training and not self.starts_accumulation()):
            raise MisconfigurationException(
                "roundpipe: modules or parameters of the model were replaced within a window of "
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}. Replace them between windows, for example "
                "in on_train_epoch_start."
            )

    def sees_each_batch(self) -> str | None:
        """Return what has the batches of a window run one at a time, see `hook_audit`; None if nothing has."""
        return sees_each_batch(self._trainer, self._module, self._parameters)

    @property
    def asynchronous(self) -> bool:
        """Whether the optimizer steps on its own thread."""
        return self._engine.updates is not None

    def started(self) -> None:
        """Start training: move ``FlushOptimizer`` before callbacks that were added since, and audit them."""
        self._settle_for(looks_at_weights(self._trainer, self._module))

    def ended(self) -> None:
        """Finish pending updates at the end of training."""
        self._engine.settle()
        self._settle.remove(self._trainer)

    def close(self) -> None:
        """Remove all hooks from the trainer, the module and its optimizers."""
        self._settle.remove(self._trainer)
        self._hooks.close()

    def choose(self) -> None:
        """Choose how to step [1]. Called before every batch and within the optimizer step.

        The first batch chooses, after all hooks on gradients are registered. A later batch chooses again if that has
        changed: hooks may come with any batch, and the tuner tries batch sizes and learning rates without the user's
        callbacks.

        Raises:
            MisconfigurationException: ``staleness=1`` is set, which needs the thread, and the step has to block; or the
                module switched to manual optimization during training.
        """
        if self.asynchronous and not self._module.automatic_optimization:
            raise MisconfigurationException(
                "automatic_optimization was set to False during training, when the optimizer has begun to step beside "
                "it: set it in the LightningModule's __init__."
            )
        now, before = self._now(), self._listening
        if now == before:
            return
        looks = looks_at_weights(self._trainer, self._module)
        reason = self._reason(looks)
        if before is not None:
            if reason is None and not (self.asynchronous or self.starts_accumulation()):
                return  # the gradients accumulated in .grad stay there until the step that uses them
            self._settle_for(looks)
        self._listening = now
        self._refuse_options(reason)
        if reason is None:
            if not self.asynchronous:
                self._engine.enable_async_optimizer(lambda: next(iter(self._trainer.optimizers), None))
            if self._engine.updates is not None:
                self._engine.updates.gradients.keeps = reads_gradients(looks)
        else:
            self._engine.enable_async_optimizer(None)
            self._inform(f"roundpipe: training waits for each optimizer step: {reason}.")
        self._keep_own_state()

    def _refuse_options(self, reason: str | None) -> None:
        """Raise if options need the optimizer's thread, which ``reason`` rules out, or do not suit the optimizer."""
        options = self._engine.context.options
        form, device, staleness = options.optimizer_state, options.optimizer_device, options.staleness
        if form != FP32 and (why := reason or self._unpackable()) is not None:
            raise MisconfigurationException(
                f"optimizer_state={form!r} unpacks moments of Adam and AdamW as layers are updated one by one, which "
                f"is not possible: {why}. Set optimizer_state='fp32', or change that."
            )
        if device != "cpu" and (why := reason or self._all_fused()) is not None:
            raise MisconfigurationException(
                f"optimizer_device={device!r} has workers step, layer by layer, what the host has no fused kernel for, "
                f"which is not possible: {why}. Set optimizer_device='cpu', or change that."
            )
        if staleness and reason is not None:
            raise MisconfigurationException(
                f"staleness={staleness} applies updates while the next step runs, which is not possible: {reason}. "
                "Set staleness=0, or change that."
            )

    def loaded(self) -> None:
        """Take note that the optimizer's state was loaded, and may still lie in the file."""
        self._state_is_mapped = True
        if self._listening is not None:  # otherwise the first batch decides who needs it
            self._keep_own_state()

    def _keep_own_state(self) -> None:
        """Drop the state of parameters that other machines update. Copy the rest, if it lies in a checkpoint's file."""
        mapped, self._state_is_mapped = self._state_is_mapped, False
        updates = self._engine.updates
        for optimizer in self._optimizers:
            for parameter in list(optimizer.state):
                owner = self._engine.owner_of(parameter) if isinstance(parameter, nn.Parameter) else None
                if owner is not None and owner != self._engine.machine:
                    del optimizer.state[parameter]
                elif mapped and updates is not None and id(parameter) in self._engine.model.bucket_of:
                    updates.optimizer.mapped.add(id(parameter))
                elif mapped:
                    copy_state(optimizer.state[parameter])

    def _now(self) -> list[object]:
        return [*listening(self._trainer, self._module, self._optimizers, self._parameters), self._zeroed_elsewhere()]

    def _zeroed_elsewhere(self) -> str | None:
        """Return why Lightning drops gradients at other batches than the first of each window, if it does."""
        fetcher: Any = self._trainer.fit_loop._data_fetcher
        if self._trainer.accumulate_grad_batches == 1 or not isinstance(fetcher, _DataLoaderIterDataFetcher):
            return None
        return "training_step takes dataloader_iter, with which Lightning zeroes gradients within a window"

    def _reason(self, looks: Mapping[str, str]) -> str | None:
        """Return why the optimizer cannot step on its own thread; None if it can."""
        reason = needs_gradients(self._trainer, self._module, self._optimizers) or self._zeroed_elsewhere()
        for optimizer in self._optimizers if self._engine.model.formats.sets_default else ():
            reason = reason or goes_by_default_format(optimizer, double=self._engine.model.formats.low is None)
        if reason is None and (looking := slowed_by(looks)) is not None:
            reason = f"{looking} may read weights or gradients after each batch {DECLARE}"
        return reason

    def _unpackable(self) -> str | None:
        """Return why moments cannot be packed; None if they can."""
        for optimizer in self._optimizers:
            if not all(Hyperparameters.of(optimizer).direct):
                return f"{type(optimizer).__name__} with these settings has no fused kernel that takes parts"
        return None

    def _all_fused(self) -> str | None:
        """Return why nothing is stepped on workers; None if something is."""
        if any(map(bytes_elsewhere, self._optimizers)):
            return None
        return f"the host has one for all parameters of {type(unwrapped(self._optimizers[0])).__name__}"

    def _settle_for(self, looks: Mapping[str, str]) -> None:
        self._settle.remove(self._trainer)
        self._settle = FlushOptimizer(self._finish, looks)
        self._settle.install(self._trainer)

    def refuse_late_hooks(self) -> None:
        """Check that nothing has come to need the gradients of the running batch, which the optimizer's thread takes.

        Raises:
            RoundPipeError: code that needs them was added since the batch began.
        """
        if not self.asynchronous or self._now() == self._listening:
            return
        reason = needs_gradients(self._trainer, self._module, self._optimizers)
        if reason is not None:
            raise RoundPipeError(
                f"{reason}. It was registered or replaced within the batch, when its optimizer step had been prepared "
                "without it. Do it between batches, for example in on_train_batch_start."
            )

    def step(self, plugin: RoundPipePrecision, run: Callable[[], Any]) -> Any:
        """Run one optimizer step. ``run`` is Lightning's part of it [2]."""
        self.choose()
        clips: list[Clip] = []
        plugin.clipping = clips.append if self.asynchronous else None
        try:
            result = run()
        finally:
            plugin.clipping = None
        self.refuse_late_hooks()
        updates = self._engine.updates
        if updates is not None and not plugin.skipped:
            self._engine.publish_seen()
            updates.submit(clips[-1] if clips else None)  # [3]
            self._stepped = True
        return result

    def begin(self, span: int) -> bool:
        """Prepare a window of ``span`` batches. Return whether gradients of earlier windows are dropped.

        Raises:
            RoundPipeError: Lightning would add to gradients that a step has used, and these are gone.
        """
        self.choose()
        zero_grad = self.starts_accumulation()
        stepped, self._stepped = self._stepped, False
        if stepped and not zero_grad:
            batches, batch = self._trainer.accumulate_grad_batches, self._trainer.fit_loop.epoch_loop.batch_idx
            raise RoundPipeError(
                f"accumulate_grad_batches was changed to {batches} at batch {batch} of an epoch, which is no multiple "
                "of it: Lightning zeroes gradients at multiples only, and would add to those that the last step has "
                "used. Change it at a multiple, or between epochs, as GradientAccumulationScheduler does."
            )
        self._window = range(self._processed(), self._processed() + span)
        if zero_grad:
            self._zero_grad()
        return zero_grad

    def _zero_grad(self) -> None:
        """Do what Lightning does before it asks for backward: that of layers runs now, and its sums take memory."""
        trainer, module = self._trainer, self._module
        if self.asynchronous or not module.automatic_optimization or self._zeroed_elsewhere() is not None:
            return
        if self.sees_each_batch() or finds_last_gradients(trainer, module):
            return
        plain = [one for one in self._optimizers if getattr(one.zero_grad, "__func__", None) is Optimizer.zero_grad]
        for group in (group for optimizer in plain for group in optimizer.param_groups):
            for parameter in group["params"]:
                parameter.grad = None

    def is_within_window(self) -> bool:
        """Return whether a window has begun of which Lightning has not finished all batches."""
        return self._processed() in self._window

    def _processed(self) -> int:
        total: Any = self._trainer.fit_loop.epoch_loop.batch_progress.total
        return int(total.processed)

    def starts_accumulation(self) -> bool:
        """Return, before a batch, whether Lightning drops the accumulated gradients."""
        return self._trainer.fit_loop.epoch_loop.batch_idx % self._trainer.accumulate_grad_batches == 0

    def batch_number(self) -> int:
        """Return the number of batches since training began, which continues after resuming."""
        return int(self._trainer.fit_loop.epoch_loop.total_batch_idx)


def _run_settled(settle: Settle, loop: Any) -> Any:
    settle()
    return type(loop).run(loop)
