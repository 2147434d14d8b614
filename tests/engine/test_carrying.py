"""Plans that carry products: the bits of those that recompute them, with what is not computed again."""

import itertools
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_identical, call_count, ours, per_call, run, seeded
from test_quantized import task, trained
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula
from torchao import float8
from traps import WIDTH, Block, Net

from lightning_roundpipe.engine import carrying
from lightning_roundpipe.engine.executor import Executor
from lightning_roundpipe.memory.host_tensor import HostTensor
from lightning_roundpipe.planning.memory import PRODUCTS
from lightning_roundpipe.planning.schedule import Plan

CAREFUL = {"poison": True, "delay_seed": 3}
PLAN = "forward 0 1-2 3; fused 4; backward 3 1-2 0; round 2"
COMPUTED = Counter()
"""How often forwards of products were computed."""
TIMES = itertools.count()


@torch.library.custom_op("roundpipe_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    COMPUTED["product"] += 1
    return x @ weight.t()


@torch.library.custom_op("roundpipe_tests::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    COMPUTED["noisy"] += 1
    mask = torch.rand(len(x), len(weight)) < 0.7
    return x @ weight.t() * mask, mask


def _backward(ctx, grad, *_):
    x, weight, *mask = ctx.saved_tensors
    for each in mask:
        grad = grad * each
    return grad @ weight, grad.t() @ x


for name, operation in {"product": product, "noisy": noisy}.items():
    operation.register_autograd(
        _backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
            *inputs, *(output[1:] if isinstance(output, tuple) else ())
        ),
    )
    register_flop_formula(getattr(torch.ops.roundpipe_tests, name))(lambda x, w, *_, **__: 2 * x[0] * x[1] * w[0])


class Products(Block):
    """Computes with operations that count how often they are called."""

    def forward(self, x):
        made = product(torch.tanh(x), self.inner.weight)
        drawn = noisy(torch.tanh(made), self.other.weight)[0]
        return x + F.dropout(drawn, 0.3, self.training)


class WritesToProducts(Block):
    """By an alias that shares no version with the product, by ``.data``, and through a view."""

    def forward(self, x):
        x = torch.stack([x, x + 1])
        y = F.linear(torch.tanh(x), self.inner.weight)
        y += 1
        z = F.linear(torch.tanh(y), self.other.weight)
        z.data.mul_(2)
        y = F.linear(torch.tanh(z), self.other.weight)
        y[0].sub_(1)
        return torch.tanh(y * z).sum(0)


class ReturnsProducts(Block):
    """One that user code writes to, one that is an attribute."""

    def forward(self, x):
        self.aux = self.inner(x)
        return self.other(torch.tanh(self.aux)).t().contiguous().t()


class Checkpoints(Block):
    def forward(self, x):
        x = checkpoint(lambda h: torch.tanh(self.inner(torch.tanh(h))), x, use_reentrant=False)
        x = checkpoint(lambda h: torch.tanh(self.inner(h)), x, use_reentrant=True)
        return self.other(x)


class Transforms(Block):
    def forward(self, x):
        y = torch.vmap(lambda row: torch.tanh(self.inner.weight @ row))(x)
        return y + self.other(torch.tanh(y))


class Compiled(Block):
    """A part of it."""

    @staticmethod
    @torch.compile(backend="aot_eager")
    def part(x, weight):
        return torch.tanh(x @ weight).sin()

    def forward(self, x):
        return self.other(self.part(self.inner(x), self.inner.weight))


class Differentiates(Block):
    """Within its forward."""

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        (slope,) = torch.autograd.grad(y.square().sum(), y if not y.requires_grad else x, create_graph=True)
        return self.other(y + slope)


class Alternates(Block):
    """Computes one product more each second time, so that recomputations have other ones than their forwards."""

    def forward(self, x):
        if next(TIMES) % 2:
            product(torch.ones(2, 2), torch.ones(2, 2))
        return product(torch.tanh(self.inner(torch.tanh(x))), self.other.weight)


class Float8(Block):
    """Products of tensor subclasses, which return plain tensors."""

    def __init__(self):
        super().__init__()
        config = replace(float8.Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        float8.convert_to_float8_training(self, config=config)

    def forward(self, x):
        return self.other(torch.tanh(self.inner(torch.tanh(x)))) + x


class Many(Block):
    """Products of other kinds: convolution, batches of matrices, integers."""

    def forward(self, x):
        y = F.conv1d(x[:, None], self.inner.weight[:2, None, :3], padding=1)
        y = torch.tanh(y @ y.transpose(1, 2)) @ y
        chosen = (torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 2, dtype=torch.int64)).float().mean()
        return self.other(torch.tanh(y.sum(1) * chosen)) + x


class Network(Net):
    """User code writes to what layers return."""

    def body(self, h):
        for block in self.blocks:
            h += 0.5
            h = block(h)
            h *= 1.5
        return h


def train(block, plan=PLAN, devices=2, **options):
    with seeded(5):
        module = zoo.PlainClassifier(Network(block))
    given = {"num_microbatches": 4, "layers": ["Linear", block.__name__]} | options
    precision = given.pop("precision", None)
    batches = zoo.make_batches("mlp", samples=8)
    return run(ours(plan=plan, **given), module, batches, devices=devices, precision=precision)


BLOCKS = [
    Products, WritesToProducts, ReturnsProducts, Checkpoints, Transforms, Compiled, Differentiates, Alternates, Float8,
    Many,
]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
def test_no_bit_of_any_layer_depends_on_what_is_carried(block):
    assert_identical(train(block), train(block, f"{PLAN}; carry 0-3", emulation=CAREFUL))


def test_a_carried_product_is_computed_once():
    counts = []
    for plan in (PLAN, f"{PLAN}; carry 1 3"):
        COMPUTED.clear()
        train(Products, plan)
        counts.append(COMPUTED.copy())
    steps, microbatches, blocks = 2, 4, 2  # the first of three steps has no plan
    for kind, count in counts[0].items():
        assert count - counts[1][kind] == steps * microbatches * blocks


def test_a_product_with_too_few_flops_is_computed_again():
    """One of 2 x WIDTH elements takes WIDTH / 2 FLOPs for each of its bytes in fp32."""
    plain, counts = train(Products), []
    for least in (WIDTH // 2, WIDTH // 2 + 1):
        COMPUTED.clear()
        assert_identical(plain, train(Products, f"{PLAN}; carry 0-3 from {least}"))
        counts.append(COMPUTED["product"])
    steps, microbatches, blocks = 2, 4, 3
    assert counts[1] - counts[0] == steps * microbatches * blocks


def plans(n, size):
    """Plans of ``n`` calls that carry."""
    fused = n - 2
    whole = f"forward 0-{fused - 1}; fused {fused}-{n - 1}; backward 0-{fused - 1}; round {size}"
    return {
        "each call": f"{per_call(n, size)}; carry 0-{n - 2}",
        "ahead": f"{whole}; recompute ahead; carry 0-{fused - 1}",
        "rounds": f"{per_call(n, 1)}; carry 0-{n - 2}",
        "some": f"{per_call(n, size)}; carry 1 {n - 2}",
    }


CASES = {
    "llama": ("each call", {}),
    "mixture": ("ahead", {"name": "qwen3_moe"}),
    "LoRA": ("rounds", {"lora": True}),
    "dropout": ("each call", {"name": "gpt2", "staleness": 1}),
    "autocast": ("some", {"precision": "bf16-mixed"}),
    "true": ("ahead", {"precision": "bf16-true", "lora": True}),
    "convolution": ("each call", {"name": "resnet"}),
}


@pytest.mark.parametrize(("kind", "case"), CASES.values(), ids=CASES)
def test_no_bit_of_a_model_depends_on_what_is_carried(kind, case):
    options = {"name": "llama", "lora": False, "precision": None} | case
    name, lora, precision = (options.pop(key) for key in ("name", "lora", "precision"))
    module, batches = zoo.make_module(name, lora), zoo.make_batches(name)

    def fit(plan, devices, **careful):
        strategy = ours(num_microbatches=3, plan=plan, **options, **careful)
        return run(strategy, module, batches, devices=devices, precision=precision)

    first = fit(None, 1)
    plan = plans(call_count(first.report["plan"]), 3)[kind]
    for devices in (2, 3):
        found = fit(plan, devices, emulation=CAREFUL)
        assert_identical(first, found)
        assert found.report is not None and Plan.parse(found.report["plan"]).carry


def test_packed_weights():
    module = task()
    assert_identical(
        *(
            trained(module, plan=f"forward 0-1 2; fused 3-6; backward 2 0-1; round 2{end}")
            for end in ("", "; carry 0-2")
        )
    )


def test_no_product_is_left_on_the_host_when_its_backward_is_over():
    alive, most, real = weakref.WeakSet[Any](), 0, carrying.download_parts

    def download_parts(whole, *rest):
        nonlocal most
        alive.add(whole.untyped_storage())
        most = max(most, len(alive))
        return real(whole, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrying, "download_parts", download_parts)
        train(Block, "forward 0-3; fused 4; backward 0-3; round 4; carry 0-3", 1)
    assert not alive and most == 4 * 4  # calls and microbatches of a round


def test_a_call_is_carried_when_all_products_but_the_last_call_s_have_gone(monkeypatch):
    """Plans count so much of a device's memory. Downloads take much longer than calls here."""
    sent, waiting = list[HostTensor](), list[int]()
    real, real_forward = carrying.download_parts, Executor.forward

    def download_parts(*args):
        sent.append(real(*args))
        return sent[-1]

    def forward(self, *args, carries=None, **options):
        if carries is not None:
            waiting.append(sum(each.ready is not None and not each.ready.done() for each in sent))
        return real_forward(self, *args, carries=carries, **options)

    monkeypatch.setattr(carrying, "download_parts", download_parts)
    monkeypatch.setattr(Executor, "forward", forward)
    train(Block, "forward 0-3; fused 4; backward 0-3; round 4; carry 0-3", 1, emulation={"bandwidth": 1e5})
    assert len(waiting) == 2 * 4 * 4 and max(waiting) <= PRODUCTS - 1


def test_compiled_layers_are_recomputed_and_that_is_said(caplog):
    compiled = {"compile_layers": {"backend": "aot_eager"}}
    plain = train(Block, **compiled)
    caplog.clear()
    assert_identical(plain, train(Block, f"{PLAN}; carry 0-2", **compiled))
    assert "plan: 3 calls of carry have nothing that can be carried" in caplog.text


@pytest.mark.parametrize(("block", "nbytes"), [(Products, 4 + 4 + 1), (Float8, 4 + 4)])  # two products, and a mask
def test_what_a_call_s_products_take_is_measured_in_the_first_window(block, nbytes):
    report = train(block, None, carry_products=True).report
    assert report is not None
    for call in report["costs"]["calls"][1:4]:
        assert sum(made[1] for made in call["products"]) == 2 * WIDTH * nbytes  # of two samples
        assert 0 < sum(made[2] for made in call["products"]) < call["forward_s"]
