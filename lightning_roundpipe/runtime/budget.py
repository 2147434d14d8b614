"""What a worker may use of its device, and whether the layers and a plan written by hand keep to it.

A layer is the smallest thing that is moved, so one that exceeds the budget can never run. That is known before the
first batch, and said then; what its calls need beside weights and gradients is measured in the first batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_roundpipe.config import Options
from lightning_roundpipe.devices import Device
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import ARENAS, device_bytes
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.sums import HostGradients
from lightning_roundpipe.runtime.weights import HostLayer

_SHARE = 0.9
"""Of a device's memory, where ``memory_budget`` is not set."""


def worker_bytes(options: Options, devices: Sequence[Device]) -> int | None:
    """What any worker may use, as stages go to all of them: that of the smallest device. None: no limit.

    Raises:
        ValueError: if the budget is a fraction of a memory that has no size.
    """
    budget, capacity = options.memory_budget, capacity_of(devices)
    if isinstance(budget, float):
        if capacity is None:
            raise ValueError(
                f"memory_budget={budget} is a fraction, and emulated devices have no limit to take it of: give a "
                "size such as '2GiB', or set emulation.memory."
            )
        return int(budget * capacity)
    if budget is not None:
        return int(budget)
    return None if capacity is None else int(_SHARE * capacity)


def capacity_of(devices: Sequence[Device]) -> int | None:
    """Bytes that the smallest device has; None: no limit."""
    return min((c for c in (device.capacity() for device in devices) if c is not None), default=None)


def check_layers_fit(layers: Sequence[HostLayer], options: Options, devices: Sequence[Device]) -> None:
    """``ValueError`` unless there is room for the arenas of the largest layer, which nothing runs without."""
    limit, setting = worker_bytes(options, devices), "memory_budget"
    if options.memory_budget is None:  # the share left for activations is the plan's affair
        limit, setting = capacity_of(devices), "emulation.memory (or use devices with more memory)"
    weights = max(layer.nbytes for layer in layers)
    gradients = max(HostGradients.bytes_of(layer) for layer in layers)
    need = ARENAS * (weights + gradients)
    if limit is not None and need > limit:
        largest = max(layers, key=lambda layer: layer.nbytes + HostGradients.bytes_of(layer))
        raise ValueError(
            f"layer {largest.name!r} is too large: workers may use {limit:,} bytes, and a layer at a time needs "
            f"{need:,} ({ARENAS} x {weights:,} for weights, {ARENAS} x {gradients:,} for gradients). Raise {setting}, "
            "or name smaller modules in layers= so that the layer is split."
        )


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
        )
