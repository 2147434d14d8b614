"""What CUDA's libraries keep of a GPU's memory for themselves.

torch gives cuBLAS a workspace for each thread that multiplies in each stream, out of the memory that it counts, and
never takes it back. Layers run in one stream, on the worker's thread and, backward, on the thread that autograd has for
the GPU. Code between layers that multiplies matrices has one more for each microbatch's thread, which is not foreseen.
"""

from __future__ import annotations

import os
import re

import torch

_THREADS = 2
"""The worker's, and autograd's. Workers on one GPU share that, so a little is counted too often there."""
_KIB = 1024
_USUAL, _HOPPER = (2 * 4096 + 8 * 16) * _KIB, 8 * 4096 * _KIB
"""What torch chooses where ``CUBLAS_WORKSPACE_CONFIG`` does not say."""


def library_bytes(torch_device: torch.device) -> int:
    """Of one worker on the GPU, once it has multiplied forward and backward."""
    return _THREADS * workspace_bytes(torch_device)


def workspace_bytes(torch_device: torch.device) -> int:
    """cuBLAS's workspace of one thread in one stream; cuBLASLt uses the same (torch 2.7)."""
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))  # such as :4096:2:16:8
    if said:
        return sum(int(size) * int(count) * _KIB for size, count in said)
    major: int = torch.cuda.get_device_properties(torch_device).major
    return _HOPPER if major in (9, 10) else _USUAL


def multiply(torch_device: torch.device) -> None:
    """Forward and backward, so that the workspaces are there."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(16, 16, device=torch_device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())
