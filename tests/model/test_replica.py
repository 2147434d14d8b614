"""A layer's copy on a worker: new where it must be, the user's own objects everywhere else; and its attributes."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_same, ours, run
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.model.attributes import ModuleState
from lightning_roundpipe.model.replica import Replica, parameter_places, unique_parameters
from lightning_roundpipe.user_code.interception import Interceptor

CPU = torch.device("cpu")


def scaled(module: nn.Module, x: Tensor, factor: float = 1.0) -> Tensor:
    return module(x) * factor


class Odd(nn.Module):
    """Holds its own parts in all the ways that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.config = {"shared": object(), "list": [1, 2]}
        self.tokenizer = object()
        self.method = self.helper
        self.step = functools.partial(scaled, self.inner, factor=3.0)
        self.keyword = functools.partial(scaled, module=self.inner)
        self.parts = [self.inner, "text", (self.other,)]
        self.kinds = {self.inner}
        self.table = {"a": self.inner, "b": [self.other]}
        self.weights = [self.inner.weight]

    def helper(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.method(x) + self.step(x)


@pytest.fixture
def layer() -> Odd:
    return Odd()


def reached_from_outside(copy: Replica, value: Any) -> bool:
    """Whether something of the original can be reached from ``value``."""
    originals = {id(m) for m in copy.originals} | {id(p) for m in copy.originals for p in m._parameters.values()}
    if isinstance(value, dict):
        return any(reached_from_outside(copy, v) for v in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(reached_from_outside(copy, v) for v in value)
    if isinstance(value, functools.partial):
        return reached_from_outside(copy, [value.func, *value.args, *value.keywords.values()])
    return id(getattr(value, "__self__", value)) in originals


# ------------------------------------------------------------------------------------------------------------- the copy


def test_what_refers_to_the_layer_refers_to_the_copy(layer: Odd) -> None:
    """Otherwise the worker would compute with the masters, on the host, and their gradients would be lost."""
    copy = Replica(layer, CPU)
    inside: Any = copy.module
    assert type(inside) is Odd and inside is not layer and inside.inner is not layer.inner
    assert inside.method.__self__ is inside and inside.method.__func__ is Odd.helper
    assert inside.step.args == (inside.inner,) and inside.step.keywords == {"factor": 3.0}
    assert inside.keyword.keywords == {"module": inside.inner}
    assert inside.parts == [inside.inner, "text", (inside.other,)]
    assert inside.kinds == {inside.inner} and inside.table == {"a": inside.inner, "b": [inside.other]}
    assert inside.weights[0] is copy.parameters[0]
    for name, value in inside.__dict__.items():
        assert name == "_buffers" or not reached_from_outside(copy, value), name


@pytest.mark.parametrize("rounded", [(), (0, 1, 2, 3)])
def test_unbinding_gives_memory_back_at_once(layer: Odd, rounded: tuple[int, ...]) -> None:
    """This copy holds a method of its own, so it would hold its memory until Python looks for such circles."""
    gc.disable()
    try:
        copied = Replica(layer, CPU, rounded=rounded)
        kept = torch.bfloat16 if rounded else torch.float32
        views = [torch.ones_like(p, dtype=kept) for p in layer.parameters()]
        memory = [StorageWeakRef(view.untyped_storage()) for view in views]
        whole = [torch.ones_like(p) for p in layer.parameters()]
        copied.bind(views, [True] * len(views), whole.__getitem__)
        copied.module(torch.ones(1, 2)).sum().backward()
        del views
        memory += [StorageWeakRef(p.grad.untyped_storage()) for p in copied.parameters if p.grad is not None]
        assert len(memory) > len(whole)
        assert not any(reference.expired() for reference in memory)
        copied.unbind()
        del copied
        assert all(reference.expired() for reference in memory)
    finally:
        gc.enable()


def test_nothing_is_copied_that_need_not_be(layer: Odd) -> None:
    """Configurations and tokenizers are large, and what user code changes in them must be seen."""
    inside: Any = Replica(layer, CPU).module
    assert inside.config["shared"] is layer.config["shared"] and inside.tokenizer is layer.tokenizer
    llama = zoo.ENTRIES["llama"].build()
    block: Any = Replica(llama.model.layers[0], CPU).module
    assert block.self_attn.config is llama.config


def test_the_original_is_left_alone(layer: Odd) -> None:
    before = [dict(m.__dict__) for m in layer.modules()]
    pointers = [p.data_ptr() for p in layer.parameters()]
    copy = Replica(layer, CPU)
    copy.bind([torch.zeros_like(p) for p in copy_of_shapes(layer)], [True] * 4)
    copy.module.train(False)
    assert [dict(m.__dict__) for m in layer.modules()] == before
    assert [p.data_ptr() for p in layer.parameters()] == pointers


def copy_of_shapes(layer: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in unique_parameters(layer)]


def test_parameters_become_views(layer: Odd) -> None:
    """The copy computes with what lies in the arena, and with what it holds later, without being bound again."""
    copy = Replica(layer, CPU)
    arena = torch.full((24,), 2.0)
    views = [arena[0:4].view(2, 2), arena[4:6], arena[6:10].view(2, 2), arena[10:12]]
    copy.bind(views, [True, False, True, True])
    assert [p.requires_grad for p in copy.parameters] == [True, False, True, True]
    assert [p.data_ptr() for p in copy.module.parameters()] == [v.data_ptr() for v in views]
    x = torch.ones(1, 2)
    assert copy.module(x).tolist() == [[24.0, 24.0]]  # (1 + 3) (2 + 2 + 2)
    arena.fill_(1.0)
    assert copy.module(x).tolist() == [[12.0, 12.0]]
    copy.module(x).sum().backward()
    assert copy.parameters[0].grad is not None and copy.parameters[1].grad is None
    assert layer.inner.weight.grad is None


def test_a_tied_parameter_is_one_in_the_copy() -> None:
    """Two would each get half of the gradient."""
    layer = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    layer[1].weight = layer[0].weight
    assert len(unique_parameters(layer)) == 1 and len(list(parameter_places(layer))) == 2
    copy = Replica(layer, CPU)
    assert copy.module[0].weight is copy.module[1].weight is copy.parameters[0]  # type: ignore[index]


def test_recurrent_layers_keep_lists_of_their_parameters() -> None:
    layer = nn.LSTM(3, 3)
    copy = Replica(layer, CPU)
    copy.bind(copy_of_shapes(layer), [True] * 4)
    x = torch.ones(2, 1, 3)
    assert torch.equal(copy.module(x)[0], layer(x)[0])
    copy.module(x)[0].sum().backward()
    assert all(p.grad is None for p in layer.parameters()) and all(p.grad is not None for p in copy.parameters)


def test_a_patched_forward_comes_along(layer: Odd) -> None:
    def doubled(self: Odd, x: Tensor) -> Tensor:
        return 2 * self.inner(x)

    layer.forward = doubled.__get__(layer)  # type: ignore[method-assign]
    copy = Replica(layer, CPU)
    copy.bind([torch.ones_like(p) for p in copy_of_shapes(layer)], [True] * 4)
    assert copy.module(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]


def test_other_kinds_of_parameters_are_refused(layer: Odd) -> None:
    class Quantized(nn.Parameter):
        pass

    layer.inner.weight = Quantized(torch.ones(2, 2))
    with pytest.raises(RoundPipeError, match=r"type Quantized cannot be moved.*no other quantised weights"):
        Replica(layer, CPU)


# ----------------------------------------------------------------------------------------------------------- attributes


def watched(layer: nn.Module) -> tuple[Replica, ModuleState]:
    return Replica(layer, CPU), ModuleState("the layer", layer)


def test_nothing_changed_is_nothing(layer: Odd) -> None:
    _, state = watched(layer)
    assert state.current() is None
    interceptor = Interceptor(cast(HostLayer, SimpleNamespace(module=layer, name="the layer")))
    interceptor.install(None)
    assert state.current() is None
    interceptor.remove()
    layer.forward = lambda x: x  # type: ignore[method-assign]  # user code, between steps
    assert state.current() is not None


def test_modes_hold_for_a_call_and_again_for_its_recomputation(layer: Odd) -> None:
    """``train()`` and ``eval()`` between two calls; a recomputation may come long after the flag was flipped back."""
    copy, state = watched(layer)
    layer.eval()
    then = state.current()
    assert then is not None and state.current() is then, "unchanged state must stay one object: it is compared so"
    layer.train()
    layer.other.eval()
    now = state.current()
    copy.apply(now)
    assert copy.module.training and not copy.module.other.training
    copy.apply(then)
    assert not any(m.training for m in copy.modules)
    copy.apply(None)
    assert all(m.training for m in copy.modules)


def test_attributes_set_and_removed(layer: Odd) -> None:
    layer.inner.was = "there"
    copy, state = watched(layer)
    layer.inner.flag = [layer.other]  # translated: the copy must not get hold of the original
    del layer.inner.was
    copy.apply(state.current())
    assert copy.module.inner.flag == [copy.module.other] and not hasattr(copy.module.inner, "was")
    del layer.inner.flag
    layer.inner.was = "back"
    copy.apply(state.current())
    assert not hasattr(copy.module.inner, "flag") and copy.module.inner.was == "back"


def test_tensors_are_carried(layer: Odd) -> None:
    """``self.skip = h`` on a module inside a layer: it travels with the call, so that its gradient has a way out."""
    _, state = watched(layer)
    layer.inner.skip = skip = torch.ones(2, requires_grad=True)
    then = state.current()
    assert then is not None and then.carried == {(1, "skip"): skip}
    layer.inner.skip = [skip]  # type: ignore[assignment]
    now = state.current()
    assert now is not None and now.carried[1, "skip"] == [skip]


def test_what_a_list_holds_is_compared(layer: Odd) -> None:
    _, state = watched(layer)
    layer.parts.append("more")
    diff = state.current()
    assert diff is not None and diff.changed[0][0]["parts"] == layer.parts
    layer.parts.pop()
    assert state.current() is None
    layer.inner.register_forward_hook(lambda *_: None)
    assert state.current() is not None


def test_disabled_adapters_are_seen_and_applied() -> None:
    """PEFT's reference pass: what is flipped lies deep inside the block, and in containers that are replaced."""
    model: Any = zoo.make_module("llama", lora=True).model
    block = model.base_model.model.model.layers[0]
    copy, state = watched(block)
    copy.bind(copy_of_shapes(block), [p.requires_grad for p in unique_parameters(block)])
    projection, original = copy.module.mlp.up_proj, block.mlp.up_proj
    x = torch.randn(2, zoo.WIDTH)
    adapted = original(x)
    with model.disable_adapter():
        without, plain = state.current(), original(x)
        assert without is not None
    after = state.current()
    assert not torch.equal(adapted, plain)
    copy.apply(without)
    assert torch.equal(projection(x), plain)
    copy.apply(after)
    assert torch.equal(projection(x), adapted)


# ------------------------------------------------------------------------------------------------------ as in training


class Branches(NamedTuple):
    first: nn.Module
    second: nn.Module


class Holding(nn.Module):
    """A block that reaches its own parts in a way that a copy has to follow."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.other = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.paths: Any = {
            "list": [self.inner, self.other],
            "bound method": (self.twice,),
            "partial": (functools.partial(scaled, self.inner, factor=0.5),),
            "ordered dict": OrderedDict(first=self.inner, second=self.other),
            "named tuple": Branches(self.inner, self.other),
            "lambda": (lambda x: self.twice(x),),
            "inner hook": (self.inner,),
        }[kind]
        if kind == "inner hook":
            self.inner.register_forward_hook(lambda _, args, output: output * torch.tanh(self.other.weight).sum(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Holding:
        copy = Holding(self.kind)  # a lambda's deep copy would refer to this module still
        copy.load_state_dict(self.state_dict())
        return copy

    def twice(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + self.other(x)

    def forward(self, x: Tensor) -> Tensor:
        paths = self.paths.values() if isinstance(self.paths, dict) else self.paths
        for path in paths:
            x = x + torch.tanh(path(x))
        return x


class HoldingNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.block = Holding(kind)
        self.head = nn.Linear(zoo.WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


def assert_as_plain(model: nn.Module, callback: type[pl.Callback] = pl.Callback, window: int = 1) -> None:
    batches = zoo.make_batches("mlp")
    module = zoo.PlainClassifier(model)
    options: Any = {"callbacks": [callback()], "accumulate_grad_batches": window}
    layers = [kind for kind in ("Holding", "Keeping", "ResidualBlock", "Linear") if _has(model, kind)]
    plain = run("auto", module, batches, **options)
    assert_same(plain, run(ours(layers=layers), module, batches, devices=2, **options))


def _has(model: nn.Module, kind: str) -> bool:
    return any(type(m).__name__ == kind for m in model.modules())


@pytest.mark.parametrize(
    "kind", ["list", "bound method", "partial", "ordered dict", "named tuple", "lambda", "inner hook"]
)
def test_however_a_layer_holds_its_parts(kind: str) -> None:
    assert_as_plain(HoldingNet(kind), window=2)


class NewParameter(pl.Callback):
    """What ``load_state_dict(assign=True)`` does, too."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        stem = pl_module.model.stem
        stem.weight = nn.Parameter(stem.weight.detach() * 2)


class NewModule(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        block = pl_module.model.blocks[1]
        block.up = copy.deepcopy(block.up)
        with torch.no_grad():
            block.up.weight.mul_(2)


@pytest.mark.parametrize("callback", [NewParameter, NewModule])
def test_a_layer_that_was_changed_in_training(callback: type[pl.Callback]) -> None:
    """The workers would go on computing with what is no longer there."""
    assert_as_plain(zoo.MLP(), callback)


class Called(nn.Module):
    """Calls a layer with other weights than its own: hypernetworks, meta-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.head = nn.Linear(zoo.WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        weights = {"weight": self.head.weight * self.gain, "bias": self.head.bias}
        return self.head(h) + torch.func.functional_call(self.head, weights, (h,))


def test_a_layer_called_with_other_weights() -> None:
    module = zoo.PlainClassifier(Called())
    with pytest.raises(RoundPipeError, match="with other weights than its own"):
        run(ours(layers=["Linear"]), module, zoo.make_batches("mlp"))


class Collecting(nn.Module):
    """Keeps something in a container of its own, as mixtures of experts do with their auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.block = Keeping()
        self.head = nn.Linear(zoo.WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.stem(x))
        return self.head(h * (1 + self.block.kept["penalty"]))


class Keeping(zoo.ResidualBlock):
    def __init__(self) -> None:
        super().__init__(zoo.WIDTH)
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept["penalty"] = y.square().mean(1, keepdim=True)
        return y


def test_a_tensor_left_in_a_dict_of_the_layer() -> None:
    assert_as_plain(Collecting(), window=2)


def test_a_copy_is_made_while_other_threads_set_attributes() -> None:
    """As user code does, on the thread of a microbatch, while a worker opens its first slot."""
    layer: Any = nn.Linear(2, 2)
    for number in range(200):
        setattr(layer, f"setting_{number}", number)
    over = threading.Event()

    def set_attributes() -> None:
        while not over.is_set():
            for number in range(100):
                setattr(layer, f"late_{number}", number)
            for number in range(100):
                delattr(layer, f"late_{number}")

    before = sys.getswitchinterval()
    thread = threading.Thread(target=set_attributes)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(200):
            replica = Replica(layer, CPU, ModuleState("Linear", layer))
            assert vars(replica.module)["setting_199"] == 199
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()
