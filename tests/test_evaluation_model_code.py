"""What a model's own code does in evaluation beside computing a row for each sample: as in plain Lightning."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_tensors_same, loader, ours, quiet, trainer_of
from torch import Tensor, nn

COUNT = 0
"""How often a model has run."""
CENTRE = 2.5


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 5)

    def rows(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out

    def forward(self, x: Any) -> Any:
        return self.rows(x)


class Module(pl.LightningModule):
    """Predicts with a model of the kind."""

    kind: type[Model] = Model

    def __init__(self) -> None:
        super().__init__()
        self.model = self.kind()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(batch)


class InPlace(Module):
    """Normalises its input in place, as torchvision's ``normalize(inplace=True)`` does."""

    class kind(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x.sub_(0.5).div_(0.5))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(batch), batch.clone()


class FillsItsDict(Module):
    class kind(Model):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            x["hidden"] = self.first(x["x"])
            return self.last(x["hidden"].tanh())  # type: ignore[no-any-return]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        given = {"x": batch}
        return self.model(given), given["hidden"]


class ReplacesInItsDict(Module):
    class kind(Model):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            x["x"] = x["x"] * 2
            return self.rows(x["x"])

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        given = {"x": batch}
        return self.model(given), given["x"]


class AppendsToItsList(Module):
    class kind(Model):
        def forward(self, x: list[Tensor]) -> Tensor:
            x.append(self.first(x[0]))
            return self.last(x[-1].tanh())  # type: ignore[no-any-return]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        given = [batch]
        return self.model(given), given[-1]


class CountsLater(Module):
    """From the third batch on, which is compared again."""

    class kind(Model):
        batch, seen = 0, 0

        def forward(self, x: Tensor) -> Tensor:
            if self.batch >= 2:
                self.seen += 1
            return self.rows(x) * (1 + self.seen)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.model.batch = batch_idx  # type: ignore[assignment]
        return self.model(batch)


class _Centres(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x - x.mean(0))


class Masks(Module):
    """What is filled in must not pass for the scale of what is compared."""

    class kind(_Centres):
        value = float("-inf")

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).index_fill(1, torch.tensor([0]), self.value)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(batch)[:, 1:]


class MasksFinitely(Masks):
    class kind(Masks.kind):
        value = -1e9


class TurnsAFlag(Module):
    class kind(Model):
        centred = False

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x - x.mean(0) if self.centred else x)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.model.centred = False
        plain = self.model(batch)
        self.model.centred = True
        return plain, self.model(batch)


