"""Manual optimization in ``bf16-true`` and ``16-true``: optimizers step fp32 masters, all else sees copies of them.

What it is compared with is plain Lightning in fp32 whose modules cast their parameters by themselves, each time.
"""

import harness
import pytest
import test_manual
import torch
import torch.nn.functional as F
from harness import assert_same, ours
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.amp import GradScaler

from lightning_roundpipe import RoundPipePrecision
from lightning_roundpipe.config import RoundPipeError

BF16 = torch.bfloat16


class Linear(nn.Linear):
    """Computes in ``low``; None: in the format that its parameters are in, which is to be that one."""

    low = None

    def forward(self, x):
        if self.low is None:
            assert self.weight.dtype is self.bias.dtype is x.dtype is not torch.float32
            return F.linear(x, self.weight, self.bias)
        assert self.bias is not None
        return F.linear(x.to(self.low), self.weight.to(self.low), self.bias.to(self.low))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = Linear(8, 8), Linear(8, 8)

    def forward(self, x):
        return x + self.out(torch.tanh(self.inner(x)))


class Low:
    """A module that computes in low precision by hand, if it is told to."""

    low = None

    def by_hand(self, low):
        self.low, self.copies = low, {}
        for module in self.modules():
            if isinstance(module, Linear):
                module.low = low
        return self

    def seen(self, tensor):
        """As training_step sees it: one copy, until it changes."""
        if self.low is None:
            return tensor
        key = (id(tensor), tensor.detach().numpy().tobytes())
        if key not in self.copies:
            with torch.enable_grad():
                self.copies[key] = tensor, tensor.to(self.low)
        return self.copies[key][1]

    def training_step(self, batch, batch_idx):
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.low or before)
        try:
            return super().training_step(batch if self.low is None else batch.to(self.low), batch_idx)
        finally:
            self.copies = {}
            torch.set_default_dtype(before)


class Manual(Low, test_manual.Manual):
    def __init__(self, step, make=None):
        super().__init__(step, make)
        self.trunk, self.one, self.two = (
            nn.Sequential(Linear(6, 8), Block(), Block(), Linear(8, 8)),
            Linear(8, 1),
            Linear(8, 1),
        )

    def losses(self, batch):
        hidden = self.trunk(batch)
        # Not in front of both: what comes back from two layers goes through such user code one after the other, in
        # bf16.
        return (self.one(hidden) * self.seen(self.scale)).square().mean(), (self.two(hidden.tanh()) - 1).square().mean()


def hand_and_ours(make, devices=2, **options):
    torch.manual_seed(2)
    module = make()
    emulation = {"poison": True}
    result = test_manual.run(ours(emulation=emulation), module, devices=devices, precision="bf16-true", **options)
    assert all(value.dtype is torch.float32 for value in result.state.values())
    assert any(not torch.equal(result.state[name], before) for name, before in module.state_dict().items())
    return test_manual.run("auto", module.by_hand(BF16), **options), result


FAST = ("one loss after another", "with closures", "lbfgs", "written to unseen")


@pytest.mark.parametrize("way", FAST)
def test_as_by_hand(way):
    step, make = test_manual.WAYS[way]
    assert_same(*hand_and_ours(lambda: Manual(step, make), val_batches=test_manual.samples(1)))


def test_memory_of_another_format_is_refused():
    """Made of what training_step sees, and put in the place of a master."""
    step, _ = test_manual.WAYS["put elsewhere"]
    with pytest.raises(RoundPipeError, match=r"changed from .* torch.float32 to .* torch.bfloat16"):
        test_manual.run(ours(), Manual(step), precision="bf16-true")


# ------------------------------------------------------------------------------------------------------ who sees what


def _seeing(self, optimizer, batch):
    low = self.low or BF16
    assert torch.get_default_dtype() is low and batch.dtype is low
    assert self.seen(self.scale).dtype is (self.scale + 0 if self.low is None else self.scale.to(low)).dtype is low
    for _ in range(2):
        self.scale.data.mul_(0.95)  # which no counter sees
        optimizer.zero_grad()
        loss = sum(self.losses(batch))
        loss = (
            loss + self.seen(self.one.weight).square().sum() + self.seen(self.scale).square()
        )  # user code reads a layer's
        self.manual_backward(loss)
        assert self.scale.grad.dtype is self.one.weight.grad.dtype is torch.float32
        optimizer.step()
        self.log("scale", self.seen(self.scale).float())  # is the new one


class Looking(torch.optim.SGD):
    """Goes by what it sees."""

    def step(self, closure=None):
        assert torch.get_default_dtype() is not BF16
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype is (parameter + 0).dtype is parameter.data.dtype is torch.float32
        return super().step(closure)


def test_user_code_sees_copies_and_optimizers_see_masters():
    plain, result = hand_and_ours(lambda: Manual(_seeing, lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
    assert_same(plain, result)
    module = Manual(_seeing, lambda parameters: Looking(parameters, lr=0.1))
    test_manual.run(ours(), module, precision="bf16-true")


# ----------------------------------------------------------------------------------------------------------- in 16-true


def _scaled(self, optimizer, batch):
    optimizer.zero_grad()
    loss, other = self.losses(batch)
    self.manual_backward(loss / 64, retain_graph=True)
    self.manual_backward(other / 64)
    self.log("of a weight that user code reads", self.scale.grad)
    optimizer.step()


@pytest.mark.parametrize(("scale", "rounding"), [(2.0**17, 1), (2900.0, 1000)])
def test_losses_are_scaled(scale, rounding):
    """As Lightning's own plugin does it for weights that are fp32. The largest one makes the first steps overflow.

    What is no power of two is not multiplied in fp16, as it would be there.
    """
    torch.manual_seed(2)
    module = Manual(_scaled)
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=3)
    plugin = RoundPipePrecision("16-true", GradScaler("cpu", init_scale=scale, growth_interval=3))
    batches = test_manual.samples(6)
    result = test_manual.run(ours(precision_plugin=plugin), module, batches, devices=2)
    by_hand = module.by_hand(torch.float16)
    plain = test_manual.run("auto", by_hand, batches, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert_same(plain, result, rtol=rounding * harness.RTOL, atol=rounding * harness.ATOL)
    assert plugin.scaler is not None and plugin.scaler.state_dict() == scaler.state_dict()
    assert plugin.scaler.get_scale() != scale
