"""What CUDA allows and refuses between devices, by the word of torch's own fake CUDA tensors.

Those only work in a process that has no other accelerator, so a test asks another process: ``python rules.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rule = Callable[[Tensor, Tensor], Any]


def _set(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value
    return target


RULES: dict[str, Rule] = {
    "host + device": lambda h, d: h + d,
    "device + host": lambda h, d: d + h,
    "host without dimensions + device": lambda h, d: h.sum() + d,
    "device + host without dimensions": lambda h, d: d + h.sum(),
    "device without dimensions + host": lambda h, d: d.sum() + h,
    "both without dimensions": lambda h, d: h.sum() + d.sum(),
    "device += host": lambda h, d: d.add_(h),
    "device += host without dimensions": lambda h, d: d.add_(h.sum()),
    "host += device": lambda h, d: h.add_(d),
    "host += device without dimensions": lambda h, d: h.add_(d.sum()),
    "host without dimensions += device": lambda h, d: h.sum().add_(d.sum()),
    "a product": lambda h, d: h @ d.T,
    "addmm with a bias on the host": lambda h, d: torch.addmm(h[0, :2], d, d.T),
    "where on the host": lambda h, d: torch.where(h > 0, d, d),
    "where with a number of the host": lambda h, d: torch.where(d > 0, d, torch.tensor(0.0)),
    "cat": lambda h, d: torch.cat([d, h]),
    "stack without dimensions": lambda h, d: torch.stack([d.sum(), h.sum()]),
    "masked_fill by a host mask": lambda h, d: d.masked_fill(h > 0, 0.0),
    "masked_fill by a host's number": lambda h, d: d.masked_fill(d > 0, torch.tensor(1.0)),
    "host.masked_fill by a device mask": lambda h, d: h.masked_fill(d > 0, 0.0),
    "device[host indices]": lambda h, d: d[torch.tensor([0, 1])],
    "device[device indices]": lambda h, d: d[torch.tensor([0, 1], device=d.device)],
    "host[device indices]": lambda h, d: h[torch.tensor([0, 1], device=d.device)],
    "device[host indices] = number": lambda h, d: _set(d, torch.tensor([0]), 1.0),
    "device[host indices] = host": lambda h, d: _set(d, torch.tensor([0]), h[:1]),
    "host[0] = device": lambda h, d: _set(h, 0, d[0]),
    "device[0] = host": lambda h, d: _set(d, 0, h[0]),
    "host[device indices] = device": lambda h, d: _set(h, torch.tensor([0], device=d.device), d[:1]),
    "copy_ to the host": lambda h, d: h.copy_(d),
    "copy_ to the device": lambda h, d: d.copy_(h),
    "gather by host indices": lambda h, d: d.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    "index_select by host indices": lambda h, d: d.index_select(0, torch.tensor([0])),
    "scatter_ of host values": lambda h, d: d.scatter_(0, torch.zeros(1, 3, dtype=torch.long, device=d.device), h),
    "embedding of host indices": lambda h, d: F.embedding(torch.tensor([0]), d),
    "cross_entropy with host targets": lambda h, d: F.cross_entropy(d, torch.tensor([0, 1])),
    "mse_loss with host targets": lambda h, d: F.mse_loss(d, h),
    "layer_norm with a host weight": lambda h, d: F.layer_norm(d, (3,), h[0]),
    "zeros_like": lambda h, d: torch.zeros_like(d),
    "zeros_like on the host": lambda h, d: torch.zeros_like(d, device="cpu"),
    "new_zeros": lambda h, d: d.new_zeros(2),
    "new_tensor": lambda h, d: d.new_tensor([1.0]),
    "to like the host": lambda h, d: d.to(h),
    "type_as the device": lambda h, d: h.type_as(d),
    "lerp to the host": lambda h, d: d.lerp(h, 0.5),
    "equal": lambda h, d: d.eq(h),
    "max of both": lambda h, d: torch.maximum(d, h),
    "clamp by a host's number": lambda h, d: d.clamp(min=torch.tensor(0.0)),
    "softmax, sort, topk, cumsum": lambda h, d: d.softmax(-1).sort().values.topk(2).values.cumsum(0),
    "einsum": lambda h, d: torch.einsum("ij,kj->ik", d, h),
}


BY_HAND = {
    "stack without dimensions": "refused",
    "host[device indices]": "refused",
    "clamp by a host's number": "refused",
    "device[host indices]": "device (2, 3) torch.float32",
    "device[device indices]": "device (2, 3) torch.float32",
    "device[host indices] = number": "device (2, 3) torch.float32",
    "device[host indices] = host": "refused",
    "device[0] = host": "device (2, 3) torch.float32",
    "host[0] = device": "cpu (2, 3) torch.float32",
    "host[device indices] = device": "refused",
    "copy_ to the device": "device (2, 3) torch.float32",
    "new_tensor": "device (1,) torch.float32",
}
"""Where fake tensors say something else than CUDA, or that torch was built without it."""


def outcomes(name: str) -> dict[str, str]:
    """Of each rule on the device type ``name``."""
    return {rule: _outcome(function, name) for rule, function in RULES.items()}


def _outcome(rule: Rule, name: str) -> str:
    try:
        result = rule(torch.ones(2, 3), torch.ones(2, 3, device=name))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"refused: {error}"
    return f"{result.device.type} {tuple(result.shape)} {result.dtype}".replace(name, "device")


if __name__ == "__main__":
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        print(json.dumps(outcomes("cuda")))
