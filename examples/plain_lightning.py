"""An ordinary Lightning script with one line changed.

A small BERT learns whether a sentence of random words holds the word 7. It is trained twice from the same start: by
plain Lightning, and with ``strategy="roundpipe"`` on four emulated devices, which hold the model's weights only while
they need them. The eight batches of an optimizer step are the microbatches that go through the devices. Nothing else
differs, RoundPipe is not even imported, and the losses are the same.

    python examples/plain_lightning.py          (about 15 seconds, no GPU)
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy
from transformers import BertConfig, BertForSequenceClassification

STEPS, WINDOW = 24, 8  # optimizer steps, and the batches of each
CONFIG = BertConfig(
    vocab_size=16,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=16,
    num_labels=2,
    # RoundPipe has random numbers of its own for every microbatch. Without dropout the two runs can be compared.
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class SentenceClassifier(pl.LightningModule):
    """A Hugging Face model, a loss, a metric, an optimizer: what any LightningModule has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BertForSequenceClassification(CONFIG).train()
        self.accuracy = BinaryAccuracy()
        self.val_loss = MeanMetric()

    def training_step(self, batch, batch_idx):
        words, label = batch
        loss = self.model(input_ids=words, labels=label).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        words, label = batch
        output = self.model(input_ids=words, labels=label)
        self.accuracy.update(output.logits.argmax(dim=1), label)
        self.val_loss.update(output.loss, len(words))
        self.log_dict({"val_loss": self.val_loss, "val_accuracy": self.accuracy})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Losses(pl.Callback):
    """Keeps the loss of each batch, which Lightning has divided by the batches of a step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def sentences(number: int, seed: int) -> TensorDataset:
    words = torch.randint(16, (number, 12), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words == 7).any(dim=1).long())


def train(**options) -> tuple[pl.Trainer, list[float], dict[str, float]]:
    """Trains from the same start, with these options: the trainer, the loss of each step, and the validation."""
    pl.seed_everything(1, verbose=False)
    module, losses = SentenceClassifier(), Losses()
    trainer = pl.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=WINDOW,
        callbacks=losses,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(
        module,
        DataLoader(sentences(STEPS * WINDOW * 4, seed=1), batch_size=4),
        DataLoader(sentences(256, seed=2), batch_size=64),
    )
    steps = torch.tensor(losses.values).view(STEPS, WINDOW).sum(dim=1).tolist()
    return trainer, steps, {key: float(trainer.callback_metrics[key]) for key in ("val_loss", "val_accuracy")}


def main() -> None:
    _, plain_losses, plain = train(accelerator="cpu", devices=1)
    trainer, our_losses, ours = train(accelerator="cpu", devices=4, strategy="roundpipe")  # the one line

    print("\n step   plain Lightning   roundpipe   difference")
    for step, (a, b) in enumerate(zip(plain_losses, our_losses, strict=True)):
        if step % 4 == 0 or step == STEPS - 1:
            print(f"{step:5} {a:17.6f} {b:11.6f} {abs(a - b):12.1e}")
    for name, value in plain.items():
        print(f"{name:12} {value:10.6f} {ours[name]:11.6f} {abs(value - ours[name]):12.1e}")

    report = trainer.strategy.report()
    print(f"\nIn the last step {report['microbatches']} microbatches went through these stages. A stage ran on the")
    print("worker whose turn it was; its weights were copied there and dropped when all microbatches had passed:")
    for slot in report["slots"]:
        first, last = slot["layers"][0], slot["layers"][-1]
        layers = first if first == last else f"{first} … {last}"
        print(f"  worker {slot['worker']}  {slot['phase']:8}  {layers}")


if __name__ == "__main__":
    main()
