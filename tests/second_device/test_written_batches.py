"""What a step writes to its batch: in plain training on a GPU, Lightning has copied the batch there."""

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run


class Encoding:
    """An object that Lightning moves by its own method, as those of tokenizers."""

    def to(self, device):
        return self


ENCODING = Encoding()


class Masked(zoo.PlainClassifier):
    """Masks inputs and labels of its batch in place."""

    def on_train_batch_start(self, batch, batch_idx):
        assert batch.pop("encoding") is ENCODING

    def training_step(self, batch, batch_idx):
        batch["x"].add_(1).masked_fill_(batch["x"] > 2, 0.0)
        batch["y"][batch["y"] == 4] = -100
        return F.cross_entropy(self.model(batch["x"]), batch["y"], ignore_index=-100)


class CopiesFirst(Masked):
    """What plain training on a GPU does, on the CPU."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return copy.deepcopy(batch) | {"encoding": ENCODING}


def build(kind):
    torch.manual_seed(1)
    return kind(zoo.MLP())


@pytest.mark.parametrize("microbatches", [1, 3])
def test_do_not_reach_the_data_set(microbatches, devices):
    batches = [{**batch, "encoding": ENCODING} for batch in zoo.make_batches("mlp", 2)]
    before = copy.deepcopy(batches)
    expected = run("auto", build(CopiesFirst), copy.deepcopy(batches), max_epochs=2)
    result = run(
        ours(num_microbatches=microbatches, loss_weight="targets"), build(Masked), batches, devices=2, max_epochs=2
    )
    assert devices
    assert_same(expected, result)
    for one, other in zip(before, batches, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("x", "y"))
