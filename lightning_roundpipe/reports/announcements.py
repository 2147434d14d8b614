"""What a run reports about itself on the screen: settings and plan. Nothing is reported per step.

first batch ── devices, microbatches, precision, model, host memory ── settings without effect
plan is made ── stages, memory of a device, seconds of a step
             └─ another strategy, if a device could hold the whole model
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lightning_roundpipe.config import Emulation, Options, parse_bytes
from lightning_roundpipe.devices.core_semaphore import concurrent_devices
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.memory.budget import peak_bytes, worker_bytes
from lightning_roundpipe.messages import PREFIX, count, gib, plural, seconds, warn
from lightning_roundpipe.model.quantized import weights_in
from lightning_roundpipe.optim.independence import KNOWN, is_torchs
from lightning_roundpipe.planning.memory import carried_bytes, size_text
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.reports.planned import planned_seconds

_PROBE = 64
"""Rows and columns of the parameter on which the size of an optimizer's state is measured."""


class Announcements:
    """The announcements of one fit. ``precision``: Lightning's flag; ``inform`` prints a line."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, engine: Engine, precision: str, inform: Callable[[str], None]
    ) -> None:
        self._trainer, self._module, self._engine = trainer, module, engine
        self._precision, self._inform = precision, inform
        self._sizes: list[int] | None = None
        self._begun = self._compared = False
        self._plan: Plan | None = None
        self.planned_host_bytes: int | None = None
        """Host memory that stays in use between steps; None before the first batch."""

    def before(self, samples: list[int] | None) -> None:
        """Announce the first window. ``samples``: of each of its microbatches; None under manual optimization."""
        if self._begun:
            return
        self._begun, self._sizes = True, samples
        self._inform(PREFIX + self._beginning())
        for text in uncompiled(self._engine, self._module):
            warn(PREFIX + text)

    def after(self) -> None:
        """Announce the plan after a batch, if it is new."""
        plan = self._engine.context.learned.plan
        if plan is not None and plan is not self._plan:
            self._plan = plan
            self._inform(PREFIX + self._planned(plan))
            if not self._compared:
                self._compared = True
                self._compare()

    def _compare(self) -> None:
        """Name the strategy that is likely faster, if a device holds at once what the host holds here."""
        engine = self._engine
        costs, devices = engine.context.learned.costs, engine.context.pool.devices
        limit = worker_bytes(engine.context.options, devices)
        if limit is None or engine.context.options.memory_budget is not None or not self._module.automatic_optimization:
            return
        assert costs is not None and self.planned_host_bytes is not None
        whole = self.planned_host_bytes + costs.stage_bytes(0, len(costs) - 1, "fused").activations
        if whole > limit:
            return
        way = 'strategy="auto"' if len(devices) == 1 else 'strategy="ddp"'
        self._inform(
            f"{PREFIX}A device of {gib(limit)} also holds all weights, gradients, optimizer state and a microbatch's "
            f"activations at once, about {gib(whole)}: {way} is likely faster."
        )

    # -- lines --------------------------------------------------------------------------------------------------------

    def _beginning(self) -> str:
        engine = self._engine
        parameters = list({id(p): p for p in self._module.parameters()}.values())
        total, trained = (sum(map(weights_in, ps)) for ps in (parameters, [p for p in parameters if p.requires_grad]))
        self.planned_host_bytes = host_bytes(engine, parameters, self._trainer.optimizers)
        share = "all trained" if trained == total else f"{count(trained)} trained"
        facts = [
            name_devices(engine),
            how_cut(self._sizes) if self._sizes else "manual optimization on whole batches",
            self._precision,
            plural(len(engine.model.layers), "layer"),
            f"{count(total)} {'parameter' if total == 1 else 'parameters'} ({share})",
            f"about {gib(self.planned_host_bytes)} of host memory",
        ]
        return ", ".join(facts) + "."

    def _planned(self, plan: Plan) -> str:
        engine = self._engine
        costs, workers = engine.context.learned.costs, len(engine.context.pool.workers)
        assert costs is not None
        memory = peak_bytes(plan, costs, engine.context.options, engine.context.pool.devices)
        microbatches = len(self._sizes or [1])
        stages = len(plan.stages()) * -(-microbatches // plan.round_microbatches)
        few = f" on {stages} of {plural(workers, 'device')} at a time" if stages < workers else ""
        took = ""
        if engine.context.options.plan != "static":
            cores = None if engine.context.pool.accelerator is not None else concurrent_devices()
            took = f", at least {seconds(planned_seconds(plan, costs, workers, microbatches, cores))} a step"
        named, products = plural(len(plan.stages()), "stage"), carried_bytes(plan, costs, workers)
        carried = f", up to {gib(products)} of carried products on the host" if products else ""
        return f'plan "{plan}": {named}{few}, about {gib(memory)} on each device{carried}{took}.'


def uncompiled(engine: Engine, module: nn.Module) -> list[str]:
    """Return a message if user code has compiled modules, which run as written on workers."""
    compiled = [n for n, m in module.named_modules() if m._compiled_call_impl is not None or "_orig_mod" in m._modules]
    if not compiled or engine.context.options.compile_layers:
        return []
    return [
        f"torch.compile was applied to {compiled[0]!r}, which runs as it is written on workers: set "
        "compile_layers=True, which compiles layers once for all workers of a device."
    ]


def name_devices(engine: Engine) -> str:
    """Return the devices in words: ``"4 emulated devices"`` or ``"2 GPUs"``."""
    pool = engine.context.pool
    return plural(len(pool.workers), "emulated device" if pool.accelerator is None else "GPU")


def how_cut(sizes: Sequence[int]) -> str:
    """Return the microbatches in words: ``"4 microbatches of 1 to 2 samples"``."""
    least, most = min(sizes), max(sizes)
    samples = plural(most, "sample") if least == most else f"{least} to {plural(most, 'sample')}"
    return f"{plural(len(sizes), 'microbatch')} of {samples}"


def host_bytes(engine: Engine, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> int:
    """Return the host memory that stays in use between steps: weights, their copies, gradients and optimizer state."""
    flats = [flat for layer in engine.model.layers for flat in layer.weights.flats]
    in_files = {id(p) for flat in flats if flat.in_place for p in flat.masters}
    weights = sum(p.nbytes for p in parameters if id(p) not in in_files)
    copies = sum(flat.nbytes for flat in flats if flat.copied and not flat.shares)
    gradients = sum(p.nbytes for p in parameters if p.requires_grad)
    return weights + copies + gradients + sum(map(_state_bytes, optimizers))


def _state_bytes(optimizer: Optimizer) -> int:
    """Return the size of the optimizer's state, present or expected; 0 if it cannot be known before its first step."""
    stepped = optimizer.state_dict().get("state", {}).values()
    if stepped:
        held = (state.values() for state in stepped if isinstance(state, dict))
        return sum(t.nbytes for values in held for t in values if isinstance(t, torch.Tensor))
    cls = type(optimizer)
    if cls not in KNOWN or not is_torchs(cls.step):
        return 0
    probe = nn.Parameter(torch.zeros(_PROBE, _PROBE))
    probe.grad = torch.zeros_like(probe)
    try:
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        trial = cls([{**group, "params": [probe]}])  # type: ignore[call-arg]
        with torch.no_grad():
            inspect.unwrap(cls.step)(trial)  # without its wrappers, which run the hooks on steps of all optimizers
    except Exception:
        return 0
    kept = sum(t.nbytes for t in trial.state[probe].values() if isinstance(t, torch.Tensor))
    masters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return int(sum(4 * p.numel() for p in masters) * kept / probe.nbytes)  # trained parameters are fp32


def changed_settings(options: Options) -> dict[str, str]:
    """Return the options that differ from their defaults, each as written in a script."""
    default, changed = Options(), {}
    for name in (f.name for f in fields(Options)):
        value = getattr(options, name)
        if value != getattr(default, name):
            if name == "memory_budget" and value > 1 and parse_bytes(short := size_text(value), name) == value:
                value = short
            changed[name] = name_setting(value)
    return changed


def name_setting(value: Any) -> str:
    """Return a setting's value as written in a script, with functions and classes by their names."""
    if isinstance(value, Emulation):
        value = {f.name: v for f in fields(value) if (v := getattr(value, f.name)) != f.default}
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(name_setting, value))}]"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return str(value.__qualname__)
    return repr(value)
