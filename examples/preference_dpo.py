"""Preference tuning (DPO) with a frozen reference that costs no memory.

Direct Preference Optimization (arXiv 2305.18290) compares the model that is tuned with what it was before. With
adapters both are one model: ``disable_adapter()`` gives the reference. So ``training_step`` calls the same layers
twice, once without gradients and without adapters. The strategy follows that as it is written.

    python examples/preference_dpo.py          (under a minute, no GPU)

A small random Llama is to prefer lists that go up to lists that go down. Prints, for lists that it was not trained on,
how often the better one gains on the reference, and by how much; first as it is, then after training; and that the
reference is what it was.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, NUMBERS, LENGTH, BETA = 24, 30, 6, 0.5
CONFIG = LlamaConfig(
    vocab_size=NUMBERS + 1,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    bos_token_id=0,
    eos_token_id=None,
)


class PreferenceTuning(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(r=16, target_modules="all-linear"))
        self.model.train()

    def log_probability(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of each list, by what the model is at the moment."""
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum(dim=(1, 2))

    def margins(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """By how much more than the reference the model takes to the better list than to the worse one."""
        lists = torch.cat(batch)  # better ones, then worse ones
        with torch.no_grad(), self.model.disable_adapter():
            reference = self.log_probability(lists)
        better, worse = (self.log_probability(lists) - reference).chunk(2)
        return BETA * (better - worse)

    def training_step(self, batch, batch_idx):
        return -F.logsigmoid(self.margins(batch)).mean()

    def validation_step(self, batch, batch_idx):
        margins = self.margins(batch)
        self.log_dict({"preferred": (margins > 0).float().mean(), "margin": margins.mean()}, batch_size=len(margins))

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=4e-3)


def pairs(number: int, seed: int) -> TensorDataset:
    """Different numbers in ascending order, and the same ones in descending order; 0 begins a list."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.rand(number, NUMBERS, generator=generator).argsort(dim=1)[:, :LENGTH] + 1
    ascending = shuffled.sort(dim=1).values
    start = torch.zeros(number, 1, dtype=torch.long)
    return TensorDataset(torch.cat([start, ascending], 1), torch.cat([start, ascending.flip(1)], 1))


def main() -> None:
    pl.seed_everything(1, verbose=False)
    module = PreferenceTuning()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy="roundpipe",
        max_steps=STEPS,
        accumulate_grad_batches=8,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held_out = DataLoader(pairs(128, seed=2), batch_size=32)
    first = pairs(1, seed=3).tensors[0]
    with torch.no_grad(), module.model.disable_adapter():
        reference = module.log_probability(first)

    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, DataLoader(pairs(STEPS * 16, seed=1), batch_size=2))
    [after] = trainer.validate(module, held_out, verbose=False)
    for when, found in (("before", before), ("after", after)):
        print(
            f"{when}: the better list gains in {100 * found['preferred']:.0f} % of pairs, margin {found['margin']:.3f}"
        )
    with torch.no_grad(), module.model.disable_adapter():
        same = torch.equal(module.log_probability(first), reference)
    print(f"the reference is {'what it was' if same else 'another'}")


if __name__ == "__main__":
    main()
