"""Batches that call layers otherwise than the first ones: their microbatches leave the plan and go on one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import stress
import torch
import torch.nn.functional as F
import transformers
from harness import assert_identical, assert_same, ours, run
from torch import Tensor, nn

Batch = dict[str, Any]
HARD = {"poison": True, "delay_seed": 3}


class Model(nn.Module):
    """Blocks and three heads. It can end early, and change its input."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(drop)) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor, head: int = 0, depth: int = 4, order: Any = (0, 1, 2, 3)) -> Tensor:
        for at in order[:depth]:
            x = self.blocks[at](x)
        out: Tensor = self.heads[head](x)
        return out


class Module(pl.LightningModule):
    def __init__(self, step: Callable[[Any, Batch, int], Tensor], drop: float = 0.0) -> None:
        super().__init__()
        self.step = step
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model = Model(drop)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.step(self, batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def data(count: int = 9) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, 8, generator=generator),
            "y": torch.randint(3, (8,), generator=generator),
        }
        for _ in range(count)
    ]


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"])


def with_a_second_loss(module: Any, batch: Batch, index: int) -> Tensor:
    """A term that begins after some steps, as auxiliary and consistency losses do."""
    loss = cross_entropy(module.model(batch["x"]), batch)
    if module.global_step >= 3:
        loss = loss + 0.5 * cross_entropy(module.model(batch["x"].flip(1), head=1), batch)
    return loss


def with_a_teacher(module: Any, batch: Batch, index: int, behind: int = -1) -> Tensor:
    """A pass without gradients in every third batch, in front of one with gradients, and in others ``behind`` it."""
    known = torch.zeros(8, 3)[: len(batch["x"])]
    if index % 3 == 1:
        with torch.no_grad():
            known = module.model(batch["x"]).softmax(1)
    logits = module.model(batch["x"])
    if index % 3 == behind:
        with torch.no_grad():
            known = module.model(batch["x"] + 1).softmax(1)
    return cross_entropy(logits, batch) + 0.1 * (logits - known.to(logits)).square().mean()


STEPS: dict[str, Callable[[Any, Batch, int], Tensor]] = {
    "a head for each batch": lambda m, b, i: cross_entropy(m.model(b["x"], head=i % 3), b),
    "a model that grows": lambda m, b, i: cross_entropy(m.model(b["x"], depth=min(4, 1 + m.global_step // 2)), b),
    "a second loss": with_a_second_loss,
    "a teacher here and there": lambda m, b, i: with_a_teacher(m, b, i, behind=2),
    "an order for each batch": lambda m, b, i: cross_entropy(
        m.model(b["x"], order=[(0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 1, 0)][i % 3]), b
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_other_calls_give_what_plain_training_gives(name: str) -> None:
    module = Module(STEPS[name])
    result = run(ours(num_microbatches=4, emulation=HARD), module, data(), devices=3)
    assert_same(run("auto", module, data()), result)


def test_the_next_batches_are_learned_until_a_plan_has_the_calls() -> None:
    result = run(ours(num_microbatches=4), Module(with_a_second_loss), data(), devices=2)
    assert result.report is not None
    assert not result.report["profiled"]
    assert all(slot["round"] >= 0 for slot in result.report["slots"]), "the plan has them"


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_same_bits_whatever_runs_beside(staleness: int) -> None:
    """With dropout in the layers; an update that comes too early shows, and so does one that reads too late."""
    module = Module(STEPS["a head for each batch"], drop=0.3)
    one, other, hard = (
        run(
            ours(num_microbatches=4, staleness=staleness, emulation=emulation, watchdog_timeout=stress.WATCHDOG),
            module,
            data(),
            devices=devices,
        )
        for devices, emulation in ((1, {}), (3, {}), (3, HARD | {"bandwidth": 1e6}))
    )
    assert_identical(one, other)
    assert_identical(one, hard)


def for_some_samples(module: Any, batch: Batch, index: int) -> Tensor:
    logits = module.model(batch["x"])
    chosen = batch["chosen"] > 0.5
    if chosen.any():
        logits = torch.where(chosen[:, None], module.model(batch["x"], head=2), logits)
    return cross_entropy(logits, batch)


def test_some_microbatches_leave() -> None:
    batches = data(4)
    for batch in batches:
        batch["chosen"] = torch.zeros(8)
    batches[2]["chosen"][[1, 6]] = 1.0
    module = Module(for_some_samples)
    result = run(ours(num_microbatches=4, emulation=HARD), module, batches, devices=2)
    assert_same(run("auto", module, batches), result)


def test_a_given_plan_is_kept() -> None:
    module, plan = Module(STEPS["a head for each batch"]), "forward 0-1; fused 2-4; backward 0-1; round 2"
    result = run(ours(num_microbatches=4, plan=plan), module, data(4), devices=2)
    assert_same(run("auto", module, data(4)), result)
    assert result.report is not None
    assert result.report["plan"].startswith("forward 0-1; fused 2-4")


def with_a_late_reference(module: Any, batch: Batch, index: int) -> Tensor:
    """The adapters' layers are called without them from the fourth window on."""

    def margin() -> Tensor:
        both = torch.cat([batch["x"], batch["x"].flip(1)])
        found: Tensor = module.model(input_ids=both).logits.log_softmax(-1).gather(-1, both[..., None]).sum((1, 2))
        return found[: len(batch["x"])] - found[len(batch["x"]) :]

    margins = margin()
    if index >= 12:
        with torch.no_grad(), module.model.disable_adapter():
            reference = margin()
        margins = margins - reference
    return -F.logsigmoid(0.1 * margins).mean()


def test_adapters_are_switched_off() -> None:
    module, generator = Module(with_a_late_reference), torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
        module.model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    batches = [{"x": torch.randint(32, (2, 6), generator=generator)} for _ in range(24)]
    options = {"accumulate_grad_batches": 4}
    assert_same(run("auto", module, batches, **options), run(ours(), module, batches, devices=2, **options))
