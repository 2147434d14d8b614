"""Who looks at weights or gradients between steps is found before training, and updates are finished in front of it.

The runs here are plain Lightning on the CPU: a strategy that only keeps books of what is pending stands for the one
that updates on another thread. What is found is tried by watching each parameter while a hook runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_roundpipe.callbacks.measurements import Measurements
from lightning_roundpipe.callbacks.plan_table import PlanTable
from lightning_roundpipe.callbacks.progress import ProgressLines, ProgressRich
from lightning_roundpipe.callbacks.run_folder import RunFolder
from lightning_roundpipe.tasks.causal_lm import CausalLM
from lightning_roundpipe.trainer import hook_audit
from lightning_roundpipe.trainer.hook_audit import FlushOptimizer, looks_at_weights, needs_gradients, slowed_by

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
HOOKS = sorted(hook_audit._OF_CALLBACKS)
WITHIN = hook_audit._WITHIN_THE_STEP
EVERY = sorted({*HOOKS, *hook_audit._WAITS_AT, "lr_scheduler_step"})


class Plain(pl.LightningModule):
    """A module with nothing but what each has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.lr = 0.1
        self.batch_size = 2

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch).mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(8, 4), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(4, 4), batch_size=2)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


def connected(module: pl.LightningModule, *given: Callback, **options: Any) -> pl.Trainer:
    """A trainer as it is when ``Strategy.on_train_start`` is called."""
    trainer = pl.Trainer(callbacks=list(given), **{**QUIET, **options})
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    module._trainer = trainer
    trainer.strategy.setup_optimizers(trainer)
    return trainer


def looks(*given: Callback, module: pl.LightningModule | None = None) -> dict[str, str]:
    module = module or Plain()
    return looks_at_weights(connected(module, *given), module)


def needs(*given: Callback, module: pl.LightningModule | None = None, **options: Any) -> str | None:
    module = module or Plain()
    trainer = connected(module, *given, **options)
    return needs_gradients(trainer, module, trainer.optimizers)


