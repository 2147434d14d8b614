"""``roundpipe-plan model=NAME hardware=NAME``: does a model fit a machine, how fast is it, what limits it?"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_roundpipe.commands.choices import make_model, read_config, read_machine
from lightning_roundpipe.model.layers import find_layers
from lightning_roundpipe.model.lean_loss import lean_logits, make_lean
from lightning_roundpipe.model.refine import Refined, Size, cut_to_fit
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.estimate import estimate_costs, layer_bytes
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.memory import (
    ARENAS,
    Item,
    Parameters,
    StageRow,
    ahead_within,
    device_bytes,
    device_items,
    host_items,
    smallest_within,
    stage_rows,
)
from lightning_roundpipe.planning.pipeline import Rules, Run, Staleness, run_steps
from lightning_roundpipe.planning.profile import Hardware, Precision
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import SEARCH_SECONDS, baseline_within, search_partition
from lightning_roundpipe.planning.simulate import HostTime
from lightning_roundpipe.planning.updates import Updates

MEMORY_SHARE = 0.9
"""Of a device's memory, as in training where memory_budget is not set."""

_SIZES = (8, 4, 2, 1)
"""Sequences a microbatch that are tried where nobody says how many."""

_STEPS = 8
"""Steps that are averaged, after as many that fill the pipeline."""

_LENGTHS = 256
"""Longest sequences are found in units of so many tokens."""

_EXACTLY = 64
"""Or, where that is less, to one part in so many."""

_MOST_LENGTH = 2**20
_ADAMW_BYTES = 28
"""Memory traffic of an update: a weight, its gradient and its moments are read, all but the gradient written."""


@dataclass(frozen=True)
class Wish:
    """What somebody wants to train."""

    model: str
    hardware: str
    lora: str
    precision: Precision
    sequence_length: int
    microbatch_size: int | None
    microbatches: int | None
    workers: int | None
    staleness: Staleness
    memory: int | None
    min_round: int | None = None
    max_fused: int | None = None
    search_seconds: float = SEARCH_SECONDS
    search: bool = True
    plan: str | None = None
    stage_seconds: float | None = None


class Shape:
    """A model without data, on a machine.

    Args:
        memory: bytes that each worker may use, which layers are cut to fit as in training; None: no limit.
    """

    def __init__(
        self, model: str, lora: str, precision: Precision, hardware: Hardware, staleness: Staleness = 0,
        memory: int | None = None,
    ) -> None:  # fmt: skip
        config = read_config(model)
        self.longest = getattr(config.get_text_config(), "max_position_embeddings", None) or _MOST_LENGTH
        self.hardware = hardware
        self._module = make_model(config, model, lora, precision)
        root = nn.Module()
        root.model = self._module  # as a LightningModule has it, so that layers have the names they will have
        found = find_layers(root)
        self.refined = Refined(found)
        if memory is not None:
            self.refined = cut_to_fit(found, lambda layer: Size(*layer_bytes(layer)), memory // ARENAS)
        self._layers = self.refined.layers if self.refined.stuck is None else found
        self._lean = _is_lean(self._module)
        weights = list(self._module.parameters())
        trained = sum(p.numel() for p in weights if p.requires_grad)
        frozen = sum(p.numel() for p in weights) - trained
        self.parameters = Parameters(trained, frozen, weights[0].element_size(), apart=bool(staleness))

    def costs(self, microbatch_size: int, sequence_length: int) -> Costs:
        """Of a microbatch of that many sequences."""
        tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.long, device="meta")
        with lean_logits(self._module) if self._lean else nullcontext():
            return estimate_costs(self._module, self._layers, {"input_ids": tokens, "labels": tokens}, self.hardware)

    def rules(self, staleness: Staleness) -> Rules:
        """What takes time beside computing."""
        machine = self.hardware
        traffic = _ADAMW_BYTES + (0 if self.parameters.compute_bytes == 4 else self.parameters.compute_bytes)
        rate = machine.host_memory_bandwidth * machine.memory_efficiency * 4 / traffic  # bytes of fp32 gradients
        return Rules(
            staleness=staleness, host=HostTime(hop_s=machine.hop_s), links=machine.links(), updates=Updates(rate)
        )


