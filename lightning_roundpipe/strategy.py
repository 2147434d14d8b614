"""``Trainer(strategy="roundpipe")``: the engine as Lightning sees it.

To Lightning, this strategy trains a module on the CPU in one process: the module, the batch and the optimizer stay in
host memory. Only steps go to the engine, which runs the module's layers on the workers:

    setup             the engine starts: it finds layers, and makes workers ── `engine.engine`
    training_step     the first batch of a window runs all of it; others get their results ── `trainer.fit`
    optimizer_step    Lightning's part of a step; the update goes on beside the next ── `trainer.stepping`
    validation_step   and test and prediction: several batches are in flight ── `trainer.evaluation_window`
    teardown          the engine stops

The rest of this module overrides defaults that would move something to a GPU, and reads and writes checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.apply_func import _TransferableDataType
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_roundpipe.config import Emulation, Options, RoundPipeError, refuse_unscaled
from lightning_roundpipe.devices import make_devices
from lightning_roundpipe.engine.context import make_context
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.engine.report import Report
from lightning_roundpipe.faults.interrupts import interrupts_deferred
from lightning_roundpipe.faults.notes import remedied
from lightning_roundpipe.machines.file_tensors import FileTensors
from lightning_roundpipe.memory.budget import over_capacity
from lightning_roundpipe.messages import PREFIX, plural, warn
from lightning_roundpipe.model.meta import make_room
from lightning_roundpipe.model.quantized import load_states, prepare
from lightning_roundpipe.model.token_tiles import run_in_tiles
from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.reports.announcements import changed_settings, name_devices
from lightning_roundpipe.reports.page import write_page
from lightning_roundpipe.reports.planned import replay_of
from lightning_roundpipe.reports.step_monitor import RoundPipeMonitor
from lightning_roundpipe.trainer.checkpoint_io import WholeCheckpointIO
from lightning_roundpipe.trainer.evaluation_window import EvaluationWindow
from lightning_roundpipe.trainer.fit import Fit, profile_all_threads
from lightning_roundpipe.trainer.lookahead import TRANSFER, TakenBatch, transfer_once
from lightning_roundpipe.trainer.refusals import (
    begin_run,
    end_run,
    load_optimizer,
    refuse_accelerator,
    refuse_foreign_parameters,
    refuse_launch,
    refuse_layer_sync,
    refuse_missing_states,
    refuse_module,
    refuse_plan,
    refuse_scripted,
    refuse_strange_checkpoint,
    refuse_window,
    unfitting_weights,
    unreadable_checkpoint,
)
from lightning_roundpipe.trainer.several_machines import SeveralMachines, folder_of_checkpoints

_CPU = torch.device("cpu")


def _copy_of_data(value: Any) -> Any:
    """Return a copy of an array or a host tensor. If it is page-locked, a data loader has made a copy already.

    Other objects that have a ``to`` decide themselves what that copies, here and on a GPU.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    has_pages = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
    return value if has_pages and value.is_pinned() else value.clone()


def _nothing() -> None:
    """Do nothing: `_leave_tiles` of a strategy that has started nothing. A function, because those can be pickled."""


def _report_of(engine: Engine | None, fit: Fit | None) -> Report:
    found = engine.reports.latest() if engine is not None else Report()
    if found:
        found["planned_host_bytes"] = fit.announcements.planned_host_bytes if fit is not None else None
    return found


