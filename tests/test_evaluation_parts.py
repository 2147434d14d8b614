"""Evaluation in microbatches: the same as plain Lightning's, on all workers, and never where somebody could tell."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_tensors_same, loader, ours, quiet, roundpipe_threads, trainer_of
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.modes.evaluation_step import EvaluationStep

SIZES = (8, 8, 8, 7, 1, 8)
Ran = list[tuple[bool, set[int]]]
HEARD: list[Tensor] = []
"""What a hook was told."""


class Block(nn.Module):
    def __init__(self, overwrites: bool = False) -> None:
        super().__init__()
        self.linear, self.overwrites = nn.Linear(16, 16), overwrites

    def forward(self, x: Tensor) -> Tensor:
        out = x + torch.tanh(self.linear(x))
        if self.overwrites:
            x.zero_()
        return out


class Net(nn.Module):
    """Does something of ``kind`` that shows how it was cut, or nothing."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.kept, self.owner = kind, None, [None]
        self.stem, self.blocks, self.head = nn.Linear(6, 16), nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 5)
        self.blocks[0].overwrites = kind == "overwrites"
        self.register_buffer("seen", torch.zeros(()))
        self.norm = nn.BatchNorm1d(16, track_running_stats=False)

    def forward(self, x: Tensor) -> Any:
        h = first = self.stem(x)
        for block in self.blocks[::-1] if self.kind == "turns" and len(x) < 8 and bool(x.sum() < 0) else self.blocks:
            if self.kind == "adds":
                h += block(h)
                h.view(-1)[::2].mul_(0.5)
            elif self.kind == "views":
                h = block(h)
                h += 1
            else:
                h = block(h)
        if self.kind == "drops":
            h = F.dropout(h, 0.5)
        elif self.kind == "norms":
            h = self.norm(h)
        elif self.kind == "keeps":
            self.kept = h
        elif self.kind == "counts":
            self.seen += 1
            h = h * self.seen
        elif self.kind == "overwrites":
            h = h + first
        elif self.kind == "logs":
            self.owner[0].log("mean", h.mean())
        elif self.kind == "pairs":
            return h @ h.T
        elif self.kind == "means":
            return {"out": self.head(h), "loss": h.mean()}
        return {"out": self.head(h), "kind": self.kind}


