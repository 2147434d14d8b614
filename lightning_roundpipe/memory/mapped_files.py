"""Which weights may stay in the files that they were loaded from.

Hugging Face's ``from_pretrained`` and ``safetensors`` map the file into memory instead of reading it: the system reads
a page on access and drops it when memory gets scarce. A frozen weight is never written to and needs no other place, so
the base model under adapters may be larger than host memory. Copying it costs that memory and only speeds up uploads if
the copy can be page-locked; the device decides whether that is worth it. A weight with a working copy in another dtype
always stays, because uploads do not read it.

The mapped address ranges come from ``/proc/self/maps``. Without it (not Linux) all weights are copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from lightning_roundpipe.devices import Device
from lightning_roundpipe.memory.dtypes import Formats

_NO_FILES = ("/dev/", "/memfd:", "/SYSV")
"""Prefixes of paths that are shared memory, not files."""


def mapped_weights(parameters: Iterable[nn.Parameter], device: Device, formats: Formats) -> frozenset[int]:
    """Return the ids of those of ``parameters`` that are frozen and stay in their files."""
    frozen = [p for p in parameters if not p.requires_grad and p.device.type == "cpu" and p.is_contiguous()]
    spans = _file_spans() if frozen else []
    starts = [start for start, _ in spans]
    inside = []
    for parameter in frozen:
        first = parameter.data_ptr()
        at = bisect_right(starts, first) - 1
        if parameter.nbytes and at >= 0 and first + parameter.nbytes <= spans[at][1]:
            inside.append(parameter)
    read = [p for p in inside if not formats.differ(p)]
    if read and device.worth_copying(sum(p.nbytes for p in read)):
        inside = [p for p in inside if formats.differ(p)]
    return frozenset(id(p) for p in inside)


def _file_spans() -> list[tuple[int, int]]:
    """Return the sorted address ranges of memory that is backed by files; adjacent ranges are merged."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    spans: list[tuple[int, int]] = []
    for line in lines:
        addresses, *_, name = line.split(maxsplit=5)
        if not name.startswith("/") or name.startswith(_NO_FILES):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans
