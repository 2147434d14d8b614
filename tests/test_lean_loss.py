"""Training with the lean loss is training: the whole batch's gradients, on workers that hold less."""

from functools import partial

import harness
import pytest
import torch
import zoo
from harness import assert_same, ours, run
from transformers import LlamaConfig, LlamaForCausalLM
from zoo_runs import expected

from lightning_roundpipe.model.lean_loss import lean_logits, make_lean
from lightning_roundpipe.tasks import CausalLM


class Lean(zoo.CausalLM):
    """A zoo model that is trained without its logits."""

    def __init__(self, model):
        super().__init__(model)
        make_lean(model)

    def training_step(self, batch, batch_idx):
        with lean_logits(self.model):
            loss = self.model(**batch).loss
        self.log("train/loss", loss)
        return loss


def lean(name, lora, devices=2, **options):
    module = Lean(zoo.make_module(name, lora).model)
    given = {"num_microbatches": 3, "loss_weight": "targets"} | options
    result = run(ours(**given), module, zoo.make_batches(name), devices=devices)
    result.logged, result.metrics = None, {}
    return result


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", False),
        ("qwen3", True),
        ("qwen3_moe", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gpt2", False), ("gemma", True), ("gpt_oss", True))
        ),
    ],
)
def test_equals_plain_training(name, lora):
    """Padded batches whose microbatches have unequal numbers of targets; tied weights; a router's loss beside it."""
    assert_same(expected(name, lora, 3), lean(name, lora))


@pytest.mark.slow
def test_beside_compiled_layers():
    """In bf16-true, whose default dtype Dynamo meets in the loss."""
    losses = []
    for compiled in (None, {"backend": "aot_eager"}):
        module = Lean(zoo.make_module("llama", False).model)
        strategy = ours(num_microbatches=3, loss_weight="targets", **({"compile_layers": compiled} if compiled else {}))
        losses.append(run(strategy, module, zoo.make_batches("llama"), devices=2, precision="bf16-true").losses)
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0.02, atol=0.0)


# ------------------------------------------------------------------------------------------------- the packaged module

CLASSES, WIDTH, LENGTH = 2048, 32, 64


def wide():
    """A model whose logits are much larger than anything else."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=CLASSES, **sizes, initializer_range=0.1, pad_token_id=0))


def text(samples=4):
    tokens = torch.randint(1, CLASSES, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def packaged_task(lean_loss=True):
    return CausalLM(wide(), partial(torch.optim.SGD, lr=0.1), lean_loss=lean_loss)


def packaged(strategy, lean_loss):
    task = packaged_task(lean_loss)
    return run(strategy, task, [text()] * 2, val_batches=[text()], devices=1 if strategy == "auto" else 2)


def test_the_last_stage_holds_no_logits():
    """Logits of a microbatch are 64 tokens x 2048 classes. Without them it is the weights that are large."""
    plain = packaged("auto", lean_loss=False)
    peaks = []
    for lean_loss in (False, True):
        result = packaged(ours(num_microbatches=4, plan=harness.per_call(5, 4)), lean_loss)
        assert_same(plain, result)
        head = result.report["costs"]["calls"][-1]
        assert head["layer"].endswith("lm_head")
        peaks.append((head["activation_bytes"], max(result.report["peak_device_bytes"])))
    logits, gradient = 4 * LENGTH * CLASSES, 4 * CLASSES * WIDTH
    assert peaks[0][0] > logits
    assert peaks[1][0] < gradient + logits / 4
    assert peaks[1][1] < peaks[0][1] - logits / 4


@pytest.mark.parametrize("padded", [None, 0, 1])
def test_masks_are_made_for_padding_only(padded):
    """What travels between stages is as large as the hidden states, unless there is padding: then length x length."""
    length = 256
    tokens = torch.randint(1, CLASSES, (2, length))
    batch = {"input_ids": tokens, "labels": tokens}
    if padded is not None:
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][:, length - padded :] = 0
    result = run(ours(num_microbatches=2), packaged_task(), [batch] * 2, devices=2)
    largest = max(call["boundary_bytes"] for call in result.report["costs"]["calls"])
    hidden = 4 * length * WIDTH
    rotary = 2 * hidden // 2  # sines and cosines, for one of two heads
    assert hidden <= largest - (length * length if padded else 0) <= hidden + rotary + 8 * length
