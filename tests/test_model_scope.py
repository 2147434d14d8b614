"""``microbatch_scope="model"``: training_step runs once, on the whole batch, and the calls of the model are cut.

The losses here need all samples at once, so that running training_step on each microbatch would train something else.
"""

from __future__ import annotations

import copy
import re
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import faulty
import harness
import lightning.pytorch as pl
import numpy as np
import pytest
import stress
import torch
import torch.nn.functional as F
import torchmetrics
import zoo
from faulty import SAMPLES, Boom, fail, notes
from harness import assert_identical, assert_same, ours, run
from ordering import Ordering
from peft import LoraConfig, get_peft_model
from stress import CALLS
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.modes.model_tasks import PartRun

SIZES = (8, 7, 1, 8)
LAYERS = ["Block"]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))  # type: ignore[no-any-return]


class Tower(nn.Module):
    """Returns features in a dict, with a constant beside them."""

    def __init__(self, inputs: int, width: int, blocks: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.dropout = dropout

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Any]:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 3)
        h = F.dropout(self.stem(x), self.dropout, self.training)
        for block in self.blocks:
            h = block(h)
        h = h if shift is None else h + shift
        return {"features": self.head(h), "scale": self.scale.exp(), "width": h.shape[-1]}


def contrast(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits = scale * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class TwoTowers(pl.LightningModule):
    """Pictures and texts, each other's negatives in the batch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image, self.text = Tower(6, 16, 3, dropout), Tower(5, 12, 2, dropout)
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        image, text = self.image(batch["image"]), self.text(batch["text"])
        loss = contrast(image["features"], text["features"], image["scale"] + text["scale"])
        self.log("loss", loss)
        self.log("samples", float(len(batch["image"])), reduce_fx="sum", on_step=True, on_epoch=True)
        self.seen(len(batch["image"]))
        self.log("seen", self.seen, on_step=True, on_epoch=True)
        return {"loss": loss, "features": text["features"]}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


class Chained(TwoTowers):
    """The second model takes what the first one gave, and a tensor of training_step's own that all samples share.

    The first one is called twice; once more without gradients, as a teacher.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(6, 16, 2), Tower(8, 12, 2)
        self.shift = nn.Parameter(torch.zeros(12))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        one = self.image(batch["image"])["features"]
        two = self.image(batch["image"].flip(1))["features"]
        with torch.no_grad():
            teacher = self.image(batch["image"] * 2)["features"]
        one = one + one.mean(0)
        two.register_hook(lambda grad: grad * 2)
        mixed = self.text(one * two, shift=self.shift * 3)
        loss = contrast(mixed["features"], two, mixed["scale"]) + (mixed["features"] - teacher).square().mean()
        self.log("loss", loss)
        return loss


def batches(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"image": torch.randn(n, 6, generator=generator), "text": torch.randn(n, 5, generator=generator)} for n in sizes
    ]


def made(kind: Any, *args: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return kind(*args)


def trained(module: pl.LightningModule, *, devices: int = 2, num_microbatches: int | None = 3, **options: Any) -> Any:
    strategy = {name: options.pop(name) for name in ("staleness", "plan", "round_microbatches") if name in options}
    chosen = ours(microbatch_scope="model", num_microbatches=num_microbatches, layers=LAYERS, **strategy)
    return run(chosen, module, options.pop("data", None) or batches(), devices=devices, **options)


# ---------------------------------------------------------------------------------------------------- equal to plain


@pytest.mark.parametrize("kind", [TwoTowers, Chained])
def test_it_is_found_by_itself(kind: Any) -> None:
    """Hooks that training_step sets on what a model gave run once, on the whole batch."""
    expected = run("auto", made(kind), batches())
    result = run(ours(num_microbatches=3, layers=LAYERS), made(kind), batches(), devices=2)
    assert_same(expected, result)


@pytest.mark.parametrize(
    ("kind", "devices", "microbatches"),
    [
        (TwoTowers, 2, 3),
        (Chained, 2, 3),
        pytest.param(TwoTowers, 1, 1, marks=pytest.mark.slow),
        pytest.param(TwoTowers, 1, 4, marks=pytest.mark.slow),
        pytest.param(TwoTowers, 3, 8, marks=pytest.mark.slow),
        pytest.param(Chained, 1, 1, marks=pytest.mark.slow),
        pytest.param(Chained, 3, 2, marks=pytest.mark.slow),
    ],
)
def test_equals_plain(kind: Any, devices: int, microbatches: int) -> None:
    module = made(kind)
    result = trained(module, devices=devices, num_microbatches=microbatches)
    assert_same(run("auto", module, batches()), result, outputs=True)
    if microbatches > 1:
        assert {slot["phase"] for slot in result.report["slots"]} == {"forward", "backward"}
        assert not result.report["profiled"] and result.report["microbatches"] == microbatches


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{"blocking": True}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}])
def test_with_what_trainers_do(options: dict[str, Any]) -> None:
    module = made(TwoTowers)
    plain = {name: value for name, value in options.items() if name != "blocking"}
    assert_same(run("auto", module, batches(), **plain), trained(module, **options))


