"""Modules inside layers in tiles of tokens: numbers of plain training, less memory, and what mixes tokens is found."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from harness import Result, assert_same, assert_tensors_same, loader, ours, per_call, run, trainer_of
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from zoo.modules import ZooModule
from zoo_runs import expected

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.messages import RoundPipeWarning
from lightning_roundpipe.tiles import tile_check
from lightning_roundpipe.tiles.tile_check import TileVerdict, check
from lightning_roundpipe.tiles.tiled_call import Adding, CallSurroundings, Layout, TiledCall
from lightning_roundpipe.tiles.token_tiles import TokenTiles
from lightning_roundpipe.user_code.thread_state import TorchThreadState


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TokenTiles]:
    """The tiles of the engines that a test starts."""
    found: list[TokenTiles] = []
    real = TokenTiles.__init__

    def init(self: TokenTiles, *args: Any) -> None:
        real(self, *args)
        found.append(self)

    monkeypatch.setattr(TokenTiles, "__init__", init)
    return found


# -- training


@pytest.mark.parametrize(
    ("name", "lora", "modules"),
    [
        ("llama", False, {"input_layernorm", "post_attention_layernorm", "mlp"}),
        pytest.param("llama", True, {"mlp"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, {"input_layernorm", "post_attention_layernorm", "mlp"}, marks=pytest.mark.slow),
        pytest.param("gpt2", False, set(), marks=pytest.mark.slow),
        pytest.param("t5", False, None, marks=pytest.mark.slow),
        pytest.param("vit", False, None, marks=pytest.mark.slow),
    ],
)
def test_tiles_train_as_plain_lightning(
    name: str, lora: bool, modules: set[str] | None, made: list[TokenTiles]
) -> None:
    module = zoo.make_module(name, lora)
    result = run(ours(num_microbatches=3, token_tiles=4), module, zoo.make_batches(name), devices=2)
    assert_same(expected(name, lora, 3), result)
    ran = made[-1].ran
    inside = {part for layer, names in ran.items() if layer.split(".")[-1].isdigit() for part in names}
    assert inside if modules is None else modules <= inside


@pytest.mark.slow
def test_every_plan_gives_the_numbers_of_tiles(made: list[TokenTiles]) -> None:
    module, batches = zoo.make_module("llama"), zoo.make_batches("llama")
    result = run(
        ours(num_microbatches=3, token_tiles=5, plan=per_call(6, 2)), module, batches, devices=2, blocking=True
    )
    assert_same(expected("llama", False, 3), result)


@pytest.mark.slow
def test_a_router_that_reports_its_logits_leaves_the_experts_in_tiles(made: list[TokenTiles]) -> None:
    """Hooks inside the block collect logits for a loss over all tokens, so the block itself stays whole."""
    module = zoo.make_module("qwen3_moe")
    result = run(ours(num_microbatches=3, token_tiles=4), module, zoo.make_batches("qwen3_moe"), devices=2)
    assert_same(expected("qwen3_moe", False, 3), result)
    names = {name for found in made[-1].ran.values() for name in found}
    assert "mlp.experts" in names and "mlp" not in names


@pytest.mark.slow
def test_experts_that_peft_parametrizes_in_the_call_stay_whole(made: list[TokenTiles]) -> None:
    """A tile's backward would run when PEFT has removed the parametrization, without the adapters."""
    module = zoo.make_module("qwen3_moe", lora=True)
    result = run(ours(num_microbatches=3, token_tiles=4), module, zoo.make_batches("qwen3_moe"))
    assert_same(expected("qwen3_moe", True, 3), result)
    assert not any("experts" in name for found in made[-1].ran.values() for name in found)


@pytest.mark.slow
def test_validation_and_tiles(made: list[TokenTiles]) -> None:
    module, batches = zoo.make_module("llama"), zoo.make_batches("llama")
    plain = run("auto", module, batches, val_batches=batches[:1])
    assert_same(plain, run(ours(num_microbatches=3, token_tiles=4), module, batches, val_batches=batches[:1]))


@pytest.mark.slow
def test_tiles_hold_less(made: list[TokenTiles]) -> None:
    batch = {key: value.repeat(1, 8) for key, value in zoo.make_batches("llama", 1)[0].items()}
    peaks = []
    for tile in (None, 16):
        strategy = ours(num_microbatches=3, token_tiles=tile, plan=per_call(6))
        report = run(strategy, zoo.make_module("llama"), [batch] * 2).report
        assert report is not None
        peaks.append(report["peak_device_bytes"][0])
    assert peaks[1] < 0.75 * peaks[0]


