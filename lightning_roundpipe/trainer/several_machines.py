"""The parts of a strategy that concern several machines, of which each runs one process with all its devices.

Lightning expects a process per device. Here the world is made of machines: ``world_size``, ranks, samplers, logs and
checkpoints count these. With one machine, collective operations return their input and do not touch torch.distributed.

Machines compare their settings, each under a name that a message can say: those that differ would train on, to numbers
that are those of neither.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.devices.thread_owner import context_of_thread
from lightning_roundpipe.engine.evaluation_batches import Batch
from lightning_roundpipe.machines.peers import Peers, is_main_thread, meet
from lightning_roundpipe.messages import PREFIX
from lightning_roundpipe.trainer.refusals import refuse_launch, refuse_several_machines

_PACKAGES = ("lightning-roundpipe", "torch", "lightning", "pytorch-lightning")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (bool, int, float, str, type(None))
_PATH = "roundpipe_path"
"""Key under which a path travels."""


class SeveralMachines(ParallelStrategy):
    """A strategy with one process on each machine. Collective operations are between the machines."""

    options: Options
    _peers: Peers | None = None
    num_nodes: int = 1
    _agreeing: tuple[object, ...] = ()
    """The loops of the trainer in which machines agree on when to stop."""

    # -- who is who ---------------------------------------------------------------------------------------------------

    @property
    def _launched(self) -> int:
        """The number of processes by the environment; 1 where it has none."""
        try:
            return int(super().world_size)
        except KeyError:  # SLURMEnvironment outside a SLURM task
            return 1

    @property
    @override
    def world_size(self) -> int:
        return self.num_nodes if self.num_nodes > 1 else self._launched

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def global_rank(self) -> int:
        """The number of this machine. It is 0 for a single one, and until the launcher's variables are checked."""
        environment = self.cluster_environment
        if self.num_nodes == 1 or environment is None:
            return 0
        rank = environment.node_rank() if isinstance(environment, LightningEnvironment) else environment.global_rank()
        return int(rank)

    @property
    @override
    def node_rank(self) -> int:
        return self.global_rank

    @property
    def is_distributed(self) -> bool:
        """Whether samples belong to several machines."""
        return self.num_nodes > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell Lightning the number of this machine, so that only the first one prints and logs."""
        refuse_launch(self._launched, self.num_nodes, self.cluster_environment)
        if self.num_nodes > 1:
            rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- meeting ------------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        if self.num_nodes == 1:
            return
        module = self.lightning_module
        if module is not None:
            self._note_sigterm(module.trainer)
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            refuse_several_machines(module)
        assert self.cluster_environment is not None
        os.environ["MASTER_ADDR"] = str(self.cluster_environment.main_address)
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        self._peers = meet(self.global_rank, self.num_nodes, self.options.machine_timeout)
        self._peers.liveness.begin()

    def _agree_on_model(self, module: LightningModule, settings: dict[str, Any]) -> None:
        """Compare settings and model with the other machines, and take over the weights of the first one."""
        if self._peers is None:
            return
        tensors = list(_tensors(module))
        model = {
            f"{kind} {name!r}": f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            + (", trained" if tensor.requires_grad else "")
            for kind, name, tensor in tensors
        }
        packages = {type(inner).__module__.partition(".")[0] for inner in module.modules()} - {"__main__"}
        versions = {f"the version of {package}": _version(package) for package in (*_PACKAGES, *sorted(packages))}
        versions["the version of Python"] = ".".join(map(str, sys.version_info[:2]))
        counted = {"the number of parameters and buffers": len(model)}
        settings = _trainer_settings(module.trainer) | settings
        self._peers.agree(versions | settings | counted | model | _module_settings(module), "the model")
        self._peers.share([tensor for *_, tensor in tensors], "the weights of the first machine")

    def _agree_on_training(self, trainer: Trainer, module: LightningModule, buckets: list[list[str]]) -> None:
        """Compare what the trainer is about to do with the other machines."""
        if self._peers is None:
            return
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS):
                raise RoundPipeError(
                    "LBFGS searches by the loss of a machine's own batch, and machines would come to different "
                    "weights: set num_nodes=1, or use another optimizer."
                )
        validation = trainer.fit_loop.epoch_loop.val_loop
        self._peers.agree(
            {
                "the number of training batches": str(trainer.num_training_batches),
                "the number of validation batches": str(validation.max_batches),
                **_optimizer_settings(trainer),
                "the epoch and step at which training begins": [trainer.current_epoch, trainer.global_step],
                "the layers (set layers=, or the same memory_budget and devices of one size)": buckets,
            },
            "the data and settings of training",
        )

    def _agree_on_stopping(self, trainer: Trainer) -> None:
        """Let ``should_stop``, wherever code of one machine sets it, stop all of them after the same batch.

        Lightning looks at it at the end of a batch, a validation and an epoch, after all hooks of users. At two of
        these places it calls no hook of the strategy. Where ``val_check_interval`` is a time, each machine asks its own
        clock: all validate when it is time for the first of them.
        """
        if self._peers is None:
            return
        batches, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop

        def batch_ended(data_fetcher: Any) -> None:
            self._stop_together(trainer)
            type(batches).on_advance_end(batches, data_fetcher)

        def epoch_ended() -> None:
            type(epochs).on_advance_end(epochs)
            self._stop_together(trainer)

        def time_to_validate(data_fetcher: Any) -> bool:
            return self.reduce_boolean_decision(type(batches)._should_check_val_fx(batches, data_fetcher), all=False)

        if getattr(trainer, "_val_check_time_interval", None) is not None:
            batches._should_check_val_fx = time_to_validate  # type: ignore[method-assign]
        self._agreeing = batches, epochs
        batches.on_advance_end, epochs.on_advance_end = batch_ended, epoch_ended  # type: ignore[method-assign]

    def _stop_together(self, trainer: Trainer) -> None:
        """Agree on ``should_stop`` and SIGTERM, and look whether learning rates are still the same, in one exchange."""
        if (peers := self._ready("should_stop", None)) is None:
            return
        rates = _learning_rates(trainer.optimizers, trainer.global_step)
        mark = zlib.crc32(repr(list(rates.values())).encode())
        mine = torch.tensor([int(trainer.should_stop), int(trainer.received_sigterm), mark])
        stops, ended, marks = torch.stack(peers.gather(mine, "a decision")).T.tolist()
        if len(set(marks)) > 1:
            peers.agree(
                rates,
                "the learning rates",
                "A scheduler, or code that sets a learning rate, must see the same values on each machine: log what a "
                "scheduler monitors with self.log(..., sync_dist=True).",
            )
        trainer.should_stop = any(stops)
        if any(ended) and not all(ended):
            names = " and ".join(peers.liveness.name_of(rank) for rank, one in enumerate(ended) if one)
            rank_zero_info(f"{PREFIX}{names} received SIGTERM, and all machines end after this batch.")
        trainer._signal_connector.received_sigterm = any(ended)

    def _note_sigterm(self, trainer: Trainer) -> None:
        """Have a SIGTERM noted only. Lightning calls torch.distributed in the handler, where the others do not come."""
        connector = trainer._signal_connector

        def noted(*_: Any) -> None:
            connector.received_sigterm = True

        connector._sigterm_notifier_fn = noted  # type: ignore[method-assign, assignment]

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._peers is not None and self.lightning_module is not None:
            self._stop_together(self.lightning_module.trainer)

    def _tell_of_an_error(self) -> bool:
        """Tell the other machines if the run ends with an error, and return whether it does.

        Callbacks learn of an error before `on_exception` does. The others must hear of it before a callback asks them
        for something, such as their part of a checkpoint: they are anywhere, and would say that this machine is in
        another place.
        """
        module = self.lightning_module
        if self.num_nodes == 1 or module is None or module.trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        if (error := sys.exc_info()[1]) is not None:
            self.on_exception(error)
        return True

    def _stop_agreeing(self) -> None:
        for loop in self._agreeing:
            for name in ("on_advance_end", "_should_check_val_fx"):
                vars(loop).pop(name, None)
        self._agreeing = ()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._stop_agreeing()
        if self._peers is not None:
            peers, self._peers = self._peers, None
            peers.liveness.fail(exception)

    @override
    def teardown(self) -> None:
        """Leave the run together with the other machines, unless it has failed: none misses another one."""
        self._stop_agreeing()
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.come_together("the end of the run")
            peers.liveness.end()

    # -- collective operations ----------------------------------------------------------------------------------------

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if (peers := self._ready("all_gather", group)) is None:
            return tensor
        if sync_grads:
            raise RoundPipeError(
                "all_gather(sync_grads=True) differentiates between machines, which the roundpipe strategy does not: "
                "leave sync_grads out, or compute the loss on a machine's own samples."
            )
        local = tensor.detach().cpu()
        numbers = local.to(torch.uint8) if local.dtype is torch.bool else local
        gathered = torch.stack(peers.gather(numbers, "all_gather()"))
        return gathered.to(tensor.device, tensor.dtype)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or (peers := self._ready("reduce", group)) is None:
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op)).rpartition(".")[2].lower()
        mean = name in ("mean", "avg")
        operation = getattr(torch.distributed.ReduceOp, "SUM" if mean else name.upper(), None)
        if operation is None:
            raise RoundPipeError(f"strategy.reduce(reduce_op={reduce_op!r}): use 'mean', 'sum', 'min' or 'max'.")
        total = peers.sum(tensor.detach().cpu().clone().contiguous(), f"the {name} of a value", op=operation)
        if mean:
            total = (total / peers.size).to(total.dtype)
        return total.to(tensor.device)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if (peers := self._ready("reduce_boolean_decision", None)) is None:
            return decision
        yes = int(peers.sum(torch.tensor([int(decision)]), "a decision"))
        return yes == peers.size if all else bool(yes)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if (peers := self._ready("barrier", None)) is not None:
            peers.come_together(f"barrier({args[0] if args else kwargs.get('name', '')})")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if (peers := self._ready("broadcast", None)) is None:
            return obj
        sent = {_PATH: str(obj)} if isinstance(obj, Path) else obj
        received = peers.broadcast_json(sent, src, "broadcast()")
        if isinstance(received, dict) and received.keys() == {_PATH}:
            return Path(received[_PATH])
        return obj if peers.rank == src else received

    def _ready(self, name: str, group: Any) -> Peers | None:
        """Return the machines for a collective operation; None if there is one machine, or the run has failed."""
        peers = self._peers
        if peers is None or self._tell_of_an_error():
            return None
        if not is_main_thread() and not (isinstance(batch := context_of_thread(), Batch) and batch.may_exchange()):
            raise RoundPipeError(
                f"{name}() was called within a step, where microbatches of several machines would meet in any order: "
                "call it in a hook such as on_train_batch_end, or log with self.log(..., sync_dist=True)."
            )
        if group is not None and group is not torch.distributed.group.WORLD:
            raise RoundPipeError(
                f"{name}(group=...) with a process group of its own: the roundpipe strategy reduces over all machines. "
                "Leave group (or sync_dist_group) out."
            )
        return peers


def folder_of_checkpoints(trainer: Trainer) -> Path:
    """Return a folder of this machine that has room for a checkpoint, as far as settings say."""
    named = getattr(trainer.checkpoint_callback, "dirpath", None)
    found = next((str(name) for name in (named, trainer.default_root_dir) if name and "://" not in str(name)), None)
    return Path(found or tempfile.gettempdir())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    yield from (("parameter", name, parameter) for name, parameter in module.named_parameters())
    yield from (("buffer", name, buffer) for name, buffer in module.named_buffers())


# -- what machines must have in common ---------------------------------------------------------------------------------


def _trainer_settings(trainer: Trainer) -> dict[str, str]:
    """Return the arguments of the trainer that it keeps as numbers or text, except the folder, which may differ."""
    names = inspect.signature(Trainer.__init__).parameters.keys() - {"self", "default_root_dir"}
    kept = {name: getattr(trainer, name, None) for name in sorted(names)}
    time = getattr(trainer, "_val_check_time_interval", None)  # in seconds; then ``val_check_interval`` is missing
    return {name: _text_of(value) for name, value in kept.items() if isinstance(value, _PLAIN)} | (
        {} if time is None else {"val_check_interval": f"{time} s"}
    )


def _module_settings(module: nn.Module) -> dict[str, str]:
    """Return the class of each module, and the settings that it shows in ``extra_repr``."""
    return {
        f"module {name!r}": f"{type(inner).__name__}({_text_of(inner.extra_repr())})"
        for name, inner in module.named_modules()
    }


def _optimizer_settings(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of all parameter groups, and of schedulers."""
    found: dict[str, Any] = {"the optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers]}
    for at, group in _groups(trainer.optimizers):
        found[f"the number of parameters in {at}"] = len(group["params"])
        found |= {f"{name} of {at}": _text_of(value) for name, value in group.items() if name != "params"}
    for config in trainer.lr_scheduler_configs:
        kind = type(config.scheduler).__name__
        found |= {f"{name} of {kind}": _text_of(getattr(config, name)) for name in ("interval", "frequency", "monitor")}
        found |= {f"{name} of {kind}": _text_of(value) for name, value in config.scheduler.state_dict().items()}
    return found


def _learning_rates(optimizers: Sequence[Optimizer], steps: int) -> dict[str, float]:
    """Return what schedulers, or user code, have made of the learning rates after so many ``steps``.

    Nothing else of a group: some optimizers count in it, on a thread of their own.
    """
    return {f"lr of {at}, after step {steps}": float(group["lr"]) for at, group in _groups(optimizers) if "lr" in group}


def _groups(optimizers: Sequence[Optimizer]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"group {number} of {type(optimizer).__name__}", group)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
    ]


def _text_of(value: Any) -> str:
    """Return a value as text that is the same in each process."""
    return _ADDRESS.sub(
        "", value if isinstance(value, str) else str(value.tolist() if isinstance(value, Tensor) else value)
    )
