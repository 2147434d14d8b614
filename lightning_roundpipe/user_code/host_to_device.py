"""Copies of user code's host tensors (labels, masks) to a device, without blocking the host.

torch's own copy from pageable memory blocks until the device has reached it, and with it the thread that has enqueued
a layer. A copy from page-locked memory does not:

    labels.to(device), or labels that meet logits ── copied into page-locked memory ── enqueued ── [1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.base import stage


class HostToDeviceCopier:
    """Copies one microbatch's host tensors to ``devices`` of a type (``accelerator``; None if these are the host)."""

    def __init__(self, accelerator: str | None, devices: Sequence[Device]) -> None:
        self._accelerator = accelerator
        self._devices = devices

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the result of ``to``, ``cuda``, ``tensor``, ``as_tensor`` or ``new_tensor`` on a device, else None."""
        if name in ("to", "cuda"):
            if args[0].device.type != "cpu" or (asked := _parse_move(name, args[1:], kwargs)) is None:
                return None
            device, dtype = asked
            where = self._home_of(device)
            return None if where is None else self.bring(args[0], where, dtype)
        if name in ("tensor", "as_tensor", "new_tensor") and not kwargs.get("requires_grad"):
            kwargs = dict(kwargs)
            device = kwargs.pop("device", args[0].device if name == "new_tensor" else None)
            where = None if device is None else self._home_of(device)
            data = args[1 if name == "new_tensor" else 0 :]
            if where is None or len(data) != 1 or (isinstance(data[0], Tensor) and data[0].device.type != "cpu"):
                return None
            if name == "new_tensor":
                kwargs.setdefault("dtype", args[0].dtype)
            make: Any = torch.as_tensor if name == "as_tensor" else torch.tensor
            return self.bring(make(data[0], **kwargs), where)
        return None

    def _home_of(self, device: Any) -> torch.device | None:
        """Return the worker's device that ``device`` means; None if it means another one."""
        asked = torch.device(device)
        homes = {str(device.torch_device): device.torch_device for device in self._devices}
        if len(homes) > 1 and ":" not in str(asked):
            asked = torch.device(asked.type, torch.accelerator.current_device_index())
        alone = next(iter(homes.values())) if len(homes) == 1 else None
        found = alone if alone is not None and str(asked) == alone.type else homes.get(str(asked))
        return found if found is not None and found.type == self._accelerator else None

    def bring(self, tensor: Tensor, where: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return a differentiable copy on ``where`` in ``dtype``. Host tensors without grad do not block the host [1].

        The cast happens on the host, as in torch's own copies. Between GPUs torch copies, ordered by both compute
        streams (`Device.activate`).
        """
        device = next((d for d in self._devices if d.torch_device == where), None)
        if device is None or not _is_plain(tensor) or tensor.requires_grad:
            moved = tensor.to(where)  # differentiable, and may block the host
            return moved if dtype is None else moved.to(dtype)
        if dtype is not None:
            tensor = tensor.to(dtype)
        staged = stage(tensor, device)
        moved = staged.to(where, non_blocking=True)
        device.free_after_compute([staged])
        return moved


def _parse_move(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | str, torch.dtype | None] | None:
    """Return the device and dtype asked of ``Tensor.to`` or ``cuda``; None without device or with memory format."""
    if name == "cuda":
        device = args[0] if args else kwargs.get("device")
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return None if len(args) > 1 or kwargs.get("memory_format") else (device, None)
    parse: Any = torch._C._nn._parse_to
    try:
        device, dtype, _, memory_format = parse(*args[:3], **{k: v for k, v in kwargs.items() if k != "copy"})
    except (RuntimeError, TypeError):  # invalid arguments: torch itself will report them
        return None
    return None if device is None or memory_format is not None else (device, dtype)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is strided host memory and nothing else, so that copying its elements copies it."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