def _train_within(tiles: Any, memory: int | None) -> Result:
    """Two batches of a sequence of 800 tokens, whose layers take 2 MB of a worker each."""
    batch = {key: value[:1].repeat(2, 80)[:, :800] for key, value in zoo.make_batches("llama", 1)[0].items()}
    strategy = ours(num_microbatches=2, token_tiles=tiles, emulation={"memory": memory})
    return run(strategy, zoo.make_module("llama"), [batch] * 3, devices=2)


@pytest.mark.slow
def test_auto_turns_tiles_on_where_a_call_does_not_fit(made: list[TokenTiles], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_roundpipe.tiles.token_tiles.AUTO_TILE", 64)
    whole = _train_within(None, None)
    with pytest.raises(torch.OutOfMemoryError):
        _train_within(None, 1_700_000)
    roomy, tight = _train_within("auto", 20_000_000), _train_within("auto", 1_700_000)
    assert not made[-2].on and not made[-2].ran and roomy.losses == whole.losses
    assert "mlp" in {name for names in made[-1].ran.values() for name in names}
    assert_same(whole, tight)
    assert roomy.report is not None and tight.report is not None
    kept = [max(call["activation_bytes"] for call in of["costs"]["calls"]) for of in (roomy.report, tight.report)]
    assert kept[1] < 0.85 * kept[0] and tight.report["planned_device_bytes"] <= 0.9 * 1_700_000


@pytest.mark.slow
def test_auto_turns_tiles_on_where_no_plan_fits(made: list[TokenTiles], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the first batch fits on its own, but not with what waits beside it under a plan."""
    monkeypatch.setattr("lightning_roundpipe.tiles.token_tiles.AUTO_TILE", 64)
    with pytest.raises(DoesNotFit):
        _train_within(None, 2_350_000)
    assert_same(_train_within(None, None), _train_within("auto", 2_350_000))
    assert made[-1].on and made[-1].ran


def test_auto_without_a_limit_runs_nothing_in_tiles(made: list[TokenTiles]) -> None:
    run(ours(num_microbatches=3, token_tiles="auto"), zoo.make_module("llama"), zoo.make_batches("llama", 1))
    assert not made[-1].on and not made[-1].ran


class _Blocks(ZooModule):
    """Layers in which every token depends on those before it, so that nothing can be tiled."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x.cumsum(1)).tanh().sigmoid()

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(self.Block() for _ in range(3))))

    def training_step(self, batch: Tensor) -> Tensor:
        found: Tensor = self.model(batch).pow(2).mean()
        return found


class _Wide(ZooModule):
    """Layers that mix tokens, with wide modules inside that do not."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
            self.mlp = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.gate(x).tanh().cumsum(1) / 10
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(self.Block() for _ in range(3))).double())

    def training_step(self, batch: Tensor) -> Tensor:
        found: Tensor = self.model(batch).pow(2).mean()
        return found

    def validation_step(self, batch: Tensor) -> None:
        self.log("val", self.training_step(batch))


def test_wide_modules_train_as_plain_lightning_in_tiles(made: list[TokenTiles]) -> None:
    """And validate."""
    module, batch = _Wide(), torch.randn(4, 12, 8, dtype=torch.float64)
    plain, ran = (
        run(strategy, module, [batch] * 4, val_batches=[batch], blocking=True)
        for strategy in ("auto", ours(num_microbatches=1, token_tiles=5, plan=per_call(3)))
    )
    assert_same(plain, ran)
    assert set(made[-1].ran) == {"model.0", "model.1", "model.2"}
    assert all({"gate", "mlp"} <= set(names) for names in made[-1].ran.values())


def test_auto_runs_what_does_not_fit_in_tiles(made: list[TokenTiles], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_roundpipe.tiles.token_tiles.AUTO_TILE", 8)
    module, batch = _Wide(), torch.randn(2, 64, 8, dtype=torch.float64)

    def within(tiles: Any, memory: int | None) -> Result:
        return run(ours(num_microbatches=2, token_tiles=tiles, emulation={"memory": memory}), module, [batch] * 2)

    whole = within(None, None)
    with pytest.raises(torch.OutOfMemoryError):
        within(None, 350_000)
    roomy = within("auto", 4_000_000)
    assert not made[-1].on and roomy.losses == whole.losses
    assert_same(whole, within("auto", 350_000))
    assert made[-1].on and any("mlp" in names for names in made[-1].ran.values())


def test_nothing_to_tile_is_a_warning() -> None:
    with pytest.warns(RoundPipeWarning, match="nothing inside layers runs in tiles.*the layer gives something else"):
        trainer_of(ours(num_microbatches=2, token_tiles=4)).fit(_Blocks(), loader([torch.randn(4, 12, 8)]))


# -- comparison


class _Layer(nn.Module):
    """``act`` between two matrices, as a module of its own."""

    def __init__(self, act: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 32), nn.Linear(32, 8), act
        self.register_buffer("count", torch.zeros(()))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self, self.up(x)))


def _mean_over_tokens(self: _Layer, x: Tensor) -> Tensor:
    return x.tanh() - 1e-2 * x.tanh().mean(1, keepdim=True)


def _neighbours(self: _Layer, x: Tensor) -> Tensor:
    return x.tanh() + 0.01 * x.tanh().roll(1, 1)


def _position(self: _Layer, x: Tensor) -> Tensor:
    return x.tanh() + torch.arange(x.shape[1])[:, None] / 100


def _drop(self: _Layer, x: Tensor) -> Tensor:
    return nn.functional.dropout(x.tanh(), 0.1)


def _count(self: _Layer, x: Tensor) -> Tensor:
    self.count += 1
    return x.tanh()


def _remember(self: _Layer, x: Tensor) -> Tensor:
    self.seen = x.shape[1]
    return x.tanh()


def _capacity(self: _Layer, x: Tensor) -> Tensor:
    """Only the first half of those that choose an expert get it, as in routers with a capacity."""
    chosen = x[..., 0] > 0
    return x.tanh() * (chosen & (chosen.cumsum(1) <= x.shape[1] // 4))[..., None]


class _MeanLoss(torch.autograd.Function):
    """A router's loss that is added in the backward: the mean over the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + x / x.shape[1]


