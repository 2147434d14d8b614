"""Runs that are resumed within an epoch go on with the batches that are left, if the loader has a state."""

import lightning.pytorch as pl
import torch
from harness import Learner, ours, quiet, save_after, trainer_of
from torch import Tensor, nn
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_roundpipe.data.sequences import ShuffledLoader

ROWS, BATCH = 24, 4


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self):
        return ROWS

    @override
    def __getitem__(self, index):
        return {"number": torch.tensor(index), "row": torch.linspace(index, index + 1, 8)}


class Recorder(Learner, lr=0.0001):
    """Remembers the rows of each batch and the loss of each step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.seen = []
        self.losses = []

    def training_step(self, batch, batch_idx):
        return self.model(batch["row"]).square().mean()

    @override
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(batch["number"].tolist())
        self.losses.append(float(outputs["loss"]))


def fit(loader, path, *, save=0, resume=False):
    """Trains two epochs."""
    module = Recorder()
    pl.seed_everything(3, verbose=False)
    trainer = trainer_of(ours(), devices=2, max_epochs=2, max_steps=-1, callbacks=[save_after(save, path)])
    with quiet():
        trainer.fit(module, loader, ckpt_path=path if resume else None)
    return module


def test_a_loader_with_a_state_goes_on_with_the_batches_that_are_left(tmp_path):
    """Shuffled, bit for bit, in the second epoch too."""
    for save in (2, 8):
        whole = fit(ShuffledLoader(Rows(), BATCH, seed=5), tmp_path / "at.ckpt", save=save)
        assert whole.seen[:6] != whole.seen[6:] and len(whole.seen) == 12
        resumed = fit(ShuffledLoader(Rows(), BATCH, seed=5), tmp_path / "at.ckpt", resume=True)
        assert resumed.seen == whole.seen[save:]
        assert resumed.losses == whole.losses[save:]
