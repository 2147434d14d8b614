"""Gradients in validation, test and predict steps: forces, sampling, test-time adaptation, as in plain Lightning."""

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_plain, loader, ours, trainer_of

from lightning_roundpipe.config import RoundPipeError

MLP = zoo.make_module("mlp").model
LAYERS = ["Linear", "ResidualBlock"]
WITH_GRAPHS = {"inference_mode": False}


class Validated(zoo.PlainClassifier):
    """Logs what ``validate`` makes of a batch."""

    def __init__(self, model=MLP):
        super().__init__(copy.deepcopy(model))

    def validation_step(self, batch, batch_idx):
        for name, value in self.validate(batch).items():
            self.log(f"val/{name}", value)


class Sampling(Validated):
    """Some steps uphill, with calls without gradients before and after."""

    def validate(self, batch):
        x, before = batch["x"].clone(), self.model(batch["x"]).square().mean()
        for _ in range(3):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.model(x).logsumexp(1).sum(), x)
            x = x + 0.1 * slope
        return {"before": before, "after": self.model(x.detach()).square().mean()}


class Adapting(Validated):
    """Trains on what it validates, and asks what became of it."""

    def validate(self, batch):
        optimizer = torch.optim.SGD(self.model.blocks.parameters(), 0.5)
        with torch.enable_grad():
            entropy = torch.distributions.Categorical(logits=self.model(batch["x"])).entropy().mean()
            entropy.backward()
        optimizer.step()
        self.zero_grad()
        return {"entropy": entropy, "after": self.model(batch["x"]).square().mean()}


class Importance(Validated):
    """Leaves gradients behind."""

    def validate(self, batch):
        self.zero_grad()
        with torch.enable_grad():
            F.cross_entropy(self.model(batch["x"]), batch["y"]).backward()
        return {"importance": sum((p.grad.square().sum() for p in self.parameters()), torch.zeros(()))}


class FieldOf(zoo.MLP):
    """Returns the slope of what its blocks give, which its own forward takes; it trains on the plain output."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return slope


class Within(Validated):
    def __init__(self):
        super().__init__(FieldOf())

    def validate(self, batch):
        return {"slope": self.model(batch["x"]).norm()}


KINDS = [Sampling, Adapting, Importance, Within]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_validation(kind):
    module, batches = kind(), zoo.make_batches("mlp", 4)
    more = {"val_batches": zoo.make_batches("mlp", 2, seed=5), "val_check_interval": 2, **WITH_GRAPHS}
    assert_plain(module, batches, {"num_microbatches": 2, "layers": LAYERS}, **more)


class Decaying(Validated):
    """Writes to a weight behind the call that reads it, by a way that nothing tells of."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def validate(self, batch):
        logits = self.model(batch["x"])
        with torch.no_grad():
            self.write(self.model.blocks[0])
        return {"size": logits.square().mean()}


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: next(layer.parameters()).detach().mul_(0.9),
        lambda layer: torch._foreach_mul_(list(layer.parameters()), 0.9),
        lambda layer: torch.mul(next(layer.parameters()), 0.9, out=next(layer.parameters())),
    ],
    ids=["detach", "foreach", "out"],
)
def test_writes_that_nothing_tells_of_are_refused(write):
    module = Decaying(write)
    with pytest.raises(RoundPipeError, match="was written to within the step"):
        trainer_of(ours(emulation={"bandwidth": 2e5}), devices=2).validate(
            module, loader(zoo.make_batches("mlp", count=6)), verbose=False
        )
