"""Recipes and losses as users of TRL write them in Lightning by hand: plain Lightning's numbers, and pipelined."""

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import Learner, loader
from plain_oracle import assert_plain, on_devices
from torch import nn

from lightning_roundpipe.tasks import convert_to_float8

VOCABULARY = 32
IMAGE, START, END = 3, 4, 5


SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
"""Of all models. ``benchmarks/bench_recipes.py`` makes them larger."""


def small(**options):
    return SIZE | options


def llama(**options):
    options = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0} | options
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **small(**options)))


def in_fp8(recipe):
    net = llama()
    convert_to_float8(net, recipe, emulate=True)
    assert type(net.lm_head) is nn.Linear and type(net.model.layers[1].mlp.up_proj) is not nn.Linear
    return net


def adapted():
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(), config)


class Recipe(Learner, optimizer=torch.optim.AdamW, lr=0.01, eps=0.001):
    """A model that is trained, and perhaps another one that is not."""

    def __init__(self, net, other=None):
        super().__init__()
        self.net, self.other = net.double().train(), other
        if other is not None:
            self.other = other.double().eval().requires_grad_(False)

    def logits(self, model, ids):
        return model(input_ids=ids, attention_mask=(ids != 0).long()).logits

    def logps(self, model, ids, prompt=2):
        """Log probability of each row's completion."""
        logps = self.logits(model, ids)[:, :-1].log_softmax(-1)
        found = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (found * (ids[:, 1:] != 0))[:, prompt - 1 :].sum(-1)


class Packed(Recipe):
    """SFT on several conversations in a row, of which only the assistant's tokens are targets."""

    def training_step(self, batch, batch_idx):
        logits = self.net(input_ids=batch["ids"], position_ids=batch["positions"], use_cache=False).logits
        labels = batch["ids"].masked_fill(batch["assistant"] == 0, -100)[:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        self.log_dict({"loss": loss, "tokens": (labels != -100).sum().double()})
        return loss


class Preferences(Recipe):
    """DPO. The reference is another model, or this one without its adapters."""

    def training_step(self, batch, batch_idx):
        both = torch.cat([batch["chosen"], batch["rejected"]])
        with torch.no_grad():
            if self.other is not None:
                reference = self.logps(self.other, both)
            else:
                with self.net.disable_adapter():
                    reference = self.logps(self.net, both)
        chosen, rejected = (self.logps(self.net, both) - reference).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        self.log_dict({"loss": loss, "accuracy": (chosen > rejected).double().mean()})
        return loss


class Rewarded(Recipe):
    """GRPO: completions of the step's own model, and their advantage over those of the group."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net.eval()
            done = self.net.generate(batch["ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
            self.net.train()
            reference = self.logps(self.other, done, batch["ids"].shape[1])
        rewards = (done % 7).double().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        logps = self.logps(self.net, done, batch["ids"].shape[1])
        apart = reference - logps
        loss = -((logps - logps.detach()).exp() * advantages - 0.04 * (apart.exp() - apart - 1)).mean()
        self.log_dict({"loss": loss, "reward": rewards.mean()})
        return loss


class Distilled(Recipe):
    """A student that learns a frozen teacher's distribution."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            teacher = self.logits(self.other, batch["ids"]).log_softmax(-1)
        student = self.logits(self.net, batch["ids"]).log_softmax(-1)
        loss = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        self.log("loss", loss)
        return loss


class Collected(Recipe):
    """A term over attentions, which transformers collects by hooks inside of layers."""

    def training_step(self, batch, batch_idx):
        out = self.net(input_ids=batch["ids"], labels=batch["ids"], output_attentions=True)
        loss = out.loss + sum(attention.square().mean() for attention in out.attentions)
        self.log("loss", loss)
        return loss


class AdaLora(Recipe):
    """Ranks depend on gradients and weights after each step."""

    def __init__(self):
        ranks = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 6, "deltaT": 1}
        super().__init__(peft.get_peft_model(llama(), peft.AdaLoraConfig(**ranks, target_modules=["q_proj", "v_proj"])))

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch["ids"], labels=batch["ids"]).loss

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.net.base_model.update_and_allocate(self.trainer.global_step)


class Images(Recipe):
    def training_step(self, batch, batch_idx):
        loss = self.net(**batch).loss
        self.log("loss", loss)
        return loss


def qwen():
    width = SIZE["hidden_size"]
    eighth = width // SIZE["num_attention_heads"] // 8
    rope = {"rope_type": "default", "mrope_section": [eighth, eighth, 2 * eighth], "rope_theta": 10000.0}
    text = small(num_key_value_heads=2, rope_parameters=rope, bos_token_id=1, eos_token_id=2, vocab_size=VOCABULARY)
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": width, "num_heads": 2, "intermediate_size": 16}
    vision |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}
    vision |= {"window_size": 8, "fullatt_block_indexes": [1]}
    special = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 6}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def fused(hidden, weight, targets):
    """Returns the loss, and keeps its gradients, as Liger's does: a few tokens' logits at a time."""
    return Fused.apply(hidden, weight, targets)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        total, d_hidden, d_weight = hidden.new_zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in torch.arange(len(hidden), device=hidden.device).split(4):
            logits = hidden[rows] @ weight.T
            total += F.cross_entropy(logits, targets[rows], reduction="sum")
            d_logits = (logits.softmax(-1) - F.one_hot(targets[rows], len(weight))) / len(hidden)
            d_hidden[rows] = (d_logits @ weight).to(hidden.dtype)
            d_weight += d_logits.T @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx, *grads):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0], d_weight * grads[0], None


