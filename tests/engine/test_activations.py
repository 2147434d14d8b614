"""Values that a microbatch saves on the host."""

import weakref

import torch

from lightning_roundpipe.engine.activations import Activations
from lightning_roundpipe.engine.events import Recorder


def test_a_tensor_is_saved_once_while_it_lives(device):
    """Each stage that takes it finds the same values, also if no call keeps them; they do not outlive it."""
    activations = Activations(0, Recorder(), device)
    tensor = torch.ones(4)
    saved = weakref.ref(activations.save(tensor, device).tensor)
    assert saved() is not None and activations.save(tensor, device).tensor is saved()
    tensor.add_(1)
    assert activations.save(tensor, device).tensor.tolist() == [2.0] * 4
    device.activations_down.synchronize()
    device.drop_finished()
    last = weakref.ref(activations.save(tensor, device).tensor)
    assert last() is not None
    del tensor
    assert last() is None
