"""``bf16-true`` and ``16-true``: computed in low precision, trained in fp32.

``by_hand`` is the second opinion: a plain loop with fp32 masters, a copy of the model in low precision, and the copy's
gradients, microbatch by microbatch, summed in fp32.
"""

import copy
import functools

import harness
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import Learner, Result, assert_identical, assert_same, ours, run, save_after
from torch import nn

from lightning_roundpipe.config import RoundPipeError

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def one_thread():
    """A sum in bf16 ends in other last bits with other threads: a device has its share of them, the loop all."""
    torch.set_num_threads(1)


def by_hand(module, batches, microbatches, low=BF16):
    masters = copy.deepcopy(module)
    computing = copy.deepcopy(module).to(low)
    computing.log = computing.log_dict = lambda *args, **kwargs: None
    optimizer = masters.configure_optimizers()
    result = Result(logged=None)
    _untie(computing)
    pairs = [(p, computing.get_parameter(name)) for name, p in masters.named_parameters(remove_duplicate=False)]
    for batch in batches:
        parts = harness.split({k: v.to(low) if v.is_floating_point() else v for k, v in batch.items()}, microbatches)
        weights = [float(module.targets(part)) for part in parts]
        total = torch.zeros((), dtype=torch.float64)
        for part, weight in zip(parts, weights, strict=True):
            torch.set_default_dtype(low)
            try:
                loss = computing.training_step(part, 0)
            finally:
                torch.set_default_dtype(torch.float32)
            loss.backward()
            share = weight / sum(weights)
            total += loss.detach().double() * share
            for master, copied in pairs:
                if copied.grad is not None:
                    gradient = copied.grad.float() * share
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    copied.grad = None
        result.losses.append(total.to(loss.dtype))
        result.grads.append(harness.gradients(masters))
        optimizer.step()
        optimizer.zero_grad()
        for master, copied in pairs:
            copied.data.copy_(master.data)
    result.state = {n: b.clone() for n, b in computing.named_buffers() if n in computing.state_dict()}
    result.state.update({n: p.detach().clone() for n, p in masters.named_parameters(remove_duplicate=False)})
    return result


def _untie(module):
    """Each place gets a parameter of its own, so that autograd does not sum their gradients in low precision."""
    seen = set()
    for inner in module.modules():
        for name, parameter in list(inner._parameters.items()):
            if id(parameter) in seen and parameter is not None:
                inner._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(id(parameter))


@pytest.mark.parametrize(
    ("name", "lora", "devices", "microbatches"), [("gpt2", False, 1, 3), ("qwen3", True, 2, 3), ("mlp", False, 2, 4)]
)
def test_equals_a_loop_by_hand(name, lora, devices, microbatches):
    module, batches = zoo.make_module(name, lora), zoo.make_batches(name, 4)
    expected = by_hand(module, batches, microbatches)
    strategy = ours(num_microbatches=microbatches, loss_weight=module.weighs)
    result = run(strategy, module, batches, devices=devices, precision="bf16-true")
    result.logged = None
    assert_same(expected, result)


# ------------------------------------------------------------------------------------------------- what user code sees

SEEN = set()