def overriding(base: type, *hooks: str, away: Any = None, **names: Any) -> Any:
    """An instance of a subclass of ``base`` that overrides ``hooks`` with functions that only pass on."""

    def passing(hook: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(super(kind, self), hook)(*args, **kwargs)

    said = {} if away is None else {hook_audit.PASSIVE_HOOKS: away}
    kind = type("Mine", (base,), {**{hook: passing(hook) for hook in hooks}, **said, **names})
    return kind() if base is not callbacks.EarlyStopping else kind("loss")


# -- Lightning's own callbacks -----------------------------------------------------------------------------------------

ARGUMENTS: dict[type, tuple[Any, ...]] = {
    callbacks.EarlyStopping: ("loss",),
    callbacks.GradientAccumulationScheduler: ({0: 1},),
    callbacks.ModelPruning: ("l1_unstructured",),
    callbacks.StochasticWeightAveraging: (0.1,),
    callbacks.ThroughputMonitor: (len,),
    callbacks.OnExceptionCheckpoint: (".",),
}
OWN = [kind for name in callbacks.__all__ if (kind := getattr(callbacks, name)) is not Callback]


def made(kind: type) -> Any:
    return kind(*ARGUMENTS.get(kind, ()))


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_own_callbacks_of_lightning(kind: type) -> None:
    own = {hook for hook in HOOKS if getattr(kind, hook) is not getattr(Callback, hook)}
    found = set() if kind in hook_audit._PASSIVE else own
    module, callback = Plain(), made(kind)
    trainer = connected(module)
    trainer.callbacks = [callback]  # type: ignore[attr-defined]
    assert looks_at_weights(trainer, module) == dict.fromkeys(found, f"callback {kind.__name__}")
    assert needs_gradients(trainer, module, trainer.optimizers) is None


class Watch(Profiler):
    """Notes in which callback's hook a parameter or a part of the optimizer's state is touched.

    Lightning tells a profiler of each hook. What a hook has saved does not count: the strategy is asked for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[str] = set()
        self.called: set[str] = set()
        self.module: pl.LightningModule | None = None
        self.open: list[str] = []

    def start(self, action_name: str) -> None:
        self.open.append(action_name)
        if action_name.startswith("[Callback]"):
            self.called.add(action_name)

    def stop(self, action_name: str) -> None:
        assert self.open.pop() == action_name

    def summary(self) -> str:
        return ""

    def watched(self) -> set[int]:
        assert self.module is not None
        found = {id(p) for p in self.module.parameters()}
        for optimizer in self.module.trainer.optimizers:
            found |= {id(v) for state in optimizer.state.values() for v in state.values()}
        return found


class Touches(TorchFunctionMode):
    """Sees each use of a tensor, attributes too."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.watch.open[-1] if self.watch.open else ""
        if name.startswith("[Callback]") and any(id(arg) in self.watch.watched() for arg in args):
            self.watch.touched.add(name)
        return func(*args, **(kwargs or {}))


def watched_run(callback: Callback, folder: Path) -> Watch:
    watch, module = Watch(), Plain()
    watch.module = module
    shown = {"enable_progress_bar": isinstance(callback, callbacks.ProgressBar)}
    saving = {"enable_checkpointing": isinstance(callback, callbacks.Checkpoint)}
    trainer = pl.Trainer(
        **{**QUIET, **shown, **saving, "logger": CSVLogger(folder)},
        callbacks=[callback],
        profiler=watch,
        max_epochs=2,
        log_every_n_steps=1,
        default_root_dir=folder,
    )
    with Touches(watch):
        trainer.fit(module)
        trainer.test(module, verbose=False)
        trainer.predict(module)
    return watch


def run_arguments(kind: type, folder: Path) -> dict[str, Any]:
    if kind is callbacks.ModelCheckpoint:
        return {"dirpath": folder, "every_n_train_steps": 1, "save_last": True}
    return {}


@pytest.mark.parametrize("kind", [kind for kind in OWN if kind in hook_audit._PASSIVE], ids=lambda kind: kind.__name__)
def test_passive_callbacks_touch_no_weights(kind: type, tmp_path: Path) -> None:
    callback = kind(*ARGUMENTS.get(kind, ()), **run_arguments(kind, tmp_path))
    if kind is callbacks.OnExceptionCheckpoint:
        callback = kind(tmp_path)
    watch = watched_run(callback, tmp_path)
    saved = ("on_save_checkpoint", "on_load_checkpoint", "setup")
    assert not [name for name in watch.touched if kind.__name__ in name and not name.endswith(saved)]
    assert [name for name in watch.called if kind.__name__ in name]


def test_the_watch_sees_what_is_touched(tmp_path: Path) -> None:
    watch = watched_run(callbacks.EMAWeightAveraging(), tmp_path)
    assert any(name.endswith("on_train_batch_end") for name in watch.touched)


# -- the user's callbacks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_a_users_callback_looks(hook: str) -> None:
    assert looks(overriding(Callback, hook)) == {hook: "callback Mine"}


def test_a_function_given_to_a_lambda_callback_looks() -> None:
    given = callbacks.LambdaCallback(on_train_batch_end=lambda *_: None, on_fit_end=lambda *_: None)
    assert set(looks(given)) == {"on_train_batch_end", "on_fit_end"}


def test_a_hook_replaced_in_the_instance_looks() -> None:
    stopping = callbacks.EarlyStopping("loss")
    stopping.on_validation_end = lambda *_: None  # type: ignore[method-assign]
    assert set(looks(stopping)) == {"on_validation_end"}


def test_a_subclass_of_a_passive_callback_waits_until_it_is_declared() -> None:
    assert set(looks(overriding(callbacks.EarlyStopping))) == {"on_train_epoch_end", "on_validation_end"}
    assert set(looks(overriding(callbacks.EarlyStopping, away=True))) == set()
    assert looks(overriding(Callback, "on_train_batch_end", roundpipe_looks_away=True)) == {}, "the earlier name"


def test_what_only_looks_like_a_callback_looks() -> None:
    trainer = connected(module := Plain())
    trainer.callbacks = [MagicMock()]  # type: ignore[attr-defined]
    assert looks_at_weights(trainer, module) == dict.fromkeys(HOOKS, "callback MagicMock")
    assert needs_gradients(trainer, module, trainer.optimizers) == "callback MagicMock has on_before_backward"


@pytest.mark.parametrize("away", [True, ("on_train_batch_end",), ["on_train_batch_end"], "on_train_batch_end"])
def test_a_class_declares_passive_hooks(away: Any) -> None:
    vouching = overriding(Callback, "on_train_batch_end", "on_train_start", away=away)
    assert set(looks(vouching)) == (set() if away is True else {"on_train_start"})


def test_a_class_speaks_for_itself_and_what_it_inherits() -> None:
    parent = type(overriding(Callback, "on_train_batch_end", "on_train_start", away=True))
    assert looks(overriding(parent)) == {}
    assert set(looks(overriding(parent, "on_train_start"))) == {"on_train_start"}, "the parent cannot know"
    assert looks(overriding(parent, "on_train_start", away=("on_train_start",))) == {}
    assert set(looks(overriding(parent, "on_train_start", away=False))) == {"on_train_start"}
    silent = type(overriding(Callback, "on_train_batch_end"))
    assert looks(overriding(silent, away=True)) == {}


def test_an_instance_speaks_for_its_own_functions() -> None:
    patched = overriding(Callback, "on_train_batch_end", away=True)
    patched.on_train_batch_end = lambda *_: None
    assert set(looks(patched)) == {"on_train_batch_end"}, "its class cannot know"
    given = callbacks.LambdaCallback(on_train_batch_end=lambda *_: None)
    given.roundpipe_passive_hooks = True  # type: ignore[attr-defined]
    assert looks(given) == {}


def test_the_packaged_job_waits_for_nobody() -> None:
    packaged = (Measurements(), PlanTable(), ProgressRich(), ProgressLines(), RunFolder("."))
    trainer = connected(module := Plain())
    trainer.callbacks = [*packaged]  # type: ignore[attr-defined]
    assert slowed_by(looks_at_weights(trainer, module)) is None
    assert needs_gradients(trainer, module, trainer.optimizers) is None
    for hook in (*EVERY, *WITHIN, *hook_audit._PARTS_OF_THE_STEP, "optimizer_step"):
        if hook in hook_audit.PER_BATCH or hook not in EVERY:
            assert getattr(CausalLM, hook, None) is getattr(pl.LightningModule, hook, None)


# -- modules, data modules, schedulers ---------------------------------------------------------------------------------


def test_a_plain_module_has_no_listeners() -> None:
    assert looks() == {}
    assert needs() is None
    assert slowed_by(looks()) is None


@pytest.mark.parametrize("hook", [h for h in EVERY if hasattr(pl.LightningModule, h)])
def test_an_overridden_hook_of_the_module_looks(hook: str) -> None:
    module = overriding(Plain, hook)
    assert looks(module=module) == {hook: "Mine"}
    assert looks(module=overriding(Plain, hook, away=(hook,))) == {}
    patched = Plain()
    setattr(patched, hook, getattr(patched, hook))
    assert looks(module=patched) == {hook: "Plain"}


def test_what_nobody_calls_does_not_count() -> None:
    assert looks(module=overriding(Plain, on_exception=lambda self: None)) == {}


def test_all_who_look_are_named() -> None:
    found = looks(overriding(Callback, "on_train_batch_end"), module=overriding(Plain, "on_train_batch_end"))
    assert found == {"on_train_batch_end": "callback Mine, Mine"}
    assert slowed_by(found) == "callback Mine, Mine (on_train_batch_end)"
    assert slowed_by(looks(overriding(Callback, "on_train_epoch_end"))) is None


def test_a_data_modules_transfers_count() -> None:
    module = Plain()
    trainer = connected(module)
    trainer.datamodule = overriding(pl.LightningDataModule, "on_after_batch_transfer", "setup")  # type: ignore[attr-defined]
    assert looks_at_weights(trainer, module) == {"on_after_batch_transfer": "Mine"}


class Strange(LRScheduler):
    """A scheduler of somebody's own."""

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]


