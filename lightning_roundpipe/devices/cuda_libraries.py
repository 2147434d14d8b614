"""GPU memory that CUDA's libraries keep for themselves.

torch gives cuBLAS a workspace per thread and stream that multiplies matrices. Its allocator counts the workspaces, but
torch does not free them by itself. Layers multiply on the thread of each microbatch and on autograd's thread for the
GPU.
"""

from __future__ import annotations

import os
import re

import torch

_THREADS = 2
"""One microbatch's thread and autograd's. Workers on one GPU share the latter, so it is counted too often there."""
_KIB = 1024
_USUAL, _SINCE_HOPPER = (2 * 4096 + 8 * 16) * _KIB, 8 * 4096 * _KIB
"""torch's default sizes, used when ``CUBLAS_WORKSPACE_CONFIG`` is not set."""


def library_bytes(torch_device: torch.device, others: int) -> int:
    """Return the bytes of one worker's workspaces, plus those of ``others``, the other microbatches' threads.

    cuBLAS has one for each thread and stream, which cuBLASLt uses, too.
    """
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))  # such as :4096:2:16:8
    usual = _SINCE_HOPPER if torch.cuda.get_device_properties(torch_device).major >= 9 else _USUAL
    each = sum(int(size) * int(count) * _KIB for size, count in said) if said else usual
    return (_THREADS + others) * each


def multiply(torch_device: torch.device) -> None:
    """Run a forward and a backward product, so that both threads' workspaces are allocated."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(16, 16, device=torch_device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())


def clear() -> None:
    """Free the workspaces of all threads on all GPUs. No thread may be multiplying: it would lose its own."""
    torch._C._cuda_clearCublasWorkspaces()
