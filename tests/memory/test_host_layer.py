"""Masters in flat host buffers, and gradients that come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from host_gradients import host_gradients
from torch import nn

from lightning_roundpipe.config import Emulation, RoundPipeError
from lightning_roundpipe.devices import Device, make_devices
from lightning_roundpipe.memory.grad_buffers import DeviceGradSums, Reduction
from lightning_roundpipe.memory.host_layer import HostLayer, make_buckets
from lightning_roundpipe.threads.task_thread import TaskThread


def no_thread(worker: int) -> TaskThread:
    raise AssertionError("sums travel in their own dtype, one after another")


OWN = Reduction(None, no_thread)


@pytest.fixture
def device() -> Iterator[Device]:
    [made] = make_devices("cpu", [torch.device("cpu")], Emulation())
    yield made
    made.close()


def test_masters_stay_who_they_are(device: Device) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    before = {n: (id(p), p.detach().clone(), p.stride()) for n, p in module.named_parameters()}
    layer = HostLayer(0, "layer", module, device, {})
    for name, parameter in module.named_parameters():
        assert (id(parameter), parameter.stride()) == (before[name][0], before[name][2])
        assert torch.equal(parameter, before[name][1])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "saving it would save its layer"
    segment = torch.zeros(layer.nbytes, dtype=torch.uint8)
    layer.upload(device.weights_up, segment)
    device.weights_up.synchronize()
    for view, parameter in zip(layer.views(segment), layer.masters, strict=True):
        assert torch.equal(view, parameter) and view.stride() == parameter.stride()


def test_a_master_comes_home_unless_user_code_holds_its_memory(device: Device) -> None:
    """None did, as autograd's base of its view was taken for a holder: the layer was in memory twice from then on."""
    module = nn.Linear(3, 3)
    layer = HostLayer(0, "layer", module, device, {})
    [flat] = layer.flats
    home = module.weight.data_ptr()
    for number in (7.0, 8.0):
        module.weight.data = torch.full((3, 3), number)
        layer.reattach()
        assert module.weight.data_ptr() == home and flat.source is flat.buffer
        assert module.weight.eq(number).all()
    kept = module.weight.data
    module.weight.data = theirs = torch.full((3, 3), 9.0)
    layer.reattach()
    assert module.weight.data_ptr() == theirs.data_ptr() and kept.eq(8.0).all()
    module.weight.data = kept
    layer.reattach()
    assert module.weight.data_ptr() == home and flat.source is flat.buffer
    array = np.full((3, 3), 6.0, dtype=np.float32)
    for others in (torch.from_numpy(array), torch.ones(3, 3).share_memory_()):
        module.weight.data = others
        place = others.data_ptr()
        del others
        layer.reattach()
        assert module.weight.data_ptr() == place


@pytest.mark.parametrize("rounded", [{}, {0: torch.bfloat16}])
def test_what_user_code_puts_in_place_of_a_master_is_what_travels(
    device: Device, rounded: dict[int, torch.dtype]
) -> None:
    module = nn.Linear(3, 3)
    layer = HostLayer(0, "layer", module, device, {})
    make_buckets([layer], module.parameters())
    layer.round(rounded)
    module.weight.data = torch.full((3, 3), 7.0)
    layer.reattach()
    segment = torch.zeros(layer.nbytes, dtype=torch.uint8)
    layer.upload(device.weights_up, segment)
    device.weights_up.synchronize()
    assert layer.views(segment)[0].unique().tolist() == [7.0]
    assert layer.rounded == rounded.keys()
    module.weight.data = torch.zeros(4, 4)
    with pytest.raises(RoundPipeError, match="changed from"):
        layer.reattach()


def test_a_tied_weight_has_one_master_and_travels_with_each_holder(device: Device) -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    owned: dict[int, Any] = {}
    layers = [HostLayer(i, str(i), m, device, owned) for i, m in enumerate((first, second))]
    assert [len(layer.tied) for layer in layers] == [0, 1]
    segment = torch.zeros(layers[1].nbytes, dtype=torch.uint8)
    layers[1].upload(device.weights_up, segment)
    device.weights_up.synchronize()
    assert torch.equal(layers[1].views(segment)[0], first.weight)


def test_a_parameter_without_gradient_keeps_none(device: Device) -> None:
    """Zeros instead would be decayed by AdamW."""
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    layer = HostLayer(0, "layer", module, device, {})
    host = host_gradients(layer, device, OWN).begin()
    copies = [nn.Parameter(p.detach().clone()) for p in layer.masters]
    gradients = DeviceGradSums(host, torch.zeros(host.layout.nbytes, dtype=torch.uint8))
    for _ in range(2):
        gradients.attach(copies)
        (copies[0].sum() * 3).backward()
        gradients.detach(copies)
    gradients.download(device.gradients_down, 0)
    taken = host.take(0.5)
    assert list(taken) == [id(layer.masters[0])] and taken[id(layer.masters[0])].unique().tolist() == [3.0]


def test_two_buffers_take_turns(device: Device) -> None:
    """``zero_grad`` comes after the next sum has begun; two are enough then, and memory is not asked for again."""
    module = nn.Linear(2, 2, bias=False)
    buffers = host_gradients(HostLayer(0, "layer", module, device, {}), device, OWN)
    seen: list[int] = []
    for _ in range(6):
        host = buffers.begin()
        host.handed_out, host.present = True, [True]
        module.weight.grad = None
        [module.weight.grad] = host.take(1.0).values()
        seen.append(host.flat.data_ptr())
        host.release()
    assert seen[0] != seen[1] and seen == seen[:2] * 3


def test_what_is_not_handed_out_stays_in_one_buffer_and_in_the_same_tensors(device: Device) -> None:
    buffers = host_gradients(HostLayer(0, "layer", nn.Linear(2, 2), device, {}), device, OWN)
    seen = set()
    for _ in range(4):
        host = buffers.begin()
        host.present = [True, True]
        seen.add((host.flat.data_ptr(), *map(id, host.take(1.0).values())))
        host.release()
    assert len(seen) == 1
