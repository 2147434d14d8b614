"""One sequence of 65,536 tokens on a device that is too small for it.

A small language model whose attention looks 64 tokens back, so that a CPU can compute it, trains on one sequence a
step. Plain training keeps all that its layers compute for these tokens. The strategy keeps one layer's at a time, and
with ``token_tiles`` the MLP's and the norms' intermediates of 1,024 tokens only. The device has a memory
limit, and what does not fit is an error: without tiles, the strategy does not fit either.

    python examples/long_sequence.py          (under a minute, no GPU)

Prints what each needs and whether the losses are equal. Memory is counted alike everywhere: weights, gradients, and
each tensor that goes into a layer or that autograd keeps, once.
"""

import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy

TOKENS, WINDOW, WIDTH, LAYERS, VOCABULARY = 65_536, 64, 16, 4, 64
STEPS = 3
DEVICE_MEMORY = "112MiB"


class Block(nn.Module):
    """Attention to the tokens of a window and of the one before it, then an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.out(self.attend(*self.qkv(self.norms[0](x)).chunk(3, dim=-1)))
        return x + self.mlp(self.norms[1](x))

    def attend(self, q, k, v):
        q, k, v = (t.view(-1, WINDOW, WIDTH) for t in (q, k, v))
        k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, 0))[:-1], t], dim=1) for t in (k, v))  # the window before, and own
        seen = torch.ones(WINDOW, 2 * WINDOW, dtype=torch.bool).tril(WINDOW).triu(1)
        return F.scaled_dot_product_attention(q, k, v, seen).view(1, -1, WIDTH)


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses = []

    def training_step(self, tokens, batch_idx):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x)[0, :-1], tokens[0, 1:])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sequences() -> list[torch.Tensor]:
    """Each token is the one before it plus 0 to 7."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(8, (1, TOKENS), generator=generator).cumsum(1) % VOCABULARY for _ in range(STEPS)]


def train(strategy) -> LanguageModel:
    pl.seed_everything(1, verbose=False)
    module = LanguageModel()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        logger=False,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(sequences(), batch_size=None))
    return module


def plain_bytes() -> int:
    """Weights, gradients, and what autograd keeps of one plain step."""
    pl.seed_everything(1, verbose=False)
    module, kept = LanguageModel(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module.training_step(sequences()[0], 0)
    weights = [p for p in module.parameters() if p.untyped_storage().data_ptr() not in kept]
    loss.backward()
    return sum(kept.values()) + sum(p.nbytes for p in weights) + sum(p.grad.nbytes for p in module.parameters())


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    plain, equal = train("auto"), []
    print(f"{TOKENS:,} tokens in one sequence, device memory {DEVICE_MEMORY}")
    print("                          needs     loss of the last step")
    print(f"plain Lightning      {plain_bytes() / 2**20:6.1f} MiB     {plain.losses[-1]:.6f}")
    for tiles in (None, 1024):
        strategy = RoundPipeStrategy(token_tiles=tiles, emulation={"memory": DEVICE_MEMORY})
        name = f"token_tiles={tiles}"
        try:
            ours = train(strategy)
        except torch.OutOfMemoryError:
            print(f"{name:20} does not fit")
            continue
        peak = max(strategy.report()["peak_device_bytes"])
        equal.append(torch.allclose(torch.stack(plain.losses), torch.stack(ours.losses), rtol=1e-5))
        print(f"{name:20} {peak / 2**20:6.1f} MiB     {ours.losses[-1]:.6f}")
    print(f"losses of all steps equal those of plain Lightning: {'yes' if equal and all(equal) else 'no'}")


if __name__ == "__main__":
    main()
