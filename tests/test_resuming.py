"""Runs that are resumed within an epoch: which batches they go on with, and what is said where those are not the ones
that were left."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import SaveAfter, ours, quiet, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import override

from lightning_roundpipe.data.sequences import ShuffledLoader
from lightning_roundpipe.messages import RoundPipeWarning

ROWS, BATCH = 24, 4


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index), "row": torch.linspace(index, index + 1, 8)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows without an end that is known."""

    @override
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Rows()[index] for index in range(ROWS))


class Recorder(pl.LightningModule):
    """Remembers the rows of each batch and the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch["row"]).square().mean()
        return loss

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["number"].tolist())
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(loader: Any, path: Path, *, save: int = 0, resume: bool = False, **options: Any) -> tuple[Recorder, list[str]]:
    """Trains two epochs; the module, and the warnings that the strategy gave."""
    module = Recorder()
    pl.seed_everything(3, verbose=False)
    trainer = trainer_of(ours(), devices=2, max_epochs=2, max_steps=-1, callbacks=[SaveAfter(save, path)], **options)
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RoundPipeWarning)
        trainer.fit(module, loader, ckpt_path=path if resume else None)
    said = [str(w.message) for w in caught if issubclass(w.category, RoundPipeWarning)]
    return module, [text for text in said if "checkpoint" in text]


def test_a_loader_with_a_state_goes_on_with_the_batches_that_are_left(tmp_path: Path) -> None:
    """Shuffled, bit for bit, in the second epoch too, and without a warning."""
    for save in (2, 8):
        whole, _ = fit(ShuffledLoader(Rows(), BATCH, seed=5), tmp_path / "at.ckpt", save=save)  # type: ignore[arg-type]
        assert whole.seen[:6] != whole.seen[6:] and len(whole.seen) == 12
        resumed, said = fit(ShuffledLoader(Rows(), BATCH, seed=5), tmp_path / "at.ckpt", resume=True)  # type: ignore[arg-type]
        assert resumed.seen == whole.seen[save:]
        assert resumed.losses == whole.losses[save:]
        assert not said


def test_a_loader_without_one_begins_again_and_a_warning_says_so(tmp_path: Path) -> None:
    for shuffle in (True, False):
        loader = DataLoader(Rows(), BATCH, shuffle=shuffle)
        whole, said = fit(loader, tmp_path / "at.ckpt", save=2)
        assert not said
        resumed, said = fit(loader, tmp_path / "at.ckpt", resume=True)
        assert len(said) == 1
        assert said[0].startswith(
            "roundpipe: the checkpoint was written after batch 2 of 6 of an epoch, and the training data loader "
            "(DataLoader) cannot say which batches are left"
        )
        assert "state_dict() and load_state_dict()" in said[0]
        assert len(resumed.seen) == 4 + 6  # as the warning says, the epoch ends after as many as were left
        assert resumed.seen[:4] == whole.seen[:4] != whole.seen[2:6]  # of the same seed, the first ones again
        assert resumed.losses != whole.losses[2:]


def test_a_stream_without_length_is_warned_of_too(tmp_path: Path) -> None:
    """Lightning's own warning asks for the number of batches."""
    fit(DataLoader(Stream(), BATCH), tmp_path / "at.ckpt", save=2)
    _, said = fit(DataLoader(Stream(), BATCH), tmp_path / "at.ckpt", resume=True)
    assert len(said) == 1 and "after batch 2 of an epoch" in said[0]