class Ordinary(Strange):
    roundpipe_passive_hooks = ("lr_scheduler_step",)


@pytest.mark.parametrize(
    ("scheduler", "found"),
    [
        (lambda o: LambdaLR(o, lambda step: 1.0), {}),
        (Strange, {"lr_scheduler_step": "scheduler Strange"}),
        (lambda o: ChainedScheduler([StepLR(o, 1), Strange(o)]), {"lr_scheduler_step": "scheduler Strange"}),
        (Ordinary, {}),
    ],
)
def test_schedulers_that_are_not_torchs_count(scheduler: Callable[[Any], Any], found: dict[str, str]) -> None:
    class Scheduled(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [scheduler(optimizer)]

    assert looks(module=Scheduled()) == found
    assert looks(module=overriding(Scheduled, away=("lr_scheduler_step",))) == {}
    assert needs(module=Scheduled()) is None


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", WITHIN)
def test_a_callback_within_the_step_needs_gradients(hook: str) -> None:
    assert needs(overriding(Callback, hook)) == f"callback Mine has {hook}"
    assert needs(callbacks.LambdaCallback(**{hook: lambda *_: None})) == f"callback LambdaCallback has {hook}"
    assert needs(overriding(Callback, hook, away=(hook,))) is None
    assert looks(overriding(Callback, hook)) == {}


@pytest.mark.parametrize("hook", (*WITHIN, "optimizer_step", *hook_audit._PARTS_OF_THE_STEP))
def test_a_module_within_the_step_needs_gradients(hook: str) -> None:
    assert needs(module=overriding(Plain, hook)) == f"Mine overrides {hook}"
    patched = Plain()
    setattr(patched, hook, getattr(patched, hook))
    assert needs(module=patched) == f"Plain overrides {hook}"
    vouched = needs(module=overriding(Plain, hook, away=True))
    assert vouched == (f"Mine overrides {hook}" if hook in hook_audit._PARTS_OF_THE_STEP else None)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_need_gradients(register: str) -> None:
    module = Plain()
    handle = getattr(module.layer.bias, register)(lambda _: None)
    assert needs(module=module) == "parameter 'layer.bias' has a hook"
    handle.remove()
    assert needs(module=module) is None


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_several_gradients_are_hooks_on_parameters(mode: Any) -> None:
    module = Plain()
    handle = torch.autograd.graph.register_multi_grad_hook([module.layer.weight], lambda *_: None, mode=mode)
    assert needs(module=module) == "parameter 'layer.weight' has a hook"
    handle.remove()
    assert needs(module=module) is None


def test_anomaly_detection_needs_the_step_where_it_happens() -> None:
    assert "detect_anomaly" in (needs(detect_anomaly=True) or "")
    with torch.autograd.set_detect_anomaly(True):
        assert "detect_anomaly" in (needs() or "")


def test_manual_optimization_and_several_optimizers() -> None:
    module = Plain()
    module.automatic_optimization = False
    assert needs(module=module) == "Plain has automatic_optimization=False"
    module = Plain()
    trainer = connected(module)
    several = [torch.optim.SGD([p], lr=0.1) for p in module.parameters()]
    assert needs_gradients(trainer, module, several) == "there are several optimizers (2)"


def altered(change: str, optimizer: Any) -> Any:
    """Changes ``optimizer`` (or all) and returns what takes it back, if anything has to."""
    if change in ("step", "zero_grad"):
        plain = getattr(optimizer, change)
        setattr(optimizer, change, lambda *args, **kwargs: plain(*args, **kwargs))
        return None
    if change == "all":
        return register_optimizer_step_post_hook(lambda *_: None)
    return getattr(optimizer, change)(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("register_step_pre_hook", "AdamW has a step hook"),
        ("register_step_post_hook", "AdamW has a step hook"),
        ("all", "a step hook is registered for all optimizers"),
        ("step", "step() of AdamW was replaced in the instance"),
        ("zero_grad", "zero_grad() of AdamW was replaced in the instance"),
    ],
)
def test_an_altered_optimizer_steps_whole(change: str, reason: str) -> None:
    module = Plain()
    trainer = connected(module)
    handle = altered(change, trainer.optimizers[0])
    assert needs_gradients(trainer, module, trainer.optimizers) == reason
    if handle is not None:
        handle.remove()
        assert needs_gradients(trainer, module, trainer.optimizers) is None


