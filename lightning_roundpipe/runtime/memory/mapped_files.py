"""Which weights may stay in the files that they were read from.

Hugging Face's ``from_pretrained`` and ``safetensors`` do not read weights: they map the file into memory, and the
system reads a page when somebody looks at it and takes it back when memory gets scarce. A frozen weight that nobody
writes to needs no other place, so a base model under adapters may be larger than the host's memory. To copy it costs
that memory, and gains speed only where the copy can be pinned: the device says whether that is worth it. What uploads
do not read, as there is a working copy in another format, stays in any case.

Where files are mapped is asked of the system, and so not known but on Linux; elsewhere all weights are copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.memory.dtypes import Formats

_NO_FILES = ("/dev/", "/memfd:", "/SYSV")
"""Names of memory that is shared between processes."""


def mapped_weights(parameters: Iterable[nn.Parameter], device: Device, formats: Formats) -> frozenset[int]:
    """The ids of those of ``parameters`` that are frozen and are to stay in the files that they lie in."""
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
    """Addresses of memory that files back: first and behind the last, in order; what is adjacent is one."""
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
