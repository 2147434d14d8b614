r"""Operations that the host issues for each expert, in models that run their experts in turn: counted, on tiny models.

``planning.estimate.EXPERT_OPERATIONS`` holds what this prints with transformers 4.57.6, whose models are those of the
paper's library. That version lies beside the installed one:

    .venv/bin/python -m pip install --no-deps --target OLD \
        transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2
    PYTHONPATH=OLD .venv/bin/python benchmarks/bench_expert_operations.py
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"experts": "num_local_experts", "layer_types": ["full_attention"]},
    "qwen3_moe": {"experts": "num_experts", "moe_intermediate_size": 16, "decoder_sparse_step": 1},
}
EXPERTS = (8, 16)
TOKENS = 256


class Counter(TorchDispatchMode):
    """Counts all operations, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def operations(kind: str, experts: int) -> int:
    """Operations of a forward in which every expert has tokens."""
    settings = dict(MODELS[kind])
    settings[settings.pop("experts")] = experts
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, num_experts_per_tok=4, **settings,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with Counter() as counter:
        model(torch.randint(0, 64, (1, TOKENS)))
    return counter.operations


def main() -> None:
    table = Table(title=f"transformers {transformers.__version__}, experts in turn")
    for heading in ("model", *(f"operations with {experts} experts" for experts in EXPERTS), "of an expert"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    few, many = EXPERTS
    for kind in MODELS:
        counts = operations(kind, few), operations(kind, many)
        table.add_row(kind, *(f"{count:,}" for count in counts), f"{(counts[1] - counts[0]) / (many - few):g}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