def _is_lean(module: nn.Module) -> bool:
    """Whether the packaged module computes its loss without holding the logits."""
    try:
        make_lean(module)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and what keeps it from being longer."""

    tokens: int
    limited_by: str


@dataclass(frozen=True)
class Outlook:
    """What is to be expected of a `Wish`. ``run`` is None where it does not fit."""

    wish: Wish
    hardware: Hardware
    parameters: Parameters
    costs: Costs
    workers: int
    microbatches: int
    microbatch_size: int
    limits: Limits
    rules: Rules
    plan: Plan
    run: Run | None
    longest: Longest
    refined: Refined

    @cached_property
    def device_items(self) -> list[Item]:
        return device_items(self.plan, self.costs, self.workers, self.memory)

    @cached_property
    def host_items(self) -> list[Item]:
        return host_items(self.plan, self.costs, self.parameters)

    @property
    def cuts(self) -> list[str]:
        """Layers that were too large for a worker, and into what they are cut."""
        return self.refined.summary() if self.refined.stuck is None else []

    @property
    def stages(self) -> list[StageRow]:
        """In the order in which they run."""
        return stage_rows(self.plan, self.costs, self.workers)

    @property
    def memory(self) -> int | None:
        return self.limits.memory

    @property
    def fits_device(self) -> bool:
        return self.memory is None or total(self.device_items) <= self.memory

    @property
    def fits_host(self) -> bool:
        return total(self.host_items) <= self.hardware.host_memory

    @property
    def step_tokens(self) -> int:
        return self.microbatches * self.microbatch_size * self.wish.sequence_length

    @property
    def period_s(self) -> float:
        assert self.run is not None
        return self.period_of(self.run)

    def period_of(self, run: Run) -> float:
        """Seconds of each of many steps, under this plan or another one."""
        return run.period_s(_STEPS)

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / self.period_s

    @property
    def bubble_pct(self) -> float:
        """Of steps that follow each other."""
        assert self.run is not None
        busy = self.run.busy_s / len(self.run.ends_s)
        return 100 * (1 - busy / (self.workers * self.period_s))


def total(items: Iterable[Item]) -> int:
    return sum(item.nbytes for item in items)


def look(wish: Wish) -> Outlook:
    """Estimates costs, makes the best plan within memory (or takes the wish's own), and simulates it.

    Raises:
        ValueError: something of the wish is not known or makes no sense. That it does not fit is an answer.
    """
    machine = read_machine(wish.hardware)
    memory = _memory_of(wish, machine)
    return look_at(Shape(wish.model, wish.lora, wish.precision, machine, wish.staleness, memory), wish)


def _memory_of(wish: Wish, machine: Hardware) -> int | None:
    """Of each worker; None: no limit."""
    return wish.memory or (None if machine.memory is None else int(MEMORY_SHARE * machine.memory))


def look_at(shape: Shape, wish: Wish) -> Outlook:
    """`look`, where the model has been built."""
    machine = shape.hardware
    memory = _memory_of(wish, machine)
    if wish.sequence_length > shape.longest:
        raise ValueError(
            f"sequence_length={wish.sequence_length} is longer than the {shape.longest} tokens that model={wish.model} "
            "has positions for (max_position_embeddings)."
        )
    workers = wish.workers or machine.workers
    microbatches = wish.microbatches or 2 * workers
    size, costs = _choose_size(shape, wish, workers, microbatches, memory)
    limits, rules = _limits(costs, wish, workers, microbatches, memory), shape.rules(wish.staleness)
    plan, fits = _make_plan(costs, wish, workers, microbatches, limits, rules.host)
    run = run_steps(plan, costs, workers, microbatches, rules, 2 * _STEPS) if fits else None
    longest = find_longest(shape, workers, microbatches, memory, wish.min_round)
    return Outlook(
        wish, machine, shape.parameters, costs, workers, microbatches, size, limits, rules, plan, run, longest,
        shape.refined,
    )  # fmt: skip


def _choose_size(shape: Shape, wish: Wish, workers: int, microbatches: int, memory: int | None) -> tuple[int, Costs]:
    """As many sequences a microbatch as fit."""
    sizes = _SIZES if wish.microbatch_size is None else (wish.microbatch_size,)
    for size in sizes[:-1]:
        costs = shape.costs(size, wish.sequence_length)
        if _why_not(costs, shape, workers, microbatches, memory, wish.min_round) is None:
            return size, costs
    return sizes[-1], shape.costs(sizes[-1], wish.sequence_length)


def _limits(costs: Costs, wish: Wish, workers: int, microbatches: int, memory: int | None) -> Limits:
    usual = Limits.usual(costs, workers, microbatches, memory)
    fused = usual.max_fused if wish.max_fused is None else wish.max_fused
    return Limits(min(wish.min_round or usual.min_round, microbatches), fused, memory)


def _make_plan(
    costs: Costs, wish: Wish, workers: int, microbatches: int, limits: Limits, host: HostTime
) -> tuple[Plan, bool]:
    """A plan, and whether it keeps to the memory; if none does, the one that takes least."""
    if wish.plan is not None:
        plan = Plan.parse(wish.plan)
        plan.validate(costs.layers)
        return plan, limits.memory is None or device_bytes(plan, costs, workers) <= limits.memory
    smallest = smallest_within(costs, workers, microbatches, limits.min_round, limits.memory)
    if limits.memory is not None and device_bytes(smallest, costs, workers) > limits.memory:
        return smallest, False
    if wish.search and wish.stage_seconds is None:
        return search_partition(costs, workers, microbatches, limits, wish.staleness, host, wish.search_seconds), True
    baseline = baseline_within(costs, workers, microbatches, limits, wish.stage_seconds)
    return ahead_within(baseline, costs, workers, limits.memory), True


def find_longest(
    shape: Shape, workers: int, microbatches: int, memory: int | None, min_round: int | None = None
) -> Longest:
    """For microbatches of one sequence each, cut at every layer, in rounds as small as they have to be."""

    def why_not(tokens: int) -> str | None:
        return _why_not(shape.costs(1, tokens), shape, workers, microbatches, memory, min_round)

    low, high = 0, max(shape.longest // _LENGTHS * _LENGTHS, min(shape.longest, _LENGTHS))
    reason = why_not(high)
    if reason is None:
        return Longest(high, "the model's max_position_embeddings")
    while high - low > max(1, min(_LENGTHS, low // _EXACTLY)):
        middle = (low + high) // 2
        if high - low > _LENGTHS:
            middle -= middle % _LENGTHS
        found = why_not(middle)
        if found is None:
            low = middle
        else:
            high, reason = middle, found
    return Longest(low, reason)


def _why_not(
    costs: Costs, shape: Shape, workers: int, microbatches: int, memory: int | None, min_round: int | None
) -> str | None:
    """What is too large, in words; None: it fits."""
    plan = smallest_within(costs, workers, microbatches, min_round or workers, memory)
    if memory is not None and device_bytes(plan, costs, workers) > memory:
        item = max(device_items(plan, costs, workers, memory), key=lambda item: item.nbytes)
        return f"memory={memory / 2**30:,.2f}GiB of each worker, most of it for {_without_stage(item)}"
    items = host_items(plan, costs, shape.parameters)
    if total(items) > shape.hardware.host_memory:
        item = max(items, key=lambda item: item.nbytes)
        limit = f"host_memory={shape.hardware.host_memory / 2**30:,.2f}GiB of {shape.hardware.title}"
        return f"{limit}, most of it for {item.name}"
    return None


def _without_stage(item: Item) -> str:
    return item.name.partition(", of stage")[0].partition(", stage")[0]


def as_dict(found: Outlook) -> dict[str, Any]:
    """What ``format=json`` prints."""
    wish, plan, parameters = found.wish, found.plan, found.parameters
    times: dict[str, Any] = {"tokens_per_s": None, "period_ms": None, "makespan_ms": None, "bubble_pct": None}
    if found.run is not None:
        times = {
            "tokens_per_s": found.tokens_per_s,
            "period_ms": 1e3 * found.period_s,
            "makespan_ms": 1e3 * found.run.ends_s[0],
            "bubble_pct": found.bubble_pct,
        }
    return {
        "model": wish.model,
        "hardware": wish.hardware,
        "lora": wish.lora,
        "precision": wish.precision,
        "staleness": wish.staleness,
        "fits": found.fits_device and found.fits_host,
        **times,
        "workers": found.workers,
        "microbatches": found.microbatches,
        "microbatch_size": found.microbatch_size,
        "sequence_length": wish.sequence_length,
        "parameters": parameters.trained + parameters.frozen,
        "trained_parameters": parameters.trained,
        "cut": found.cuts,
        "plan": str(plan),
        "forward": [len(span) for span in plan.forward],
        "fused": len(plan.fused) - 1,
        "backward": [len(span) for span in plan.backward],
        "round_microbatches": plan.round_microbatches,
        "stages": [asdict(row) for row in found.stages],
        "device_memory": _memory(found.device_items, found.memory),
        "host_memory": _memory(found.host_items, found.hardware.host_memory),
        "longest_sequence": found.longest.tokens,
        "limited_by": found.longest.limited_by,
    }


def _memory(items: list[Item], limit: int | None) -> dict[str, Any]:
    rows = [{"name": item.name, "bytes": item.nbytes, "page_locked": item.locked} for item in items]
    return {"limit_bytes": limit, "needed_bytes": total(items), "items": rows}
