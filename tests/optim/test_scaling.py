"""The loss scale lives on the host."""

import torch
from torch.amp import GradScaler

from lightning_roundpipe.optim.scaling import LossScale


def test_another_default_device_changes_nothing():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    with torch.device("meta"):
        loss_scale = LossScale(scaler)
    loss_scale.update(finite=True)
    assert loss_scale.now() == 16.0
    loss_scale.update(finite=False)
    assert loss_scale.now() == 8.0
