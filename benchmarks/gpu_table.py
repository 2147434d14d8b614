"""The tables of `bench_gpu.py`, in Markdown: what was measured, and what of it reaches the goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_rows import Record, Records

from lightning_roundpipe.devices.errors import sizeof

NOT_YET = "not yet measured"
NONE = "–"

GOALS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("tokens/s over roundpipe's (goal ≥ 1.1)", ("roundpipe", "roundpipe_sync"), "tokens_per_s", "≥ 1.1"),
    ("over FSDP's and DeepSpeed's (≥ 2)", ("fsdp", "deepspeed"), "tokens_per_s", "≥ 2"),
    ("over plain's (≥ 0.95)", ("plain", "plain_checkpointed"), "tokens_per_s", "≥ 0.95"),
    ("host memory over roundpipe's (≤ 0.75)", ("roundpipe", "roundpipe_sync"), "host", "≤ 0.75"),
)
"""A heading, the rows of which the best is what ours is held against, of what, and the goal."""

OURS = ("ours", "ours_stale", "ours_compiled")


def host(record: Record) -> int:
    """Bytes: the larger of the two ways to count."""
    return max(record["host_bytes"], record["host_fell_bytes"])


def longest(records: dict[int, Record]) -> str:
    """The longest sequence that ran; with ≥ where nobody knows whether a longer one would."""
    ran = [length for length, record in records.items() if "reason" not in record]
    if not ran:
        return NONE
    known = any(record.get("out_of_memory") for length, record in records.items() if length > max(ran))
    return f"{'' if known else '≥ '}{max(ran):,}"


def table(records: Records, model: str, cap: int | None, rows: Iterable[tuple[str, str]], first: int) -> list[str]:
    """The lines of one model's table under one cap.

    Args:
        rows: names and titles.
        first: the shortest sequence, of which memory is shown.
    """
    rows = list(rows)
    found = {name: records.of(model, cap, name) for name, _ in rows}
    lengths = sorted({first, *(length for row in found.values() for length, r in row.items() if "reason" not in r)})
    head = ["", *(f"tokens/s at {length:,}" for length in lengths)]
    head += [f"device memory at {first:,}", "host memory", "longest sequence", ""]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 2), "---"])]
    for name, title in rows:
        row = found[name]
        speeds = [f"{row[n]['tokens_per_s']:,.0f}" if n in row and "reason" not in row[n] else NONE for n in lengths]
        at_first = row.get(first)
        if at_first is None:
            lines.append(_line([title, *speeds, NONE, NONE, longest(row), NOT_YET]))
            continue
        if "reason" in at_first:
            lines.append(_line([title, *speeds, NONE, NONE, longest(row), at_first["reason"]]))
            continue
        device = sizeof(at_first["device_bytes"]) if "device_bytes" in at_first else NONE
        job = at_first["job"]
        cut = f"{job['microbatches']} x {job['microbatch_size']} sequences"
        lines.append(_line([title, *speeds, device, sizeof(host(at_first)), longest(row), cut]))
    return lines


def goals(records: Records, model: str, cap: int | None, rows: Iterable[tuple[str, str]], first: int) -> list[str]:
    """The lines that hold ours against the best of the others, at the shortest sequence."""
    lines = [_line(["", *(heading for heading, *_ in GOALS)]), _line(["---", *["---:"] * len(GOALS)])]
    for name, title in rows:
        if name not in OURS:
            continue
        mine = _value(records.of(model, cap, name).get(first))
        cells = []
        for _, others, of, goal in GOALS:
            theirs = [value for other in others if (value := _value(records.of(model, cap, other).get(first)))]
            cells.append(_ratio(mine, theirs, of, goal))
        lines.append(_line([title, *cells]))
    return lines


def _value(record: Record | None) -> dict[str, float] | None:
    if record is None or "reason" in record:
        return None
    return {"tokens_per_s": record["tokens_per_s"], "host": host(record)}


def _ratio(mine: dict[str, float] | None, theirs: Sequence[dict[str, float]], of: str, goal: str) -> str:
    if mine is None or not theirs:
        return NONE
    best = max if of == "tokens_per_s" else min
    ratio = mine[of] / best(other[of] for other in theirs)
    sign, number = goal.split()
    reached = ratio >= float(number) if sign == "≥" else ratio <= float(number)
    return f"{ratio:.2f}" + ("" if reached else " (missed)")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def under(cap: int | None) -> str:
    """A cap, in words."""
    return "all of the device's memory" if cap is None else f"{sizeof(cap)} of device memory"