def test_a_step_replaced_in_front_of_a_scheduler_is_seen_behind_it() -> None:
    class Sly(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            step = optimizer.step
            optimizer.step = (lambda self, *a, **k: step(*a, **k)).__get__(optimizer)  # type: ignore[method-assign]
            return [optimizer], [StepLR(optimizer, 1)]

    assert needs(module=Sly()) == "step() of SGD was replaced in the instance"


# -- FlushOptimizer ----------------------------------------------------------------------------------------------------


class Books(SingleDeviceStrategy):
    """Plain training; an update counts as pending until somebody settles. Wired as the strategy is to be."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.pending = False
        self.settled = 0
        self.error: Exception | None = None
        self.looks: dict[str, str] = {}
        self.now: FlushOptimizer | None = None

    def finish(self) -> None:
        self.settled += self.pending
        self.pending = False
        if self.error is not None:
            raise self.error

    def _listen(self, hooks: dict[str, str]) -> None:
        self.looks = hooks
        self.now = FlushOptimizer(self.finish, hooks)
        self.now.install(self.lightning_module.trainer)  # type: ignore[union-attr]

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._listen({})

    def on_train_start(self) -> None:
        module = self.lightning_module
        assert module is not None
        self._listen(looks_at_weights(module.trainer, module))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self.pending = True
        if "lr_scheduler_step" in self.looks:
            self.finish()
        return result

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.finish()
        return super().lightning_module_state_dict()

    def on_train_end(self) -> None:
        assert self.now is not None
        self.now.remove(self.lightning_module.trainer)  # type: ignore[union-attr]

    def teardown(self) -> None:
        if self.lightning_module is not None and self.now is not None:
            self.now.remove(self.lightning_module.trainer)
        super().teardown()


Calls = list[tuple[str, str, bool]]


def noting(base: type, who: str, calls: Calls, *hooks: str, away: Any = None) -> Any:
    """One that notes for each of its ``hooks`` that is called, whether an update was pending."""

    def note(hook: str) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            trainer: Any = self.trainer if isinstance(self, pl.LightningModule) else args[0]
            calls.append((who, hook, trainer.strategy.pending))
            return getattr(super(type(mine), self), hook)(*args, **kwargs)

        return noted

    mine = overriding(base, away=away, **{hook: note(hook) for hook in hooks})
    return mine


def run(module: pl.LightningModule, *given: Callback, **options: Any) -> tuple[pl.Trainer, Books]:
    books = Books()
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 2, **options}, strategy=books, callbacks=list(given))
    before = list(trainer.callbacks)  # type: ignore[attr-defined]
    trainer.fit(module)
    assert trainer.callbacks == before, "FlushOptimizer was left behind"  # type: ignore[attr-defined]
    return trainer, books


def test_nothing_is_pending_where_somebody_looks(tmp_path: Path) -> None:
    calls: Calls = []
    on_modules = [hook for hook in EVERY if hasattr(pl.LightningModule, hook)]
    callback = noting(Callback, "callback", calls, *HOOKS)
    module = noting(Plain, "module", calls, *on_modules)
    trainer, _ = run(module, callback, val_check_interval=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    assert not [call for call in calls if call[2]]
    reached = {(who, hook) for who, hook, _ in calls}
    assert ("module", "lr_scheduler_step") in reached
    assert {hook for who, hook in reached if who == "callback"} == set(HOOKS) - {"on_exception", "on_load_checkpoint"}


IN_FIT = [h for h in EVERY if not h.startswith(("on_exception", "on_save", "on_load", "on_test", "on_predict"))]


@pytest.mark.parametrize("hook", IN_FIT)
def test_nothing_is_pending_where_only_one_hook_is_looked_at(hook: str) -> None:
    """Each by itself, so that none leans on what is settled for another."""
    calls: Calls = []
    kinds: set[str] = set()
    short: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1}
    if hasattr(pl.LightningModule, hook):
        run(noting(Plain, "module", calls, hook), **short)
        kinds.add("module")
    if hook in HOOKS:
        run(Plain(), noting(Callback, "callback", calls, hook), **short)
        kinds.add("callback")
    assert not [call for call in calls if call[2]]
    assert {who for who, _, _ in calls} == kinds


def test_passive_hooks_do_not_wait() -> None:
    calls: Calls = []
    hooks = ("on_train_batch_start", "on_train_batch_end")
    _, books = run(Plain(), noting(Callback, "callback", calls, *hooks, away=True), val_check_interval=2)
    assert [pending for _, hook, pending in calls if hook == "on_train_batch_end"] == [True] * 8
    assert books.settled == 4  # in front of each validation, which is also where the epochs end


def test_the_last_batchs_update_is_pending_until_the_epoch_ends() -> None:
    calls: Calls = []
    module = noting(Plain, "module", calls, "on_train_batch_end", "on_train_epoch_end", away=("on_train_batch_end",))
    _, books = run(module, limit_val_batches=0)
    assert [pending for _, hook, pending in calls if hook == "on_train_batch_end"] == [True] * 8
    assert [pending for _, hook, pending in calls if hook == "on_train_epoch_end"] == [False] * 2
    assert books.settled == 2


def test_it_is_first_and_checkpoints_last_wherever_others_come_from() -> None:
    seen: list[list[str]] = []

    class Adds(Plain):
        def configure_callbacks(self) -> Any:
            return [callbacks.Timer(), callbacks.ModelCheckpoint(save_top_k=0)]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append([type(c).__name__ for c in self.trainer.callbacks])  # type: ignore[attr-defined]

    module = Adds()
    books = Books()
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True, "enable_model_summary": True}, strategy=books, max_steps=1
    )
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module)
    assert [names[0] for names in seen] == ["FlushOptimizer", "FlushOptimizer"]
    assert [names[-1] for names in seen] == ["ModelCheckpoint", "ModelCheckpoint"]
    assert [names.count("FlushOptimizer") for names in seen] == [1, 1]
    assert len(seen[0]) == len(seen[1])


def test_a_checkpoint_does_not_know_of_it(tmp_path: Path) -> None:
    saving = callbacks.ModelCheckpoint(tmp_path, filename="with", every_n_train_steps=1)
    run(Plain(), saving, max_steps=2, enable_checkpointing=True)
    plain = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True},
        max_steps=2,
        callbacks=[callbacks.ModelCheckpoint(tmp_path, filename="without", every_n_train_steps=1)],
    )
    plain.fit(Plain())
    saved = torch.load(tmp_path / "with.ckpt", weights_only=False)
    assert saved["callbacks"].keys() == torch.load(tmp_path / "without.ckpt", weights_only=False)["callbacks"].keys()
    assert "FlushOptimizer" not in str(
        {key: saved[key] for key in saved if key not in ("state_dict", "optimizer_states")}
    )


@pytest.mark.filterwarnings("error:.*callbacks used to create the checkpoint.*")
def test_a_run_resumes_without_missing_it(tmp_path: Path) -> None:
    trainer, _ = run(Plain(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = pl.Trainer(**QUIET, max_epochs=2, strategy=Books())
    again.fit(Plain(), ckpt_path=tmp_path / "a.ckpt")
    assert again.callbacks == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", ["training_step", "on_train_batch_end", "on_validation_epoch_end", "on_fit_start"])
def test_it_goes_after_an_error_and_the_trainer_can_be_used_again(at: str) -> None:
    module: Any = Plain()
    callback = callbacks.EarlyStopping("val_loss")
    trainer = pl.Trainer(**QUIET, strategy=Books(), callbacks=[callback], max_epochs=1, num_sanity_val_steps=0)

    def fails(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    setattr(module, at, fails)
    with pytest.raises(ArithmeticError):
        trainer.fit(module)
    assert trainer.callbacks == [callback]  # type: ignore[attr-defined]
    delattr(module, at)
    trainer.fit(module)
    assert trainer.callbacks == [callback]  # type: ignore[attr-defined]


def test_in_on_exception_it_acts_first_and_never_raises(tmp_path: Path) -> None:
    calls: Calls = []
    books = Books()

    class Fails(Plain):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step == 2:
                books.pending, books.error = True, RuntimeError("the update failed")
                raise ArithmeticError("on purpose")

    watching = noting(Callback, "callback", calls, "on_exception")
    trainer = pl.Trainer(**QUIET, strategy=books, callbacks=[watching], max_epochs=1, limit_val_batches=0)
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        trainer.fit(Fails())
    assert calls == [("callback", "on_exception", False)]
    assert any("the update failed" in note for note in caught.value.__notes__)


def test_an_error_of_the_update_itself_is_not_noted_on_itself() -> None:
    books = Books()

    class Fails(Plain):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 1:
                books.error = RuntimeError("the update failed")

    trainer = pl.Trainer(**QUIET, strategy=books, max_epochs=1, limit_val_batches=0)
    with pytest.raises(RuntimeError, match="the update failed") as caught:
        trainer.fit(Fails())
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("finder", ["learning rate", "batch size", "learning rate callback"])
def test_trials_of_the_tuner_are_settled_too(finder: str, tmp_path: Path) -> None:
    """While it tries, the tuner has put away all callbacks."""
    calls: Calls = []
    module = noting(Plain, "module", calls, "on_train_batch_end")
    given = [callbacks.LearningRateFinder(num_training_steps=4)] if finder.endswith("callback") else []
    trainer = pl.Trainer(**QUIET, strategy=Books(), max_steps=3, callbacks=[*given], default_root_dir=tmp_path)
    tuner = Tuner(trainer)
    if finder == "learning rate":
        found = tuner.lr_find(module, num_training=4)
        assert found is not None and len(found.results["loss"]) == 4
    elif finder == "batch size":
        tuner.scale_batch_size(module, max_trials=2, steps_per_trial=2)
    else:
        trainer.fit(module)
    assert len(calls) >= 4
    assert not [call for call in calls if call[2]]
    assert trainer.callbacks == given  # type: ignore[attr-defined]


def test_it_is_installed_once_and_stale_ones_are_dropped() -> None:
    mine: list[Any] = [callbacks.Timer(), callbacks.EarlyStopping("loss")]
    trainer: Any = pl.Trainer(**QUIET, callbacks=[*mine])
    old, new = FlushOptimizer(lambda: None), FlushOptimizer(lambda: None)
    old.install(trainer)
    new.install(trainer)
    walked = trainer.callbacks
    assert walked == [new, *mine]
    new.install(trainer)
    assert trainer.callbacks is walked
    trainer.callbacks = [mine[0], new, mine[1]]
    new.install(trainer)
    assert trainer.callbacks == [new, *mine]
    walked = trainer.callbacks
    new.remove(trainer)
    new.remove(trainer)
    assert trainer.callbacks == mine
    assert walked == [new, *mine], "somebody may be walking through the list"


def test_it_does_not_listen_itself() -> None:
    trainer = connected(module := Plain())
    FlushOptimizer(lambda: None, HOOKS).install(trainer)
    assert looks_at_weights(trainer, module) == {}
    assert needs_gradients(trainer, module, trainer.optimizers) is None


def hooks_of(settle: FlushOptimizer) -> Iterator[str]:
    return (hook for hook in HOOKS if getattr(getattr(settle, hook), "__func__", None) is not getattr(Callback, hook))


def test_only_what_was_asked_for_is_implemented() -> None:
    always = set(hooks_of(FlushOptimizer(lambda: None)))
    assert always == {*hook_audit._ALWAYS, "on_exception"}
    more = set(
        hooks_of(
            FlushOptimizer(lambda: None, ["on_train_batch_start", "on_before_batch_transfer", "lr_scheduler_step"])
        )
    )
    assert more - always == {"on_train_batch_start", "on_train_batch_end"}
    with pytest.raises(AssertionError, match="on_somehting"):
        FlushOptimizer(lambda: None, ["on_somehting"])
