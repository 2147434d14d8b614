"""Nominal rates of a device, which turn counted operations into seconds without a clock.

With ``plan="static"``, a plan follows from shapes. The times of calls follow from their operations and from the rates
of one machine of the kind, so the plan is the same on every machine. A plan depends on the ratios of the calls' times,
and hardly on their scale. ``conf/hardware/cpu.yaml`` and ``conf/hardware/rtx4090x8.yaml`` have the same figures and
their sources.
"""

from __future__ import annotations

import dataclasses

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.profile import Hardware

EMULATED = Hardware(
    title="an emulated device", workers=1, flops={"fp32": 50e9, "bf16": 25e9, "fp16": 25e9},
    memory=None, memory_bandwidth=10e9, upload=5e9, download=5e9,
    host_memory=16 * 2**30, host_memory_bandwidth=40e9,
    matmul_efficiency=0.8, memory_efficiency=0.85, kernel_s=5e-6, hop_s=0.2e-3, emulated=True,
)  # fmt: skip
GPU = Hardware(
    title="an RTX 4090", workers=1, flops={"fp32": 82.6e12, "bf16": 165.2e12, "fp16": 330.3e12, "fp8": 330.3e12},
    memory=24 * 2**30, memory_bandwidth=1008e9, upload=25e9, download=25e9,
    host_memory=128 * 2**30, host_memory_bandwidth=51.2e9,
    matmul_efficiency=0.8, memory_efficiency=0.85, kernel_s=5e-6, hop_s=1e-3, call_s=0.5e-3, turn_s=0.5e-3,
)  # fmt: skip


def nominal(device_type: str) -> Hardware:
    """Return the rates for a device type, as ``torch.device.type`` spells it."""
    return EMULATED if device_type == "cpu" else GPU


def with_times_of_bytes(costs: Costs, hardware: Hardware) -> Costs:
    """Return ``costs`` with times for calls of which no operation was counted.

    A `Counter` does not see kernels that torch does not dispatch. The forward of such a call counts as memory traffic
    of its weights and activations, and its backward as twice that, for their gradients.
    """

    def timed(call: CallCost) -> CallCost:
        moved_s = hardware.product_s(0.0, call.weight_bytes + call.activation_bytes, "fp32")
        backward_s = call.backward_s or (2 * moved_s if call.needs_backward else 0.0)
        return dataclasses.replace(call, forward_s=call.forward_s or moved_s, backward_s=backward_s)

    return costs.map(timed)
