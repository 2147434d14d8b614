"""Finds the hooks that may read weights or gradients while an update runs, and the callback that waits for it.

The optimizer runs on its own thread while user code continues. Code that reads a weight, a gradient or optimizer state
meanwhile would see half of an update, and code that writes one would lose its change, both silently. Lightning's hooks
are known before training, so the rule is: an overridden hook of a callback or of the module waits for the update. Two
kinds of hooks do not wait:

- those of a class that declares them passive: ``roundpipe_passive_hooks = ("on_train_batch_end",)``, or ``True`` for
  all, on a callback, a LightningModule, a LightningDataModule or a learning-rate scheduler. Passive hooks neither read
  nor write weights, gradients or optimizer state. The declaration covers the functions that the class defines or
  inherits, not what a subclass overrides;
- those of Lightning's own callbacks in ``_PASSIVE``, of exactly these classes.

A hook after the step may read ``.grad`` too: in plain training, the step's clipped gradients stay there until the next
backward. So waiting for an update includes setting ``.grad``.

The audit does not see code that Lightning does not call as a hook: a logger, a profiler, or the functions of a
``LambdaLR`` (under bf16 it may find NaN in place of weights, see `split_masters`). `LookAhead` sees data loaders, and
validation waits before it makes its own. Nor does it see hooks on a parameter's ``AccumulateGrad`` node, which Python
cannot list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_roundpipe.optim.independence import stepped_by_parameter

PASSIVE_HOOKS = "roundpipe_passive_hooks"

DECLARE = f"(the class attribute {PASSIVE_HOOKS} = True declares that it does not)"
"""How a class avoids that its hooks are waited for."""

_WITHIN_THE_STEP = ("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step")
"""Hooks of callbacks and modules in which plain training shows finished gradients, or the weights before the step.

``on_before_backward`` is one of them: layers' backward, and with it their updates, has begun by then.
"""

_PARTS_OF_THE_STEP = ("backward", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients")
"""Methods of the module that perform a part of the step themselves. No declaration exempts them."""

_OF_CALLBACKS = frozenset(n for n in vars(Callback) if n.startswith("on_") or n == "teardown") - {*_WITHIN_THE_STEP}

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

_WAITS_AT = dict.fromkeys(
    (*_TRANSFERS, "on_validation_model_zero_grad", "on_validation_model_eval"), "on_train_batch_end"
)
"""Hooks of modules that no callback's hook closely precedes, with the hook before them at which to wait."""

_SCHEDULER = "lr_scheduler_step"

PER_BATCH = frozenset({"on_train_batch_start", "on_train_batch_end", _SCHEDULER, *_WAITS_AT})
"""Hooks in which waiting costs speed. At other hooks the update would have to finish soon anyway."""

_STAGES = ("on_sanity_check", "on_validation", "on_test", "on_predict")
_ALWAYS = frozenset({f"{stage}_start" for stage in _STAGES})
_ALWAYS |= {"on_train_epoch_end", "on_train_end", "on_save_checkpoint", "on_load_checkpoint"}

_PASSIVE = {
    callbacks.TQDMProgressBar,
    callbacks.RichProgressBar,
    callbacks.DeviceStatsMonitor,
    callbacks.LearningRateMonitor,
    callbacks.ThroughputMonitor,
    callbacks.SpikeDetection,
    callbacks.Timer,
    callbacks.EarlyStopping,
    callbacks.GradientAccumulationScheduler,
    callbacks.ModelCheckpoint,  # saves through Trainer.save_checkpoint, where the strategy finishes updates itself
    callbacks.OnExceptionCheckpoint,
    _LRCallback,
}
"""Lightning's own callbacks whose hooks read neither weights nor optimizer state."""

_NAMES = frozenset({*_WITHIN_THE_STEP, *_PARTS_OF_THE_STEP, *_OF_CALLBACKS, *_WAITS_AT, _SCHEDULER, "optimizer_step"})
"""The names of all functions that the audit considers."""


# -- gradients ---------------------------------------------------------------------------------------------------------


def needs_gradients(trainer: Trainer, module: LightningModule, optimizers: Collection[Optimizer]) -> str | None:
    """Return why only the blocking step is correct: finished gradients are needed within it, or all of them together.

    Call it after ``on_fit_start`` and ``on_train_start``, which may register hooks. A module whose ``optimizer_step``
    only steps and sets hyperparameters can name it in ``roundpipe_passive_hooks``.

    Returns:
        The first reason, to follow "because": ``"callback GradNorm has on_after_backward"``. None if there is none.
    """
    return next(_gradient_needs(trainer, module, optimizers), None)


