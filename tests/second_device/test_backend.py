"""The device type itself: what CUDA allows and refuses, by the word of torch's own fake CUDA tensors; and who waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from second_device import backend


def _set(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value
    return target


def test_devices_do_not_mix() -> None:
    one, other = torch.ones(2, device="played:0"), torch.ones(2, device="played:1")
    with pytest.raises(RuntimeError, match=r"on the same device, .* played:[01] and played:[01]"):
        one + other
    assert (one + other.to("played:0")).tolist() == [2.0, 2.0]


def test_backward_runs_on_a_thread_of_each_device() -> None:
    seen: dict[str, int] = {}
    for index in (0, 1):
        x = torch.ones(2, device=f"played:{index}", requires_grad=True)
        x.register_hook(lambda grad: seen.update({str(grad.device): threading.get_ident()}))
        (x * 2).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    assert set(seen) == {"played:0", "played:1"}
    assert len({*seen.values(), threading.get_ident()}) == 3


def _pinned(n: int) -> Tensor:
    return torch.ones(n, pin_memory=True)


WAITS: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "item": (True, lambda d: d.sum().item()),
    "bool": (True, lambda d: bool(d.sum() > 0)),
    "tolist": (True, lambda d: d.tolist()),
    "cpu": (True, lambda d: d.cpu()),
    "to the host": (True, lambda d: d.to("cpu")),
    "to the host, without blocking": (False, lambda d: d.to("cpu", non_blocking=True)),
    "copy_ to the host": (True, lambda d: torch.empty(4).copy_(d)),
    "copy_ to pageable memory, without blocking": (True, lambda d: torch.empty(4).copy_(d, non_blocking=True)),
    "copy_ to pinned memory": (True, lambda d: _pinned(4).copy_(d)),
    "copy_ to pinned memory, without blocking": (False, lambda d: _pinned(4).copy_(d, non_blocking=True)),
    "from the host": (True, lambda d: torch.ones(4).to(d.device)),
    "from pageable memory, without blocking": (True, lambda d: torch.ones(4).to(d.device, non_blocking=True)),
    "from pinned memory": (True, lambda d: _pinned(4).to(d.device)),
    "from pinned memory, without blocking": (False, lambda d: _pinned(4).to(d.device, non_blocking=True)),
    "equal": (True, lambda d: torch.equal(d, d)),
    "nonzero": (True, lambda d: d.nonzero()),
    "by a mask": (True, lambda d: d[d > 0]),
    "by a mask, set to a number": (False, lambda d: _set(d, d > 0, 0.0)),
    "by indices": (False, lambda d: d[torch.zeros_like(d, dtype=torch.long)]),
    "by indices on the host": (True, lambda d: d[torch.tensor([0])]),
    "unique": (True, lambda d: d.unique()),
    "a number from the host": (False, lambda d: d + 1.0),
    "a tensor without dimensions from the host": (False, lambda d: d + torch.tensor(1.0)),
    "made there": (True, lambda d: torch.tensor([1.0], device=d.device)),
    "computed": (False, lambda d: (d * 2).softmax(-1).sum()),
    "where": (False, lambda d: torch.where(d > 0, d, 0.0)),
    "to another device": (False, lambda d: d.to("played:1")),
}


@pytest.mark.parametrize("what", WAITS)
def test_who_waits_is_noted(what: str) -> None:
    expected, action = WAITS[what]
    d = torch.ones(4, device="played")
    with backend.waits() as found:
        action(d)
    assert bool(found) == expected, found
    assert all("test_backend.py" in str(wait) for wait in found)