def _loss(self: _Layer, x: Tensor) -> Tensor:
    found: Tensor = _MeanLoss.apply(x.tanh())  # type: ignore[no-untyped-call]
    return found


_OUTSIDE = nn.Parameter(torch.ones(32))


def _outside(self: _Layer, x: Tensor) -> Tensor:
    return x.tanh() * _OUTSIDE


def _verdict(act: Callable[..., Tensor], x: Tensor | None = None) -> TileVerdict:
    x = torch.randn(2, 30, 8) if x is None else x
    module, layout = _Layer(act), Layout.of([x])
    assert layout is not None
    return check(module, lambda tensors: module(*tensors), [x], layout, grad=True)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (_mean_over_tokens, "some of the tokens"),
        (_neighbours, "some of the tokens"),
        (_position, "some of the tokens"),
        (_drop, "draws random numbers"),
        (_count, "writes to"),
        (_remember, "sets attribute 'seen'"),
        (_capacity, "some of the tokens"),
        (_loss, "other gradients"),
        (_outside, "not its own"),
    ],
)
def test_what_couples_tokens_is_found(act: Callable[..., Tensor], why: str) -> None:
    assert why in _verdict(act).why_not


class _Returns(nn.Module):
    """What ``made`` makes of the tokens, and of a matrix."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.made = nn.Parameter(torch.randn(8, 64)), made

    def forward(self, x: Tensor) -> Any:
        return self.made(x, self.weight)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda x, w: (x @ w).sum(), r"returns a tensor of shape \(\)"),
        (lambda x, w: (x @ w).mean((0, 1)), r"returns a tensor of shape \(64,\)"),
        (lambda x, w: (x @ w, {1, 2}), "returns a set"),
        (lambda x, w: None, "returns no tensor"),
        (lambda x, w: (x @ w).detach(), "has no gradients"),
        (lambda x, w: x * w[:, 0], "keeps little for its backward"),
        (lambda x, w: (x @ w).tanh() if x.shape[1] > 20 else x.tanh() @ w.detach(), "some of the tokens"),
        (lambda x, w: x.tanh() @ (w if x.shape[1] > 20 else w.detach()), "has gradients on some of the tokens only"),
        (lambda x, w: (x @ w).argsort(1), "some of the tokens"),
        (lambda x, w: (x @ w, *[x] * (x.shape[1] > 20)), "some of the tokens"),
        (lambda x, w: (x @ w).float() if x.shape[1] > 20 else (x @ w).half(), "some of the tokens"),
        (lambda x, w: (x @ w)[:, torch.arange(x.shape[1]) + 30 - x.shape[1]], r"fails on some .* \(IndexError: index"),
    ],
)
def test_what_cannot_run_in_tiles_is_said(made: Callable[[Tensor, Tensor], Any], why: str) -> None:
    x = torch.randn(1, 30, 8)
    module, layout = _Returns(made), Layout.of([x])
    assert layout is not None
    assert re.search(why, check(module, lambda tensors: module(*tensors), [x], layout, grad=True).why_not)


def test_memory_that_is_short_in_the_comparison_is_no_verdict() -> None:
    def fails(x: Tensor, weight: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("of the device")

    x = torch.randn(1, 30, 8)
    layout = Layout.of([x])
    assert layout is not None
    with pytest.raises(torch.OutOfMemoryError, match="of the device"):
        check(_Returns(fails), lambda tensors: _Returns(fails)(*tensors), [x], layout, grad=True)


def test_what_acts_on_each_token_passes() -> None:
    verdict = _verdict(lambda self, x: x.tanh())
    assert verdict == TileVerdict("", (True,))


def test_dropout_that_begins_later_is_an_error() -> None:
    with tile_check.refuse_random(), pytest.raises(RoundPipeError, match="token_tiles=None"):
        nn.functional.dropout(torch.ones(4), 0.5)
    with tile_check.refuse_random():
        nn.functional.dropout(torch.ones(4), 0.0)


# -- tiles


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [1, 5, 16, 33])
@pytest.mark.parametrize("tile", [1, 4, 16, 40])
def test_tiles_cover_each_token_once_and_in_order(rows: int, columns: int, tile: int) -> None:
    spans = Layout(rows, columns, True).spans(tile)
    places = torch.arange(rows * columns).view(rows, columns)
    for span in spans:
        assert torch.equal(places[span.rows, span.columns].flatten(), places.flatten()[span.flat])
        assert span.flat.stop - span.flat.start <= max(tile, 1)
    assert torch.equal(torch.cat([places.flatten()[span.flat] for span in spans]), places.flatten())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("adding", [False, True])
def test_gradients_of_tiles_are_those_of_the_whole(dtype: torch.dtype, adding: bool) -> None:
    """16-bit gradients are summed in fp32: 64 tiles differ from the whole by no more than two do."""
    whole = _Layer(lambda self, x: x.tanh()).to(dtype)
    x = torch.randn(2, 64, 8, dtype=dtype)
    slope = torch.randn(2, 64, 8, dtype=dtype)
    results = []
    for tile in (None, 2):
        module, given = copy.deepcopy(whole), x.clone().requires_grad_()
        out = module(given) if tile is None else _tiled(module, given, tile, adding=adding)
        out.backward(slope)
        results.append([out, given.grad, *(p.grad for p in module.parameters())])
    tolerance = 1e-12 if dtype is torch.float64 else 1e-2
    for one, other in zip(*results, strict=True):
        assert_tensors_same(one, other, rtol=tolerance)


def _tiled(module: _Layer, x: Tensor, tile: int, *, adding: bool) -> Tensor:
    around = CallSurroundings(
        TorchThreadState.capture(("cpu",)), contextvars.copy_context(), contextlib.nullcontext, lambda tensors: None,
        contextlib.nullcontext, Adding(adding),
    )  # fmt: skip
    layout = Layout.of([x])
    assert layout is not None
    _, spec = tree_flatten(((x,), {}))
    call = TiledCall(
        module.forward, spec, [None], [0], [True], layout, tile, list(module.parameters()), around, None, ()
    )
    found: Tensor = call.run([x])
    return found


# -- settings


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", True])
def test_settings_are_checked(value: Any) -> None:
    with pytest.raises(ValueError, match="token_tiles="):
        RoundPipeStrategy(token_tiles=value)


def test_compiled_layers_have_no_tiles() -> None:
    with pytest.raises(ValueError, match="compile_layers"):
        RoundPipeStrategy(token_tiles=512, compile_layers=True)


# -- precision


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_tiles_in_low_precision_train_as_without(precision: str, made: list[TokenTiles]) -> None:
    """As near to each other as bf16 rounds."""
    module, batches = zoo.make_module("llama"), zoo.make_batches("llama", 2)
    whole, tiled = (
        run(ours(num_microbatches=3, token_tiles=tile), module, batches, precision=precision) for tile in (None, 4)
    )
    assert "mlp" in {name for names in made[-1].ran.values() for name in names}
    _assert_alike(whole, tiled)


def _assert_alike(whole: Result, tiled: Result) -> None:
    for one, other in zip(whole.losses, tiled.losses, strict=True):
        assert float(other) == pytest.approx(float(one), rel=4e-3)
    for one, other in zip(whole.grads, tiled.grads, strict=True):
        largest = max(float(g.abs().max()) for g in one.values() if g is not None)
        for name, grad in one.items():
            if grad is not None:
                found = other[name]
                assert found is not None
                torch.testing.assert_close(found.float(), grad.float(), rtol=0, atol=0.02 * largest, msg=name)