class Module(pl.LightningModule):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.model, self.kind = Net(kind), kind

    def outputs(self, batch: Tensor) -> Tensor:
        self.model.owner[0] = self
        if self.kind == "hooked" and not HEARD:
            self.model.blocks[0].register_forward_hook(lambda m, a, out: HEARD.append(out.mean()))
        out = self.model(batch)
        out = out["out"] if isinstance(out, dict) else out
        if self.kind in ("keeps", "hooked"):
            return out + (self.model.kept if self.kind == "keeps" else HEARD[-1]).mean()
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.outputs(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self.outputs(batch)
        self.log("loss", F.cross_entropy(out, torch.arange(len(out)) % out.shape[1]), on_step=True, on_epoch=True)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("largest", self.outputs(batch).max(), reduce_fx="max")

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.outputs(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def made(kind: str = "") -> Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return Module(kind)


def batches(sizes: tuple[int, ...] = SIZES, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 6, generator=generator) for n in sizes]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """Of each call in parts: whether it is unsplittable, and on which workers it ran."""
    found: Ran = []
    real = EvaluationStep.run_parts

    def run_parts(self: EvaluationStep, *args: Any) -> None:
        real(self, *args)
        found.append((self.unsplittable, {slot.worker for slot in self.slots}))

    monkeypatch.setattr(EvaluationStep, "run_parts", run_parts)
    yield found


def predicted(module: Module, strategy: Any, devices: int = 2, data: Any = None, **options: Any) -> Any:
    trainer = trainer_of(strategy, devices=devices, **options)
    torch.manual_seed(1)
    with quiet():
        return trainer.predict(copy.deepcopy(module), loader(batches() if data is None else data))


def cut(**options: Any) -> Any:
    return ours(**({"layers": ["Block", "Linear"], "num_microbatches": 3} | options))


@pytest.mark.slow
@pytest.mark.parametrize("inference_mode", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_loops(inference_mode: bool, ran: Ran) -> None:
    """Two data loaders, a smaller last batch, a batch of one; validation between training steps."""
    module, found = made(), []
    for strategy, devices in (("auto", 1), (cut(emulation={"poison": True, "delay_seed": 2}), 2)):
        used = copy.deepcopy(module)
        trainer = trainer_of(strategy, devices=devices, inference_mode=inference_mode)
        loaders = [loader(batches()), loader(batches((8, 3), 5))]
        with quiet():
            trainer.fit(used, loader(batches((8, 8, 8))), loaders)
            values: list[Any] = [dict(trainer.callback_metrics), trainer.validate(used, loaders, verbose=False)]
            found.append([*values, trainer.test(used, loaders, verbose=False), trainer.predict(used, loaders)])
    assert_tensors_same(*found)
    assert len(ran) > 4 * 6
    assert all(not unsplittable and workers == {0, 1} for unsplittable, workers in ran)


def test_one_microbatch_or_worker_is_not_cut(ran: Ran) -> None:
    predicted(made(), cut(num_microbatches=1))
    predicted(made(), cut(), devices=1)
    assert not ran


@pytest.mark.parametrize(
    "kind", ["drops", "norms", "keeps", "counts", "overwrites", "logs", "hooked", "pairs", "means"]
)
def test_what_would_show_is_made_whole(kind: str, ran: Ran) -> None:
    module, data, found = made(kind), batches((8, 8, 8, 7)), []
    for strategy, devices in (("auto", 1), (cut(), 2)):
        HEARD.clear()
        if kind == "logs":
            with quiet():
                trainer = trainer_of(strategy, devices=devices)
                found.append([trainer.validate(copy.deepcopy(module), loader(data), verbose=False)])
        else:
            found.append(predicted(module, strategy, devices, data))
        assert len(HEARD) == (len(data) if kind == "hooked" else 0)
    assert_tensors_same(*found)
    # The first batch shows it, and is repeated whole. The normalisation is defined after the layer that follows it.
    assert len(ran) == (2 if kind == "norms" else kind != "hooked")


@pytest.mark.parametrize("inference_mode", [True, False])
def test_code_between_layers_writes_in_place(inference_mode: bool, ran: Ran) -> None:
    """To what goes into the next layer, on another worker. In inference mode tensors have no version that says so."""
    module, data = made("adds"), batches((8, 8, 8))
    expected, found = (
        predicted(module, strategy, devices, data, inference_mode=inference_mode)
        for strategy, devices in (("auto", 1), (cut(), 3))
    )
    assert_tensors_same(expected, found)
    assert [unsplittable for unsplittable, _ in ran] == [False] * 3


def test_another_order_is_made_whole(ran: Ran) -> None:
    module, data = made("turns"), [torch.randn(8, 6).abs(), torch.rand(8, 6), torch.rand(8, 6), -torch.rand(8, 6)]
    assert_tensors_same(predicted(module, "auto", 1, data), predicted(module, cut(), data=data))
    assert [unsplittable for unsplittable, _ in ran] == [False, False, False, True]


def test_an_error_in_a_part_is_the_models_own(ran: Ran) -> None:
    module, data = made(), batches((8, 8, 8, 8))
    data[3][5] = float("nan")
    broken = copy.deepcopy(module)
    broken.model.blocks[1].forward = _refuse_nan  # type: ignore[method-assign]
    trainer = trainer_of(cut(), devices=2)
    with quiet(), pytest.raises(KeyError, match="nan") as caught:
        trainer.predict(broken, loader(data))
    assert any("evaluation" in note for note in caught.value.__notes__)
    assert [unsplittable for unsplittable, _ in ran] == [False, False, False, True]
    with quiet():
        found = trainer.predict(broken, loader(data[:3]))
    assert len(found) == 3
    assert roundpipe_threads() == []


class Effects(nn.Module):
    """Changes something of ``kind`` each time that it is called, with which its output does not change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.stem, self.block, self.head = kind, nn.Linear(6, 16), Block(), nn.Linear(16, 5)
        self.calls, self.helper, self.number = [], SimpleNamespace(count=0), 0
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if self.kind == "a list":
            self.calls.append(len(x))
        elif self.kind == "a helper object":
            self.helper.count += 1
        elif self.kind == "an attribute":
            self.number += 1
        elif self.kind == "a random number":
            random.random()
        elif self.kind == "requires_grad":
            self.scale.requires_grad_()
        return self.head(self.block(h))

    def state(self) -> Any:
        return list(self.calls), self.helper.count, self.number, random.getstate()[1][-1], self.scale.requires_grad


@pytest.mark.parametrize("kind", ["a list", "a helper object", "an attribute", "a random number", "requires_grad"])
def test_what_a_failed_attempt_has_changed_is_put_back(kind: str, ran: Ran) -> None:
    """The first call runs in parts, which show that it has an effect; then that of the whole call is the only one."""
    found = []
    for strategy, devices in (("auto", 1), (cut(), 2)):
        module = _Rare("")
        module.model = Effects(kind)
        random.seed(4)
        with quiet():
            trainer_of(strategy, devices=devices).predict(module, loader(batches((8, 8, 8))))
        found.append(module.model.state())
    assert found[0] == found[1]
    assert [unsplittable for unsplittable, _ in ran] == [False]


def test_writing_to_a_parameter_is_never_tried_in_parts(ran: Ran) -> None:
    """It could not be put back. The part stops before it writes."""
    found = []
    for strategy, devices in (("auto", 1), (cut(), 2)):
        module = made()
        module.model.offset = nn.Parameter(torch.zeros(()))
        real = module.model.forward
        module.model.forward = lambda x, m=module.model, real=real: (m.offset.add_(1.0), real(x + m.offset))[1]
        with quiet():
            found.append(trainer_of(strategy, devices=devices).predict(module, loader(batches((8, 8, 8)))))
        found.append(module.model.offset.item())
    assert_tensors_same(found[0], found[2])
    assert found[1] == found[3] == 3.0
    assert all(unsplittable for unsplittable, _ in ran)


def test_layers_in_another_order_than_that_of_their_definition(ran: Ran) -> None:
    """The first call is then made whole, and shows the order."""

    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.block, self.stem = nn.Linear(16, 5), Block(), nn.Linear(6, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(self.stem(x)))

    module, data = _Rare(""), batches((8, 8, 8))
    module.model = HeadFirst()
    assert_tensors_same(predicted(module, "auto", 1, data), predicted(module, cut(), data=data))
    assert [unsplittable for unsplittable, _ in ran] == [True, False, False]


def _refuse_nan(x: Tensor) -> Tensor:
    if bool(x.isnan().any()):
        raise KeyError("nan")
    return x * 2


@pytest.mark.parametrize("inference_mode", [True, False])
def test_writing_to_what_shares_memory_is_refused(inference_mode: bool) -> None:
    """A layer's output is a view of its input: on another worker the one would not follow the other."""
    module = made("views")
    module.model.blocks[1].forward = lambda x: x[:, :]  # type: ignore[method-assign]
    with pytest.raises(RoundPipeError, match=r"'model\.blocks\.1' returned tensors that share memory"):
        predicted(module, cut(), inference_mode=inference_mode)


class _Rare(pl.LightningModule):
    """Computes otherwise for a batch in which anything is large, however the code finds that out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.model = how, made().model

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "a branch" and bool((x > 50).any()):
            return self.model(x / x.abs().max())
        if self.how == "a branch in a helper":
            x = _scaled(x)
        elif self.how == "an assertion":
            assert_all = torch.all(x < 50)
            x = x if assert_all else x - x.mean(0)
        return self.model(x)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


def _scaled(x: Tensor) -> Tensor:
    while (x.abs() > 50).any():
        x = x / x.abs().max()
    return x


@pytest.mark.parametrize("how", ["a branch", "a branch in a helper", "an assertion"])
def test_a_branch_that_only_rare_batches_take(how: str, ran: Ran) -> None:
    module, data = _Rare(how), batches((8,) * 6)
    data[3][1, 2] = 100.0  # in parts the fourth call, which is not compared
    assert_tensors_same(predicted(module, "auto", 1, data), predicted(module, cut(), data=data))
    assert [unsplittable for unsplittable, _ in ran] == [False, False, False, True, False, False]


def test_parts_are_compared_again_and_said_once(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs without any branch is found by the next comparison, and said."""

    class Silent(_Rare):
        def forward(self, x: Tensor) -> Tensor:
            rare = (x > 50).any().float()
            return self.model(x - rare * x.mean(0))

    said: list[str] = []
    monkeypatch.setattr("lightning_roundpipe.strategy.rank_zero_info", said.append)
    module, data = Silent("silently"), batches((8,) * 8)
    data[6][1, 2] = 100.0  # in parts the seventh call
    with pytest.warns(RoundPipeWarning, match=r"^roundpipe: in evaluation, parts of a batch gave something else"):
        found = predicted(module, cut(), data=data)
    assert_tensors_same(predicted(module, "auto", 1, data), found)
    assert len(ran) == 7
    assert len([line for line in said if line.startswith("roundpipe: in evaluation, calls of")]) == 1
