"""The longest sequence that the plan command says is what emulated devices of that memory train, to 10 %."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import loader, ours, quiet, trainer_of
from peft import LoraConfig

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.commands.plan_model import MEMORY_SHARE, ModelShape, find_longest
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.model.loading import from_config
from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.tasks.causal_lm import CausalLM

WITHIN = 0.1
MEMORY = 16_000_000
TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2**16, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def settings(kind: str) -> dict[str, Any]:
    return TINY | {"model_type": kind} | ({"head_dim": 16} if kind == "qwen3" else {})


def shape_of(kind: str, lora: bool, folder: Path) -> ModelShape:
    config, adapters = folder / "config.json", folder / "lora.yaml"
    config.write_text(json.dumps(settings(kind)))
    adapters.write_text("r: 4\ntarget_modules: all-linear\ntask_type: CAUSAL_LM\n")
    return ModelShape(str(config), str(adapters) if lora else "none", "32-true", read_machine("cpu"))


def train(kind: str, lora: bool, length: int, workers: int, **options: Any) -> dict[str, Any]:
    """The report of a step with a plan."""
    module = CausalLM(
        from_config(**settings(kind)).model,
        partial(torch.optim.AdamW, lr=1e-4),
        lora=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    tokens = torch.randint(1, 256, (2 * workers, length))
    trainer = trainer_of(ours(num_microbatches=2 * workers, **options), devices=workers)
    with quiet():
        trainer.fit(module, loader([{"input_ids": tokens, "labels": tokens}] * 2))
    report: dict[str, Any] = trainer.strategy.report()  # type: ignore[attr-defined]
    return report


@pytest.mark.parametrize(("kind", "lora"), [("llama", True), ("qwen3", False)])
def test_calls_take_what_is_estimated(kind: str, lora: bool, tmp_path: Path) -> None:
    estimated = shape_of(kind, lora, tmp_path).costs(1, 256)
    report = train(kind, lora, 256, 1, plan=str(Plan.per_call(len(estimated), 2)))
    measured = Costs.from_dict(report["costs"])
    assert [call.layer for call in measured] == [call.layer for call in estimated]
    blocks = [call.layer.endswith("layers.1") for call in measured].index(True)
    one, other = estimated.calls[blocks], measured.calls[blocks]
    for what in ("weight", "gradient", "boundary", "activation", "kept", "forward", "returning", "input", "waiting"):
        assert getattr(one, f"{what}_bytes") == pytest.approx(getattr(other, f"{what}_bytes"), rel=0.02), what
    head, real = estimated.calls[-1], measured.calls[-1]
    assert head.activation_bytes == pytest.approx(real.activation_bytes, rel=0.02)


def fits(*case: Any) -> bool:
    try:
        train(*case, emulation={"memory": MEMORY})
    except (DoesNotFit, torch.OutOfMemoryError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("kind", "lora"), [("llama", False), ("llama", True), ("qwen3", False), ("qwen3", True)])
def test_the_longest_sequence_is_as_long_as_the_plan_command_says(
    kind: str, lora: bool, workers: int, tmp_path: Path
) -> None:
    shape = shape_of(kind, lora, tmp_path)
    said = find_longest(shape, workers, 2 * workers, int(MEMORY_SHARE * MEMORY)).tokens
    low, high = said // 2, 2 * said
    assert fits(kind, lora, low, workers) and not fits(kind, lora, high, workers)
    while high - low > said // 50:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(kind, lora, middle, workers) else (low, middle)
    assert said == pytest.approx(low, rel=WITHIN)
