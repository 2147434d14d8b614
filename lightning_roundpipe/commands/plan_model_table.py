"""The answer of ``roundpipe-plan model=NAME``: tables for the terminal, and a dictionary for ``format=json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.commands.options import pasted
from lightning_roundpipe.commands.plan_costs import Partitioner, side_by_side_line
from lightning_roundpipe.commands.plan_model import Communication, Outlook, total
from lightning_roundpipe.commands.plan_shape import Wish
from lightning_roundpipe.commands.remedies import Remedies, size_text
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.memory import Item, Parameters, StageRow
from lightning_roundpipe.planning.schedule import Plan

_FASTER = 1.02
"""Ratio of tokens a second from which on data parallelism is named. What is closer is within the error of estimates."""


def as_table(
    found: Outlook, remedies: Remedies | None = None, explained: Sequence[RenderableType] = ()
) -> RenderableType:
    """Return the answer for the terminal: the verdict, what would fit, the memory, and the plan if it fits.

    Args:
        found: the estimates.
        remedies: settings that would fit; None if they were not looked for.
        explained: what ``explain=`` adds below the tables of memory.
    """
    wish, plan = found.wish, found.plan
    reduced = "" if wish.reduce_dtype is None else f", gradients travel in {wish.reduce_dtype}"
    each = f"{wish.machines} machines, each {found.hardware.title}" if wish.machines > 1 else found.hardware.title
    adapters = "" if wish.lora == "none" else f", lora={wish.lora}"
    weights = found.parameters.trained + found.parameters.frozen
    head = [
        f"{wish.model}{adapters}: {_count(weights)} weights, {_count(found.parameters.trained)} of them trained.",
        f"{each}: {plural(found.workers, 'worker')}, {plural(found.microbatches, 'microbatch')} of "
        f"{found.microbatch_size} x {found.sequence_length:,} tokens, {wish.precision}, staleness {wish.staleness}"
        f"{reduced}.",
    ]
    if wish.like_paper:
        head.append("Predicted is the paper's library, under its plan and with its times (partitioner=paper).")
    head += [f"Assumed {text}" for text in found.assumed]
    if wish.precision.endswith("-mixed"):
        true = wish.precision.replace("mixed", "true")
        head.append(
            f"Counted as if all were in 16 bits, as {true} has it; {wish.precision} keeps norms, embeddings and what "
            "goes from layer to layer in fp32."
        )
    if found.parameters.packed:
        head += _packed(found.parameters, found.plan)
    elif found.parameters.frozen and found.parameters.compute_bytes < 4:
        head.append("Frozen weights are counted in 16 bits: load them so (model.dtype=bfloat16).")
    if wish.max_positions is not None:
        head.append(
            f"Planned for {wish.max_positions:,} positions (max_positions=); the configuration has "
            f"{found.configured_positions:,}. To train beyond them, stretch the model's rotary embedding (model.rope=)."
        )
    if wish.token_tiles is not None:
        head.append(_tiles(wish))
    if found.cuts:
        head.append(f"Layers that are too large for a worker are cut: {'; '.join(found.cuts)}.")
    parts: list[RenderableType] = [Text(line) for line in (_verdict(found), *_facts(found))]
    if remedies is not None:
        parts += ["", *_remedies(found, remedies)]
    parts += ["", *(Text(line) for line in head)]
    if found.worker is None:
        parts.append(memory_table("Each worker", found.device_items, found.memory, locked=False))
    else:
        for title, worker in _fullest(found).items():
            parts.append(memory_table(title, found.items_of(worker), found.memory_of(worker), locked=False))
    parts.append(
        memory_table(
            "Host" if wish.machines == 1 else "Each host", found.host_items, found.hardware.host_memory, locked=True
        )
    )
    parts += explained
    if found.run is not None:
        sizes = [("forward", plan.forward), ("fused", [plan.fused]), ("backward", plan.backward)]
        cut = "; ".join(f"{phase} {_runs([len(span) for span in spans])}" for phase, spans in sizes)
        heading = "GiB of each stage; times and activations are one microbatch's:"
        parts += ["", Text(heading), "", _stage_table(found.stages), "", Text(f"Layers of each stage: {cut}")]
        parts.append(pasted(f"plan='{plan}'"))
    return Group(*parts)


def _tiles(wish: Wish) -> str:
    tiles = wish.token_tiles
    if isinstance(tiles, int):
        return f"MLPs, norms and experts run in tiles of {tiles:,} tokens (strategy.token_tiles={tiles})."
    named = ", ".join(f"{name}: {tokens}" for name, tokens in tiles or ())
    return f"Modules run in tiles of tokens (strategy.token_tiles={{{named}}})."


def _packed(parameters: Parameters, plan: Plan) -> list[str]:
    """Return sentences about packed weights: their format, and how copies of them are counted."""
    once, all_ = len(plan.unpack_once), len(plan.stages())
    copied = "Every product reads a copy that is made for it."
    if once:
        where = f"In {once} of {plural(all_, 'stage')}" if once < all_ else "In each stage"
        copied = f"{where}, products of all microbatches read one copy (unpack once)."
        copied += " In the others, every product reads a copy that is made for it." if once < all_ else ""
    others = " The others are counted in 16 bits: load them so (model.dtype=bfloat16)."
    lines = [
        f"{_count(parameters.packed)} of the frozen weights are in {parameters.packed_as} (model.quantization=), "
        f"{8 * parameters.packed_bytes / parameters.packed:.2f} bits each. "
        f"{copied}{others if parameters.compute_bytes < 4 else ''}"
    ]
    if parameters.packed_as == "int8":
        lines.append("GPUs multiply int8 in forward; that is counted as if each product made a copy there as well.")
    if parameters.packed_experts:
        lines.append("Experts are computed together (experts_implementation=grouped_mm), from a copy of them all.")
    return lines


def _fullest(found: Outlook) -> dict[str, int]:
    """Return the worker with the least room left, for each kind of device by its heading."""
    workers: dict[str, list[int]] = {}
    for worker, device in enumerate(found.hardware.devices):
        workers.setdefault(f"Each {device.title}", []).append(worker)
    return {title: max(same, key=lambda worker: total(found.items_of(worker))) for title, same in workers.items()}


def _verdict(found: Outlook) -> str:
    """Return the answer in one line."""
    if found.run is not None:
        return f"Fits: {found.tokens_per_s:,.0f} tokens/s, {_seconds(found.period_s)} a step (estimated)."
    device, host = total(found.device_items), total(found.host_items)
    needs = []
    if not found.fits_device:
        assert found.memory is not None
        needs.append(f"{_share(device, found.memory)} a worker")
    if not found.fits_host:
        needs.append(f"{_share(host, found.hardware.host_memory)} of host")
    return f"Does not fit: {', '.join(needs)}."


def _facts(found: Outlook) -> list[str]:
    lines = []
    if found.run is not None:
        lines.append(f"A step has {found.step_tokens:,} tokens, its bubble is {found.bubble_pct:.1f} %.")
        if found.side_by_side:
            lines.append(side_by_side_line(found.plan, found.microbatches))
        if (rate := found.data_parallel_tokens_per_s or 0.0) > _FASTER * found.tokens_per_s:
            lines.append(_data_parallel(found, rate))
    if (exchanged := found.communication) is not None:
        lines.append(_exchanged(found, exchanged))
    if (stuck := found.refined.stuck) is not None:
        lines.append(f"Layer {stuck.name} is too large and cannot be cut: {stuck.why}.")
    if (longest := found.longest) is not None:
        lines.append(
            f"Longest sequence: {longest.tokens:,} tokens, one a microbatch; limited by {longest.limited_by}."
            if longest.tokens
            else f"No sequence fits, however short: limited by {longest.limited_by}."
        )
    return lines


def _data_parallel(found: Outlook, rate: float) -> str:
    way = 'plain training (strategy="auto")' if found.workers == 1 else 'data parallelism (strategy="ddp")'
    return (
        f"A GPU also holds all weights, gradients and optimizer state at once: {way} would be faster, up to "
        f"{rate:,.0f} tokens/s."
    )


def _exchanged(found: Outlook, exchanged: Communication) -> str:
    network, cost = exchanged.network, exchanged.cost_s
    share = 100 * cost / exchanged.period_s
    hidden = (
        "which is hidden behind computing"
        if exchanged.is_hidden
        else f"of which {_seconds(cost)} ({share:.0f} % of a step) are not hidden"
    )
    return (
        f"{network.machines} machines: each sends and receives {exchanged.nbytes / 1e9:,.2f} GB a step, which takes "
        f"{_seconds(exchanged.busy_s)} at {network.bytes_per_s / 1e9:,.2f} GB/s, {hidden}."
    )


def _remedies(found: Outlook, remedies: Remedies) -> list[RenderableType]:
    """Return a line for each remedy, its tokens a second before its options, or what else could help."""
    parts: list[RenderableType] = []
    if remedies.found:
        parts.append(Text("What would fit, each planned with these settings added or replaced:"))
        rates = [f"{remedy.outlook.tokens_per_s:,.0f}" for remedy in remedies.found]
        for rate, remedy in zip(rates, remedies.found, strict=True):
            note = f" ({remedy.note})" if remedy.note else ""
            parts.append(pasted(f"  {rate:>{max(map(len, rates))}} tokens/s  {remedy.settings}{note}"))
    else:
        where = "a host with more memory"
        if remedies.device_memory is not None:
            enough = size_text(remedies.device_memory)
            where = f"memory={enough} or more" if found.wish.memory else f"devices with {enough} or more"
        tried = f" (tried: {'; '.join(remedies.hopeless)})" if remedies.hopeless else ""
        parts.append(Text(f"Nothing that was tried fits{tried}. Take {where}, or a smaller model."))
    if remedies.untried:
        parts.append(Text(f"Not tried: {'; '.join(remedies.untried)}."))
    return parts


def memory_table(title: str, items: Sequence[Item], limit: int | None, locked: bool) -> Table:
    """Return a table of memory in GiB, with the sum as its last row.

    Args:
        title: heading of the first column.
        items: the rows.
        limit: bytes that the sum is compared with; None: no limit.
        locked: whether a column lists page-locked memory.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold")
    table.add_column("GiB", justify="right", no_wrap=True)
    if locked:
        table.add_column("page-locked", justify="right", no_wrap=True)
    for item in items:
        table.add_row(item.name, in_gib(item.nbytes), *([in_gib(item.nbytes) if item.locked else ""] if locked else []))
    table.add_section()
    pinned = in_gib(total([item for item in items if item.locked]))
    of = "without a limit" if limit is None else f"of {in_gib(limit)}, {100 * total(items) / limit:.0f} %"
    table.add_row(f"together, {of}", in_gib(total(items)), *([pinned] if locked else []))
    return table