def test_backward_goes_on_behind_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one step late, a step computes with the weights before the last update, as with one microbatch."""
    module = made(TwoTowers)
    overlapped = []
    real = PartRun.back
    monkeypatch.setattr(
        PartRun, "back", lambda self, *a: (overlapped.append(self._step.spec.overlaps), real(self, *a))[1]
    )
    late = run(ours(num_microbatches=1, layers=LAYERS, staleness=1), module, batches())
    assert_same(late, trained(module, staleness=1))
    assert any(overlapped)


def test_dropout_is_the_same_for_any_workers_rounds_and_plan() -> None:
    module, data = made(TwoTowers, 0.3), batches((8, 7, 8))
    one = trained(module, data=data, devices=1)
    calls = harness.call_count(one.report["plan"])
    assert_identical(one, trained(module, data=data, devices=3, plan=harness.per_call(calls, 2)), rng=True)
    module.eval().log = lambda *args, **kwargs: None
    assert float((one.losses[0] - module.training_step(data[0], 0)["loss"]).abs()) > 1e-3, "nothing was dropped"


def test_each_call_draws_numbers_of_its_own() -> None:
    """Between layers too: a model that is called twice with the same samples gives two views of them."""
    found = []

    class Views(TwoTowers):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
            views = [self.image(batch["image"])["features"] for _ in range(2)]
            found.append([view.detach().clone() for view in views])
            return contrast(*views, torch.tensor(2.0))

    for width in (0, 3):  # without blocks, only code between layers draws
        module = made(Views, 0.5)
        module.image = made(Tower, 6, 16, width, 0.5)
        trained(module, data=batches((8, 8)))
    for one, two in found:
        assert bool((one != two).any(1).all()), "the same masks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "devices", "microbatches", "options"),
    [
        (harness.per_call(CALLS, 2), 2, 4, {}),
        pytest.param("forward 0-4; fused 5; backward 3-4 0-2; round 1", 3, 3, {}, marks=pytest.mark.slow),
        pytest.param(harness.single(CALLS, 3), 2, 3, {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(harness.halves(CALLS, 4), 3, 4, {"drops": False}, marks=pytest.mark.slow),
        pytest.param(harness.per_call(CALLS, 4), 4, 4, {"blocking": True, "drops": False}, marks=pytest.mark.slow),
        pytest.param(harness.per_call(CALLS, 2), 1, 4, {"skips": (2, 1)}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(120)
def test_hard_devices_change_no_bit(plan: str, devices: int, microbatches: int, options: dict[str, Any]) -> None:
    """Random delays, poison, and every access to memory ordered by events."""
    case = stress.Case(plan, devices, microbatches, (8, 7, 8), **options)
    kind = replace(case, plan=harness.single(CALLS, microbatches), devices=1, emulation={})
    expected = stress.train(kind, microbatch_scope="model")
    with Ordering() as ordering:
        hard = stress.train(case, microbatch_scope="model")
    assert ordering.accesses > 100, "nothing was followed"
    assert_identical(expected.result, hard.result, rng=True)
    assert not ordering.faults and not hard.user_code.faults


class HuggingFaceLoss(pl.LightningModule):
    """Means over the whole batch of what a Hugging Face model gives."""

    def __init__(self, name: str, *, lora: bool = False) -> None:
        super().__init__()
        self.model = zoo.make_module(name).model
        if lora:
            self.model = get_peft_model(
                self.model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["labels"]
        given = {name: value for name, value in batch.items() if name != "labels"}
        if self.model.config.is_encoder_decoder:
            given["decoder_input_ids"] = labels.clamp(min=0)
        logits = self.model(**given).logits
        if logits.dim() == 3:
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "lora"), [("bert", False), ("llama", False), ("llama", True), ("t5", False)])
def test_hugging_face_models(name: str, lora: bool) -> None:
    module = made(HuggingFaceLoss, name) if not lora else made(lambda: HuggingFaceLoss(name, lora=True))
    data = zoo.make_batches(name)
    result = run(ours(microbatch_scope="model", num_microbatches=2), module, data, devices=2)
    assert_same(run("auto", module, data), result)


class Normed(pl.LightningModule):
    """Batch norm over each part; ``parts`` makes plain training do the same."""

    parts = 1

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), Block(16), nn.BatchNorm1d(16), Block(16))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        views = [batch["image"], batch["image"].flip(1)]
        one, two = (torch.cat([self.model(part) for part in view.tensor_split(self.parts)]) for view in views)
        return contrast(one, two, torch.tensor(3.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_batch_norm_is_that_of_the_parts() -> None:
    module = made(Normed)
    data = batches((8, 8, 8))
    result = run(ours(microbatch_scope="model", num_microbatches=2), module, data, devices=2)
    module.parts = 2
    assert_same(run("auto", module, data), result)


# -------------------------------------------------------------------------------------------------- the model's calls


class Counting(pl.LightningModule):
    """Its own forward is the model, which writes down which samples come, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.came = nn.Linear(6, 16), Block(16), []

    def forward(self, x: Tensor) -> Tensor:
        self.came.append(int(x[0, 0]))
        self.log("mean", x.mean(), on_step=True, on_epoch=True)
        return self.block(self.stem(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return contrast(self(batch), batch @ batch.T, torch.tensor(2.0)) if len(batch) == 16 else self(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_parts_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PartRun._enter_user_code

    def late(self: PartRun) -> None:
        if self.reached == 0:
            time.sleep(0.3 - 0.1 * self.index)
        real(self)

    monkeypatch.setattr(PartRun, "_enter_user_code", late)
    data = [torch.arange(6.0)[:, None].expand(6, 6).clone() for _ in range(3)]
    result = run(ours(microbatch_scope="model", num_microbatches=3, layers=LAYERS), made(Counting), data)
    assert result.module.came == [0, 2, 4] * 3
    assert [line["mean_step"] for _, line in result.logged if "mean_step" in line] == [2.5] * 3


class Similar(nn.Module):
    """Returns a value for each pair of samples, or features."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, features)

    def forward(self, x: Tensor, pairs: bool) -> Tensor:
        h: Tensor = self.head(self.stem(x).tanh())
        return h @ h.T if pairs else h


@pytest.mark.parametrize("both", [False, True], ids=["pairs", "pairs and features"])
def test_what_may_be_pairs_is_said(both: bool) -> None:
    class Pairs(TwoTowers):
        def __init__(self) -> None:
            super().__init__()
            self.similar = Similar()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
            features = self.similar(batch["image"], False).square().mean() if both else 0.0
            similar = self.similar(batch["image"], True)
            return similar[:, :1].square().mean() * 0 + features + self.image(batch["image"])["features"].mean()

    with pytest.warns(RoundPipeWarning, match=r"^roundpipe: .*a value for each pair of samples") as caught:
        run(
            ours(microbatch_scope="model", num_microbatches=2, layers=["Linear"]),
            made(Pairs),
            batches((16, 16)),
            devices=2,
        )
    assert sum("pair of samples" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("scope", ["model", "auto"])
@pytest.mark.parametrize("called", ["model", "layers"])
@pytest.mark.parametrize(("features", "samples"), [(8, 16), (2, 4), (1, 2)])
def test_as_many_features_as_samples_are_no_pairs(features: int, samples: int, called: str, scope: str) -> None:
    class Features(TwoTowers):
        def __init__(self) -> None:
            super().__init__()
            self.similar = Similar(features)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
            similar, x = self.similar, batch["image"]
            h = similar(x, False) if called == "model" else similar.head(similar.stem(x).tanh())
            return (h - h.mean(0)).square().mean() + h.mean()  # type: ignore[no-any-return]

    strategy = ours(microbatch_scope=scope, num_microbatches=2, layers=["Linear"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RoundPipeWarning)
        result = run(strategy, made(Features), batches((samples, samples)), devices=2)
    assert not [warning for warning in caught if "pair of samples" in str(warning.message)]
    assert_same(run("auto", made(Features), batches((samples, samples))), result)


class Odd(nn.Module):
    """Returns, takes or leaves something that cannot be put together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.kept = nn.Linear(6, 16), Block(16), None

    def forward(self, x: Tensor, what: Any) -> Any:
        h = self.block(self.stem(x))
        if what == "number":
            return h, h.mean()
        if what == "columns":
            return h.T
        if what == "texts":
            return h, str(float(x.sum()))
        if what == "structure":
            return [h] * (1 + int(bool((x == x.max()).all())) + int(float(x[0, 0]) > 0))
        if what == "attribute":
            self.kept = h
        if isinstance(what, DynamicCache):
            return what.update(h[:, None, None], h[:, None, None], 0)[0][:, 0, 0]
        if isinstance(what, dict):
            what["h"] = h.detach()
        return h


class OddModule(pl.LightningModule):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.model, self.what = Odd(), what

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        what = self.what
        if what == "object":
            what = SimpleNamespace(h=batch * self.model.stem.weight.mean())
        if what == "dict":
            what = {"x": batch}
        if what == "cache":
            what = DynamicCache()
        output = self.model(batch, what)
        if what == "attribute":
            return self.model.kept.square().mean()  # type: ignore[no-any-return]
        return (
            sum(x.square().mean() for x in output if isinstance(x, Tensor))
            if isinstance(output, tuple)
            else output.mean()
        )  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("number", "returns a number for each part of the batch"),
        ("columns", "returns tensors of the shapes"),
        ("texts", "returns another str for each part"),
        ("structure", "returns something of another structure for each part"),
        ("attribute", "attribute 'kept' of Odd, which the model's forward has set"),
        ("dict", "changes a list, a dict or an object that it is given"),
        ("cache", "is given a key-value cache, which cannot be cut into microbatches.*use_cache=False"),
        ("object", "a list or an object that holds a tensor which requires grad"),
    ],
)
def test_what_cannot_be_put_together_is_refused(what: str, message: str) -> None:
    data = torch.linspace(-1, 1, 30).view(5, 6)
    with pytest.raises(RoundPipeError, match=message) as caught:
        run(ours(microbatch_scope="model", num_microbatches=2, layers=LAYERS), OddModule(what), data)
    assert "whole batch" in notes(caught.value)


class Generous(nn.Module):
    """Returns rows, and what parts cannot give: a value for each pair of samples, columns, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 16), Block(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        rows = self.head(self.block(self.stem(x)))
        return {"loss": rows.square().mean(), "pairs": rows @ rows.T, "more": [rows.T, rows.shape[1]], "rows": rows}


class GenerousModule(pl.LightningModule):
    """Its loss needs the rows of all samples. ``use`` does something with an output."""

    def __init__(self, use: Any = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model, self.use = Generous(), use

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = self.model(batch)
        assert output["loss"] is not None
        rows = F.normalize(output["rows"], dim=1)
        loss = F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))
        returned = self.use(self, output) if self.use is not None else None
        return loss if returned is None else {"loss": loss, "other": returned}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def keeps(module: Any, output: dict[str, Any]) -> None:
    module.latest = output


@pytest.mark.parametrize(("scope", "use"), [("model", None), ("model", keeps), ("auto", None)])
def test_outputs_that_nobody_uses_need_not_be_put_together(scope: str, use: Any) -> None:
    """They ended the training, although the loss is made of others."""
    data = [torch.linspace(-1, 1, 30 + 6 * extra).view(5 + extra, 6) for extra in range(3)]
    options: dict[str, Any] = {"microbatch_scope": scope, "num_microbatches": 2, "layers": LAYERS}
    plain = run("auto", GenerousModule(use), data)
    assert_same(plain, run(ours(**options), GenerousModule(use), data, devices=2), rtol=1e-4)


USES = {
    "computes": lambda module, output: (output["pairs"] + 1).mean(),
    "computes another way": lambda module, output: torch.stack([output["loss"], output["loss"]]),
    "asks for its shape": lambda module, output: output["pairs"].shape[0],
    "reads": lambda module, output: float(output["loss"]),
    "prints": lambda module, output: f"{output['loss']}",
    "logs": lambda module, output: module.log("loss", output["loss"]),
    "logs many": lambda module, output: module.log_dict({"loss": output["loss"]}),
    "returns": lambda module, output: output["more"][0],
    "returns all": lambda module, output: output,
    "detaches": lambda module, output: output["pairs"].detach(),
    "gives it to a layer": lambda module, output: module.model.stem(output["pairs"]),
    "gives it to the model": lambda module, output: module.model(output["pairs"])["rows"],
    "feeds a metric": lambda module, output: torchmetrics.MeanMetric()(output["loss"]),
    "copies": lambda module, output: copy.deepcopy(output),
    "takes numpy's": lambda module, output: np.asarray(output["more"][0].data),
}


@pytest.mark.parametrize("use", USES)
def test_what_cannot_be_put_together_is_refused_where_it_is_used(use: str) -> None:
    data = torch.linspace(-1, 1, 30).view(5, 6)
    options: dict[str, Any] = {"microbatch_scope": "model", "num_microbatches": 2, "layers": LAYERS}
    with pytest.raises(RoundPipeError, match=r"the call of 'model' returns (a number|tensors of the shapes)"):
        run(ours(**options), GenerousModule(USES[use]), data, devices=2)


class Scaled(nn.Module):
    """Takes what is the same for all samples: a parameter, a number computed from parameters, and a tensor of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(6, 16), Block(16)

    def forward(self, x: Tensor, gain: Tensor, factor: Tensor, bias: Tensor) -> Tensor:
        return self.block(self.stem(x) * gain) * factor + bias  # type: ignore[no-any-return]


class ScaledModule(pl.LightningModule):
    """Its loss needs all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.gain, self.scale = Scaled(), nn.Parameter(torch.ones(16)), nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        bias = self.scale * torch.linspace(0, 1, 16)[None].expand(len(batch), -1)
        out = self.model(batch, self.gain, self.scale.exp(), bias)
        return (out - out.mean(0)).square().mean() + out.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("workers", [1, 2])
def test_arguments_that_are_the_same_for_all_samples_get_the_gradients_of_all_parts(workers: int) -> None:
    data = [torch.randn(5, 6) for _ in range(3)]
    module = ScaledModule()
    strategy = ours(microbatch_scope="model", num_microbatches=2, layers=LAYERS)
    assert_same(run("auto", module, data), run(strategy, module, data, devices=workers))


def test_other_calls_than_in_the_first_batches_are_refused() -> None:
    class Turned(TwoTowers):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
            if batch_idx == 1:
                self.text(batch["text"])
            return self.image(batch["image"])["features"].square().mean()

    with pytest.raises(RoundPipeError, match="training_step called 'text' where the first batches did not"):
        trained(made(Turned))


def test_calls_may_be_left_out() -> None:
    class Sometimes(TwoTowers):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
            image = self.image(batch["image"]) if batch_idx % 2 == 0 else None
            loss = self.text(batch["text"])["features"].square().mean()
            return loss if image is None else loss + image["features"].abs().mean()

    module = made(Sometimes)
    assert_same(run("auto", module, batches()), trained(module))


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("where", "sample", "said"),
    [
        pytest.param("loss", None, "the code after .*, forward pass, whole batch,", marks=pytest.mark.slow),
        ("loss backward", None, "the code after .*, backward pass, whole batch,"),
        pytest.param("between 1", 3, "the code after layer .*, forward pass, microbatch 1,", marks=pytest.mark.slow),
        ("block 2", 5, r"layer 'model\.blocks\.2', forward pass, microbatch 2,"),
        pytest.param(
            "block 1 backward", 0, r"layer 'model\.blocks\.1', backward pass, microbatch 0,", marks=pytest.mark.slow
        ),
        pytest.param(
            "training_step", None, "the code before the first layer, forward pass, whole batch,", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize("batch", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_exception_arrives(where: str, sample: int | None, said: str, batch: int) -> None:
    error = fail(batch, where, sample, microbatch_scope="model", again=where == "block 2")
    assert type(error) is Boom
    assert re.search(said, notes(error)), notes(error)


def test_without_a_fault() -> None:
    assert SAMPLES == 6
    faulty.assert_trains(microbatch_scope="model")
