"""A vision transformer on devices that are too small for it.

A small ViT tells four patterns apart, in noise. Its four devices have a memory limit, and the model with its gradients
and the optimizer's state is several times as large: a device holds two stages' weights at a time and the activations of
what is running, everything else stays in host memory. What does not fit is an error, so it fits.

    python examples/vision_transformer.py          (under a minute, no GPU)

Prints the accuracy on held-out images before and after, and the memory that training takes and that a device had.
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import ViTConfig, ViTForImageClassification

from lightning_roundpipe import RoundPipeStrategy

STEPS, SIZE = 32, 32
DEVICE_MEMORY = "6MiB"
CONFIG = ViTConfig(
    image_size=SIZE,
    patch_size=8,
    num_channels=1,
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    intermediate_size=512,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=4,
)


class PatternClassifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = ViTForImageClassification(CONFIG).train()
        self.accuracy = MulticlassAccuracy(num_classes=4)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return self.model(pixel_values=images, labels=labels).loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy.update(self.model(pixel_values=images).logits, labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def patterns(number: int, seed: int) -> TensorDataset:
    """Stripes across, stripes down, stripes aslant and checks, each somewhere else, in noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (number,), generator=generator)
    shift = 2 * torch.pi * torch.rand(number, 2, 1, 1, generator=generator)
    x = torch.arange(SIZE).view(1, 1, SIZE) * 0.8 + shift[:, 0]
    y = torch.arange(SIZE).view(1, SIZE, 1) * 0.8 + shift[:, 1]
    kinds = torch.stack([y.sin() + 0 * x, x.sin() + 0 * y, ((x + y) / 2**0.5).sin(), x.sin() * y.sin()])
    images = kinds[labels, torch.arange(number)]
    return TensorDataset((images + torch.randn(images.shape, generator=generator)).unsqueeze(1), labels)


def main() -> None:
    pl.seed_everything(1, verbose=False)
    module = PatternClassifier()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=RoundPipeStrategy(emulation={"memory": DEVICE_MEMORY}),
        max_steps=STEPS,
        accumulate_grad_batches=8,
        num_sanity_val_steps=0,
        limit_val_batches=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held_out = DataLoader(patterns(128, seed=2), batch_size=16)
    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, DataLoader(patterns(STEPS * 32, seed=1), batch_size=4))
    report = trainer.strategy.report()
    [after] = trainer.validate(module, held_out, verbose=False)
    print(f"accuracy before {before['accuracy']:.3f}, after {after['accuracy']:.3f}")

    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    print(f"weights, gradients and AdamW's state: {4 * weights / 2**20:.1f} MiB; memory of a device: {DEVICE_MEMORY}")
    peaks = ", ".join(f"{peak / 2**20:.1f}" for peak in report["peak_device_bytes"])
    print(f"at their peaks the devices held {peaks} MiB, in {len(report['slots'])} stages: {report['plan']}")


if __name__ == "__main__":
    main()
