"""Packed against 16-bit weights where stages wait for the link: time, bytes and stalls of a step of LoRA.

A Llama of random weights is trained on emulated devices whose links have a stated bandwidth, once for each format of
its frozen weights. Nothing else differs. Computing is fast for what crosses the link (few tokens a microbatch), as it
is for a large model on a GPU behind PCIe. Unpacking is done by the processor here, and slower for that.

    .venv/bin/python benchmarks/bench_quantized.py [--bandwidth 100MB] [--devices 2] [--quick]
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from common import Steps, batches, parser_of, quiet, show, trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.config import Emulation, parse_bytes

FORMATS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}
VOCAB, TOKENS, MICROBATCHES, WARM_UP = 1024, 16, 4, 2


class Task(pl.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def task(folder: str, options: dict[str, Any] | None) -> Task:
    """The model in ``folder`` with adapters in its attention."""
    given = {}
    if options is not None:
        fast = {"bnb_4bit_compute_dtype": torch.bfloat16} if "load_in_4bit" in options else {}
        given["quantization_config"] = BitsAndBytesConfig(**options, **fast)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu", **given)
    torch.manual_seed(1)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    return Task(get_peft_model(model, adapters)).train()


def measure(module: Task, devices: int, bandwidth: float, steps: int, plan: str) -> dict[str, float]:
    """The median step's seconds, and what the last step's report says of its copies."""
    strategy = RoundPipeStrategy(num_microbatches=MICROBATCHES, plan=plan, emulation=Emulation(bandwidth=bandwidth))
    watch = Steps()
    data = torch.randint(0, VOCAB, (MICROBATCHES * (steps + WARM_UP), TOKENS), generator=torch.manual_seed(2))
    loop = trainer(strategy, devices, precision="bf16-true", callbacks=[watch])
    loop.fit(module, batches(data, MICROBATCHES))
    report = strategy.report()
    return {
        "seconds": statistics.median(watch.seconds[WARM_UP:]),
        "uploaded": sum(report["bytes_uploaded"]),
        "stalled": report["stall_pct"],
    }


def main() -> None:
    parser = parser_of(__doc__, devices=2)
    parser.add_argument("--bandwidth", default="100MB", help="bytes a second of each device's link")
    parser.add_argument("--quick", action="store_true", help="a smaller model and two steps")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    width, layers, steps = (128, 4, 2) if args.quick else (512, 8, 6)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=TOKENS,
    )  # fmt: skip
    last = layers + 2
    plan = f"forward 0-{layers // 2}; fused {layers // 2 + 1}-{last}; backward 0-{layers // 2}; round {MICROBATCHES}"
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        for name, options in FORMATS.items():
            bandwidth = parse_bytes(args.bandwidth, "bandwidth")
            rows[name] = measure(task(folder, options), args.devices, bandwidth, steps, plan)
    first = rows["bfloat16"]
    headings = ("frozen weights", "step (s)", "over bfloat16", "sent up (MB a step)", "over bfloat16", "stalled (%)")
    cells = [
        (
            name,
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / first['seconds']:.2f}",
            f"{row['uploaded'] / 1e6:.1f}",
            f"{row['uploaded'] / first['uploaded']:.2f}",
            f"{row['stalled']:.0f}",
        )
        for name, row in rows.items()
    ]
    show(f"{layers} layers of width {width}, {args.devices} devices, {args.bandwidth}/s each", headings, cells)


if __name__ == "__main__":
    main()
