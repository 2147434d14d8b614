"""A layer that is larger than a worker allows is cut into several, and trains what it trained."""

import pytest
import torch
import zoo
from harness import assert_same, ours, run
from torch import nn
from zoo_runs import expected

from lightning_roundpipe.config import Options
from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.model_shape import ModelShape
from lightning_roundpipe.estimates.models import make_model, read_config
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.memory.budget import layers_that_fit
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.model.layers import find_layers

PARTS = ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"]


def arenas(module):
    """Two for weights and two for gradients; rounding up only adds to them."""
    return 2 * sum(p.nbytes * (1 + p.requires_grad) for p in module.parameters())


def largest(module):
    return max(map(arenas, find_layers(module).values()))


@pytest.mark.parametrize(
    ("name", "lora", "devices"), [("llama", True, 2), ("qwen3_moe", False, 2), ("gpt_oss", False, 1)]
)
def test_blocks_that_do_not_fit_are_cut(name, lora, devices, capsys, caplog):
    module = zoo.make_module(name, lora)
    budget = largest(module)
    options = {"num_microbatches": 3, "loss_weight": "targets", "memory_budget": budget, "round_microbatches": 1}
    result = run(ours(**options), module, zoo.make_batches(name, samples=3), devices=devices)
    assert_same(expected(name, lora, 3, samples=3), result)
    # Which experts are asked for changes with the weights, and with it what is saved.
    assert max(result.report["peak_device_bytes"]) <= budget * (1.05 if name == "qwen3_moe" else 1)
    called = [call["layer"] for call in result.report["costs"]["calls"]]
    assert [c.rsplit(".", 1)[1] for c in called if ".layers.1." in c] == PARTS
    said = capsys.readouterr().err + caplog.text
    assert said.count("layers.* into self_attn, mlp, input_layernorm, post_attention_layernorm") == 1


def test_parts_that_do_not_fit_are_cut_on():
    """Here into single matrices, and what is between them is user code."""
    module = zoo.make_module("llama")
    budget = arenas(module.model.model.layers[0].mlp) - 1
    options = {"num_microbatches": 3, "loss_weight": "targets", "memory_budget": budget, "round_microbatches": 1}
    result = run(ours(**options), module, zoo.make_batches("llama", samples=3), devices=2)
    assert_same(expected("llama", False, 3, samples=3), result)
    called = [call["layer"] for call in result.report["costs"]["calls"]]
    inner = [c.split(".layers.1.")[1] for c in called if ".layers.1." in c]
    assert inner == [*PARTS[:3], "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def test_a_plan_that_lacks_calls_because_layers_are_cut_says_so():
    options = {"plan": "forward 0-2; fused 3-5; backward 0-2; round 2", "emulation": {"memory": "160KB"}}
    with pytest.raises(ValueError, match=r"is due\..* layers are cut here: model\.model\.layers\.\* into self_attn"):
        run(ours(num_microbatches=4, **options), zoo.make_module("llama"), zoo.make_batches("llama"), devices=2)


def test_the_plan_command_cuts_what_training_cuts():
    name, machine = "tiny_qwen3_1_7b", read_machine("cpu")
    root = nn.Module()
    root.model = make_model(read_config(name)[0], name, "bf16-mixed").float()
    formats, cuts = Formats(torch.bfloat16), []
    for budget in (largest(root), largest(root) * 5 // 8, largest(root) * 3 // 8):
        trained = layers_that_fit(root, Options(memory_budget=budget), [], formats)
        planned = ModelShape(PlanRequest(name), machine, memory=budget).refined
        assert list(planned.layers) == list(trained.layers) and planned.cuts == trained.cuts
        cuts.append(len(trained.cuts))
    assert cuts[0] == 0 < cuts[1] < cuts[2]
