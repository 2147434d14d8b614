"""Traps in weights that are not a layer's own or change in a step, and in modes, flags and threads around layers."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run, seeded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BigBirdConfig, BigBirdForSequenceClassification
from traps import Block, Traps, in_turn, windows

from lightning_roundpipe.config import RoundPipeError

trap = Traps()


# -------------------------------------------------------------------------------------------------------------- weights


def with_weights(self, batch, batch_idx):
    weights = {name: p * 0.5 for name, p in self.model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(self.model, weights, (batch["x"],)), batch["y"])


OTHER = "'weight' was replaced within the step, as torch.func.functional_call does"
trap("functional_call of the whole model", OTHER, training_step=with_weights)(in_turn)


@trap("a parameter replaced in the step", "'weight' was replaced within the step")
def _(net, h):
    net.blocks[0].inner.weight = nn.Parameter(torch.zeros_like(net.blocks[0].inner.weight))
    return in_turn(net, h)


@trap("a module replaced in the step", "a module inside layer 'model.blocks.1' was replaced within the step")
def _(net, h):
    h = net.blocks[0](h)
    net.blocks[1].register_module("inner", None)
    return net.blocks[1](h)


def test_a_model_that_replaces_its_modules_for_short_sequences():
    """It sets attention_type to 'original_full' in its first forward. Where it has that at the start, it trains."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def make(**settings):
        with seeded(0):
            return zoo.modules.Classifier(
                BigBirdForSequenceClassification(BigBirdConfig(**sizes, **off, **settings, vocab_size=96))
            )

    tokens = torch.randint(5, 96, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens[:, 0] % 2}
    with pytest.raises(RoundPipeError, match=r"was replaced.*Or set config.attention_type='original_full' before"):
        run(ours(), make(), batch)
    script = {"batches": batch, "steps": 4, "accumulate_grad_batches": 2}
    plain = run("auto", make(), **script)
    assert_same(plain, run(ours(), make(attention_type="original_full"), devices=2, **script))


WRITTEN = "parameter 'weight' of layer 'model.blocks.1' was written to within the step.*between steps"


@trap("a weight written to in the step", WRITTEN)
def _(net, h):
    with torch.no_grad():
        net.blocks[1].inner.weight.clamp_(-0.1, 0.1)
    return in_turn(net, h)


def sets_its_data(self, x):
    self.inner.weight.data = torch.nn.functional.normalize(self.inner.weight.data, dim=0)
    return Block.forward(self, x)


CALLS = itertools.count()


def writes_later(self, x):
    data = self.inner.weight.data
    if next(CALLS) > 20:  # behind the first window, in which it only reads them
        data.mul_(0.5)
    return Block.forward(self, x)


OWN = "writes to its own parameters while it runs"
trap("a layer sets its weights' data", OWN, forward=sets_its_data)(in_turn)
trap("a layer begins to write to its weights' data", OWN, forward=writes_later)(in_turn)


def give_a_neighbour(self, net):
    net.blocks[1].aux = [net.blocks[0]]


trap(
    "a layer calls another", "'model.blocks.0' was called by code inside layer 'model.blocks.1'",
    forward=lambda self, x: Block.forward(self, x) + (self.aux[0](x) if self.aux else 0), arrange=give_a_neighbour,
)(in_turn)  # fmt: skip
trap(
    "a layer reads another's weights",
    forward=lambda self, x: Block.forward(self, x) + (self.aux[0].inner.weight.sum() if self.aux else 0),
    arrange=give_a_neighbour,
)(in_turn)


def quantise(self, net):
    net.blocks[1].inner.weight = Quantised(net.blocks[1].inner.weight)


class Quantised(nn.Parameter):
    pass


trap("parameters that cannot be moved", "type Quantised cannot be moved.*quantised", arrange=quantise)(in_turn)


# -------------------------------------------------------------------------------------- modes, flags, and other threads


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@trap("a TorchDispatchMode around layers", "under the mode Watching")
def _(net, h):
    with Watching():
        return in_turn(net, h)


@trap("cached parametrizations", r"under torch.nn.utils.parametrize.cached\(\)")
def _(net, h):
    with nn.utils.parametrize.cached():
        return in_turn(net, h)


@trap("another default dtype", "called with another default dtype")
def _(net, h):
    torch.set_default_dtype(torch.float64)
    try:
        return in_turn(net, h)
    finally:
        torch.set_default_dtype(torch.float32)


SCALE, LOCAL = ContextVar("scale", default=1.0), threading.local()


class Scaled(Block):
    """Beside the ``threading.local`` that it reads."""

    def forward(self, x):
        return super().forward(x) * SCALE.get() * getattr(LOCAL, "scale", 1.0)


@contextlib.contextmanager
def variable(value):
    token = SCALE.set(value)
    yield
    SCALE.reset(token)


@contextlib.contextmanager
def of_thread(value):
    LOCAL.scale, LOCAL.kept = value, torch.full((2,), value)  # which does not compare to one truth value
    yield
    del LOCAL.scale, LOCAL.kept


for way, around in {"context variable": variable, "thread-local value": of_thread}.items():

    def within(net, h, around=around):
        with around(1.5 + float(h.detach().mean())):
            return in_turn(net, h)

    def begins(self, around=around):
        self.entered = contextlib.ExitStack()
        self.entered.enter_context(around(1.5))

    trap(f"a {way} around layers", block=Scaled)(within)
    hooks = {"on_train_start": begins, "on_train_end": lambda self: self.entered.close()}
    trap(f"a {way} around training", block=Scaled, **hooks)(in_turn)


def call_and_forget(layer, h):
    with contextlib.suppress(RoundPipeError):
        layer(h)


@pytest.mark.parametrize("swallowed", [False, True])
def test_layers_called_from_another_thread(swallowed):
    """Also if that thread's error is lost: the step must fail, not train without the layer's gradient."""

    def body(net, h):
        if not swallowed:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(net.blocks[0], h).result()
        thread = threading.Thread(target=call_and_forget, args=(net.blocks[0], h))
        thread.start()
        thread.join()
        return h

    traps = Traps()
    traps("thread", "'model.blocks.0' was called from a thread that user code has started")(body)
    traps.check_refused("thread")


def test_autocast_switched_off_in_part():
    """In user code around a layer, and inside a layer: what runs in bfloat16 is the same as in plain training."""
    seen = set()

    class Partly(Block):
        def forward(self, x):
            around = self.other(x).dtype
            with torch.autocast("cpu", enabled=False):
                seen.add((self.aux, around, self.other(x.float()).dtype))
                return Block.forward(self, x.float())

    def arrange(self, net):
        for name, block in net.blocks.named_children():
            block.aux = name

    def body(net, h):
        h = net.blocks[0](h)
        with torch.autocast("cpu", enabled=False):
            h = net.blocks[1](h.float())
        return net.blocks[2](h)

    traps = Traps()
    traps("autocast", block=Partly, arrange=arrange)(body)
    low, full = torch.bfloat16, torch.float32
    for strategy in ("auto", ours(layers=["Partly"])):
        seen.clear()
        run(strategy, traps.build(traps.equal["autocast"]), precision="bf16-mixed", **windows())
        assert seen == {("0", low, full), ("1", full, full), ("2", low, full)}


@pytest.mark.parametrize("name", trap.equal)
def test_equals_plain(name):
    trap.check_equal(name)


@pytest.mark.parametrize("name", trap.refused)
def test_refused(name):
    trap.check_refused(name)
