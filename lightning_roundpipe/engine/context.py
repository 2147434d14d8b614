"""What steps use and what outlives them: the engine makes it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_roundpipe.config import Options
from lightning_roundpipe.devices import Device
from lightning_roundpipe.engine.compiling import forwards_of
from lightning_roundpipe.engine.executor import Executor, FirstWindow
from lightning_roundpipe.engine.hints import Hints
from lightning_roundpipe.engine.pool import Pool
from lightning_roundpipe.engine.trace import Trace
from lightning_roundpipe.estimates.nominal import nominal
from lightning_roundpipe.machines.peers import Peers
from lightning_roundpipe.memory.budget import layers_that_fit
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.grad_buffers import GradientMemory, Reduction
from lightning_roundpipe.memory.host_model import HostModel
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.updates.gradient_exchange import GradientExchange
from lightning_roundpipe.user_code.interception import InterceptedModule


@dataclass
class Learned:
    """What the first window has shown.

    Attributes:
        plan: the stages that windows run in; None while there is none.
        costs: what the plan was made from.
        trace: the calls that the plan is of.
        read_by_user_code: buckets that user code reads.
        logs_in_backward: whether user code logs in backward.
        calls_in_backward: whether user code calls layers in backward, as checkpoints around them do.
        in_order: whether microbatches run one after another, without a plan, as what they do depends on their order.
    """

    plan: Plan | None = None
    costs: Costs | None = None
    trace: Trace | None = None
    read_by_user_code: frozenset[ParamBucket] = frozenset()
    logs_in_backward: bool = False
    calls_in_backward: bool = False
    in_order: bool = False


@dataclass(frozen=True)
class Context:
    """The parts of the engine that outlive a step.

    Attributes:
        learned: what the first window has shown.
        user: the user's module, intercepted.
        exchange: sums gradients over several machines; None if there is only one.
    """

    options: Options
    model: HostModel
    pool: Pool
    gradients: GradientMemory
    learned: Learned
    hints: Hints
    user: InterceptedModule
    exchange: GradientExchange | None = None


def make_context(
    module: nn.Module, devices: list[Device], options: Options, inform: Callable[[str], None],
    formats: Formats | None = None, *, fitting: bool = True, peers: Peers | None = None,
) -> Context:  # fmt: skip
    """Return the parts of an engine. Its threads run until `Engine.close`.

    Args:
        module: the user's LightningModule, with its weights on the CPU.
        options: the strategy's options, already checked.
        inform: called with the text of each hint.
        formats: number formats of layers and user code.
        fitting: whether the module will be trained. A module without layers is an error only then.
        peers: the other machines that train the same model; None if there are none.
    """
    compiler, formats = forwards_of(options), formats or Formats()  # it refuses wrong options before threads start
    found = layers_that_fit(module, options, devices, formats, fitting=fitting)
    model = HostModel(module, found.layers, devices[0], formats, double_buffered=bool(options.staleness))
    hints = Hints(inform)
    hints.of_cuts(found, fitting=fitting)
    casts = model.formats.mixed and not compiler.compiled  # compiled code does not show how it uses weights
    may_carry = options.carry_products or bool(options.plan_text and Plan.parse(options.plan_text).carry)
    carries = may_carry and not compiler.compiled
    rates = nominal(devices[0].torch_device.type) if options.plan == "static" else None
    first_window = FirstWindow(rates, casts=casts, carries=carries)
    pool = Pool(
        devices, options.watchdog_timeout,
        partial(Executor, compiler=compiler, masters=model.bucket_of, first_window=first_window),
        prefetch=bool(options.prefetch), elsewhere=peers.liveness.says if peers is not None else str,
    )  # fmt: skip
    reduction, exchange = Reduction(_dtype(options.reduce_dtype), pool.summing), None
    if peers is not None:
        dtype, shards = _dtype(options.network_dtype), options.shard_optimizer
        exchange = GradientExchange(peers, model.buckets, dtype, shards=shards)
    return Context(
        options=options,
        model=model,
        pool=pool,
        gradients=GradientMemory(model.layers, devices[0], reduction, len(devices)),
        learned=Learned(),
        hints=hints,
        user=InterceptedModule(model, pool.device_types),
        exchange=exchange,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
