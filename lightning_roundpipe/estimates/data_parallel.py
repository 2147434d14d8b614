"""Data parallelism on the same machine, for comparison: every GPU holds the whole model with its optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import Parameters
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.planning.updates import adamw_bytes

STATE_BYTES = 4 + 4 + 8 + 2
"""Bytes of a trained element on each GPU: master weight, gradient, two moments, and what layers compute with."""


def data_parallel_s(
    costs: Callable[[int], Costs], sizes: Iterable[int], parameters: Parameters, machine: Hardware, workers: int,
    sequences: int, memory: int,
) -> float | None:  # fmt: skip
    """Return the seconds of a step, at best; None if a GPU cannot hold it.

    Nothing is recomputed. Gradients are summed in fp32 over the links while the last backward runs, and the GPU updates
    the weights. The estimate favours data parallelism: operations are issued at no cost, and sums reach the links' full
    rate.

    Args:
        costs: returns the costs of a microbatch of a number of sequences. It is not called if the state does not fit.
        sizes: numbers of sequences of a microbatch to try.
        parameters: the model's parameters.
        machine: the machine, with equal devices.
        workers: number of GPUs.
        sequences: sequences of a step, which GPUs share evenly.
        memory: bytes that each GPU may use.
    """
    plain = parameters.frozen - parameters.packed
    state = STATE_BYTES * parameters.trained + parameters.compute_bytes * plain + parameters.packed_bytes
    bandwidth = machine.memory_bandwidth * machine.memory_efficiency
    update = adamw_bytes() * parameters.trained / bandwidth
    sums = 0.0
    if workers > 1:
        link = replace(machine, workers=workers).link(machine)
        both_ways = machine.host_memory_bandwidth * machine.memory_efficiency / (2 * workers)
        rate = min(link.upload, link.download, both_ways)
        sums = 2 * (workers - 1) / workers * 4 * parameters.trained / rate
    if state > memory:
        return None
    seconds = []
    for size in sizes:
        cost = costs(size)
        if state + cost.stage_bytes(0, len(cost) - 1, "fused").activations > memory:
            continue
        passes = -(-sequences // (size * workers))
        backward = sum(call.backward_s for call in cost if call.needs_backward)
        forward = sum(call.forward_s for call in cost)
        seconds.append(passes * (forward + backward) + max(0.0, sums - backward) + update)
    return min(seconds, default=None)