class TurnsToTraining(Module):
    class kind(Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(self.norm(x))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        plain = self.model(batch)
        self.model.train()
        adapted = self.model(batch)
        self.model.eval()
        return plain, adapted, self.model.norm.running_mean.clone()


class AsksForANumber(Module):
    class kind(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x / max(30.0, x.abs().max().item()))


class AsksWhetherEqual(Module):
    class kind(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.rows(-x if torch.equal(x.abs().max(), torch.tensor(100.0)) else x)


class ReturnsOneTensorTwice(Module):
    class kind(Model):
        def forward(self, x: Tensor) -> Any:
            rows = self.rows(x)
            return {"logits": rows, "scores": rows}

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.model(batch)
        out["scores"].div_(2.0)
        return out["logits"]


@dataclasses.dataclass
class Output:
    logits: Tensor
    name: str


class ReturnsAnObject(Module):
    class kind(Model):
        def forward(self, x: Tensor) -> Any:
            return Output(self.rows(x), "rows")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.model(batch)
        assert out.name == "rows"
        return out.logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if mask.any():
            hidden.masked_fill_(mask[:, None], 0.0)
        return self.inner(hidden.tanh())  # type: ignore[no-any-return]


class WritesInALayer(Module):
    """A layer writes to its argument in some batches, not in the first one."""

    class kind(Model):
        def __init__(self) -> None:
            super().__init__()
            last = self.last
            del self.last
            self.block, self.last = Block(), last  # the block is on another worker than the first layer

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(self.block(hidden, x.amax(1) > 50)) + hidden.sum(1, keepdim=True)  # type: ignore[no-any-return]


class MapsOverSamples(Module):
    """Writes to a layer's outputs within ``torch.vmap``, as masks of `flex_attention` are made in it."""

    class kind(Model):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            before = self.last(h)
            torch.vmap(lambda row: row.tanh_().mul_(2))(h)
            return before, self.last(h)


class Counts(Module):
    class kind(Model):
        def forward(self, x: Tensor) -> Tensor:
            global COUNT
            COUNT += 1
            return self.rows(x)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(batch), torch.tensor(COUNT)


class TakesItsParameter(Module):
    class kind(Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows_of_it = nn.Parameter(torch.randn(8, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(self.model.rows_of_it), self.model(batch)


class TakesAnObject(Module):
    class kind(Model):
        def forward(self, x: Output) -> Tensor:
            return self.rows(x.logits)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(Output(batch, "given"))


class TakesTensorsOfOtherLengths(Module):
    class kind(Model):
        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            return self.rows(x[0] + x[1][0])

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model((batch, batch[:3]))


class ReturnsTexts(Module):
    """Of some samples others than of others."""

    class kind(Model):
        def forward(self, x: Tensor) -> Any:
            return self.rows(x), "far" if x.max() > 50 else "near"


class HasAHook(Module):
    """Which sees the model's outputs, and so would see each part's."""

    class kind(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_forward_hook(lambda module, given, output: output - output.mean(0))


CODE = [
    TakesItsParameter, TakesAnObject, TakesTensorsOfOtherLengths, ReturnsTexts, HasAHook,
    InPlace, FillsItsDict, ReplacesInItsDict, AppendsToItsList, Masks, MasksFinitely, TurnsAFlag, TurnsToTraining,
    AsksForANumber, AsksWhetherEqual, WritesInALayer, ReturnsOneTensorTwice, ReturnsAnObject, MapsOverSamples, Counts,
    CountsLater,
]  # fmt: skip


def batches() -> list[Tensor]:
    """Return batches of which the second and the fifth have a sample that is unlike the others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = [torch.randn(8, 6) for _ in range(8)]
    made[1][1, 2] = made[4][5, 2] = 100.0
    return made


def predicted(module: pl.LightningModule, strategy: Any, devices: int = 1, **options: Any) -> Any:
    global COUNT
    COUNT = 0
    with quiet():
        return trainer_of(strategy, devices=devices, **options).predict(copy.deepcopy(module), loader(batches()))


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("code", CODE)
@pytest.mark.filterwarnings("ignore::lightning_roundpipe.RoundPipeWarning")
def test_it_gives_what_plain_evaluation_gives(code: type[Module], inference_mode: bool) -> None:
    torch.manual_seed(1)
    module = code()
    plain = predicted(module, "auto", inference_mode=inference_mode)
    for microbatches in (1, 4):
        strategy = ours(num_microbatches=microbatches, layers=["Linear", "Block"] if code is WritesInALayer else None)
        assert_tensors_same(plain, predicted(module, strategy, devices=2, inference_mode=inference_mode))


class Tries(pl.LightningModule):
    """Logs in its model, whatever comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(BaseException):
            self.log("mean", x.mean())
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)


def test_what_a_model_logs_is_not_lost() -> None:
    torch.manual_seed(1)
    module, found = Tries(), []
    for strategy, devices in (("auto", 1), (ours(num_microbatches=4), 2)):
        with quiet():
            trainer = trainer_of(strategy, devices=devices)
            found.append(trainer.validate(copy.deepcopy(module), loader(batches()), verbose=False))
    assert_tensors_same(*found)


class DropsAfterwards(Module):
    """A deterministic prediction, and then samples of it."""

    class kind(Model):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.dropout(self.first(x).tanh()))  # type: ignore[no-any-return]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        plain = self.model(batch)
        self.model.dropout.train()
        drawn = self.model(batch)
        self.model.dropout.eval()
        return plain, drawn


def test_draws_after_a_deterministic_call_are_reproducible() -> None:
    module, found = DropsAfterwards(), []
    for _ in range(2):
        torch.manual_seed(2)
        found.append(predicted(module, ours(num_microbatches=4, emulation={"delay_seed": len(found)}), devices=2))
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))