class OfTheHead(Recipe):
    """A loss that is given the output layer's weight; the layer itself is not called."""

    def __init__(self, net, loss):
        super().__init__(net)
        self.loss = loss

    def training_step(self, batch, batch_idx):
        hidden = self.net.model(input_ids=batch["ids"]).last_hidden_state[:, :-1]
        loss = self.loss(hidden.flatten(0, 1), self.net.lm_head.weight, batch["ids"][:, 1:].flatten())
        self.log("loss", loss)
        return loss


class FusedHead(nn.Linear):
    """An output layer that returns the loss."""

    def forward(self, hidden, targets):
        return fused(hidden, self.weight, targets)


class WithFusedHead(OfTheHead):
    def __init__(self):
        net = llama()
        net.lm_head = FusedHead(SIZE["hidden_size"], VOCABULARY, bias=False)
        super().__init__(net, lambda hidden, weight, targets: net.lm_head(hidden, targets))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def tokens(rows, length, seed):
    return torch.randint(7, VOCABULARY, (rows, length), generator=generator(seed))


def plain_ids(i, times=1):
    return {"ids": tokens(2, (5 + i % 3) * times, i)}


def packed(i, times=1):
    ids = tokens(1, 8 * times, i)
    return {
        "ids": ids,
        "positions": torch.tensor([[*range((3 + i % 3) * times), *range((5 - i % 3) * times)]]),
        "assistant": torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1]]).repeat_interleave(times, 1),
    }


def pairs(i, times=1):
    seen = torch.arange(6 * times) < (4 + i % 3) * times
    return {"chosen": tokens(2, 6 * times, i), "rejected": tokens(2, 6 * times, 100 + i) * seen}


def images(i, times=1):
    rows = 1 + i % 2
    ids = tokens(rows, 6 * times, i)
    ids[:, 1], ids[:, 2], ids[:, 3] = START, IMAGE, END
    pixels = torch.randn(4 * rows, 12, dtype=torch.float64, generator=generator(i))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return batch | {"mm_token_type_ids": (ids == IMAGE).int(), "image_grid_thw": torch.tensor([[1, 2, 2]] * rows)}


RECIPES = {
    "SFT, packed, assistant masks": (lambda: Packed(llama()), packed),
    "SFT, packed, fp8, tensorwise": (lambda: Packed(in_fp8("tensorwise")), packed),
    "SFT, packed, fp8, rowwise": (lambda: Packed(in_fp8("rowwise")), packed),
    "DPO, disable_adapter": (lambda: Preferences(adapted()), pairs),
    "DPO, reference model": (lambda: Preferences(llama(), llama()), pairs),
    "GRPO, generate in the step": (lambda: Rewarded(llama(), llama()), plain_ids),
    "distillation": (lambda: Distilled(llama(), llama(hidden_size=2 * SIZE["hidden_size"])), plain_ids),
    "attentions": (lambda: Collected(llama(attn_implementation="eager")), plain_ids),
    "AdaLoRA": (AdaLora, plain_ids),
    "Qwen2.5-VL": (lambda: Images(qwen()), images),
    "linear_cross_entropy": (lambda: OfTheHead(llama(), F.linear_cross_entropy), plain_ids),
    "a fused loss": (lambda: OfTheHead(llama(), fused), plain_ids),
    "a fused loss as a layer": (WithFusedHead, plain_ids),
    "a fused loss, tied": (lambda: OfTheHead(llama(tie_word_embeddings=True), fused), plain_ids),
}
if not hasattr(F, "linear_cross_entropy"):  # came with torch 2.13
    del RECIPES["linear_cross_entropy"]


@on_devices(1, 3)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_plain(devices, window, name):
    make, batch = RECIPES[name]
    given = [batch(i) for i in range(2 * window if window > 1 else 3)]
    _, ours = assert_plain(devices, make, lambda: loader(given), accumulate_grad_batches=window, rtol=1e-5)
    if window > 1:
        events = ours.trainer.strategy.report()["events"]
        used = {event["worker"] for event in events if event["kind"] in ("forward", "backward")}
        assert used == set(range(devices)), "not pipelined"
        if name == "a fused loss as a layer":
            slots = [e["slot"] for e in events if e["kind"] == "upload_weights" and e["layer"] == "net.lm_head"]
            assert 0 < len(slots) == len(set(slots)) <= 4, "its weight travels once in a stage"
