"""What a user can get wrong: an error that names the setting and the remedy, before any training."""

from __future__ import annotations

import re
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, loader, ours, run, trainer_of
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(60)

BATCHES = zoo.make_batches("mlp", 4)


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# ---------------------------------------------------------------------------------------------------------- bad options

TWO = {"num_microbatches": 2}
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    # what is wrong, options of the strategy, options of the Trainer, what the message says (ignoring case)
    ("both sizes", {"num_microbatches": 2, "microbatch_size": 2}, {}, ["num_microbatches", "microbatch_size", "both"]),
    ("no microbatches", {"num_microbatches": 0}, {}, ["num_microbatches=0", "at least 1"]),
    ("negative", {"num_microbatches": -2}, {}, ["num_microbatches=-2", "at least 1"]),
    ("not a number", {"num_microbatches": "2"}, {}, ["num_microbatches='2'", "whole number"]),
    ("empty microbatch", {"microbatch_size": 0}, {}, ["microbatch_size=0", "at least 1"]),
    ("empty round", {"round_microbatches": 0}, {}, ["round_microbatches=0", "at least 1"]),
    ("unknown layer", {"layers": ["NoSuchLayer"]}, {}, ["layers", "NoSuchLayer"]),
    ("one unknown layer", {"layers": ["ResidualBlock", "blocks.17"]}, {}, ["layers", "blocks.17"]),
    ("no layers", {"layers": []}, {}, ["layers"]),
    ("layers as text", {"layers": "ResidualBlock"}, {}, ["layers", "list"]),
    ("plan misses", {"plan": "forward 0-1; fused 3-5; backward 0-2; round 2"}, {}, ["plan", "call 2", "missed"]),
    ("plan misses back", {"plan": "forward 0-2; fused 3-5; backward 1-2; round 2"}, {}, ["plan", "call 0", "missed"]),
    ("plan repeats", {"plan": "forward 0-2; fused 2-5; backward 0-1; round 2"}, {}, ["plan", "call 2", "repeats"]),
    ("plan reorders", {"plan": "forward 2-3 0-1; fused 4-5; backward 2-3 0-1; round 2"}, {}, ["plan", "reordered"]),
    ("plan too long", {"plan": "forward 0-3; fused 4-9; backward 0-3; round 2"}, {}, ["plan", "out of range"]),
    ("plan too short", {"plan": "forward 0-1; fused 2-4; backward 0-1; round 2"}, {}, ["plan", "call 5"]),
    ("plan unreadable", {"plan": "first this, then that"}, {}, ["plan", "forward 0-3"]),
    ("plan not text", {"plan": 3}, {}, ["plan=3", "text"]),
    ("staleness", {"staleness": 1}, {}, ["staleness=1", "not built"]),
    ("prefetch", {"prefetch": 2}, {}, ["prefetch=2", "0 or 1"]),
    ("scope", {"microbatch_scope": "epoch"}, {}, ["microbatch_scope", "not built"]),
    ("budget unreadable", {"memory_budget": "plenty"}, {}, ["memory_budget='plenty'", "20GiB"]),
    ("no budget", {"memory_budget": 0}, {}, ["memory_budget=0"]),
    ("budget below a layer", {"memory_budget": "2KB"}, {}, ["memory_budget"]),
    ("pinning", {"pin_memory": "maybe"}, {}, ["pin_memory='maybe'", "auto"]),
    ("watchdog", {"watchdog_timeout": 0}, {}, ["watchdog_timeout=0"]),
    ("loss weight", {"loss_weight": 3}, {}, ["loss_weight=3", "function"]),
    ("emulation", {"emulation": {"speed": 3}}, {}, ["emulation", "speed"]),
    ("emulated memory", {"emulation": {"memory": "much"}}, {}, ["emulation.memory", "much"]),
    ("emulated latency", {"emulation": {"latency": -1}}, {}, ["emulation.latency"]),
    ("unknown option", {"microbatches": 3}, {}, ["microbatches"]),
    ("16-true", TWO, {"precision": "16-true"}, ["precision", "16-true"]),
    ("bf16-true", TWO, {"precision": "bf16-true"}, ["precision", "bf16-true"]),
    ("64-true", TWO, {"precision": "64-true"}, ["precision", "64-true"]),
    ("several machines", TWO, {"num_nodes": 2}, ["node"]),
]


