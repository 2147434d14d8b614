"""Errors for what the strategy cannot run: launchers, modules, optimizers, checkpoints.

A strategy that continued would silently train something else: every process on the same data, parameters that never get
a gradient, weights that were not in the file. Each function here raises before that, and its message names the setting
and the remedy.
"""

from __future__ import annotations

import os
import textwrap
import threading
import weakref
from collections.abc import Container, Iterable, Mapping
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.messages import first_line, plural
from lightning_roundpipe.model.meta import without_values
from lightning_roundpipe.optim.packed_moments import load
from lightning_roundpipe.planning.schedule import Plan

_NAMED = 3
"""Most tensors that a message names."""

_LISTED = 500
"""Characters of torch's list of tensors that do not fit, which has all of a model's."""

_NEEDED = ("state_dict", "pytorch-lightning_version")
"""Keys of every checkpoint that Lightning writes."""


def refuse_launch(world_size: int, num_nodes: int, environment: object) -> None:
    """Raise unless there is one process on each of ``num_nodes`` machines.

    Args:
        world_size: the number of processes that the launcher has started, as far as Lightning knows it.
        num_nodes: the number of machines.
        environment: Lightning's cluster environment.
    """
    asked = max(world_size, _number("WORLD_SIZE", 1))  # launchers that Lightning does not know set it
    if num_nodes == 1:
        if asked > 1:
            raise MisconfigurationException(
                f"the roundpipe strategy runs in one process on a machine, and {asked} were asked for: start the "
                "script with plain `python` (no torchrun, one SLURM task, no WORLD_SIZE in the environment). All GPUs "
                f"of the machine are used by that one process. For {asked} machines, set num_nodes={asked}."
            )
        return
    here = max(_number("LOCAL_WORLD_SIZE", 1), _number("SLURM_NTASKS_PER_NODE", 1))
    if here > 1 or asked not in (1, num_nodes):
        raise MisconfigurationException(
            f"num_nodes={num_nodes}, and the launcher has started {plural(asked, 'process')}, {here} on this machine: "
            "the roundpipe strategy runs in one process on each machine, which uses all its GPUs. Start it with "
            f"`torchrun --nnodes={num_nodes} --nproc-per-node=1`, or in SLURM with `--nodes={num_nodes} "
            "--ntasks-per-node=1`."
        )
    known = _number("NODE_RANK", _number("GROUP_RANK", -1))
    if isinstance(environment, LightningEnvironment) and not 0 <= known < num_nodes:
        raise MisconfigurationException(
            f"num_nodes={num_nodes}, and nothing says which machine this is: start the script with `torchrun "
            f"--nnodes={num_nodes} --nproc-per-node=1` or in SLURM, or set NODE_RANK (0 to {num_nodes - 1}), "
            "MASTER_ADDR and MASTER_PORT on each machine."
        )


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default


def refuse_several_machines(module: LightningModule) -> None:
    """Raise for what runs on one machine only."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "automatic_optimization=False with several machines: the module's own steps would each see the gradients "
            "of one machine. Set num_nodes=1, or automatic_optimization=True."
        )


def refuse_window(batches: object) -> None:
    """Raise for an ``accumulate_grad_batches`` that counts no batches. Lightning's Trainer takes any value."""
    if not (isinstance(batches, Integral) and batches):
        raise MisconfigurationException(
            f"accumulate_grad_batches={batches!r} must be a whole number of batches, at least 1: they are the "
            "microbatches of a step."
        )


def refuse_accelerator(kind: str) -> Literal["cpu", "cuda"]:
    """Return ``kind``, or raise if there are no devices of that kind."""
    if kind in ("cpu", "cuda"):
        return cast(Literal["cpu", "cuda"], kind)
    raise MisconfigurationException(
        f"accelerator of type {kind!r} is not supported by the roundpipe strategy; use accelerator='gpu' "
        "(NVIDIA) or accelerator='cpu' (emulated devices)."
    )


def refuse_scripted(module: nn.Module, kind: str) -> None:
    """Raise for TorchScript modules on GPUs: they run in user code with their weights on the host, the data do not."""
    for name, inner in module.named_modules() if kind != "cpu" else ():
        if isinstance(inner, torch.jit.ScriptModule) and any(True for _ in inner.parameters()):
            raise MisconfigurationException(
                f"{name!r} is compiled by TorchScript: its weights cannot be copied to a worker, and stay on the host "
                "while the data is on a GPU. Give the LightningModule the module itself; compile_layers=True compiles "
                "layers."
            )