def _gradient_needs(trainer: Trainer, module: LightningModule, optimizers: Collection[Optimizer]) -> Iterator[str]:
    name = type(module).__name__
    if not module.automatic_optimization:
        yield f"{name} has automatic_optimization=False"
    if len(optimizers) > 1:
        yield f"there are several optimizers ({len(optimizers)})"
    for hook in _PARTS_OF_THE_STEP:
        if _overrides(module, hook, LightningModule):
            yield f"{name} overrides {hook}"
    for hook in (*_WITHIN_THE_STEP, "optimizer_step"):
        yield from (f"{who}, which may read weights or gradients {DECLARE}" for who in _looking(trainer, module, hook))
    if hooked := hooked_parameter(module):
        yield f"parameter {hooked!r} has a hook"
    if getattr(trainer, "_detect_anomaly", False) or torch.is_anomaly_enabled():
        yield "detect_anomaly=True is to name the step that went wrong"
    yield from filter(None, map(stepped_by_parameter, optimizers))


def _looking(trainer: Trainer, module: LightningModule, hook: str) -> Iterator[str]:
    """Yield the module, and the callbacks, whose ``hook`` is not passive, as part of a sentence."""
    if _looks(module, hook, LightningModule):
        yield f"{type(module).__name__} overrides {hook}"
    for callback in others(trainer):
        if _looks(callback, hook, Callback):
            yield f"callback {type(callback).__name__} has {hook}"


def sees_each_batch(trainer: Trainer, module: LightningModule, parameters: Iterable[nn.Parameter]) -> str | None:
    """Return what finds the gradients of each batch of a window, so that batches run one at a time; None if nothing.

    ``parameters``: those of the module. Finding their names takes milliseconds.
    """
    hooked = hooked_parameter(module) if any(map(_has_hook, parameters)) else None
    return next(_looking(trainer, module, "on_after_backward"), hooked and f"parameter {hooked!r} has a hook")


def finds_last_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether anything may look at the last step's gradients between ``training_step`` and ``zero_grad``."""
    return _overrides(module, "optimizer_zero_grad", LightningModule) or any(
        _looking(trainer, module, "on_before_zero_grad")
    )


def hooked_parameter(module: nn.Module) -> str | None:
    """Return the first parameter with a hook on itself or its gradient, as ``wandb.watch`` registers them."""
    return next((name for name, parameter in module.named_parameters() if _has_hook(parameter)), None)


