"""The device type itself: what CUDA allows and refuses, by the word of torch's own fake CUDA tensors; and who waits."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from second_device import backend, rules


def _set(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value
    return target


@functools.cache
def _of_cuda() -> dict[str, str]:
    asked = subprocess.run([sys.executable, rules.__file__], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(asked.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", rules.RULES)
def test_refuses_what_cuda_refuses(name: str) -> None:
    expected, result = rules.BY_HAND.get(name, _of_cuda()[name]), rules.outcomes(backend.NAME)[name]
    if expected.startswith("refused"):
        assert result.startswith("refused"), (expected, result)
        assert "device" in result
    else:
        assert result == expected


def test_devices_do_not_mix() -> None:
    one, other = torch.ones(2, device="played:0"), torch.ones(2, device="played:1")
    with pytest.raises(RuntimeError, match=r"on the same device, .* played:[01] and played:[01]"):
        one + other
    assert (one + other.to("played:0")).tolist() == [2.0, 2.0]


def test_views_share_their_storage_and_version() -> None:
    base = torch.zeros(2, 3, device="played")
    view = base[1]
    assert type(view) is Tensor and view._base is base
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert view.data_ptr() == base.data_ptr() + 3 * 4
    view += 1
    assert base._version == view._version == 1
    assert base.tolist() == [[0.0] * 3, [1.0] * 3]
    assert base.view(torch.uint8).shape == (2, 12) and base.untyped_storage().device == torch.device("played", 0)
    assert copy.deepcopy(base).tolist() == base.tolist()
    with pytest.raises(TypeError, match="can't convert played:0 device type tensor to numpy"):
        base.numpy()


def test_backward_runs_on_a_thread_of_each_device() -> None:
    seen: dict[str, int] = {}
    for index in (0, 1):
        x = torch.ones(2, device=f"played:{index}", requires_grad=True)
        x.register_hook(lambda grad: seen.update({str(grad.device): threading.get_ident()}))
        (x * 2).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    assert set(seen) == {"played:0", "played:1"}
    assert len({*seen.values(), threading.get_ident()}) == 3


def test_threads_have_a_current_device_each() -> None:
    found = []
    with torch.played.device("played:2"):  # type: ignore[attr-defined]
        assert torch.ones(1, device="played").device.index == 2
        other = threading.Thread(target=lambda: found.append(torch.ones(1, device="played").device.index))
        other.start()
        other.join()
    assert found == [0]
    assert torch.accelerator.current_device_index() == 0


def test_devices_draw_from_their_own_generators() -> None:
    torch.manual_seed(1)
    host, first = torch.get_rng_state(), torch.randn(3, device="played").tolist()
    assert torch.equal(torch.get_rng_state(), host)
    mask = F.dropout(torch.ones(64, device="played"), 0.5)
    torch.manual_seed(1)
    assert torch.randn(3, device="played").tolist() == first
    assert torch.randn(3, device="played:1").tolist() == first  # seeded alike
    assert torch.equal(F.dropout(torch.ones(64, device="played"), 0.5), mask)
    assert 0 < int((mask == 0).sum()) < 64


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


class Seen(TorchDispatchMode):
    """Lets everything through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_within_a_mode() -> None:
    with Seen(), Seen():
        d = torch.tensor([1.0, 2.0], device="played")
        assert (d[[1]] + d).tolist() == [3.0, 4.0]


MODULES: dict[str, Callable[[], tuple[torch.nn.Module, Tensor]]] = {
    "LSTM": lambda: (torch.nn.LSTM(3, 4), torch.randn(2, 5, 3)),
    "GRU": lambda: (torch.nn.GRU(3, 4), torch.randn(2, 5, 3)),
    "Conv2d": lambda: (torch.nn.Conv2d(4, 6, 3, groups=2, stride=2), torch.randn(2, 4, 7, 7)),
    "ConvTranspose1d": lambda: (torch.nn.ConvTranspose1d(4, 6, 3, groups=2), torch.randn(2, 4, 7)),
    "BatchNorm1d": lambda: (torch.nn.BatchNorm1d(3), torch.randn(5, 3)),
    "attention": lambda: (torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_computes_as_the_cpu(name: str) -> None:
    results = []
    for where in ("cpu", "played:1"):
        torch.manual_seed(3)
        module, x = MODULES[name]()
        module, x = module.to(where), x.to(where).requires_grad_()
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        results.append([t.grad.cpu() for t in (x, *module.parameters()) if t.grad is not None])
    torch.testing.assert_close(results[0], results[1])
