"""The answer of ``roundpipe-plan`` for one model and machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_roundpipe.commands.answer import Answer, table
from lightning_roundpipe.estimates.outlook import Outlook
from lightning_roundpipe.estimates.remedies import Remedies
from lightning_roundpipe.messages import count, plural, seconds
from lightning_roundpipe.planning.memory import Item, carried_bytes, size_text, stage_rows, system_bytes, total

_FASTER = 1.02
"""Ratio of tokens a second from which on data parallelism is named. What is closer is within the error of estimates."""

_SETTINGS = (
    "lora", "precision", "staleness", "reduce_dtype", "optimizer_state", "gradient_clip_val",
    "max_positions",
)  # fmt: skip
_SIZES = ("workers", "microbatches", "microbatch_size", "sequence_length")
"""What JSON says of the request, and of the estimate."""


def answer(found: Outlook, remedies: Remedies | None = None) -> Answer:
    """Return the answer: the verdict, what would fit, the memory, and the plan if it fits."""
    devices = {"Each worker": found.worker} if found.worker is None else _fullest(found)
    tables = [
        _memory_table(heading, found.items_of(worker), found.memory_of(worker), locked=False)
        for heading, worker in devices.items()
    ]
    host = "Host" if found.request.machines == 1 else "Each host"
    tables.append(_memory_table(host, found.host_items, found.shape.hardware.host_memory, locked=True))
    return Answer(
        verdict=_verdict(found),
        facts=[*_facts(found), *(_tried(found, remedies) if remedies else [])],
        remedies=_remedies(remedies) if remedies else [],
        notes=_notes(found),
        tables=tables,
        paste=[f"plan='{found.plan}'"] if found.run is not None else [],
        data=as_dict(found, remedies),
        code=0 if found.fits else 1,
    )


def _fullest(found: Outlook) -> dict[str, int]:
    """Return the worker with the least room left, for each kind of device by its heading."""
    workers: dict[str, list[int]] = {}
    for worker, device in enumerate(found.shape.hardware.devices):
        workers.setdefault(f"Each {device.title}", []).append(worker)
    return {title: max(same, key=lambda worker: total(found.items_of(worker))) for title, same in workers.items()}


def _verdict(found: Outlook) -> str:
    """Return the answer in one line."""
    if found.run is not None:
        return f"Fits: {found.tokens_per_s:,.0f} tokens/s, {seconds(found.period_s)} a step (estimated)."
    needs = []
    if found.memory is not None and not found.fits_device:
        needs.append(f"{_share(total(found.device_items), found.memory)} a worker")
    if not found.fits_host:
        needs.append(f"{_share(total(found.host_items), found.shape.hardware.host_memory)} of host")
    return f"Does not fit: {', '.join(needs)}."


def _facts(found: Outlook) -> list[str]:
    """Return sentences that explain the verdict."""
    lines = []
    if found.run is not None:
        lines.append(f"A step has {found.step_tokens:,} tokens, its bubble is {found.bubble_pct:.1f} %.")
        if found.slower_links:
            slower = ", ".join(f"{rate:,.0f} tokens/s over {name}" for name, rate in found.slower_links.items())
            lines.append(
                f"Assumes {found.shape.hardware.upload / 1e9:,.0f} GB/s to each GPU. This plan reaches {slower}."
            )
        if found.plan.side_by_side(found.workers, found.microbatches):
            whole = " Each is a whole microbatch on one worker, as in data parallelism."
            alone = whole if len(found.plan.stages()) == 1 else ""
            lines.append(f"The {found.microbatches} rounds of a step run side by side.{alone}")
        if carry := found.plan.carry:
            sizes = carried_bytes(found.plan, found.costs, found.workers)
            least = found.plan.carry_least
            which = f" with at least {least:,} FLOPs a byte" if least else ""
            lines.append(
                f"Carried: products{which} of {len(carry)} of {plural(found.plan.fused.first, 'call')} outside of the "
                f"fused stage go to the host ({sizes / 2**30:,.0f} GiB) and come back, and are not computed again."
            )
        host = found.shape.hardware.host_memory
        left, system = host - total(found.host_items), system_bytes(host)
        if left < system:
            text = (
                f"Leaves {left / 2**30:,.2f} GiB of the host to the operating system, which takes about "
                f"{system / 2**30:,.1f} where {size_text(host)} are installed."
            )
            if host > system:
                unit, name = _unit(host - system)
                text += f" There, plan with host_memory={(host - system) // unit}{name}."
            lines.append(text)
        if (rate := found.data_parallel_tokens_per_s or 0.0) > _FASTER * found.tokens_per_s:
            way = 'plain training (strategy="auto")' if found.workers == 1 else 'data parallelism (strategy="ddp")'
            lines.append(
                f"A GPU also holds all weights, gradients and optimizer state at once: {way} would be faster, up to "
                f"{rate:,.0f} tokens/s."
            )
    if (sent := found.communication) is not None:
        rate = sent.network.bytes_per_s
        share = 100 * sent.cost_s / found.period_s
        hidden = f"of which {seconds(sent.cost_s)} ({share:.0f} % of a step) are not hidden"
        hidden = "which is hidden behind computing" if sent.is_hidden else hidden
        lines.append(
            f"{sent.network.machines} machines: each sends and receives {sent.nbytes / 1e9:,.2f} GB a step, which "
            f"takes {seconds(sent.busy_s)} at {rate / 1e9:,.2f} GB/s, {hidden}."
        )
    if (stuck := found.shape.refined.stuck) is not None:
        lines.append(f"Layer {stuck.name} is too large and cannot be cut: {stuck.why}.")
    if (longest := found.longest) is not None:
        lines.append(
            f"Longest sequence: {longest.tokens:,} tokens, one a microbatch; limited by {longest.limited_by}."
            if longest.tokens
            else f"No sequence fits, however short: limited by {longest.limited_by}."
        )
    return lines


def _notes(found: Outlook) -> list[str]:
    """Return sentences about the model, the machine, and what the estimate assumes."""
    request, parameters = found.request, found.shape.parameters
    reduced = "" if request.reduce_dtype is None else f", gradients travel in {request.reduce_dtype}"
    reduced += "" if request.optimizer_state == "fp32" else f", moments in {request.optimizer_state}"
    reduced += "" if request.gradient_clip_val is None else ", gradients are clipped"
    each = (
        f"{request.machines} machines, each {found.shape.hardware.title}"
        if request.machines > 1
        else found.shape.hardware.title
    )
    adapters = "" if request.lora == "none" else f", lora={request.lora}"
    lines = [
        f"{request.model}{adapters}: {count(parameters.trained + parameters.frozen)} weights, "
        f"{count(parameters.trained)} of them trained.",
        f"{each}: {plural(found.workers, 'worker')}, {plural(found.microbatches, 'microbatch')} of "
        f"{found.microbatch_size} x {found.sequence_length:,} tokens, {request.precision}, "
        f"staleness {request.staleness}{reduced}.",
    ]
    lines += [f"Assumed {text}" for text in found.assumed]
    if request.precision.endswith("-mixed"):
        lines.append(
            f"Counted as if all were in 16 bits, as {request.precision.replace('mixed', 'true')} has it; "
            f"{request.precision} keeps norms, embeddings and what goes from layer to layer in fp32."
        )
    if request.precision == "fp8":
        lines.append(
            "Counted as precision=bf16-true with compiled linear layers of torchao.float8 (the output layer stays in "
            "bf16): weights travel in bf16."
        )
    if parameters.packed:
        lines += _packed(found)
    elif parameters.frozen and parameters.compute_bytes < 4:
        lines.append("Frozen weights are counted in 16 bits: load them so (model.dtype=bfloat16).")
    if request.max_positions is not None:
        lines.append(
            f"Planned for {request.max_positions:,} positions (max_positions=); the configuration has "
            f"{found.shape.configured:,}. To train beyond them, stretch the model's rotary embedding (model.rope=)."
        )
    if cuts := _cuts(found):
        lines.append(f"Layers that are too large for a worker are cut: {'; '.join(cuts)}.")
    return lines


def _cuts(found: Outlook) -> list[str]:
    """Return the layers that are too large for a worker, and the modules they are cut into."""
    return found.shape.refined.summary() if found.shape.refined.stuck is None else []


def _packed(found: Outlook) -> list[str]:
    """Return sentences about packed weights: their format, and how copies of them are counted."""
    parameters, once, stages = found.shape.parameters, len(found.plan.unpack_once), len(found.plan.stages())
    copied = "Every product reads a copy that is made for it."
    if once:
        where = f"In {once} of {plural(stages, 'stage')}" if once < stages else "In each stage"
        copied = f"{where}, products of all microbatches read one copy (unpack once)."
        copied += " In the others, every product reads a copy that is made for it." if once < stages else ""
    others = " The others are counted in 16 bits: load them so (model.dtype=bfloat16)."
    lines = [
        f"{count(parameters.packed)} of the frozen weights are in {parameters.packed_as} (model.quantization=), "
        f"{8 * parameters.packed_bytes / parameters.packed:.2f} bits each. "
        f"{copied}{others if parameters.compute_bytes < 4 else ''}"
    ]
    if parameters.packed_as == "int8":
        lines.append("GPUs multiply int8 in forward; that is counted as if each product made a copy there as well.")
    if parameters.packed_experts:
        lines.append("Experts are computed together (experts_implementation=grouped_mm), from a copy of them all.")
    return lines


def _remedies(remedies: Remedies) -> list[str]:
    """Return a line for each remedy, its tokens a second before its options."""
    rates = [f"{remedy.outlook.tokens_per_s:,.0f}" for remedy in remedies.found]
    lines = [
        f"  {rate:>{max(map(len, rates))}} tokens/s  {remedy.settings}"
        for rate, remedy in zip(rates, remedies.found, strict=True)
    ]
    return ["What would fit, each planned with these settings added:", *lines] if lines else []


def _tried(found: Outlook, remedies: Remedies) -> list[str]:
    """Return a sentence about what was tried in vain, if nothing fits."""
    if remedies.found:
        return []
    where = "a host with more memory"
    if remedies.device_memory is not None:
        enough = size_text(remedies.device_memory)
        where = f"memory={enough} or more" if found.request.memory else f"devices with {enough} or more"
    tried = f" (tried: {'; '.join(remedies.hopeless)})" if remedies.hopeless else ""
    return [f"Nothing that was tried fits{tried}. Take {where}, or a smaller model."]


def _memory_table(heading: str, items: Sequence[Item], limit: int | None, locked: bool) -> Table:
    """Return a table of memory, with the sum as its last row. ``locked``: with page-locked memory."""
    unit, name = _unit(total(items))

    def row(name: str, rows: Sequence[Item]) -> list[str]:
        pinned = [item for item in rows if item.locked]
        sums = (rows, pinned) if locked else (rows,)
        return [name, *(f"{total(part) / unit:,.2f}" if part else "" for part in sums)]

    of = "without a limit" if limit is None else f"of {limit / unit:,.2f}, {100 * total(items) / limit:.0f} %"
    rows = [*(row(item.name, [item]) for item in items), row(f"together, {of}", items)]
    made = table([heading], [name, *(["page-locked"] if locked else [])], rows)
    made.rows[-2].end_section = True
    return made


def _share(need: int, limit: int) -> str:
    unit, name = _unit(limit)
    return f"{need / unit:,.2f} of {limit / unit:,.2f} {name}"


def _unit(nbytes: int) -> tuple[int, str]:
    """Return the unit that a size is written in."""
    return (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB")


def as_dict(found: Outlook, remedies: Remedies | None = None) -> dict[str, Any]:
    """Return what ``format=json`` prints. Keys end in their units; times and rates are None if it does not fit."""
    request, parameters, run, sent = found.request, found.shape.parameters, found.run, found.communication
    return {
        "model": request.model,
        "hardware": found.shape.hardware.title,
        "assumed": list(found.assumed),
        **{name: getattr(request, name) for name in _SETTINGS},
        "token_tiles": dict(request.token_tiles) if isinstance(request.token_tiles, tuple) else request.token_tiles,
        "machines": request.machines,
        "communication": None
        if sent is None
        else {
            "bytes_per_s": sent.network.bytes_per_s,
            "sent_bytes": round(sent.nbytes),
            "busy_ms": 1e3 * sent.busy_s,
            "cost_ms": 1e3 * sent.cost_s,
            "is_hidden": sent.is_hidden,
        },
        "fits": found.fits,
        "tokens_per_s": found.tokens_per_s if run else None,
        "period_ms": 1e3 * found.period_s if run else None,
        "makespan_ms": 1e3 * run.ends_s[0] if run else None,
        "bubble_pct": found.bubble_pct if run else None,
        "data_parallel_tokens_per_s": found.data_parallel_tokens_per_s,
        **{name: getattr(found, name) for name in _SIZES},
        "parameters": parameters.trained + parameters.frozen,
        "trained_parameters": parameters.trained,
        "packed_parameters": parameters.packed,
        "packed_as": parameters.packed_as or None,
        "cut": _cuts(found),
        **found.plan.to_dict(),
        "side_by_side": found.plan.side_by_side(found.workers, found.microbatches),
        "stages": stage_rows(found.plan, found.costs, found.workers),
        "device_memory": _memory(found.device_items, found.memory),
        "host_memory": _memory(found.host_items, found.shape.hardware.host_memory),
        "longest_sequence": found.longest and found.longest.tokens,
        "limited_by": found.longest and found.longest.limited_by,
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


def _memory(items: list[Item], limit: int | None) -> dict[str, Any]:
    rows = [{"name": item.name, "bytes": item.nbytes, "page_locked": item.locked} for item in items]
    return {"limit_bytes": limit, "needed_bytes": total(items), "items": rows}