class Block(nn.Module):
    """A layer with a buffer, which may go by torch's default format."""

    def __init__(self, by_default, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.register_buffer("mean", torch.full((width,), 0.1))
        self.by_default = by_default

    def forward(self, x):
        SEEN.add(("layer", (x.dtype, self.linear.weight.dtype, self.mean.dtype)))
        x = x + torch.tanh(self.linear(x) - self.mean)
        return x * (torch.arange(1, 9) / 7).cumsum(0) if self.by_default else x  # of integers, hence the default's


class Parts(Learner, optimizer=torch.optim.AdamW, lr=0.001, eps=0.001):
    """User code reads parameters, trained and frozen ones, and buffers."""

    def __init__(self, by_default=False, width=8):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(by_default, width) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(width))
        self.shift = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("offset", torch.rand(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def loss(self, where, batch):
        x = batch["x"]
        for tensor in (x, self.scale, self.shift, self.offset, self.steps, self.blocks[0].linear.weight):
            SEEN.add((where, tensor.dtype))
        x = x * self.scale + self.shift.detach() - self.offset
        SEEN.add((where, (self.dtype, torch.get_default_dtype(), next(self.parameters()).dtype, x.dtype)))
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(x, batch["y"])
        SEEN.add((f"{where}: loss", loss.dtype))
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss("training", batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss("validation", batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        SEEN.add(("between steps", (torch.get_default_dtype(), batch["x"].dtype)))

    roundpipe_passive_hooks = True

    def targets(self, batch):
        return len(batch["x"])


def parts_batches(count, width=8):
    generator = torch.Generator().manual_seed(5)
    return [{name: torch.randn(7, width, generator=generator) for name in "xy"} for _ in range(count)]


def train(module, batches, **options):
    strategy = ours(**{"num_microbatches": 3, "layers": ["Block"], **options.pop("strategy_options", {})})
    result = run(strategy, module, batches, **{"devices": 2, "precision": "bf16-true", **options})
    result.logged = None
    return result


@functools.cache
def seen(kind):
    SEEN.clear()
    batches, validation = parts_batches(3), {"val_batches": parts_batches(1)}
    if kind == "lightning":
        run("auto", Parts(), batches, precision="bf16-true", **validation)
    else:
        train(Parts(), batches, **validation)
    return frozenset(SEEN)


def test_user_code_sees_what_lightnings_own_plugin_shows_it():
    assert ("layer", (BF16, BF16, BF16)) in seen("lightning")
    assert ("between steps", (torch.float32, BF16)) in seen("lightning")
    assert seen("ours") == seen("lightning")


@pytest.mark.parametrize("by_default", [False, True])
def test_user_code_that_reads_parameters(by_default):
    """Layers that go by torch's default format are recomputed under the one that they ran under."""
    module, batches = Parts(by_default), parts_batches(5)
    expected = by_hand(module, batches, 3)
    result = train(module, batches)
    assert_same(expected, result)
    assert torch.get_default_dtype() is torch.float32


def test_evaluation_equals_lightnings():
    """Where no master is updated the numbers are the same, those of `generate` too; a mean of parts rounds."""

    class Generates(zoo.CausalLM):
        def predict_step(self, batch, batch_idx):
            return self.model.generate(batch["input_ids"][:, :5], max_new_tokens=4, pad_token_id=0)

    batches, found = zoo.make_batches("gpt2", 2), []
    for strategy, devices in (("auto", 1), (ours(), 2)):
        module = Generates(zoo.make_module("gpt2").model)
        trainer = harness.trainer_of(strategy, devices=devices, precision="bf16-true")
        found.append(
            [
                trainer.validate(module, harness.loader(batches), verbose=False),
                trainer.predict(module, harness.loader(batches)),
            ]
        )
    harness.assert_tensors_same(*found, rtol=1e-6, atol=1e-30)


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("born_low", "staleness"), [(True, 0), (False, 1)])
def test_resuming_goes_on_bit_for_bit(born_low, staleness, tmp_path):
    """Masters keep what low precision would lose, also those of a module that the user has built in it."""

    def fresh():
        return Parts().to(BF16) if born_low else Parts()

    batches, path = parts_batches(1) * 6, tmp_path / "at.ckpt"
    options = {"strategy_options": {"staleness": staleness}}
    whole = train(fresh(), batches, callbacks=[save_after(3, path)], **options)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved["scale"].dtype is torch.float32 and saved["offset"].dtype is BF16
    assert not torch.equal(saved["scale"], saved["scale"].to(BF16).float())
    resumed = train(fresh(), batches, fit={"ckpt_path": path}, **options)
    whole.losses, whole.grads = whole.losses[3:], whole.grads[3:]
    assert_identical(whole, resumed)


def test_what_begins_to_be_trained_gets_a_master(tmp_path):
    """A frozen block, built in low precision, is thawed in the middle of training."""

    class Thaw(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                pl_module.blocks[1].requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(pl_module.blocks[1].parameters())})

    module = Parts()
    module.blocks[1].to(BF16).requires_grad_(False)
    result = train(module, parts_batches(5), callbacks=[Thaw()])
    weight = result.module.get_parameter("blocks.1.linear.weight")
    assert weight.dtype is torch.float32 and not torch.equal(weight, weight.to(BF16).float())
    assert result.trainer.optimizers[0].state[weight]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("write", [lambda p: p.mul_(2), lambda p: p.data.mul_(2)])
def test_writes_within_the_step_are_refused(write):
    """What training_step sees is a copy."""

    class Writes(Parts):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                write(self.scale)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RoundPipeError, match="low-precision copy"):
        train(Writes(), parts_batches(1))
