"""What CUDA's libraries keep of a GPU's memory for themselves.

torch gives cuBLAS a workspace for each thread that multiplies in each stream, out of the memory that it counts, and
never takes it back by itself. Layers run in one stream, on the worker's thread and, backward, on the thread that
autograd has for the GPU. Code between layers that multiplies matrices, as rotary embeddings do, has one more for each
microbatch's thread. The first batch, which runs its microbatches on one thread, shows whether it does.
"""

from __future__ import annotations

import os
import re

import torch

_THREADS = 2
"""The worker's, and autograd's. Workers on one GPU share that, so a little is counted too often there."""
_KIB = 1024
_USUAL, _SINCE_HOPPER = (2 * 4096 + 8 * 16) * _KIB, 8 * 4096 * _KIB
"""What torch chooses where ``CUBLAS_WORKSPACE_CONFIG`` does not say."""


def library_bytes(torch_device: torch.device, others: int) -> int:
    """Of one worker on the GPU, once it has multiplied forward and backward, and so have ``others``, threads."""
    return (_THREADS + others) * workspace_bytes(torch_device)


def workspace_bytes(torch_device: torch.device) -> int:
    """cuBLAS's workspace of one thread in one stream; cuBLASLt uses the same (torch 2.7)."""
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))  # such as :4096:2:16:8
    if said:
        return sum(int(size) * int(count) * _KIB for size, count in said)
    major: int = torch.cuda.get_device_properties(torch_device).major
    return _SINCE_HOPPER if major >= 9 else _USUAL  # of major 12, only newer versions of torch take so much


def multiply(torch_device: torch.device) -> None:
    """Forward and backward, so that the workspaces are there."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(16, 16, device=torch_device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())


def clear() -> None:
    """Take the workspaces back, of all threads on all GPUs. No thread may be multiplying: it would lose its own."""
    torch._C._cuda_clearCublasWorkspaces()
