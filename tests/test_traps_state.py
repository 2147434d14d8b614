"""Traps in what is kept on modules: attributes that layers and user code set, flags flipped around calls, hooks,
patches.
"""

import itertools

import pytest
import torch
import zoo
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from traps import Block, Traps, in_turn

trap = Traps()


def keeps(aux):
    """A forward that leaves something on its module."""

    def forward(self, x):
        y = Block.forward(self, x)
        self.aux = aux(y)
        return y

    return forward


# --------------------------------------------------------------------------------------------- attributes set by layers


@trap("a layer sets a tensor that requires grad", forward=keeps(lambda y: y.square().mean(1, keepdim=True)))
def _(net, h):
    for block in net.blocks:
        h = block(h)
        h = h * (1 + block.aux)
    return h * (1 + sum(block.aux for block in net.blocks))


class Keeping(Block):
    def __init__(self):
        super().__init__()
        self.kept = {"penalties": []}

    def forward(self, x):
        y = Block.forward(self, x)
        self.kept["penalties"] = [y.square().mean(1, keepdim=True)]
        self.inner.seen = y.detach().tanh()
        return y


@trap("a layer fills a dict of its own", block=Keeping)
def _(net, h):
    h = in_turn(net, h)
    return h * sum(block.kept["penalties"][0] * block.inner.seen for block in net.blocks)


def reads_what_it_left(self, x):
    y = Block.forward(self, x) * (1.0 if self.aux is None else self.aux)
    self.aux = y.cos()
    return y


@trap("a layer reads what its last call left", forward=reads_what_it_left, calls=6)
def _(net, h):
    for block in net.blocks:
        block.aux = None
    return net.blocks[0](in_turn(net, h))


class Unregistered(Block):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(zoo.WIDTH)


def averages(self, x):
    self.table.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return Block.forward(self, x) + self.table


def fills(self, x):
    torch.linspace(0, 1, x.shape[1], out=self.table)
    return Block.forward(self, x) + self.table


trap("a layer fills a tensor that is not a buffer", block=Unregistered, forward=fills)(in_turn)
trap(
    "a layer averages in a tensor that is not a buffer",
    "writes in place to its attribute 'table'.*register_buffer",
    block=Unregistered,
    forward=averages,
)(in_turn)


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def see(self, grad):
        self.seen.add_(grad.detach().norm())


def counts_in_backward(self, x):
    y = Block.forward(self, x)
    if y.requires_grad:
        y.register_hook(self.see)
    return y


trap(
    "a layer's backward writes to its buffer",
    r"buffer 'seen' of .* in layer 'model\.blocks\.\d' was written to in backw",
    block=Counting,
    forward=counts_in_backward,
)(in_turn)


class WithTable(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2))


def registers(self, x):
    """As rotary caches do."""
    if self.inner._buffers.get("seen") is None:
        self.inner.register_buffer("seen", torch.linspace(1, 2, x.shape[-1]))
    return Block.forward(self, x * self.inner.seen)


def deletes(self, x):
    if hasattr(self, "table"):
        del self.table
    return Block.forward(self, x)


trap("a layer registers a buffer", forward=registers, blocking=True)(in_turn)
trap("a layer deletes a buffer", block=WithTable, forward=deletes, blocking=True)(in_turn)


def adds(what):
    def forward(self, x):
        if what == "weight":
            self.inner.weight = nn.Parameter(self.inner.weight.detach() * 1.1)
        elif not hasattr(self, "added") and (what != "parameter, later" or next(CALLS) > 20):  # in the second window
            self.added = nn.Linear(2, 2) if what == "module" else nn.Parameter(torch.ones(3))
        return Block.forward(self, x)

    return forward


def first_alone(net, h):
    for _ in range(3):
        h = net.blocks[0](h)
    return h


CALLS = itertools.count()
REGISTERED = {
    "parameter": "the parameter 'added' of its Block",
    "parameter, later": "the parameter 'added' of its Block",
    "module": "the module 'added' of its Block",
    "weight": "the parameter 'weight' of its Linear",
}
for what, named in REGISTERED.items():
    error = f"layer 'model.blocks.0' registers, replaces or removes {named}"
    trap(f"a layer registers a {what}", error, forward=adds(what))(first_alone)


# ------------------------------------------------------------------------------------------ attributes set by user code


