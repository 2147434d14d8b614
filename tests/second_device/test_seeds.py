"""Seeds of user code, which torch sets on the generators of all devices."""

import harness
import torch
import zoo
from harness import ours, run
from torch import nn


class Seeds(zoo.PlainClassifier):
    """Seeds torch's generators in every step, as for noise that is always the same."""

    def loss_and_logits(self, batch):
        torch.manual_seed(7)
        with torch.random.fork_rng():
            weights = torch.rand(5)
        logits = self.model(batch["x"])
        return nn.functional.cross_entropy(logits * weights.to(logits.device), batch["y"]), logits


def test_seeds_of_user_code_do_not_reach_other_devices(devices):
    """There a layer may be drawing its mask: torch seeds, and restores, the generators of all devices."""
    module, data = Seeds(zoo.make_module("mlp").model), zoo.make_batches("mlp", 4, samples=8)
    module.model.blocks = nn.ModuleList(nn.Sequential(layer, nn.Dropout(0.5)) for layer in module.model.blocks)
    results = [
        run(ours(num_microbatches=4, layers=["Linear", "Sequential"]), module, data, devices=count) for count in (1, 2)
    ]
    assert devices
    harness.assert_identical(*results)
