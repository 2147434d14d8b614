"""The longest sequence that the plan command says trains on emulated devices of that memory, and 10 % more does not."""

import json
from functools import partial

import pytest
import torch
from harness import loader, ours, quiet, trainer_of
from peft import LoraConfig

from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.outlook import MEMORY_SHARE, ModelShape, find_longest
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.model.loading import from_config
from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.tasks.causal_lm import CausalLM

WITHIN = 0.1
MEMORY = 16_000_000
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2**16, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
}
TILE = 64


def settings(kind):
    return TINY | {"model_type": kind} | KINDS[kind]


def adapters(kind):
    """PEFT parametrizes experts in the call, which tiles cannot."""
    of_attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    modules = of_attention if "moe" in kind else "all-linear"
    return {"r": 4, "target_modules": modules, "task_type": "CAUSAL_LM"}


def shape_of(kind, lora, folder):
    config, choice = folder / "config.json", folder / "lora.yaml"
    config.write_text(json.dumps(settings(kind)))
    choice.write_text(json.dumps(adapters(kind)))
    request = PlanRequest(str(config), lora=str(choice) if lora else "none", precision="32-true")
    return ModelShape(request, read_machine("cpu"))


def train(kind, lora, length, workers, **options):
    """The report of a step with a plan."""
    module = CausalLM(
        from_config(**settings(kind)).model,
        partial(torch.optim.AdamW, lr=1e-4),
        lora=LoraConfig(**adapters(kind)) if lora else None,
    )
    tokens = torch.randint(1, 256, (2 * workers, length))
    trainer = trainer_of(ours(num_microbatches=2 * workers, **options), devices=workers)
    with quiet():
        trainer.fit(module, loader([{"input_ids": tokens, "labels": tokens}] * 2))
    return trainer.strategy.report()


@pytest.mark.parametrize(
    ("kind", "lora", "tile"),
    [("llama", False, None), ("qwen3", False, TILE), pytest.param("qwen3_moe", True, TILE, marks=pytest.mark.slow)],
)
def test_calls_take_what_is_estimated(kind, lora, tile, tmp_path):
    shape = shape_of(kind, lora, tmp_path)
    estimated = (shape if tile is None else shape.in_tiles(tile)).costs(1, 256)
    report = train(kind, lora, 256, 1, plan=str(Plan.per_call(len(estimated), 2)), token_tiles=tile)
    measured = Costs.from_dict(report["costs"])
    assert [call.layer for call in measured] == [call.layer for call in estimated]
    blocks = [call.layer.endswith("layers.1") for call in measured].index(True)
    one, other = estimated.calls[blocks], measured.calls[blocks]
    for what in ("weight", "gradient", "boundary", "activation", "kept", "forward", "returning", "input", "waiting"):
        assert getattr(one, f"{what}_bytes") == pytest.approx(getattr(other, f"{what}_bytes"), rel=0.02), what
    head, real = estimated.calls[-1], measured.calls[-1]
    # The estimate counts the mean of the loss behind the call, too: 12 bytes beside the 512 of a token's hidden states.
    assert head.activation_bytes == pytest.approx(real.activation_bytes, rel=0.03)


def fits(*case, **options):
    try:
        train(*case, emulation={"memory": MEMORY}, **options)
    except (DoesNotFit, torch.OutOfMemoryError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "lora", "tile", "workers"),
    [("llama", True, None, 2), ("qwen3", False, None, 1), ("qwen3_moe", True, TILE, 1)],
)
def test_the_longest_sequence_is_what_trains(kind, lora, tile, workers, tmp_path):
    """What is said trains, and a tenth more does not: the longest that trains is between them."""
    shape = shape_of(kind, lora, tmp_path)
    shape = shape if tile is None else shape.in_tiles(tile)
    said = find_longest(shape, workers, 2 * workers, int(MEMORY_SHARE * MEMORY)).tokens
    assert fits(kind, lora, said, workers, token_tiles=tile)
    assert not fits(kind, lora, int((1 + WITHIN) * said), workers, token_tiles=tile)
