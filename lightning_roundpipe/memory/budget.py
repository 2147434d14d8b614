"""The memory that a worker may use of its device, and the checks of layers and hand-written plans against it.

A layer is the smallest unit that is uploaded, so a layer that exceeds the budget can never run. `layers_that_fit` cuts
or refuses it before the first batch. That batch then measures what calls need beside weights and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from lightning_roundpipe.config import Options
from lightning_roundpipe.devices import Device
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.flat_params import aligned
from lightning_roundpipe.messages import gib
from lightning_roundpipe.model.layers import find_layers, find_requested
from lightning_roundpipe.model.refine import Refined, Size, arenas_of, cut_to_fit
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import BESIDE, Memory, WorkerNeeds, device_bytes
from lightning_roundpipe.planning.schedule import Plan

_ALIKE = 0.95
"""Workers with this part of the largest one's memory have stages of the same size."""
_SHARE = 0.9
"""Fraction of a device's memory that workers use if ``memory_budget`` is not set."""


def memory_of_workers(options: Options, devices: Sequence[Device]) -> Memory | None:
    """Return `worker_bytes`, or those of each worker where they differ and no plan is written by hand."""
    each = [worker_bytes(options, [device]) for device in devices]
    known = tuple(size for size in each if size is not None)
    if options.plan_text is not None or len(known) < len(each) or min(known) >= _ALIKE * max(known):
        return worker_bytes(options, devices)
    return known


def worker_bytes(options: Options, devices: Sequence[Device]) -> int | None:
    """Return the bytes that every worker may use for tensors, without what libraries keep; None if there is no limit.

    Without a plan, any layer may run on any worker, so the smallest device counts.

    Raises:
        ValueError: the budget is a fraction and the devices have no capacity.
    """
    budget = _budget_of(options, devices)
    return None if budget is None else max(0, budget - library_bytes(devices))


def _budget_of(options: Options, devices: Sequence[Device]) -> int | None:
    """Return `worker_bytes` with the memory that libraries keep."""
    budget, capacity = options.memory_budget, capacity_of(devices)
    if capacity is None:
        if isinstance(budget, float):
            raise ValueError(
                f"memory_budget={budget} is a fraction, and emulated devices have no limit to take it of: give a "
                "size such as '2GiB', or set emulation.memory."
            )
        return None if budget is None else int(budget)
    share = _SHARE if budget is None else budget
    return min(int(share * capacity if isinstance(share, float) else share), capacity)


def over_capacity(options: Options, devices: Sequence[Device]) -> str | None:
    """Return a warning if ``memory_budget`` exceeds the capacity of a device, else None."""
    budget, capacity = options.memory_budget, capacity_of(devices)
    if isinstance(budget, float) or budget is None or capacity is None or int(budget) <= capacity:
        return None
    return (
        f"memory_budget={gib(int(budget))} is more than the {gib(capacity)} that a device has: stages are planned for "
        f"{gib(capacity)}."
    )


def library_bytes(devices: Sequence[Device]) -> int:
    """Return the bytes of a device that libraries such as cuBLAS keep and optimizer steps take; the most of all."""
    return max((device.library_bytes() + device.update_bytes for device in devices), default=0)


def peak_bytes(plan: Plan, costs: Costs, options: Options, devices: Sequence[Device]) -> int:
    """Return the planned peak of a worker in bytes, including the memory that libraries keep; the most of all."""
    limit, lead = memory_of_workers(options, devices), devices[0].lead_bytes
    if not isinstance(limit, tuple):
        return WorkerNeeds(plan, costs, len(devices)).planned(limit, lead) + library_bytes(devices)
    return max(
        WorkerNeeds(plan, costs, len(devices), device.index).planned(most, lead) + library_bytes([device])
        for most, device in zip(limit, devices, strict=True)
    )