def reads(self, x):
    return Block.forward(self, x) * self.flag + (0 if self.aux is None else self.aux)


@trap("user code sets tensors on a layer", forward=reads)
def _(net, h):
    for block in net.blocks:
        block.flag = h.detach().cos()
        block.aux = h.mean(1, keepdim=True)
        h = block(h)
    return h


@trap("user code keeps tensors on the module around the layers")
def _(net, h):
    net.skip, net.all, net.named = h, [], {}
    for name, block in net.blocks.named_children():
        h = block(h) + net.skip * 0.5
        net.all.append(h)
        net.named[name] = h
    return h + sum(map(torch.tanh, net.all)) + sum(map(torch.cos, net.named.values()))


@trap("flags are flipped around a reference pass", forward=reads, calls=8)
def _(net, h):
    for block in net.blocks:
        block.flag = 0.3
    with torch.no_grad():
        reference = in_turn(net, h)
    for block in net.blocks:
        block.flag = 1.0
    return in_turn(net, h) + reference


@trap("weights frozen around a pass, and around a call", calls=8)
def _(net, h):
    net.blocks[1].requires_grad_(False)
    first = in_turn(net, h)
    net.blocks[1].requires_grad_(True)
    net.blocks[2].inner.weight.requires_grad = False
    h = in_turn(net, h)
    net.blocks[2].inner.weight.requires_grad = True
    return first + h


# ----------------------------------------------------------------------------------------------------- hooks on modules


def on_each(part, hook):
    def arrange(self, net):
        for block in net.blocks:
            hook(part(block))

    return arrange


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda module, args, output: output * 1.5),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
    "backward": lambda m: m.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,)),
}
for kind, hook in HOOKS.items():
    trap(f"{kind} hooks on layers", arrange=on_each(lambda block: block, hook))(in_turn)
    trap(f"{kind} hooks inside layers, late", arrange=on_each(lambda block: block.inner, hook), late=True)(in_turn)


def require_gradients(self, net):
    """What Hugging Face's ``gradient_checkpointing_enable`` registers. A recomputation without it made no graph."""
    net.requires_grad_(False)
    net.head.requires_grad_(True)

    def hook(module, args, output):
        output.requires_grad_(True)

    net.blocks[0].inner.register_forward_hook(hook)


trap("a hook that requires gradients inside a frozen layer", arrange=require_gradients)(in_turn)


collected = []


@trap(
    "hooks that collect what is inside",
    "entered layer .* past its outputs.*Return it from the layer",
    arrange=on_each(lambda block: block.inner, lambda m: m.register_forward_hook(lambda m, a, o: collected.append(o))),
)
def _(net, h):
    collected.clear()
    return in_turn(net, h) + sum(map(torch.tanh, collected))


# -------------------------------------------------------------------------------------- patched, compiled, parametrized


def patch_closure(module):
    old = module.forward
    module.forward = lambda *args, **kwargs: old(*args, **kwargs).tanh() * 2


class Doubling(ModelHook):
    def post_forward(self, module, output):
        return output.tanh() * 2


PATCHES = {"closure": patch_closure, "accelerate": lambda module: add_hook_to_module(module, Doubling())}
for kind, patch in PATCHES.items():
    trap(f"a layer's forward is patched by {kind}", arrange=on_each(lambda block: block, patch), late=True)(in_turn)
    trap(f"an inner forward is patched by {kind}", arrange=on_each(lambda block: block.inner, patch))(in_turn)


def hold_functions(module):
    factor = 2.0
    module.functions = {"double": lambda x: x * factor, "all": [lambda x: x * factor]}


trap("a layer holds functions in containers", arrange=on_each(lambda block: block, hold_functions))(in_turn)


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


PARAMETRIZED = {
    "weight norm by hooks": nn.utils.weight_norm,
    "a parametrization": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Twice()),
}
for kind, change in PARAMETRIZED.items():

    def arrange(self, net, change=change):
        for module in (net.stem, net.blocks[0].inner, net.blocks[2].inner):
            change(module)

    trap(kind, arrange=arrange)(in_turn)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", trap.equal)
def test_equals_plain(name):
    trap.check_equal(name)


@pytest.mark.parametrize("name", trap.refused)
def test_refused(name):
    trap.check_refused(name)