@pytest.mark.parametrize(
    ("options", "trainer_options", "fragments"),
    [pytest.param(*case[1:], id=case[0].replace(" ", "-")) for case in REFUSALS],
)
def test_refused_by_name(options: dict[str, Any], trainer_options: dict[str, Any], fragments: list[str]) -> None:
    """The message names the setting and the remedy, and not a single step was made."""
    module, batches = zoo.make_module("mlp"), zoo.make_batches("mlp")
    if "layers" not in options:
        options = options | {"layers": ["Linear", "ResidualBlock"]}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises((ValueError, TypeError, MisconfigurationException)) as caught:
        trainer = trainer_of(ours(**options), devices=2, **trainer_options)
        trainer.fit(module, loader(batches))
    for fragment in fragments:
        assert fragment.lower() in str(caught.value).lower()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert harness.roundpipe_threads() == []


class Manual(zoo.PlainClassifier):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss, _ = self.loss_and_logits(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


def test_manual_optimization_with_microbatches_is_refused() -> None:
    with pytest.raises((ValueError, MisconfigurationException, RuntimeError), match=r"(?i)manual") as caught:
        run(ours(num_microbatches=2), Manual(zoo.make_module("mlp").model), BATCHES, devices=2, watch=False)
    assert "num_microbatches" in str(caught.value)


def test_manual_optimization_is_right_or_refused() -> None:
    module = Manual(zoo.make_module("mlp").model)
    try:
        result = run(ours(), module, BATCHES, devices=2, watch=False)
    except (ValueError, MisconfigurationException, NotImplementedError, RuntimeError) as error:
        assert "manual" in str(error).lower()
    else:
        assert_same(run("auto", module, BATCHES, watch=False), result)


def test_a_batch_without_size_is_refused() -> None:
    class Sizeless(zoo.PlainClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch["scale"] * torch.ones(4, 8)).square().mean()

    module = Sizeless(zoo.make_module("mlp").model)
    batches = [{"scale": torch.tensor(0.5)}] * 3
    with pytest.raises((ValueError, MisconfigurationException), match=r"(?i)batch") as caught:
        run(ours(num_microbatches=2), module, batches, devices=2)
    assert "num_microbatches" in str(caught.value)


# ---------------------------------------------------------------------------------- a trace that is not always the same


class Wandering(zoo.PlainClassifier):
    """Calls its blocks in the order that the batch says: 0 as they stand, 1 two exchanged, 2 one left out."""

    def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
        order = {0: (0, 1, 2, 3), 1: (0, 2, 1, 3), 2: (0, 1, 3)}[int(batch["order"].max())]
        h = self.model.stem(batch["x"])
        for i in order:
            h = self.model.blocks[i](h)
        logits = self.model.head(h)
        return F.cross_entropy(logits, batch["y"]), logits


WANDERING = Wandering(zoo.make_module("mlp").model)
WANDERING_LAYERS = ["Linear", "ResidualBlock"]


def _ordered(*orders: list[int]) -> list[zoo.Batch]:
    batches = zoo.make_batches("mlp", len(orders))
    return [batch | {"order": torch.tensor(order)} for batch, order in zip(batches, orders, strict=True)]


@pytest.mark.parametrize("step", [0, 2])
def test_another_order_of_layers_is_refused_by_name(step: int) -> None:
    """In one microbatch of the first step, and of a pipelined one."""
    orders = [[0] * 6 for _ in range(4)]
    orders[step] = [0, 0, 1, 1, 0, 0]
    with pytest.raises(Exception, match=r"blocks\.1") as caught:
        run(ours(num_microbatches=3, layers=WANDERING_LAYERS), WANDERING, _ordered(*orders), devices=2)
    said = f"{caught.value} {notes(caught.value)}"
    assert "blocks.2" in said
    assert re.search(r"(?i)expect", said), said
    assert re.search(r"(?i)call", said), said
    assert harness.roundpipe_threads() == []


def test_with_one_microbatch_any_control_flow_works() -> None:
    batches = _ordered([0] * 6, [1] * 6, [2] * 6, [0] * 6, [1] * 6)
    result = run(ours(num_microbatches=1, layers=WANDERING_LAYERS), WANDERING, batches, devices=2)
    assert_same(run("auto", WANDERING, batches), result)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_layer_may_be_left_out(devices: int) -> None:
    """Layer drop: a microbatch makes a part of the trace, in its order; the others are not held up."""
    batches = _ordered([0] * 6, [0] * 6, [0, 0, 2, 2, 0, 0], [2, 2, 2, 2, 0, 0], [2] * 6, [0] * 6)
    hand = harness.by_hand(WANDERING, batches, 3)
    assert_same(hand, run(ours(num_microbatches=3, layers=WANDERING_LAYERS), WANDERING, batches, devices=devices))
