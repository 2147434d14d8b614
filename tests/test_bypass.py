"""Gradients of parameters that code between the layers uses in ways that torch functions do not show.

Each way is trained plainly and with the strategy, with one microbatch and several, on one device and two. ``between``
stands in front of the layers, where its gradient comes in backward, and behind them, where it comes from the loss.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import Result, assert_same, assert_tensors_same, halves, ours, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import ReformerConfig, ReformerModelWithLMHead

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.user_code import bypassed_gradients
from lightning_roundpipe.user_code import mode as user_code_mode
from lightning_roundpipe.user_code.mode import UserCodeMode

WIDTH = zoo.WIDTH
Between = Callable[[Any, Tensor], Tensor]
Grid = list[tuple[int, int]]
"""Numbers of microbatches and devices."""
every_grid = pytest.mark.parametrize(
    "grid",
    [
        pytest.param([(1, 1), (4, 2)], id="some"),
        pytest.param([(1, 2), (2, 1), (2, 2), (4, 1)], id="others", marks=pytest.mark.slow),
    ],
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(pl.LightningModule):
    """Five layers, and parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.arrange()

    def arrange(self) -> None:
        """What a case adds."""

    def between(self, h: Tensor) -> Tensor:
        return h

    def penalty(self) -> Tensor | float:
        return 0.0

    def body(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(self.between(self.stem(x)))))

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["x"]), batch["y"]) + self.penalty()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return zoo.modules.sgd([p for p in self.parameters() if p.requires_grad])


def make(**methods: Any) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return type("Net", (Net,), methods)()


def batches() -> list[zoo.Batch]:
    return zoo.make_batches("mlp", samples=8)


def train(module: Net, microbatches: int, devices: int, **options: Any) -> Result:
    fit = {key: options.pop(key) for key in ("precision",) if key in options}
    strategy = ours(num_microbatches=microbatches, layers=["Block", "Linear"], **options)
    return run(strategy, module, batches(), devices=devices, **fit)


def check_equal(module: Net, grid: Grid, *, some: bool = False) -> None:
    """``some``: not all parameters are trained."""
    plain = run("auto", module, batches())
    assert some or all(grad is not None for grads in plain.grads for grad in grads.values())
    for microbatches, devices in grid:  # four of them recompute some layers, and keep the graphs of others
        plan = {"plan": halves(5)} if microbatches == 4 else {}
        assert_same(plain, train(module, microbatches, devices, **plan))


# ------------------------------------------------------------------------------------------------ attributes of tensors


def all_of(self: Net, h: Tensor) -> Tensor:
    """Every parameter is used, whatever the case uses."""
    return h * self.gain @ self.mix


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "H": lambda w: w.H,
    "mH": lambda w: w.mH,
    "real": lambda w: w.real,
    "by name": lambda w: getattr(w, "T"),  # noqa: B009
    "by an attrgetter": operator.attrgetter("mT"),
    "by the descriptor": lambda w: Tensor.T.__get__(w),  # type: ignore[attr-defined]
    "of a view": lambda w: w[:].T,
    "of an alias": lambda w: w.T.T.T,
}


@pytest.mark.parametrize("view", VIEWS)
@every_grid
def test_a_view_of_a_parameter(view: str, grid: Grid) -> None:
    check_equal(make(between=lambda self, h: (h * self.gain) @ VIEWS[view](self.mix)), grid)


@every_grid
def test_the_head_is_the_embedding_transposed(grid: Grid) -> None:
    check_equal(
        make(penalty=lambda self: (self.head.weight.T @ self.head.weight).square().mean(), between=all_of), grid
    )


@every_grid
def test_a_penalty_on_layers(grid: Grid) -> None:
    def orthogonality(self: Net) -> Tensor:
        eye = torch.eye(WIDTH)
        weights = [p for name, p in self.named_parameters() if name.endswith("inner.weight")]
        return sum((w @ w.T - eye).square().mean() for w in weights)  # type: ignore[return-value]

    check_equal(make(penalty=orthogonality, between=all_of), grid)


@pytest.mark.filterwarnings("ignore:Casting complex values")
@every_grid
def test_parts_of_a_complex_parameter(grid: Grid) -> None:
    def arrange(self: Net) -> None:
        self.rotation = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def between(self: Net, h: Tensor) -> Tensor:
        return all_of(self, h) * self.rotation.real + h * self.rotation.imag

    check_equal(make(arrange=arrange, between=between), grid)