def _has_hook(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def listening(
    trainer: Trainer, module: LightningModule, optimizers: Collection[Optimizer], parameters: Iterable[nn.Parameter]
) -> list[object]:
    """Return the state that `needs_gradients` and `looks_at_weights` depend on and that may change during training.

    It takes microseconds, so that each batch can compare it with the previous one's. It does not notice functions that
    are replaced in a class.
    """
    listed = others(trainer)
    set_in_instances = [vars(listener).keys() & _NAMES for listener in (module, *listed)]
    hooked, anomaly = any(map(_has_hook, parameters)), torch.is_anomaly_enabled()
    whole = [*map(stepped_by_parameter, optimizers)]
    return [listed, set_in_instances, hooked, anomaly, module.automatic_optimization, whole]


# -- weights -----------------------------------------------------------------------------------------------------------


def looks_at_weights(trainer: Trainer, module: LightningModule) -> dict[str, str]:
    """Return the hooks between steps that may read or write weights or optimizer state, and the classes that have them.

    Hooks within the step are not among them (see `needs_gradients`). `FlushOptimizer` waits just before the first
    callback's hook, or at the one of `_WAITS_AT`. ``lr_scheduler_step`` runs right after the optimizer's step, with no
    callback's hook between: the strategy must finish the update within its ``optimizer_step``. Schedulers that are not
    torch's count here too.

    Returns:
        Hook names with the classes that look, such as ``{"on_train_batch_end": "callback WeightNorm, MyModule"}``.
    """
    listeners: list[tuple[Any, type, str]] = [(c, Callback, f"callback {type(c).__name__}") for c in others(trainer)]
    listeners += [(module, LightningModule, type(module).__name__)]
    found = {
        hook: [who for listener, base, who in listeners if _looks(listener, hook, base)]
        for hook in (*sorted(_OF_CALLBACKS), *_WAITS_AT, _SCHEDULER)
    }
    for hook in _TRANSFERS if (data := getattr(trainer, "datamodule", None)) is not None else ():
        if _looks(data, hook, LightningDataModule):
            found[hook].append(type(data).__name__)
    if not any(_declares(holder, _SCHEDULER) for holder in (module, *type(module).__mro__)):
        strange = [type(s).__name__ for s in _schedulers(trainer) if _strange_scheduler(s)]
        found[_SCHEDULER] += [f"scheduler {name}" for name in strange]
    return {hook: ", ".join(dict.fromkeys(who)) for hook, who in found.items() if who}


def reads_gradients(looks: Iterable[str]) -> bool:
    """Return whether any of the hooks finds the gradients of a step in ``.grad``.

    They are gone before validation, which begins with ``zero_grad``, and there are none before the first step.
    """
    return any(not hook.startswith((*_STAGES, "on_fit_start", "on_train_start")) for hook in looks)


def slowed_by(looks: Mapping[str, str]) -> str | None:
    """Return the classes whose hooks make every batch wait, as part of a sentence; None if there are none."""
    return "; ".join(f"{who} ({hook})" for hook, who in looks.items() if hook in PER_BATCH) or None


def _schedulers(trainer: Trainer) -> Iterator[Any]:
    waiting: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    while waiting:
        yield (scheduler := waiting.pop(0))
        waiting += getattr(scheduler, "_schedulers", ())


def _strange_scheduler(scheduler: Any) -> bool:
    """Return whether a scheduler may read optimizer state. torch's own only set hyperparameters."""
    known = type(scheduler).__module__.startswith(("torch.optim.", "lightning.pytorch."))
    return not known and not any(_declares(kind, _SCHEDULER) for kind in (scheduler, *type(scheduler).__mro__))


# -- one hook ----------------------------------------------------------------------------------------------------------


def _overrides(listener: Any, hook: str, base: type) -> bool:
    """Return whether Lightning calls another function of ``listener`` than that of ``base``."""
    if not hasattr(base, hook) or not callable(getattr(listener, hook)):
        return False
    return hook in vars(listener) or getattr(type(listener), hook, None) is not getattr(base, hook)


def _looks(listener: Any, hook: str, base: type) -> bool:
    """Return whether ``listener`` overrides ``hook`` of ``base`` with a function that is not passive.

    The class that defines it may declare it passive, or one that is derived from that class.
    """
    if not _overrides(listener, hook, base) or (type(listener) in _PASSIVE and hook not in vars(listener)):
        return False
    for holder in (listener, *type(listener).__mro__):  # where Python looks for it
        if _declares(holder, hook):
            return False
        if hook in vars(holder):
            break
    return True


def _declares(holder: Any, hook: str) -> bool:
    named = vars(holder).get(PASSIVE_HOOKS, ())
    return named is True or (named is not False and hook in ((named,) if isinstance(named, str) else named))


# -- waiting -----------------------------------------------------------------------------------------------------------


class Settle:
    """Calls ``settle`` with no arguments, whatever it is called with. What is copied while a run lasts may hold it.

    A copy is this object, so a copied list of callbacks waits for the same updates. Where it is unpickled, no update is
    pending.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle

    def __call__(self, *_: Any, **__: Any) -> None:
        if self._settle is not None:
            self._settle()

    def __copy__(self) -> Settle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Settle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Settle, ()


class FlushOptimizer(Callback):
    """Finishes pending updates before the hooks of other callbacks and of modules.

    It is the first of the trainer's callbacks, and modules' hooks run after those of callbacks. Lightning adds the
    module's callbacks before ``Strategy.setup``; the tuner inserts others for a while, and expects its own to be first
    once training has ended. So `install` this callback in ``Strategy.setup`` and ``on_train_start``, and `remove` it in
    ``on_train_end`` and ``teardown``, where no update is pending.

    Args:
        settle: returns when no update is pending and each ``.grad`` is what plain training leaves after a step. It may
            raise the error of an update. It is called often, and may be reentered by a signal handler that saves.
        hooks: those of ``looks_at_weights``. The callback always acts where evaluation, an epoch's end or a checkpoint
            begins.
    """

    def __init__(self, settle: Callable[[], None], hooks: Collection[str] = ()) -> None:
        self._settle = Settle(settle)
        points = {_WAITS_AT.get(hook, hook) for hook in hooks} - {_SCHEDULER, "on_exception"}
        for hook in _ALWAYS | points:
            setattr(self, hook, self._settle)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Settle without hiding ``exception``, which ends the run: a further error is added to it as a note."""
        try:
            self._settle()
        except BaseException as error:
            if error is not exception:
                exception.add_note(f"roundpipe: finishing the pending update failed too: {error!r}")

    def install(self, trainer: Trainer) -> None:
        """Become the first of ``trainer``'s callbacks. Idempotent."""
        if vars(trainer)["callbacks"][:1] != [self]:
            vars(trainer)["callbacks"] = [self, *others(trainer)]  # a new list: the old one may be being iterated

    def remove(self, trainer: Trainer) -> None:
        """Remove this callback from ``trainer``'s callbacks."""
        if len(left := others(trainer)) < len(vars(trainer)["callbacks"]):
            vars(trainer)["callbacks"] = left


def others(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of ``trainer`` without ``FlushOptimizer``."""
    return [callback for callback in vars(trainer)["callbacks"] if not isinstance(callback, FlushOptimizer)]