def libraries_note(options: Options, devices: Sequence[Device]) -> str:
    """Return the end of a message that names a limit: why it is below the configured one. Empty if it is not."""
    kept = library_bytes(devices)
    if not kept:
        return ""
    given = options.memory_budget is not None
    whole = f"memory_budget, {_budget_of(options, devices):,} bytes," if given else "the device's memory"
    updates = max(device.update_bytes for device in devices)
    steps = f" and optimizer steps (optimizer_device='worker', {updates:,} bytes)" if updates else ""
    return f" Of {whole} libraries such as cuBLAS{steps} keep {kept:,} bytes."


def capacity_of(devices: Sequence[Device]) -> int | None:
    """Return the bytes of the smallest device, or None without a limit."""
    return min((c for c in (device.capacity() for device in devices) if c is not None), default=None)


def device_for(nbytes: int, options: Options) -> int:
    """Return the bytes of the smallest device of which workers may use ``nbytes``."""
    budget = _SHARE if options.memory_budget is None else options.memory_budget
    return math.ceil(nbytes / budget) if isinstance(budget, float) else nbytes


def layers_that_fit(
    module: nn.Module, options: Options, devices: Sequence[Device], formats: Formats, *, fitting: bool = True
) -> Refined:
    """Find the layers of ``module`` and cut those that do not fit into an arena.

    Raises:
        ValueError: if a layer neither fits nor can be cut.
    """
    found = find_layers(module, options.layers, needed=fitting)
    allowed = worker_bytes(options, devices)
    if allowed is None or not found:
        return Refined(found)
    whole = set(find_requested(module, options.layers or ()))
    refined = cut_to_fit(found, lambda layer: _size_of(layer, formats), allowed // BESIDE, whole)
    limit, setting = allowed, "memory_budget"
    if options.memory_budget is None:  # the planner sees to the share that is left for activations
        capacity = capacity_of(devices)
        limit = allowed if capacity is None else max(0, capacity - library_bytes(devices))
        setting = "emulation.memory (or use devices with more memory)"
    stuck = refined.stuck
    sizes = {name: _size_of(layer, formats) for name, layer in refined.layers.items()}
    need = arenas_of(sizes)
    if stuck is None or need <= limit:
        return refined
    weights, gradients = max(s.weights for s in sizes.values()), max(s.gradients for s in sizes.values())
    raise ValueError(
        f"layer {stuck.name!r} is too large: workers may use {limit:,} bytes, and a layer at a time needs {need:,} "
        f"({weights:,} for weights, {gradients:,} for gradients). It cannot be cut: {stuck.why}. "
        f"Raise {setting}, or {stuck.remedy}.{libraries_note(options, devices)}"
    )


def _size_of(layer: nn.Module, formats: Formats) -> Size:
    """Return the sizes that `HostLayer` and `GradientLayout` will have."""
    weights = [p.numel() * formats.of(p).itemsize for p in layer.parameters()]
    gradients = [p.nbytes for p in layer.parameters() if p.requires_grad]
    return Size(sum(map(aligned, weights)), sum(map(aligned, gradients)))


def check_plan_fits(plan: Plan, costs: Costs, options: Options, devices: Sequence[Device]) -> None:
    """Raise ``ValueError`` if a hand-written plan needs more than the configured ``memory_budget``."""
    limit = worker_bytes(options, devices)
    if options.memory_budget is None or limit is None:
        return
    if (need := device_bytes(plan, costs, len(devices))) > limit:
        copies = "unpacked weights, " if plan.unpack_once else ""
        once = str(plan).partition("; unpack once ")[2]
        fewer = f"leave out '; unpack once {once}', " if once else ""
        raise ValueError(
            f"plan: it needs {need:,} bytes on each worker (weights and gradients of the largest stage, {copies}"
            f"activations, code between layers, and boundary tensors of microbatches that wait), but memory_budget "
            f"allows {limit:,}. Cut it into more stages or smaller rounds, {fewer}or raise memory_budget."
            f"{libraries_note(options, devices)}"
        )
