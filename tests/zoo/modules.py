"""The LightningModules that the zoo's models are trained in."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F


def sgd(parameters):
    """The zoo's optimizer: steps large enough that a stale weight shows, and linear in the gradient.

    Adam would divide gradients that are zero but for rounding (a key's bias) by themselves, and compare noise.
    """
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class ZooModule(pl.LightningModule):
    """What the models of the zoo share: an ordinary LightningModule that logs with several reductions.

    Attributes:
        weighs: the option ``loss_weight`` with which the parts of a batch have the mean of the whole batch.
    """

    weighs = None

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.make_optimizer = sgd

    def loss_and_logits(self, batch):
        raise NotImplementedError  # each kind of model says what it is

    def targets(self, batch):
        """How many targets the mean of the loss is over: what a part of a batch weighs in it."""
        raise NotImplementedError  # each kind of model says what it is

    def training_step(self, batch, batch_idx):
        loss, _ = self.loss_and_logits(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/sum", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log_dict({"train/highest": loss.detach()}, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        loss, _ = self.loss_and_logits(batch)
        self.log("val/loss", loss)

    def test_step(self, batch, batch_idx):
        loss, logits = self.loss_and_logits(batch)
        self.log("test/loss", loss)
        self.log("test/lowest", logits.min(), reduce_fx="min")

    def predict_step(self, batch, batch_idx):
        return self.loss_and_logits(batch)[1]

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class HuggingFace(ZooModule):
    """A Hugging Face model that computes its own loss."""

    def loss_and_logits(self, batch):
        output = self.model(**batch)
        return output.loss, output.logits


class CausalLM(HuggingFace):
    weighs = "targets"

    def targets(self, batch):
        return int((batch["labels"][:, 1:] != -100).sum())


class Seq2SeqLM(HuggingFace):
    weighs = "targets"

    def targets(self, batch):
        return int((batch["labels"] != -100).sum())


class Classifier(HuggingFace):
    def targets(self, batch):
        return len(batch["labels"])


class PlainClassifier(ZooModule):
    """A plain PyTorch model; the loss is computed in ``training_step``."""

    def loss_and_logits(self, batch):
        logits = self.model(batch["x"])
        return F.cross_entropy(logits, batch["y"]), logits

    def targets(self, batch):
        return len(batch["y"])


class PlainLM(CausalLM):
    """A plain PyTorch language model."""

    def loss_and_logits(self, batch):
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()), logits


class PixelClassifier(PlainClassifier):
    """A class for every pixel."""

    weighs = "targets"

    def targets(self, batch):
        return int((batch["y"] != -100).sum())


class Voting(PlainClassifier):
    """Hands the whole batch to the model."""

    def loss_and_logits(self, batch):
        logits = self.model(batch["x"], batch["keep"])
        return F.cross_entropy(logits, batch["y"]), logits