def refuse_module(module: LightningModule, options: Options, *, fitting: bool) -> None:
    """Raise for what the engine cannot run of a module, as far as it is known before the first batch."""
    if fitting and not module.automatic_optimization:
        _refuse_parts(options)
    lazy = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise MisconfigurationException(
            f"{', '.join(map(repr, lazy[:_NAMED]))}: of a lazy module that has not been called yet, so there is "
            "nothing to place. Call the model once on a batch in configure_model(), under torch.no_grad(), or give the "
            "module its input size (nn.Linear instead of nn.LazyLinear)."
        )
    for name, parameter in module.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            raise MisconfigurationException(
                f"parameter {name!r} is on device {parameter.device} already; under the roundpipe strategy weights "
                "live in host memory and are sent to the GPUs layer by layer. Build the model on the CPU (no .cuda(), "
                "no device_map)."
            )
    _refuse_without_values(module)
    if fitting:
        _refuse_shared_memory(module)
        _refuse_inference_mode(module)


def _refuse_parts(options: Options) -> None:
    """Raise for options that cut the batch: a manual-optimization step differentiates and steps by itself."""
    given = {"microbatch_size": options.microbatch_size, "plan": options.plan_text}
    asked = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if options.num_microbatches not in (None, 1):
        asked.insert(0, f"num_microbatches={options.num_microbatches}")
    if asked:
        raise MisconfigurationException(
            f"{asked[0]} with automatic_optimization=False: under manual optimization training_step runs once, on the "
            "whole batch, and its layers as they are called. Leave it out."
        )


def _refuse_without_values(module: LightningModule) -> None:
    """Raise for tensors left on the meta device: inventing values for them would train another model."""
    if names := without_values(module):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise MisconfigurationException(
            f"on the meta device, without values: {', '.join(map(repr, names[:_NAMED]))}{more}. Give them values in "
            "configure_model(): load_state_dict(weights, assign=True), or to_empty(device='cpu') and an "
            "initialisation; or set ckpt_path= to a checkpoint that holds them. (Buffers that are in no checkpoint, "
            "such as rotary tables, are computed anew by building their module off the meta device.)"
        )


def _refuse_shared_memory(module: LightningModule) -> None:
    """Raise for parameters that are views of the same memory: each is copied and stored separately."""
    plain = [(n, p) for n, p in module.named_parameters() if type(p) is nn.Parameter and p.device.type == "cpu"]
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, n) for n, p in plain if p.is_contiguous() and p.numel())
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise MisconfigurationException(
                f"parameters {one!r} and {other!r} share memory without being one parameter, and would be parted. Tie "
                "them by assigning the same nn.Parameter to both, or clone one of them."
            )


def _refuse_inference_mode(module: LightningModule) -> None:
    if torch.is_inference_mode_enabled():
        raise MisconfigurationException(
            "training under torch.inference_mode(), in which nothing has gradients. Call Trainer.fit() outside of it."
        )
    for name, parameter in module.named_parameters():
        if parameter.is_inference():
            raise MisconfigurationException(
                f"parameter {name!r} was made under torch.inference_mode(), so it takes part in no backward pass. "
                "Build the model outside of it, or under torch.no_grad()."
            )


_runs: weakref.WeakKeyDictionary[Strategy, threading.Thread] = weakref.WeakKeyDictionary()
_choosing = threading.Lock()


def begin_run(strategy: Strategy) -> None:
    """Note that ``strategy`` runs on this thread until `end_run`.

    Raises:
        MisconfigurationException: another one runs on another thread. Both would replace the same functions of torch
            and Lightning, and put each other's back.
    """
    thread = threading.current_thread()
    with _choosing:
        if any(other is not thread and other.is_alive() for other in _runs.values()):
            raise MisconfigurationException(
                "another thread of this process trains or evaluates with the roundpipe strategy already, and uses the "
                "devices. Run one after the other, or each in a process of its own."
            )
        _runs[strategy] = thread


def end_run(strategy: Strategy) -> None:
    """Undo `begin_run`, if it was called."""
    with _choosing:
        _runs.pop(strategy, None)


def refuse_plan(text: str, round_microbatches: int | None) -> None:
    """Raise for a plan that is wrong for any model, before there is a trace."""
    plan = Plan.parse(text)
    plan.validate()
    size = plan.round_microbatches
    if round_microbatches is not None and round_microbatches != size:
        raise ValueError(
            f"plan: it says 'round {size}', and round_microbatches={round_microbatches}, which are the same: set only "
            "the plan."
        )


