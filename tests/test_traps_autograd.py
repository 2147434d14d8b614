"""Traps in autograd: gradients taken by user code, transforms, checkpoints, hooks on tensors and parameters."""

import pytest
import torch
import zoo
from harness import assert_tensors_same, ours, run
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from traps import WIDTH, Block, Traps, in_turn, windows

trap = Traps()

# ----------------------------------------------------------------------------------------- gradients taken by user code

ACROSS = r"gradients across layers .torch.autograd.grad, loss.backward.., create_graph. are not supported"


@trap("autograd.grad across a layer", ACROSS)
def _(net, h):
    h = h * 1.0
    y = net.blocks[0](h)
    (slope,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return y + slope


@trap("autograd.grad of what follows the layers")
def _(net, h):
    y = in_turn(net, h) * 1.0
    scale = torch.ones(WIDTH, requires_grad=True)
    slopes = torch.autograd.grad((y * scale).square().sum() + net.head.bias.square().sum(), [y, scale])
    return y + slopes[0] + slopes[1].mean() * 0


@trap("backward called by the user", ACROSS)
def _(net, h):
    y = net.blocks[0](h)
    y.sum().backward(retain_graph=True)
    return y


def penalised(self, batch, batch_idx):
    loss = zoo.PlainClassifier.training_step(self, batch, batch_idx)
    slopes = torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


trap("autograd.grad by the weights", ACROSS, training_step=penalised)(in_turn)


@trap("detached, and requiring grad again", calls=6)
def _(net, h):
    with torch.no_grad():
        fixed = net.blocks[0](h)
        fixed.mul_(2)
    with torch.inference_mode():
        constant = net.blocks[0](h).cos()
    cut = net.blocks[1](h + fixed).detach().requires_grad_()
    (slope,) = torch.autograd.grad(cut.square().sum(), cut)
    return net.blocks[2](cut * slope + constant.clone()) + h


@trap("the fused stage begins in inference mode", calls=11)
def _(net, h):
    with torch.inference_mode():
        constant = in_turn(net, in_turn(net, h))
    return in_turn(net, h) + constant.clone()


def slope_inside(self, x):
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.inner(inner)).sum(), inner, create_graph=True)
    vmapped = torch.func.vmap(lambda row: Block.forward(self, row))(x)
    value, tangent = torch.func.jvp(self.other, (x,), (torch.ones_like(x),))
    value = value - torch.func.grad(lambda v: torch.tanh(self.inner(v)).sum())(x)
    x.register_hook(lambda grad: grad * 2) if x.requires_grad else None
    vmapped.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return vmapped + slope + torch.tanh(value + tangent)


trap("gradients, transforms and hooks inside a layer", forward=slope_inside)(in_turn)


TRANSFORMS = {
    "vmap": lambda block, h: torch.func.vmap(block)(h),
    "jvp": lambda block, h: torch.func.jvp(block, (h,), (h,))[1],
}
for kind, transform in TRANSFORMS.items():
    trap(f"torch.func.{kind} of a layer", "under a transform of torch.func")(
        lambda net, h, transform=transform: transform(net.blocks[0], h)
    )


@trap("forward-mode differentiation", "under forward-mode differentiation")
def _(net, h):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net.blocks[0](forward_ad.make_dual(h, h))).primal


@trap("what autograd itself offers in user code")
def _(net, h):
    with torch.autograd.detect_anomaly(check_nan=False), save_on_cpu():
        h = in_turn(net, torch.func.vmap(torch.tanh)(h))
    return Reversed.apply(h)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


# ---------------------------------------------------------------------------------------------------------- checkpoints


def checkpoints(self, x):
    for reentrant in (True, False):
        x = checkpoint(lambda y: Block.forward(self, y), x, use_reentrant=reentrant)
    return x


trap("checkpoints inside layers", forward=checkpoints)(in_turn)


# -------------------------------------------------------------------------------------- hooks on tensors and parameters


@trap("hooks on tensors, before and after layers have taken them", calls=7)
def _(net, h):
    h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    y = net.blocks[0](h)
    z = net.blocks[1](y)
    y.register_hook(lambda grad: grad.clamp(-0.003, 0.003))
    y.register_hook(lambda grad: grad * 3)
    z.register_hook(lambda grad: None)
    y.register_hook(lambda grad: grad * 100).remove()
    between = z * 2
    between.register_hook(lambda grad: grad.clamp(-0.003, 0.003))
    return net.blocks[2](net.blocks[2](between)) + net.blocks[0](y) * y


@trap("a hook on a tensor between layers", "would be called with parts of its gradient.*goes to several layers")
def _(net, h):
    y = net.blocks[0](h) * 2
    y.register_hook(lambda grad: grad.clamp(-0.003, 0.003))
    return net.blocks[1](y) + net.blocks[2](y)


def hooked(self, net):
    net.blocks[0].register_full_backward_hook(lambda module, ins, outs: (ins[0].clamp(-0.003, 0.003),))


@trap("a backward hook on a layer whose output is shared", "'model.blocks.0' has backward hooks.*parts", arrange=hooked)
def _(net, h):
    y = net.blocks[0](h)
    return net.blocks[1](y) + net.blocks[2](y)


def test_gradients_of_layer_outputs_are_kept():
    """Whether asked for before or after another layer has taken the output."""
    kept = []

    def body(net, h):
        h.retain_grad()
        y = net.blocks[0](h)
        z = net.blocks[1](y)
        y.retain_grad()
        between = z * 2
        between.retain_grad()
        kept.append([h, y, between])
        return net.blocks[2](between) + y

    traps = Traps()
    traps("kept")(body)
    built = traps.build(traps.equal["kept"])
    run("auto", built, **windows(2))
    run(ours(layers=["Block"]), built, devices=2, **windows(2))
    for plain, other in zip(kept[:6], kept[6:], strict=True):
        assert_tensors_same([tensor.grad for tensor in plain], [tensor.grad for tensor in other])


def on_parameters(hook):
    def arrange(self, net):
        for parameter in net.parameters():
            hook(parameter)

    return arrange


def doubles_grad(parameter):
    assert parameter.grad is not None
    parameter.grad.mul_(2)


for late in (False, True):
    trap(
        f"hooks on parameters, late={late}",
        arrange=on_parameters(lambda p: p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))),
        late=late,
    )(in_turn)
trap(
    "hooks on parameters when gradients are there",
    arrange=on_parameters(lambda p: p.register_post_accumulate_grad_hook(doubles_grad)),
)(in_turn)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", trap.equal)
def test_equals_plain(name):
    trap.check_equal(name)


@pytest.mark.parametrize("name", trap.refused)
def test_refused(name):
    trap.check_refused(name)
