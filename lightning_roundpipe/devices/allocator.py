"""Which setting of torch's GPU allocator helps where memory is there but in pieces.

torch keeps what is freed in pieces of the sizes that were asked for, for each stream apart. When no piece fits and the
GPU has no more, it waits for the GPU, gives back all that it keeps, and tries again. Expandable segments have no such
pieces.
"""

from __future__ import annotations

import os
import sys

import torch

_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables, of which torch reads the first that is set."""
_SETTING = "expandable_segments"


def advice() -> str:
    """What to set, as the end of a sentence that begins with a verb in the imperative."""
    name = next((name for name in _NAMES if os.environ.get(name)), _NAMES[-1])
    said = os.environ.get(name, "")
    known = getattr(torch._C, "_accelerator_getAllocatorSettings", str)() or said  # torch 2.11 does not tell
    chosen = known.lower().replace(" ", "")
    if f"{_SETTING}:true" in chosen or "cudamallocasync" in chosen or sys.platform != "linux":
        return "set a smaller microbatch_size (or more num_microbatches), or a smaller memory_budget"
    others = [part for part in said.split(",") if part and not part.strip().startswith(_SETTING)]
    return f"set the environment variable {name}={','.join([*others, f'{_SETTING}:True'])} before the script starts"