# ------------------------------------------------------------------------------------- what torch functions do not show


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x @ weight * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight.T * ctx.scale, x.T @ grad * ctx.scale, None


class Split(torch.autograd.Function):
    """In the newer style, with the context apart."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class OfTheModule(torch.autograd.Function):
    """Reads the module's weight itself, as hand-written backward passes do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Net, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return x * module.gain @ module.mix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weights = [ctx.module.gain, ctx.module.mix]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = x * weights[0] @ weights[1]
        found = torch.autograd.grad(out, [x, *weights], grad)
        return found[0], None, *found[1:]


@torch.jit.script
def scripted(x: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
    return torch.tanh(x * gain) @ weight


traced = torch.jit.trace(lambda x, w, g: x * g @ w, (torch.ones(3, WIDTH), torch.ones(WIDTH, WIDTH), torch.ones(WIDTH)))


def in_a_thread(self: Net, h: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: h * self.gain @ self.mix).result()


def without_torch_functions(self: Net, h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h * self.gain @ self.mix


HIDDEN: dict[str, Between] = {
    "a function's argument": lambda self, h: Product.apply(h * self.gain, self.mix),
    "a function's argument, one more": lambda self, h: Split.apply(Product.apply(h, self.mix, 0.5), self.gain),
    "a function that recomputes": lambda self, h: OfTheModule.apply(h, self, self.gain, self.mix),
    "a scripted function": lambda self, h: scripted(h, self.mix, self.gain),
    "a traced function": lambda self, h: traced(h, self.mix, self.gain),
    "a reentrant checkpoint": lambda self, h: checkpoint(lambda x: all_of(self, x), h, use_reentrant=True),
    "a checkpoint that is not": lambda self, h: checkpoint(lambda x: all_of(self, x), h, use_reentrant=False),
    "a checkpoint in a checkpoint": lambda self, h: checkpoint(
        lambda x: checkpoint(lambda y: all_of(self, y), x, use_reentrant=True).tanh(), h, use_reentrant=True
    ),
    "another thread": in_a_thread,
    "torch functions switched off": without_torch_functions,
    "a mapped function": lambda self, h: torch.func.vmap(lambda row: h @ row)(self.mix).T * self.gain,
    "a keyword with a list": lambda self, h: (
        h @ torch.cat(tensors=[self.mix[:2], self.mix[2:]]) * torch.stack(tensors=[self.gain, self.gain]).mean(0)
    ),
    "an operator by its name": lambda self, h: torch.ops.aten.mul(torch.ops.aten.mm(h, self.mix), self.gain),
    "one row after another": lambda self, h: torch.stack([h @ row for row in self.mix], 1) * self.gain,
}


@pytest.mark.parametrize("way", HIDDEN)
@every_grid
def test_a_parameter_given_to(way: str, grid: Grid) -> None:
    check_equal(make(between=HIDDEN[way]), grid)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.gain


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(Small()),
    "traced": lambda: torch.jit.trace(Small(), torch.ones(2, WIDTH)),
    "scripted, in a list": lambda: nn.ModuleList([torch.jit.script(Small())]),
}


@pytest.mark.parametrize("kind", SCRIPTED)
@every_grid
def test_modules_of_torchscript(kind: str, grid: Grid) -> None:
    """They run between the layers."""

    def configure_model(self: Net) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.extra = SCRIPTED[kind]()

    def between(self: Net, h: Tensor) -> Tensor:
        return all_of(self, (self.extra[0] if isinstance(self.extra, nn.ModuleList) else self.extra)(h))

    check_equal(make(configure_model=configure_model, between=between), grid)


def test_a_module_of_torchscript_is_no_layer() -> None:
    def configure_model(self: Net) -> None:
        self.extra = torch.jit.script(Small())

    with pytest.raises(ValueError, match="'extra' names a module compiled by TorchScript"):
        run(ours(layers=["extra"]), make(configure_model=configure_model), batches())


# ------------------------------------------------------------------------------------------ layers' own backward passes


class Reversible(torch.autograd.Function):
    """Keeps no activations of the layers: its backward goes back through them by itself, as Reformer's does."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, net: Net) -> tuple[Tensor, Tensor]:
        ctx.net = net
        for block in net.blocks:
            a, b = b, a + block(b)
        ctx.save_for_backward(a.detach(), b.detach())
        return a, b

    @staticmethod
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        for block in reversed(ctx.net.blocks):
            with torch.enable_grad():
                before = a.detach().requires_grad_()
                out = ctx.net.again(block, before)
                ctx.net.differentiate(out, grad_b)
            a, b = (b - out).detach(), a
            grad_a, grad_b = grad_b, grad_a + before.grad
        return grad_a, grad_b, None


AGAIN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "its modules": lambda block, x: x + block.outer(torch.tanh(block.inner(x))),
    "its class's forward": lambda block, x: type(block).forward(block, x),
    "its weights": lambda block, x: (
        x + F.linear(torch.tanh(x @ block.inner.weight.T + block.inner.bias), block.outer.weight, block.outer.bias)
    ),
    "its weights, in a scripted function": lambda block, x: (
        x + block.outer(torch.tanh(scripted_linear(x, block.inner.weight, block.inner.bias)))
    ),
}


@torch.jit.script
def scripted_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.t() + bias


def reversible(way: str, differentiate: Callable[[Tensor, Tensor], None]) -> Net:
    return make(
        body=lambda self, h: sum(Reversible.apply(h, h * 0.5, self)),
        between=all_of,
        again=lambda self, block, x: AGAIN[way](block, x),
        differentiate=lambda self, out, grad: differentiate(out, grad),
    )


@pytest.mark.parametrize("way", AGAIN)
@every_grid
def test_a_backward_that_goes_through_layers_by(way: str, grid: Grid) -> None:
    check_equal(reversible(way, torch.autograd.backward), grid)


@every_grid
def test_a_backward_of_a_tensor_in_a_backward(grid: Grid) -> None:
    check_equal(reversible("its modules", Tensor.backward), grid)


def test_reformer() -> None:
    """Hugging Face's, whose layers are called without grad and go back by themselves."""
    sizes = {"hidden_size": 32, "feed_forward_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
    lengths = {"max_position_embeddings": 64, "local_attn_chunk_length": 4, "axial_pos_embds": False}
    lengths |= {"lsh_attn_chunk_length": 4, "num_buckets": 4}
    dropout = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    # Without a seed for the hashes, torch.seed() draws it, and plain training gives other numbers each time.
    kinds = {"attn_layers": ["local", "lsh"], "hash_seed": 0, "is_decoder": True, "vocab_size": 96}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = zoo.modules.CausalLM(ReformerModelWithLMHead(ReformerConfig(**sizes, **lengths, **dropout, **kinds)))
        tokens = [torch.randint(0, 96, (4, 16)) for _ in range(3)]
    given = [{"input_ids": ids, "labels": ids} for ids in tokens]
    plain = run("auto", module, given)
    for microbatches, devices in ((1, 1), (2, 2)):
        assert_same(plain, run(ours(num_microbatches=microbatches), module, given, devices=devices))


@every_grid
def test_a_fixed_point_that_is_differentiated_by_a_hook(grid: Grid) -> None:
    """The equilibrium's gradient is found by an iteration in backward, which reads the weights once more."""

    def between(self: Net, h: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(h)
            for _ in range(5):
                z = torch.tanh(0.1 * all_of(self, z) + h)
        z = torch.tanh(0.1 * all_of(self, z) + h)
        at = z.detach().requires_grad_()
        f = torch.tanh(0.1 * all_of(self, at) + h.detach())

        def solve(grad: Tensor) -> Tensor:
            found = grad
            for _ in range(3):
                found = torch.autograd.grad(f, at, found, retain_graph=True)[0] + grad
            return found * self.gain.detach()

        if z.requires_grad:
            z.register_hook(solve)
        return z

    check_equal(make(between=between), grid)


# --------------------------------------------------------------------------- parameters of other modules inside layers


class Box:
    """An object that is no module."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def hook_inside(self: Net, block: int, add: Callable[[Tensor], Tensor]) -> None:
    self.blocks[block].inner.register_forward_hook(lambda module, inputs, out: add(out))  # type: ignore[union-attr, operator]


def in_a_box(self: Net, block: int, add: Callable[[Tensor], Tensor]) -> None:
    inner = self.blocks[block].inner  # type: ignore[union-attr]
    inner.box = Box(add=add)  # type: ignore[union-attr, assignment]
    inner.register_forward_hook(lambda module, inputs, out: module.box.add(out))  # type: ignore[union-attr, operator]


PLACES = {"a hook": hook_inside, "an object": in_a_box}
STEERED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "added": lambda self, h: h + self.gain,
    "a product with its transpose": lambda self, h: h @ self.mix.T,
    "a scripted function": lambda self, h: scripted_product(h, self.mix.clone()),
    "a function": lambda self, h: Product.apply(h, self.mix),
    "a checkpoint": lambda self, h: checkpoint(lambda x: torch.tanh(x @ self.mix), h, use_reentrant=True),
    "weights of another layer": lambda self, h: h + F.linear(h, self.head.weight).mean(-1, keepdim=True),
    "its own weights by another name": lambda self, h: h + self.blocks[1].inner.bias,
}


def steered(way: str, place: str, blocks: tuple[int, ...], trained: str) -> Net:
    def setup(self: Net, stage: str) -> None:
        for block in blocks:
            PLACES[place](self, block, lambda h: STEERED[way](self, h))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(trained.split())))

    return make(setup=setup)


@pytest.mark.parametrize("trained", ["gain mix head", "gain mix", "stem blocks gain mix head"])
@pytest.mark.parametrize("place", PLACES)
@every_grid
def test_steering_vectors(place: str, trained: str, grid: Grid) -> None:
    check_equal(steered("added", place, (1, 2), trained), grid, some=True)


@pytest.mark.parametrize("way", STEERED)
@every_grid
def test_inside_a_frozen_layer(way: str, grid: Grid) -> None:
    check_equal(steered(way, "a hook", (0, 2), "gain mix head blocks.1.inner"), grid, some=True)


@pytest.mark.parametrize("options", [{"precision": "bf16-true"}, {"staleness": 1}])
def test_steering_under(options: dict[str, Any]) -> None:
    """The stand-in is what everything else computes with."""
    module = steered("added", "a hook", (1, 2), "gain mix head")
    plain = run("auto", module, batches())
    result = train(module, 4, 2, plan=halves(5), **options)
    close = {"rtol": 0.2, "atol": 0.05} if "precision" in options else {}
    assert_tensors_same(plain.grads[0], result.grads[0], **close)


def test_evaluation_steers_too() -> None:
    def validation_step(self: Net, batch: zoo.Batch, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch["x"]), batch["y"]))

    module = steered("a product with its transpose", "a hook", (1, 2), "gain mix head")
    type(module).validation_step = validation_step  # type: ignore[method-assign, assignment]
    plain = run("auto", module, batches(), val_batches=batches()[:1], num_sanity_val_steps=1)
    strategy = ours(num_microbatches=2, layers=["Block", "Linear"])
    assert_same(plain, run(strategy, module, batches(), val_batches=batches()[:1], num_sanity_val_steps=1, devices=2))


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (4, 2)])
def test_a_frozen_layer_that_begins_to_steer_is_refused(microbatches: int, devices: int) -> None:
    def setup(self: Net, stage: str) -> None:
        hook_inside(self, 0, lambda h: h + self.gain if self.global_step else h)
        self.requires_grad_(False)
        self.gain.requires_grad_(True), self.head.requires_grad_(True)

    with pytest.raises(
        RoundPipeError, match=r"layer 'blocks.0'.*(from a hook, a closure, a cache or an object|of another module)"
    ):
        train(make(setup=setup), microbatches, devices)


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (4, 2)])
def test_a_tensor_from_another_layer_is_refused(microbatches: int, devices: int) -> None:
    def setup(self: Net, stage: str) -> None:
        self.box = Box(value=None)
        hook_inside(self, 1, lambda h: h + self.box.value)
        self.blocks.requires_grad_(False)

    def body(self: Net, h: Tensor) -> Tensor:
        self.box.value = h * 2
        return Net.body(self, h.detach())

    with pytest.raises(RoundPipeError, match=r"layer 'blocks.1' uses a tensor that it was not given as an argument"):
        train(make(setup=setup, body=body), microbatches, devices)


@pytest.mark.parametrize("trained_head", [False, True])
def test_prefix_tuning(trained_head: bool) -> None:
    """Its vectors lie in a key-value cache, which each layer fills in the forward, and again when it is recomputed."""
    module, windows = zoo.make_module("llama"), {"batches": zoo.make_batches("llama", 6), "accumulate_grad_batches": 2}
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    module.model = peft.get_peft_model(module.model, config)
    module.model.base_model.lm_head.weight.requires_grad_(trained_head)
    result = run(ours(plan=halves(7)), module, devices=2, **windows)
    assert_same(run("auto", module, **windows), result)


# ------------------------------------------------------------------------------------------- the check behind all these

MENDS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Net]]] = {
    "views are the parameter's own": (
        lambda patch: patch.setattr(user_code_mode, "VIEWS", frozenset()),
        lambda: make(between=lambda self, h: (h * self.gain) @ self.mix.T),
    ),
    "functions get the parameter itself": (
        lambda patch: patch.setattr(UserCodeMode, "given_to_function", lambda self, args: args),
        lambda: make(between=HIDDEN["a function's argument, one more"]),
    ),
    "there is no mode in backward": (
        lambda patch: patch.setattr(UserCodeMode, "__torch_function__", only_forward(UserCodeMode.__torch_function__)),
        lambda: make(between=HIDDEN["a reentrant checkpoint"]),
    ),
    "nor for layers' own backward": (
        lambda patch: patch.setattr(UserCodeMode, "__torch_function__", only_forward(UserCodeMode.__torch_function__)),
        lambda: reversible("its modules", torch.autograd.backward),
    ),
    "a list by keyword is not looked into": (
        lambda patch: patch.setattr(UserCodeMode, "_with_proxies", lambda self, args, kwargs: (args, kwargs)),
        lambda: make(between=HIDDEN["a keyword with a list"]),
    ),
}


def only_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def torch_function(self: UserCodeMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if self.returning else function(self, func, types, args, kwargs)

    return torch_function


@pytest.mark.parametrize("mend", MENDS)
def test_a_gradient_that_finds_another_way_is_delivered(mend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what keeps it from getting there, autograd's own accumulator shows it; without that, it is lost.

    Or the optimizer, which then knows of nobody who reads the parameter, writes to it while backward needs it.
    """
    take_out, build = MENDS[mend]
    module = build()
    plain = run("auto", module, batches())
    take_out(monkeypatch)
    for microbatches, devices in ((1, 1), (4, 2)):
        assert_same(plain, train(module, microbatches, devices))
    monkeypatch.setattr(bypassed_gradients, "_arriving", lambda master, grads: None)
    with pytest.raises((AssertionError, RuntimeError), match=r"differences|modified by an inplace operation"):
        assert_same(plain, train(module, 1, 1))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another format": ({"precision": "bf16-true"}, {}),
    "staleness": ({"staleness": 1}, {}),
    "later than the first batch": (
        {}, {"between": lambda self, h: untouched(self, h) if self.global_step else all_of(self, h)},
    ),
    "a hook": ({}, {"on_fit_start": lambda self: self.mix.register_hook(lambda grad: grad * 2)}),
}  # fmt: skip


def untouched(self: Net, h: Tensor) -> Tensor:
    return scripted_linear(h, self.blocks[0].inner.weight, self.blocks[0].inner.bias)


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (4, 2)])
def test_what_cannot_be_delivered_is_refused(reason: str, microbatches: int, devices: int) -> None:
    options, methods = REFUSED[reason]
    module = make(**({"between": lambda self, h: torch.tanh(scripted_product(h, self.mix))} | methods))
    with pytest.raises(RoundPipeError, match=r"uses parameter '.*' itself.*parameter.clone"):
        train(module, microbatches, devices, **options)


@torch.jit.script
def scripted_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.to(weight.dtype) @ weight).to(x.dtype)


@pytest.mark.parametrize("options", [{"precision": "bf16-true"}, {"staleness": 1}])
def test_the_remedy_helps(options: dict[str, Any]) -> None:
    between: Between = lambda self, h: scripted_product(h, self.mix.clone()) @ self.mix.T  # noqa: E731
    result = train(make(between=between), 4, 2, **options)
    assert all(grads["mix"] is not None for grads in result.grads)


def test_nothing_is_left_behind() -> None:
    """Neither torch's own function nor parameters remember a run."""
    module = make(between=all_of)
    before = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    result = train(module, 2, 1)
    assert torch.autograd.Function.apply.__func__ is before  # type: ignore[attr-defined]
    assert result.module is not None
    (result.module.gain * 2).sum().backward()  # type: ignore[operator]
    assert result.module.gain.grad is not None
