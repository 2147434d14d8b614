"""Advice on the CUDA allocator's settings, for when enough memory is free but fragmented.

torch caches freed memory, per stream, in blocks of the sizes that were requested. When no block fits and the GPU has no
memory left, the allocator synchronizes with the GPU, returns its whole cache and tries again. Expandable segments do
not fragment like that.
"""

from __future__ import annotations

import os
import sys

import torch

_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that hold the allocator's settings. torch reads the first that is set."""
_SETTING = "expandable_segments"


def advice() -> str:
    """Return what to set, as an imperative clause that ends an error message."""
    name = next((name for name in _NAMES if os.environ.get(name)), _NAMES[-1])
    said = os.environ.get(name, "")
    known = getattr(torch._C, "_accelerator_getAllocatorSettings", str)() or said  # torch 2.11 returns nothing
    chosen = known.lower().replace(" ", "")
    if f"{_SETTING}:true" in chosen or "cudamallocasync" in chosen or sys.platform != "linux":
        return "use smaller microbatches (batches, or parts by num_microbatches), or a smaller memory_budget"
    others = [part for part in said.split(",") if part and not part.strip().startswith(_SETTING)]
    return f"set the environment variable {name}={','.join([*others, f'{_SETTING}:True'])} before the script starts"