def _stage_table(rows: Sequence[StageRow]) -> Table:
    """Return a table of stages. Consecutive stages of one phase with equal figures share a row."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("Stage", ""):
        table.add_column(name, no_wrap=True)
    table.add_column("layers", overflow="fold")  # only names are broken in a narrow terminal, not numbers
    for name in ("ms", "weights", "gradients", "activations", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    lines: list[tuple[int, int, str, list[str], list[str]]] = []
    for number, row in enumerate(rows):
        sizes = (row.weight_bytes, row.gradient_bytes, row.activation_bytes, row.waiting_bytes)
        cells = [f"{row.ms:,.1f}", *map(in_gib, sizes)]
        if lines and lines[-1][2] == row.phase and lines[-1][4] == cells:
            first, _, phase, calls, _ = lines[-1]
            lines[-1] = first, number, phase, [*calls, row.calls], cells
        else:
            lines.append((number, number, row.phase, [row.calls], cells))
    for first, last, phase, calls, cells in lines:
        numbers = str(first) if first == last else f"{first}-{last}"
        table.add_row(numbers, phase, calls[0] if first == last else f"{calls[0]} to {calls[-1]}", *cells)
    return table


def _runs(sizes: Sequence[int]) -> str:
    """Return how many stages have how many layers: ``3 x 3, 2`` for the sizes 3, 3, 3 and 2."""
    parts: list[tuple[int, int]] = []
    for size in sizes:
        if parts and parts[-1][1] == size:
            parts[-1] = parts[-1][0] + 1, size
        else:
            parts.append((1, size))
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in parts) or "none"


def _share(need: int, limit: int) -> str:
    unit, name = (2**30, "GiB") if limit >= 2**30 else (2**20, "MiB")
    return f"{need / unit:,.2f} of {limit / unit:,.2f} {name}"


def in_gib(nbytes: int) -> str:
    """Return bytes as a number of GiB with two decimals."""
    return f"{nbytes / 2**30:,.2f}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.2f} million"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.3g} ms"


def partitioner_of(wish: Wish) -> Partitioner:
    """Return the value of ``partitioner=``."""
    return "paper" if wish.like_paper else "search"


def as_dict(found: Outlook, remedies: Remedies | None = None) -> dict[str, Any]:
    """Return what ``format=json`` prints. Keys end in their units; times and rates are None if it does not fit."""
    wish, parameters = found.wish, found.parameters
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
        "hardware": found.hardware.title,
        "assumed": list(found.assumed),
        "lora": wish.lora,
        "precision": wish.precision,
        "staleness": wish.staleness,
        "reduce_dtype": wish.reduce_dtype,
        "partitioner": partitioner_of(wish),
        "max_positions": wish.max_positions,
        "token_tiles": dict(wish.token_tiles) if isinstance(wish.token_tiles, tuple) else wish.token_tiles,
        "machines": wish.machines,
        "communication": _communication(found.communication),
        "fits": found.fits,
        **times,
        "data_parallel_tokens_per_s": found.data_parallel_tokens_per_s,
        "workers": found.workers,
        "microbatches": found.microbatches,
        "microbatch_size": found.microbatch_size,
        "sequence_length": found.sequence_length,
        "parameters": parameters.trained + parameters.frozen,
        "trained_parameters": parameters.trained,
        "packed_parameters": parameters.packed,
        "packed_as": parameters.packed_as or None,
        "cut": found.cuts,
        **found.plan.to_dict(),
        "side_by_side": found.side_by_side,
        "stages": [asdict(row) for row in found.stages],
        "device_memory": _memory(found.device_items, found.memory),
        "host_memory": _memory(found.host_items, found.hardware.host_memory),
        "longest_sequence": found.longest.tokens if found.longest else None,
        "limited_by": found.longest.limited_by if found.longest else None,
        "would_fit": [
            {
                "settings": remedy.settings,
                "changes": dict(remedy.changes),
                "tokens_per_s": remedy.outlook.tokens_per_s,
                "period_ms": 1e3 * remedy.outlook.period_s,
            }
            for remedy in (remedies.found if remedies else ())
        ],
    }


def _communication(found: Communication | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "bytes_per_s": found.network.bytes_per_s,
        "sent_bytes": round(found.nbytes),
        "busy_ms": 1e3 * found.busy_s,
        "cost_ms": 1e3 * found.cost_s,
        "is_hidden": found.is_hidden,
    }


def _memory(items: list[Item], limit: int | None) -> dict[str, Any]:
    rows = [{"name": item.name, "bytes": item.nbytes, "page_locked": item.locked} for item in items]
    return {"limit_bytes": limit, "needed_bytes": total(items), "items": rows}
