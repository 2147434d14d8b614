"""Masters in flat host buffers, and gradients that come back."""

import numpy as np
import torch
from torch import nn

from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.host_layer import host_layers


def test_masters_stay_who_they_are(device):
    module = nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    before = {n: (id(p), p.detach().clone(), p.stride()) for n, p in module.named_parameters()}
    [layer] = host_layers({"layer": module}, device, Formats(), double_buffered=False, mapped=())
    for name, parameter in module.named_parameters():
        assert (id(parameter), parameter.stride()) == (before[name][0], before[name][2])
        assert torch.equal(parameter, before[name][1])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "saving it would save its layer"
    segment = torch.zeros(layer.weights.nbytes, dtype=torch.uint8)
    layer.weights.upload(device.weights_up, segment)
    device.weights_up.synchronize()
    for view, parameter in zip(layer.weights.views(segment), layer.masters, strict=True):
        assert torch.equal(view, parameter) and view.stride() == parameter.stride()


def test_a_master_comes_home_unless_user_code_holds_its_memory(device):
    """None did, as autograd's base of its view was taken for a holder: the layer was in memory twice from then on."""
    module = nn.Linear(3, 3)
    [layer] = host_layers({"layer": module}, device, Formats(), double_buffered=False, mapped=())
    [flat] = layer.weights.flats
    home = module.weight.data_ptr()
    for number in (7.0, 8.0):
        module.weight.data = torch.full((3, 3), number)
        layer.weights.reattach()
        assert module.weight.data_ptr() == home and flat.source is flat.buffer
        assert module.weight.eq(number).all()
    kept = module.weight.data
    module.weight.data = theirs = torch.full((3, 3), 9.0)
    layer.weights.reattach()
    assert module.weight.data_ptr() == theirs.data_ptr() and kept.eq(8.0).all()
    module.weight.data = kept
    layer.weights.reattach()
    assert module.weight.data_ptr() == home and flat.source is flat.buffer
    array = np.full((3, 3), 6.0, dtype=np.float32)
    for others in (torch.from_numpy(array), torch.ones(3, 3).share_memory_()):
        module.weight.data = others
        place = others.data_ptr()
        del others
        layer.weights.reattach()
        assert module.weight.data_ptr() == place
