"""The outlook of a model on a machine, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.commands.plan_model import Outlook, total
from lightning_roundpipe.planning.memory import Item, StageRow


def as_table(found: Outlook) -> RenderableType:
    """The verdict first, then where the memory goes, then the plan."""
    wish, plan = found.wish, found.plan
    adapters = "" if wish.lora == "none" else f", lora={wish.lora}"
    weights = found.parameters.trained + found.parameters.frozen
    head = [
        f"{wish.model}{adapters}: {_count(weights)} weights, {_count(found.parameters.trained)} of them trained",
        f"{found.hardware.title}: {found.workers} workers, {found.microbatches} microbatches of "
        f"{found.microbatch_size} x {wish.sequence_length} tokens, {wish.precision}, staleness {wish.staleness}",
    ]
    if found.cuts:
        head.append(f"Layers that are too large for a worker are cut: {'; '.join(found.cuts)}")
    device = _memory_table("Each worker", found.device_items, found.memory, locked=False)
    host = _memory_table("Host", found.host_items, found.hardware.host_memory, locked=True)
    parts: list[RenderableType] = [Text(line) for line in [*head, "", *_verdict(found)]]
    parts += [device, host]
    if found.run is not None:
        sizes = [("forward", plan.forward), ("fused", [plan.fused]), ("backward", plan.backward)]
        cut = "; ".join(f"{phase} {_runs([len(span) for span in spans])}" for phase, spans in sizes)
        heading = "GiB of each stage, whose times and activations are one microbatch's:"
        parts += [Text(heading), _stage_table(found.stages)]
        parts += [Text(f"Layers of each stage: {cut}"), Text(f"plan={plan}", overflow="fold")]
    return Group(*parts)


def _verdict(found: Outlook) -> list[str]:
    limited = f"limited by {found.longest.limited_by}"
    longest = f"Longest sequence: {found.longest.tokens:,} tokens, one a microbatch; {limited}."
    if not found.fits_device or not found.fits_host:
        device = "" if found.fits_device else "a worker's memory"
        host = "" if found.fits_host else "the host's memory"
        return [f"Does not fit into {' and '.join(filter(None, (device, host)))}. {_remedy(found)}", longest]
    assert found.run is not None
    return [
        f"Fits. Estimated {found.tokens_per_s:,.0f} tokens/s: {found.period_s:,.2f} s a step of {found.step_tokens:,} "
        f"tokens, bubble {found.bubble_pct:.1f} %.",
        longest,
    ]


def _remedy(found: Outlook) -> str:
    if (stuck := found.refined.stuck) is not None:
        why = f"Layer {stuck.name} is too large and cannot be cut: {stuck.why}."
        return f"{why} Take devices with more memory, or {stuck.remedy}."
    if not found.fits_device:
        smaller = "microbatch_size" if found.microbatch_size > 1 else "sequence_length"
        return f"Lower {smaller}, or take devices with more memory."
    return "Lower microbatches, train with lora, or take a host with more memory."


def _memory_table(title: str, items: Sequence[Item], limit: int | None, locked: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold")
    table.add_column("GiB", justify="right", no_wrap=True)
    if locked:
        table.add_column("page-locked", justify="right", no_wrap=True)
    for item in items:
        table.add_row(item.name, _gib(item.nbytes), *([_gib(item.nbytes) if item.locked else ""] if locked else []))
    table.add_section()
    pinned = _gib(total([item for item in items if item.locked]))
    of = "without a limit" if limit is None else f"of {_gib(limit)}, {100 * total(items) / limit:.0f} %"
    table.add_row(f"together, {of}", _gib(total(items)), *([pinned] if locked else []))
    return table


def _stage_table(rows: Sequence[StageRow]) -> Table:
    """Stages that follow each other and are alike to all digits are one line."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("Stage", "", "layers"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "weights", "gradients", "activations", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    lines: list[tuple[int, int, str, list[str], list[str]]] = []
    for number, row in enumerate(rows):
        sizes = (row.weight_bytes, row.gradient_bytes, row.activation_bytes, row.waiting_bytes)
        cells = [f"{row.ms:,.1f}", *map(_gib, sizes)]
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
    """3 3 3 2 as ``3 x 3, 2``: how many stages have how many layers."""
    parts: list[tuple[int, int]] = []
    for size in sizes:
        if parts and parts[-1][1] == size:
            parts[-1] = parts[-1][0] + 1, size
        else:
            parts.append((1, size))
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in parts) or "none"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.2f} million"
