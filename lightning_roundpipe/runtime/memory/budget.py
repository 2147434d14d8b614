"""What a worker may use of its device, and whether the layers and a plan written by hand keep to it.

A layer is the smallest thing that is moved, so one that exceeds the budget can never run. That is known before the
first batch, where it is cut or refused; what its calls need beside weights and gradients is measured in that batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_roundpipe.config import Options
from lightning_roundpipe.devices import Device
from lightning_roundpipe.messages import gib
from lightning_roundpipe.model.layers import find_layers, find_requested
from lightning_roundpipe.model.refine import Refined, Size, arenas_of, cut_to_fit
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import ARENAS, device_bytes, planned_bytes
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.memory.dtypes import Formats
from lightning_roundpipe.runtime.memory.flat_params import aligned

_SHARE = 0.9
"""Of a device's memory, where ``memory_budget`` is not set."""


def worker_bytes(options: Options, devices: Sequence[Device]) -> int | None:
    """What any worker may use, as stages go to all of them: that of the smallest device. None: no limit.

    What libraries keep there for themselves is not in it.

    Raises:
        ValueError: if the budget is a fraction of a memory that has no size.
    """
    budget = _budget_of(options, devices)
    return None if budget is None else max(0, budget - library_bytes(devices))


def _budget_of(options: Options, devices: Sequence[Device]) -> int | None:
    """The same with what libraries keep."""
    budget, capacity = options.memory_budget, capacity_of(devices)
    if isinstance(budget, float):
        if capacity is None:
            raise ValueError(
                f"memory_budget={budget} is a fraction, and emulated devices have no limit to take it of: give a "
                "size such as '2GiB', or set emulation.memory."
            )
        budget = int(budget * capacity)
    elif budget is None:
        budget = None if capacity is None else int(_SHARE * capacity)
    if budget is None or capacity is None:
        return None if budget is None else int(budget)
    return min(int(budget), capacity)


def over_capacity(options: Options, devices: Sequence[Device]) -> str | None:
    """What to say of a ``memory_budget`` that is more than a device has."""
    budget, capacity = options.memory_budget, capacity_of(devices)
    if isinstance(budget, float) or budget is None or capacity is None or int(budget) <= capacity:
        return None
    return (
        f"memory_budget={gib(int(budget))} is more than the {gib(capacity)} that a device has: stages are planned for "
        f"{gib(capacity)}."
    )


def library_bytes(devices: Sequence[Device]) -> int:
    """What libraries keep of a worker's memory."""
    return max((device.library_bytes() for device in devices), default=0)


def peak_bytes(plan: Plan, costs: Costs, options: Options, devices: Sequence[Device]) -> int:
    """What a worker will hold at its peak, with what libraries keep."""
    limit = worker_bytes(options, devices)
    return planned_bytes(plan, costs, len(devices), limit, devices[0].lead_bytes) + library_bytes(devices)


def libraries_note(options: Options, devices: Sequence[Device]) -> str:
    """The end of a message with a limit: why that is less than what was set. Empty where it is not."""
    kept = library_bytes(devices)
    if not kept:
        return ""
    given = options.memory_budget is not None
    whole = f"memory_budget, {_budget_of(options, devices):,} bytes," if given else "the device's memory"
    return f" Of {whole} libraries such as cuBLAS keep {kept:,} bytes."


def capacity_of(devices: Sequence[Device]) -> int | None:
    """Bytes that the smallest device has; None: no limit."""
    return min((c for c in (device.capacity() for device in devices) if c is not None), default=None)


def layers_that_fit(
    module: nn.Module, options: Options, devices: Sequence[Device], formats: Formats, *, fitting: bool = True
) -> Refined:
    """The layers of ``module``, cut where the arenas of the largest would not fit, without which nothing runs.

    Raises:
        ValueError: if there is a layer that does not fit and cannot be cut.
    """
    found = find_layers(module, options.layers, needed=fitting)
    allowed = worker_bytes(options, devices)
    if allowed is None or not found:
        return Refined(found)
    whole = set(find_requested(module, options.layers or ()))
    refined = cut_to_fit(found, lambda layer: _size_of(layer, formats), allowed // ARENAS, whole)
    limit, setting = allowed, "memory_budget"
    if options.memory_budget is None:  # the share left for activations is the plan's affair
        capacity = capacity_of(devices)
        limit = allowed if capacity is None else max(0, capacity - library_bytes(devices))
        setting = "emulation.memory (or use devices with more memory)"
    stuck = refined.stuck
    sizes = {name: _size_of(layer, formats) for name, layer in refined.layers.items()}
    need = ARENAS * arenas_of(sizes)
    if stuck is None or need <= limit:
        return refined
    weights, gradients = max(s.weights for s in sizes.values()), max(s.gradients for s in sizes.values())
    raise ValueError(
        f"layer {stuck.name!r} is too large: workers may use {limit:,} bytes, and a layer at a time needs {need:,} "
        f"({ARENAS} x {weights:,} for weights, {ARENAS} x {gradients:,} for gradients). It cannot be cut: {stuck.why}. "
        f"Raise {setting}, or {stuck.remedy}.{libraries_note(options, devices)}"
    )


def _size_of(layer: nn.Module, formats: Formats) -> Size:
    """What `HostLayer` and the layout of gradients will say."""
    weights = [p.numel() * formats.of(p).itemsize for p in layer.parameters()]
    gradients = [p.nbytes for p in layer.parameters() if p.requires_grad]
    return Size(sum(map(aligned, weights)), sum(map(aligned, gradients)))


def check_plan_fits(plan: Plan, costs: Costs, options: Options, devices: Sequence[Device]) -> None:
    """``ValueError`` for a plan by hand that takes more than a budget that was given."""
    limit = worker_bytes(options, devices)
    if options.memory_budget is None or limit is None:
        return
    if (need := device_bytes(plan, costs, len(devices))) > limit:
        raise ValueError(
            f"plan: it needs {need:,} bytes on each worker (two arenas each for weights and gradients of the largest "
            "stages, activations, and boundary tensors of microbatches that wait), but memory_budget allows "
            f"{limit:,}. Cut it into more stages or smaller rounds, or raise memory_budget."
            f"{libraries_note(options, devices)}"
        )