def refuse_layer_sync(layer_sync: object) -> None:
    """Raise for ``sync_batchnorm``, which has no effect here: there are no processes to synchronize."""
    if layer_sync is not None:
        raise MisconfigurationException(
            "sync_batchnorm=True joins the statistics of several processes, and the roundpipe strategy has one: batch "
            "norm sees a microbatch at a time, as under gradient accumulation. Set sync_batchnorm=False."
        )


def refuse_foreign_parameters(optimizers: Iterable[Optimizer], mine: Container[int]) -> None:
    """Raise if an optimizer has parameters that are not the module's. ``mine`` holds the ids of those that are."""
    for optimizer in optimizers:
        if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
            raise MisconfigurationException(
                f"{type(optimizer).__name__} holds parameters that are not the LightningModule's and would never "
                "get a gradient: build the optimizer from self.parameters() in configure_optimizers(), after the last "
                "parameter was made or replaced."
            )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def unreadable_checkpoint(path: Any, error: Exception) -> Exception:
    """Return the exception to raise when reading ``path`` failed with ``error``."""
    file = Path(str(path))
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(  # the words in parentheses are Lightning's
            f"ckpt_path={str(path)!r} is not there (Checkpoint file not found): name a file that ModelCheckpoint wrote."
        )
    if file.is_dir():
        return ValueError(
            f"ckpt_path={str(path)!r} is a folder, as strategies with sharded checkpoints write it; the roundpipe "
            "strategy reads single files. Convert it first (Lightning's consolidate_checkpoint)."
        )
    foreign = "Unsupported operand" in str(error)  # not a pickle; torch calls it unsafe
    if "Weights only load failed" in str(error) and not foreign:  # torch's message names the remedy
        return error
    reason = "torch.save did not write it" if foreign else first_line(error)
    size = f" ({file.stat().st_size:,} bytes)" if file.is_file() else ""
    return ValueError(
        f"ckpt_path={str(path)!r}{size} cannot be read as a checkpoint: {reason}. If saving or copying it "
        "was interrupted it is cut short: copy it again, or go on from an earlier one."
    )


def refuse_strange_checkpoint(path: Any, checkpoint: object) -> None:
    """Raise for a file that torch can read but Lightning did not write."""
    missing = [key for key in _NEEDED if not isinstance(checkpoint, Mapping) or key not in checkpoint]
    if missing:
        raise ValueError(
            f"ckpt_path={str(path)!r} is not a Lightning checkpoint: it lacks {missing[0]!r}. Weights alone are loaded "
            "by your own code (module.load_state_dict(torch.load(...))), before fit()."
        )


def unfitting_weights(module: LightningModule, error: RuntimeError) -> RoundPipeError:
    """Return the exception to raise when the checkpoint's ``state_dict`` does not fit the module."""
    adapters = any("key(s)" in line and "lora_" in line for line in str(error).splitlines())
    hint = " One of the two has adapters (LoRA), and the other has none." if adapters else ""
    listed = textwrap.shorten(str(error), _LISTED, placeholder=" ...")
    return RoundPipeError(
        f"ckpt_path: the checkpoint is of another model than this {type(module).__name__}: {listed}{hint} Build the "
        "model that it was saved from, or set module.strict_loading=False if it is to be loaded in part."
    )


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], form: str) -> None:
    """Load ``state``. A state with other groups raises now rather than at its first step.

    Args:
        optimizer: gets the state.
        state: a ``state_dict()``.
        form: how the optimizer keeps its moments, one of `config.OPTIMIZER_STATES`.
    """
    # Loading adds defaults that no group of this class has.
    needed = [group.keys() & optimizer.defaults.keys() for group in optimizer.param_groups]
    try:
        load(optimizer, state, form)
        groups = zip(needed, optimizer.param_groups, strict=True)
        lacking = [key for keys, group in groups for key in sorted(keys - group.keys())]
        problem = f"it has no {lacking[0]!r}" if lacking else ""
    except (ValueError, KeyError) as error:
        problem = first_line(error)
    if problem:
        raise ValueError(
            f"ckpt_path: the checkpoint's optimizer state does not fit {type(optimizer).__name__}: {problem}. Make "
            "the same optimizer and groups in configure_optimizers(), or take only the weights "
            "(load_from_checkpoint)."
        )


def refuse_missing_states(states: int, optimizers: int) -> None:
    """Raise for a checkpoint with the states of fewer or more optimizers than there are."""
    if states != optimizers:
        raise ValueError(
            f"ckpt_path: the checkpoint has the state of {plural(states, 'optimizer')}, and configure_optimizers() "
            f"makes {optimizers}: make the same ones, or take only the weights (load_from_checkpoint)."
        )