class RoundPipeStrategy(SeveralMachines):
    """Trains models that do not fit a GPU by sending their stages to the machine's GPUs in turn.

    The microbatches of a step are the batches of Lightning's accumulation window: ``accumulate_grad_batches=8`` gives
    eight.

    Args:
        num_microbatches: number of parts that each batch is cut into, along the first dimension of its tensors, as if
            the data loader gave the parts. Default: batches are not cut. A loader may also return `Microbatches`.
        microbatch_size: samples per part, instead of the number of parts.
        round_microbatches: parts that pass all stages one after another before the next ones start. Default: all, or as
            many as fit into device memory.
        layers: module classes, class names or qualified names. Each such module is a layer, which moves as a whole.
            Default: the strategy finds them.
        plan: ``"measured"`` makes the plan from the times of the first batch, ``"static"`` from its shapes, so that
            every run of the same model has the same plan. Or the stages by hand, as ``report()["plan"]`` prints them,
            such as ``"forward 0-3 4-7; fused 8-11; backward 4-7 0-3; round 4"``. A single microbatch has a plan only by
            hand.
        loss_weight: how much microbatches count. Default: a method ``loss_weight`` of the LightningModule; else the
            parts of a batch by their samples, and the batches of a window alike. A function of a microbatch, or
            ``"targets"``, the number of targets of its mean cross entropy, weighs all microbatches of a window.
            ``"sum"``: the losses of the parts add up to that of the batch.
        staleness: 0: exact training. 1: each step computes with the weights from before the last update, which runs
            meanwhile.
        memory_budget: device memory that a worker may use: bytes, ``"20GiB"``, or a fraction such as 0.9.
        pin_memory: ``"auto"``, ``"on"`` or ``"off"``: pinned host memory for fast copies.
        prefetch: number of stages that are uploaded ahead, 0 or 1.
        watchdog_timeout: seconds without any progress after which a step fails with the stacks of all threads.
        stage_seconds: the longest that a stage may take for one microbatch, by the times of the first batch. Default:
            what makes the step fastest.
        compile_layers: whether to compile layers with ``torch.compile``; or its arguments, such as
            ``{"dynamic": False}``.
        reduce_dtype: dtype in which gradients are copied from a device to the host, which sums them in fp32:
            ``"bfloat16"`` halves the bytes and rounds; ``"float16"`` needs a loss scale. Default: that of the trained
            weights (fp32).
        optimizer_state: form of Adam's and AdamW's moments in host memory: ``"fp32"``, as in plain training;
            ``"bf16"``, half the bytes; ``"int8"``, a quarter, in blocks as in bitsandbytes' optimizers. Checkpoints
            have the same form. A run resumes from any form.
        optimizer_device: ``"cpu"``: optimizers step on the host. ``"worker"``: what has no fused kernel there, such as
            Muon's matrices, is stepped on the workers' devices, by the same optimizer; AdamW still on the host.
        machine_timeout: with ``num_nodes`` of several, seconds within which a machine ends with an error when another
            one has died or hangs, and within which all must have come to the start.
        carry_products: whether outputs of matrix products and attention may go to host memory and back, where that is
            faster than computing them again for backward. They take up to three quarters of the free host memory,
            page-locked.
        shard_optimizer: whether each of several machines updates, and has the optimizer's state of, some layers only.
        network_dtype: dtype in which gradients travel between machines: ``"bfloat16"`` halves the bytes and rounds.
            Default: their own.
        token_tiles: modules that take their tokens in tiles, for long sequences, and the tokens of a tile:
            ``{"mlp": 1024}``. A name is the last part or parts of a module's qualified name. The modules must compute
            each token from that token alone; gradients of weights are summed tile by tile, in the weights' dtype. A
            number alone is for what Hugging Face's layers name mlp, feed_forward, experts, and the norms before and
            after them. Default: no tiles.
        overlap: whether microbatches overlap. False runs one after another, each as a whole: for code that shares state
            outside of modules' attributes between microbatches.
        evaluation_batches: batches per device that validation, test and prediction have in flight.
        emulation: how emulated devices (``accelerator="cpu"``) behave; a mapping or an ``Emulation``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning.

    Raises:
        ValueError: an option is invalid. The message names it and the remedy.
    """

    strategy_name = "roundpipe"

    def __init__(
        self,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        round_microbatches: int | None = None,
        layers: Sequence[str | type] | None = None,
        plan: str | None = "measured",
        loss_weight: Callable[[Any], Any] | Literal["targets", "sum"] | None = None,
        staleness: int = 0,
        memory_budget: int | float | str | None = None,
        pin_memory: Literal["auto", "on", "off"] | bool = "auto",
        prefetch: int = 1,
        watchdog_timeout: float = 600,
        stage_seconds: float | None = None,
        compile_layers: bool | Mapping[str, Any] = False,
        reduce_dtype: torch.dtype | str | None = None,
        optimizer_state: Literal["fp32", "bf16", "int8"] = "fp32",
        optimizer_device: Literal["cpu", "worker"] = "cpu",
        machine_timeout: float = 60,
        carry_products: bool = False,
        shard_optimizer: bool = True,
        network_dtype: torch.dtype | str | None = None,
        token_tiles: int | Mapping[str, int] | None = None,
        emulation: Emulation | Mapping[str, Any] | None = None,
        overlap: bool = True,
        evaluation_batches: int = 2,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.options = Options(
            num_microbatches=num_microbatches, microbatch_size=microbatch_size, round_microbatches=round_microbatches,
            layers=layers, plan=plan, loss_weight=loss_weight, overlap=overlap, staleness=staleness,
            memory_budget=memory_budget, pin_memory=pin_memory, prefetch=prefetch, watchdog_timeout=watchdog_timeout,
            evaluation_batches=evaluation_batches, stage_seconds=stage_seconds, compile_layers=compile_layers,
            reduce_dtype=reduce_dtype, optimizer_state=optimizer_state, optimizer_device=optimizer_device,
            carry_products=carry_products, machine_timeout=machine_timeout, shard_optimizer=shard_optimizer,
            network_dtype=network_dtype, token_tiles=token_tiles, emulation=Emulation.of(emulation),
        )  # fmt: skip
        if (text := self.options.plan_text) is not None:
            refuse_plan(text, round_microbatches)
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._engine: Engine | None = None
        self._evaluation: EvaluationWindow | None = None
        self._fit: Fit | None = None
        self._last_report = Report()
        self._leave_tiles: Callable[[], object] = _nothing
        self._former: dict[int, weakref.ref[Tensor]] = {}
        """Parameters of the models of earlier engines, by id. Optimizers may still hold them; they get no gradients."""

    # -- devices and processes ----------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else _CPU

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        profile_all_threads(model)

    @override
    def setup_environment(self) -> None:
        refuse_launch(self.world_size, self.num_nodes, self.cluster_environment)
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self._meet()

    # -- setup and teardown -------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        self._set_up(trainer)

    def _set_up(self, trainer: Trainer, *, again: bool = False) -> None:
        """Set up the engine. ``again``: during a run, keeping the optimizers."""
        before = self._fit if again else None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_launch(self.world_size, self.num_nodes, self.cluster_environment)
        module = self.lightning_module
        assert module is not None
        refuse_layer_sync(self._layer_sync)
        fitting = trainer.state.fn == TrainerFn.FITTING
        refuse_module(module, self.options, fitting=fitting)
        if fitting:
            refuse_window(trainer.accumulate_grad_batches)
        refuse_unscaled(self.options.reduce_dtype, str(self.precision_plugin.precision))
        prepare(module)
        self.model = self._precision.prepare(module, fitting=fitting)
        self._agree_on_model(module, self._shared_settings())
        with interrupts_deferred(), remedied():
            self._start_engine(module, fitting=fitting)
        assert self._engine is not None
        self._evaluation = EvaluationWindow(module, self._engine, self.options)
        transfer_once(module)
        # The base class would move the optimizer's state to the first device; it belongs with the masters on the host.
        if fitting:
            if not again:
                self.setup_optimizers(trainer)
                refuse_foreign_parameters(self.optimizers, {id(p) for p in module.parameters()})
            self._fit = Fit(trainer, module, self.optimizers, self._engine, self._precision, before)
        self.setup_precision_plugin()

    def _shared_settings(self) -> dict[str, Any]:
        """Return the settings that decide the numbers, which several machines must have in common."""
        options = self.options
        weight = options.loss_weight
        return {
            "precision": str(self.precision_plugin.precision),
            "staleness": options.staleness,
            "reduce_dtype": options.reduce_dtype,
            "optimizer_state": options.optimizer_state,
            "optimizer_device": options.optimizer_device,
            "shard_optimizer": options.shard_optimizer,
            "network_dtype": options.network_dtype,
            "loss_weight": weight if weight is None or isinstance(weight, str) else "a function",
        }

    @override
    def on_train_start(self) -> None:
        if self._fit is not None:
            module, engine = self._running()
            names = {id(p): name for name, p in module.named_parameters()}
            buckets = [[names.get(id(p), "") for p in bucket.masters] for bucket in engine.model.buckets]
            self._agree_on_training(module.trainer, module, buckets)
            self._agree_on_stopping(module.trainer)
            self._fit.stepping.started()

    def _renew_if_replaced(self) -> None:
        """Set up again, before a step, if user code has replaced modules or parameters of the model."""
        module, engine = self._running()
        if not engine.model.structure.has_changed():
            return
        rank_zero_info(
            "roundpipe: the model is made of other modules or parameters than before (pruning, a parametrization or an "
            "assignment has replaced some): the strategy is set up again, and the next batch shows what it needs."
        )
        if engine.context.exchange is not None:
            engine.context.exchange.refuse_rebuilding()
        if self._fit is not None:
            self._fit.stepping.refuse_open_window()
        self._former.update((id(p), weakref.ref(p)) for bucket in engine.model.buckets for p in bucket.masters)
        strays = [(p, p.data) for layer in engine.model.layers for flat in layer.weights.flats for p in flat.strays()]
        self._set_up(module.trainer, again=True)
        for parameter, memory in strays:
            if parameter.dtype is memory.dtype:
                parameter.data = memory  # user code may hold this memory, too
            del memory
        del strays
        if self._fit is not None:
            self._fit.stepping.started()

    @override
    def on_train_end(self) -> None:
        if self._fit is not None:
            self._fit.ended()

    def _start_engine(self, module: LightningModule, *, fitting: bool) -> None:
        if self._engine is not None:
            self._stop_engine()
        assert self.parallel_devices
        kind = refuse_accelerator(self.root_device.type)
        refuse_scripted(module, kind)
        begin_run(self)
        self._precision.device = kind
        devices = make_devices(kind, self.parallel_devices, self.options.emulation, str(self.options.pin_memory))
        try:
            self._leave_tiles = run_in_tiles(module, self.options.token_tiles)
            formats = self._precision.formats()
            self._engine = Engine(
                make_context(module, devices, self.options, rank_zero_info, formats, fitting=fitting, peers=self._peers)
            )
        except BaseException:
            self._leave_tiles()
            for device in devices:
                device.close()
            raise
        if text := over_capacity(self.options, devices):
            warn(PREFIX + text)

    def _running(self) -> tuple[LightningModule, Engine]:
        assert self.lightning_module is not None and self._engine is not None, "a step before setup()"
        return self.lightning_module, self._engine

    @override
    def model_to_device(self) -> None:
        """Do nothing: the module stays in host memory."""

    @override
    def teardown(self) -> None:
        self._stop_engine()
        super().teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @interrupts_deferred()
    def _stop_engine(self) -> None:
        try:
            self._close_engine()
        finally:
            end_run(self)  # last: until then, functions of torch and Lightning are replaced

    def _close_engine(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()
        engine, self._engine = self._engine, None
        window, self._evaluation = self._evaluation, None
        if self.lightning_module is not None:
            vars(self.lightning_module).pop(TRANSFER, None)
        if engine is not None:
            if window is not None:
                window.end()
            self._leave_tiles()
            try:
                with contextlib.suppress(torch.AcceleratorError):  # a GPU that has failed; closing it raises the error
                    self._last_report = _report_of(engine, fit) or self._last_report
            finally:
                engine.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Keep a copy of the batch on the host. Each microbatch goes to the first worker that it meets.

        What a step writes to its batch does not reach the data set, as in plain training on a GPU, and a data set may
        fill the same memory again for the next batch, which is taken ahead.
        """
        if isinstance(batch, TakenBatch):
            return batch.batch
        moved = super().batch_to_device(batch, device=device or _CPU, dataloader_idx=dataloader_idx)
        if self._engine is None:
            return moved
        return apply_to_collection(moved, (_TransferableDataType, np.ndarray), _copy_of_data)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._fit is None:  # outside of a run the module is a plain one, on the host
            return super().training_step(*args, **kwargs)
        if self._fit.between_windows:
            self._renew_if_replaced()
        return self._fit.training_step(args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, step: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._engine is None:  # as in training_step
            return getattr(super(), step)(*args, **kwargs)
        self._renew_if_replaced()
        assert self._evaluation is not None and not kwargs, "Lightning passes the arguments of steps by position"
        return self._evaluation.step(step, context, args)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as the base class does. Callbacks may have replaced the optimizer or added groups to it before."""
        step = functools.partial(super().optimizer_step, optimizer, *args, **kwargs)
        if self._fit is None:
            return step()
        module, _ = self._running()
        if module.automatic_optimization and self._fit.between_windows:
            self._renew_if_replaced()  # its only batch's training_step runs within the optimizer's step
        former = {key for key, known in self._former.items() if known() is not None}  # these get no gradients
        refuse_foreign_parameters([optimizer], self._running()[1].model.bucket_of.keys() | former)
        return self._fit.optimizer_step(step)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def whole(self) -> bool | None:
        """Whether weights and optimizer state are those of a whole step, also after an error; None if not known."""
        if self._tell_of_an_error():
            return False
        updates = self._engine.updates if self._engine is not None else None
        return None if updates is None else updates.whole

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as the base class does. For files that cannot be read, the error names ``ckpt_path`` and a remedy.

        For training, tensors stay in the file until they are copied or written to: a resumed run's first window has
        gradients of all parameters, and no room for moments yet.
        """
        plugin = self.checkpoint_io
        reader = plugin.checkpoint_io if isinstance(plugin, _WrappingCheckpointIO) else plugin
        if isinstance(reader, WholeCheckpointIO):
            module = self.lightning_module
            reader.maps = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        except Exception as error:
            reason = unreadable_checkpoint(checkpoint_path, error)
            raise reason from (None if reason is error else error)
        refuse_strange_checkpoint(checkpoint_path, checkpoint)
        for key in checkpoint.keys() - {"state_dict", "optimizer_states"}:  # hooks and callbacks may keep these
            checkpoint[key] = tree_map_only(Tensor, torch.clone, checkpoint[key])
        return checkpoint

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._tell_of_an_error():
            warn(
                f"{PREFIX}{filepath} is not written: after an error on one of several machines, the others may be in "
                "another step. Go on from an earlier one; ModelCheckpoint(every_n_train_steps=...) writes some."
            )
            return
        if self.whole is False:
            raise RoundPipeError(
                f"{filepath} is not written: the last optimizer step has not stepped all layers. Go on from an earlier "
                "checkpoint."
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self._precision.make_room(self.lightning_module, checkpoint["state_dict"])
        make_room(self.lightning_module, checkpoint["state_dict"])
        checkpoint = {**checkpoint, "state_dict": load_states(self.lightning_module, checkpoint["state_dict"])}
        try:
            super().load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            raise unfitting_weights(self.lightning_module, error) from error

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load as the base class does, but keep the state on the CPU, beside the masters."""
        states = checkpoint["optimizer_states"]
        refuse_missing_states(len(states), len(self.optimizers))
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_optimizer(optimizer, state, self.options.optimizer_state)
        if self._fit is not None:
            self._fit.stepping.loaded()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as the base class does; on the first of several machines, with that of the others."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._tell_of_an_error():
            return state  # `save_checkpoint` does not write it
        peers, engine = self._peers, self._engine
        if peers is None or engine is None:
            return state
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owners = [engine.owner_of(parameter) for parameter in parameters]
        if None in owners:
            return state
        room = FileTensors(folder_of_checkpoints(self._running()[0].trainer))
        found = peers.gather_states(state["state"], [owner or 0 for owner in owners], room, "the optimizer's state")
        return {**state, "state": dict(sorted(found.items()))}

    # -- precision ----------------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        self._precision_plugin = self._precision_plugin or RoundPipePrecision()  # keep it: later calls return the same
        return self._precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning chooses the plugin by the strategy's type from a fixed list. Replace its choice by our plugin.
        self._precision_plugin = None if precision_plugin is None else RoundPipePrecision.of(precision_plugin)

    @property
    def _precision(self) -> RoundPipePrecision:
        return cast(RoundPipePrecision, self.precision_plugin)

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create the tensors of ``configure_model``, which are the masters, on the CPU."""
        with _EmptyInit(enabled=bool(empty_init)), _CPU, self.precision_plugin.tensor_init_context():
            yield

    # -- reports ------------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return what the last finished training step did; empty before there is one. Survives ``teardown``.

        Returns:
            A dict, of which ``print`` shows a summary:
            ``plan`` (text), ``plan_policy`` (``"measured"``, ``"static"`` or ``"text"``), ``workers``,
            ``microbatches``, ``slots`` (list of ``slot, worker, round, phase, layers``),
            ``bytes_uploaded``, ``bytes_downloaded``, ``peak_device_bytes``, ``alloc_retries`` (each per worker),
            ``planned_device_bytes`` (of each worker, at most; None without a plan), ``peak_host_bytes``,
            ``planned_host_bytes`` (of weights, gradients and optimizer state), ``optimizer_lag_s`` (from the last
            gradient's arrival on the host to the end of the update; None while that is not known),
            ``waits_for_optimizer`` (whether training waits for each update),
            ``bubble_pct`` = 100 (1 - compute time / (workers x span of the step)), ``stall_pct`` (waiting for copies),
            ``step_time_s`` (from its start, or from the end of the previous step if they overlap),
            ``weights_bytes_uploaded_total`` since setup, ``profiled`` (whether the step had no plan, and each call a
            slot of its own), ``costs`` (of each call, as the plan was made from them; or None), and ``events`` and
            ``stalls``: every call, copy and wait with its worker, slot and times, in seconds from the start of the
            step (times of uploads ahead of the step are negative).
        """
        return _report_of(self._engine, self._fit) or self._last_report

    def save_report(self, path: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        """Write a page on the run to ``path``: one HTML file that needs no network.

        It shows a picture of the last step, the plan, memory against the plan, settings and versions. What steps wait
        for needs a `RoundPipeMonitor` among the Trainer's callbacks.

        Args:
            path: the file to write; its folder must exist.
            settings: shown beside the strategy's own settings, such as the configuration of the run.

        Raises:
            ImportError: matplotlib is not installed; the message names the extra.
            ValueError: no training step has finished yet.
        """
        module = self.lightning_module
        callbacks = vars(module._trainer)["callbacks"] if module is not None and module._trainer is not None else []
        monitor = next((callback for callback in callbacks if isinstance(callback, RoundPipeMonitor)), None)
        write_page(
            self.report(),
            Path(path),
            replayed=replay_of(self),
            diagnosis=monitor.diagnosis if monitor is not None else None,
            settings={**changed_settings(self.options), **(settings or {})},
        )

    def __getstate__(self) -> dict[str, Any]:
        """Drop what a run has started: threads, devices, and the objects that use them."""
        return vars(self) | {
            "_engine": None,
            "_evaluation": None,
            "_fit": None,
            "_leave_tiles": _nothing,
            "_former": {},
            "_peers": None,
            "_agreeing": (),
            "_lightning_optimizers": [],  # of classes that cannot be pickled; the base class makes them again
        }

    def __repr__(self) -> str:
        """Return the settings that are not defaults, as written in a script."""
        named = ", ".join(f"{name}={value}" for name, value in changed_settings(self.options).items())
        return f"{type(self).__name__}({named})"

    def __str__(self) -> str:
        """Return settings, devices, state and plan, one line each."""
        engine = self._engine
        if engine is None:
            lines = ["not training" if self._last_report else "not set up yet, which Trainer.fit() does"]
        else:
            precision = self.precision_plugin.precision
            lines = [f"{name_devices(engine)}, {precision}, {plural(len(engine.model.layers), 'layer')}"]
        plan = str(engine.context.learned.plan or "") if engine is not None else self._last_report.get("plan")
        return "\n  ".join([repr(self), *lines, f"plan: {plan or 'none yet, the first batch shows what it needs'}"])
