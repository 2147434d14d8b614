"""Traps in autograd and around layers: gradients taken by user code, checkpoints, tensor hooks, weights, modes."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import ours, run
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from traps import Block, Trap, Traps, in_turn

from lightning_roundpipe.config import RoundPipeError

trap = Traps()
Step = Callable[[Any, zoo.Batch, int], Tensor]

# ----------------------------------------------------------------------------------------- gradients taken by user code

ACROSS = r"gradients across layers .torch.autograd.grad, loss.backward.., create_graph. are not supported"


@trap("autograd.grad across a layer", ACROSS)
def _(net: Any, h: Tensor) -> Tensor:
    h = h * 1.0
    y = net.blocks[0](h)
    (slope,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return y + slope


@trap("backward called by the user", ACROSS)
def _(net: Any, h: Tensor) -> Tensor:
    y = net.blocks[0](h)
    y.sum().backward(retain_graph=True)
    return y


def penalised(self: Trap, batch: zoo.Batch, batch_idx: int) -> Tensor:
    loss = zoo.PlainClassifier.training_step(self, batch, batch_idx)
    slopes = torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


trap("autograd.grad by the weights", ACROSS, training_step=penalised)(in_turn)


@trap("detached, and requiring grad again", calls=6)
def _(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = net.blocks[0](h)
        fixed.mul_(2)
    with torch.inference_mode():
        constant = net.blocks[0](h).cos()
    cut = net.blocks[1](h + fixed).detach().requires_grad_()
    (slope,) = torch.autograd.grad(cut.square().sum(), cut)
    return net.blocks[2](cut * slope + constant.clone()) + h


def slope_inside(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.inner(inner)).sum(), inner, create_graph=True)
    vmapped = torch.func.vmap(lambda row: Block.forward(self, row))(x)
    value, tangent = torch.func.jvp(self.other, (x,), (torch.ones_like(x),))
    x.register_hook(lambda grad: grad * 2) if x.requires_grad else None
    vmapped.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return vmapped + slope + torch.tanh(value + tangent)


trap("gradients, transforms and hooks inside a layer", forward=slope_inside)(in_turn)


@trap("an inference tensor as an argument", forward=lambda self, x, y: Block.forward(self, x) + y, calls=3)
def _(net: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        constant = h.detach() * 2
    return net.blocks[0](h, constant)


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda block, h: torch.func.vmap(block)(h),
    "grad": lambda block, h: torch.func.grad(lambda x: block(x).sum())(h),
    "jvp": lambda block, h: torch.func.jvp(block, (h,), (h,))[1],
}
for kind, transform in TRANSFORMS.items():
    trap(f"torch.func.{kind} of a layer", "under a transform of torch.func")(
        lambda net, h, transform=transform: transform(net.blocks[0], h)  # type: ignore[misc]
    )


@trap("forward-mode differentiation", "under forward-mode differentiation")
def _(net: Any, h: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net.blocks[0](forward_ad.make_dual(h, h))).primal


@trap("what autograd itself offers in glue")
def _(net: Any, h: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly(check_nan=False), save_on_cpu():
        h = in_turn(net, torch.func.vmap(torch.tanh)(h))
    return Reversed.apply(h)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


# ---------------------------------------------------------------------------------------------------------- checkpoints


def checkpoints(self: Any, x: Tensor) -> Tensor:
    for reentrant in (True, False):
        x = checkpoint(lambda y: Block.forward(self, y), x, use_reentrant=reentrant)
    return x


trap("checkpoints inside layers", forward=checkpoints)(in_turn)


@trap("checkpoints around one layer, around several, and around glue")
def _(net: Any, h: Tensor) -> Tensor:
    h = checkpoint(net.blocks[0], h, use_reentrant=False)
    h = checkpoint(lambda x: net.blocks[2](net.blocks[1](x)), h, use_reentrant=False)
    return checkpoint(lambda x: torch.tanh(x) * x, h, use_reentrant=False)


CHECKPOINTED = "called during backward, as torch.utils.checkpoint around layers does.*without a checkpoint"


@trap("a checkpoint around a layer and glue", CHECKPOINTED)
def _(net: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.tanh(net.blocks[0](x)) * x, h, use_reentrant=False)


@trap("a reentrant checkpoint around layers", CHECKPOINTED)
def _(net: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda x: in_turn(net, x), h, use_reentrant=True)


# -------------------------------------------------------------------------------------- hooks on tensors and parameters


def on_parameters(hook: Callable[[nn.Parameter], Any]) -> Callable[..., None]:
    def arrange(self: Trap, net: Any) -> None:
        for parameter in net.parameters():
            hook(parameter)

    return arrange


def doubles_grad(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def halve(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


for late in (False, True):
    trap(f"hooks on parameters, late={late}", arrange=on_parameters(halve), late=late)(in_turn)
trap(
    "hooks on parameters when gradients are there",
    arrange=on_parameters(lambda p: p.register_post_accumulate_grad_hook(doubles_grad)),
)(in_turn)


# -------------------------------------------------------------------------------------------------------------- weights


def with_weights(self: Trap, batch: zoo.Batch, batch_idx: int) -> Tensor:
    weights = {name: p * 0.5 for name, p in self.model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(self.model, weights, (batch["x"],)), batch["y"])


OTHER = "'weight' was replaced within the step, as torch.func.functional_call does"
trap("functional_call of the whole model", OTHER, training_step=with_weights)(in_turn)


@trap("a parameter replaced in the step", "'weight' was replaced within the step")
def _(net: Any, h: Tensor) -> Tensor:
    net.blocks[0].inner.weight = nn.Parameter(torch.zeros_like(net.blocks[0].inner.weight))
    return in_turn(net, h)


@trap("a module replaced in the step", "a module inside layer 'model.blocks.1' was replaced within the step")
def _(net: Any, h: Tensor) -> Tensor:
    h = net.blocks[0](h)
    net.blocks[1].register_module("inner", None)
    return net.blocks[1](h)


WRITTEN = "parameter 'weight' of layer 'model.blocks.1' was written to within the step.*between steps"


@trap("a weight written to in the step", WRITTEN)
def _(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.blocks[1].inner.weight.clamp_(-0.1, 0.1)
    return in_turn(net, h)


@trap("a weight swapped in the step", WRITTEN)
def _(net: Any, h: Tensor) -> Tensor:
    weight = net.blocks[1].inner.weight
    weight.data = weight.data * 0.5
    return in_turn(net, h)


def clamps_itself(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.inner.weight.clamp_(-0.1, 0.1)
    return Block.forward(self, x)


trap("a layer writes to its weights", "writes to its own parameters while it runs", forward=clamps_itself)(in_turn)


def give_a_neighbour(self: Trap, net: Any) -> None:
    net.blocks[1].aux = [net.blocks[0]]


def calls_its_neighbour(self: Any, x: Tensor) -> Tensor:
    return Block.forward(self, x) + (self.aux[0](x) if self.aux else 0)


def reads_its_neighbour(self: Any, x: Tensor) -> Tensor:
    return Block.forward(self, x) + (self.aux[0].inner.weight.sum() if self.aux else 0)


trap(
    "a layer calls another", "'model.blocks.0' was called by code inside layer 'model.blocks.1'",
    forward=calls_its_neighbour, arrange=give_a_neighbour,
)(in_turn)  # fmt: skip
trap(
    "a layer reads another's weights", r"'model.blocks.1' uses a parameter of shape \(32, 32\) that is not its own",
    forward=reads_its_neighbour, arrange=give_a_neighbour,
)(in_turn)  # fmt: skip


def quantise(self: Trap, net: Any) -> None:
    net.blocks[1].inner.weight = Quantised(net.blocks[1].inner.weight)


class Quantised(nn.Parameter):
    pass


trap("parameters that cannot be moved", "type Quantised cannot be moved.*quantised", arrange=quantise)(in_turn)


@trap("a copy of a layer made in the step")
def _(net: Any, h: Tensor) -> Tensor:
    teacher = copy.deepcopy(net.blocks[0]).requires_grad_(False)
    teacher.inner.weight.zero_()
    return in_turn(net, h) + teacher(h)


# -------------------------------------------------------------------------------------- modes, flags, and other threads


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


for mode in (Doubled, Watching):

    @trap(f"a {mode.__mro__[1].__name__} around layers", f"under the mode {mode.__name__}")
    def _(net: Any, h: Tensor, mode: Any = mode) -> Tensor:
        with mode():
            return in_turn(net, h)


@trap("cached parametrizations", r"under torch.nn.utils.parametrize.cached\(\)")
def _(net: Any, h: Tensor) -> Tensor:
    with nn.utils.parametrize.cached():
        return in_turn(net, h)


@trap("another default dtype", "called with another default dtype")
def _(net: Any, h: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return in_turn(net, h)
    finally:
        torch.set_default_dtype(torch.float32)


def call_and_forget(layer: nn.Module, h: Tensor) -> None:
    with contextlib.suppress(RoundPipeError):
        layer(h)


@pytest.mark.parametrize("swallowed", [False, True])
def test_layers_called_from_another_thread(swallowed: bool) -> None:
    """Also if that thread's error is lost: the step must fail, not train without the layer's gradient."""

    def body(net: Any, h: Tensor) -> Tensor:
        if not swallowed:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(net.blocks[0], h).result()
        thread = threading.Thread(target=call_and_forget, args=(net.blocks[0], h))
        thread.start()
        thread.join()
        return h

    traps = Traps()
    traps("thread", "'model.blocks.0' was called from a thread that does not run a step")(body)
    traps.check_refused("thread")


def test_autocast_switched_off_in_part() -> None:
    """In glue around a layer, and inside a layer: what runs in bfloat16 is the same as in plain training."""
    seen: set[tuple[str, torch.dtype, torch.dtype]] = set()

    class Partly(Block):
        def forward(self, x: Tensor) -> Tensor:
            around = self.other(x).dtype
            with torch.autocast("cpu", enabled=False):
                seen.add((self.aux, around, self.other(x.float()).dtype))
                return Block.forward(self, x.float())

    def arrange(self: Trap, net: Any) -> None:
        for name, block in net.blocks.named_children():
            block.aux = name

    def body(net: Any, h: Tensor) -> Tensor:
        h = net.blocks[0](h)
        with torch.autocast("cpu", enabled=False):
            h = net.blocks[1](h.float())
        return net.blocks[2](h)

    traps = Traps()
    traps("autocast", block=Partly, arrange=arrange)(body)
    low, full = torch.bfloat16, torch.float32
    for strategy in ("auto", ours(num_microbatches=3, layers=["Partly"])):
        seen.clear()
        run(strategy, traps.build(traps.equal["autocast"]), zoo.make_batches("mlp", 2), precision="bf16-mixed")
        assert seen == {("0", low, full), ("1", full, full), ("2", low, full)}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", trap.equal)
def test_equals_plain(name: str) -> None:
    trap.check_equal(name)


@pytest.mark.parametrize("name", trap.refused)
def test_refused(name: str) -> None:
    trap.check_refused(name)
