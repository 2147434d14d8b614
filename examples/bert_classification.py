"""Classification with BERT: padded sentences, a schedule, clipping, checkpoints, and plain Lightning at the end.

A small BERT learns whether a sentence of random words, 4 to 16 of them, holds one that is rude. What a real fine-tuning
script has is all there and unchanged: padding with an attention mask, gradients accumulated over eight batches and
clipped, a learning rate that is warmed up, the best checkpoint by validation accuracy. The checkpoint is an ordinary
one: at the end plain Lightning loads it and predicts.

    python examples/bert_classification.py          (under a minute, no GPU)

Prints the accuracy after each epoch, then that of the best checkpoint under plain Lightning.
"""

import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

EPOCHS, SENTENCES, WINDOW, PAD, WORDS, RUDE = 5, 512, 8, 0, 32, 3
CONFIG = BertConfig(
    vocab_size=WORDS,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=16,
    num_labels=2,
    pad_token_id=PAD,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Classifier(pl.LightningModule):
    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = BertForSequenceClassification(CONFIG).train()
        self.accuracy = BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self.model(**batch).logits.argmax(dim=1), batch["labels"])
        self.log("val_accuracy", self.accuracy)

    def predict_step(self, batch, batch_idx):
        return self.model(**batch).logits.argmax(dim=1) == batch["labels"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = get_linear_schedule_with_warmup(optimizer, self.hparams.steps // 10, self.hparams.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Epochs(pl.Callback):
    """Prints the accuracy after each epoch."""

    def on_validation_end(self, trainer, module):
        print(f"epoch {trainer.current_epoch}: accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")


def sentence(generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Polite words, with a rude one among them in one sentence of two."""
    length, rude = int(torch.randint(4, 17, (), generator=generator)), int(torch.randint(2, (), generator=generator))
    words = torch.randint(RUDE + 1, WORDS, (length,), generator=generator)
    if rude:
        words[torch.randint(length, (1,), generator=generator)] = torch.randint(1, RUDE + 1, (1,), generator=generator)
    return words, rude


def collate(sentences: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    words = pad_sequence([words for words, _ in sentences], batch_first=True, padding_value=PAD)
    labels = torch.tensor([label for _, label in sentences])
    return {"input_ids": words, "attention_mask": (words != PAD).long(), "labels": labels}


def loader(number: int, seed: int, **options) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader([sentence(generator) for _ in range(number)], batch_size=8, collate_fn=collate, **options)


def main() -> None:
    pl.seed_everything(1, verbose=False)
    training, held_out = loader(SENTENCES, seed=1, shuffle=True), loader(256, seed=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_accuracy", mode="max")
        trainer = pl.Trainer(
            strategy="roundpipe",
            devices=4,
            max_epochs=EPOCHS,
            accumulate_grad_batches=WINDOW,
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            callbacks=[best, Epochs()],
            **quiet,
        )
        trainer.fit(Classifier(steps=EPOCHS * len(training) // WINDOW), training, held_out)

        plain = pl.Trainer(devices=1, **quiet)
        right = torch.cat(plain.predict(Classifier.load_from_checkpoint(best.best_model_path), held_out))
    print(f"\nThe best checkpoint under plain Lightning: accuracy {float(right.float().mean()):.3f}")


if __name__ == "__main__":
    main()
