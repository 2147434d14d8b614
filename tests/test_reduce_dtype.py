"""``reduce_dtype``: gradients travel rounded, and everything else is plain training."""

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import Learner, ours, run, save_after
from torch import nn
from torch.amp import GradScaler

from lightning_roundpipe import RoundPipePrecision

MICROBATCHES = 4
BF16 = torch.bfloat16


class Small(Learner, optimizer=torch.optim.AdamW, lr=0.01, eps=0.001):
    """Four layers, in fp64: else the last bits of a sum decide now and then to where it is rounded."""

    def __init__(self, trained=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))).double()
        self.layers[: 4 - trained].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layers(batch), batch.roll(1, -1))


def _data(batches=4):
    return list(torch.randn(batches, 8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def _by_hand(round_microbatches, accumulate=1, clip=None, dtype=BF16, microbatches=MICROBATCHES):
    """Weights after plain training in which each round's gradients are rounded before they are added to the others'."""
    module = Small()
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(_data()):
        parts = batch.chunk(microbatches)
        # The first window, from which the plan is made, has no rounds.
        together = round_microbatches if number >= accumulate else 1
        for start in range(0, microbatches, together):
            losses = [module.training_step(part, 0) for part in parts[start : start + together]]
            gradients = torch.autograd.grad(sum(losses), list(module.parameters()))
            for p, gradient in zip(module.parameters(), gradients, strict=True):
                share = gradient.to(dtype).double() / microbatches / accumulate
                p.grad = share if p.grad is None else p.grad + share
        if (number + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in module.parameters()]


def _ours(round_microbatches=4, *, module=None, devices=2, trainer=None, **options):
    plan = harness.per_call(4, round_microbatches)
    strategy = ours(
        **{"num_microbatches": MICROBATCHES, "plan": plan, "layers": [f"layers.{i}" for i in range(4)]} | options
    )
    return run(strategy, module or Small(), _data(), devices=devices, **(trainer or {}))


def _weights(result):
    return [p.detach() for p in result.module.parameters()]


def _downloaded(result):
    return sum(event["nbytes"] for event in result.report["events"] if event["kind"] == "download_gradients")


def _same(ours, theirs):
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("round_microbatches", "trainer"),
    [
        (1, {}),
        (4, {"blocking": True}),
        (2, {"accumulate_grad_batches": 2}),
        (2, {"gradient_clip_val": 0.05}),
        (2, {"gradient_clip_val": 0.05, "blocking": True}),
        (4, {}),
        (4, {"gradient_clip_val": 0.05}),
    ],
)
def test_it_is_plain_training_with_rounded_gradients(round_microbatches, trainer):
    """Sums over rounds and batches are not rounded, and norms are those of the sums."""
    weights = _weights(_ours(round_microbatches, reduce_dtype="bfloat16", trainer=trainer))
    settings = trainer.get("accumulate_grad_batches", 1), trainer.get("gradient_clip_val")
    assert _same(weights, _by_hand(round_microbatches, *settings))
    assert not _same(weights, _by_hand(round_microbatches, *settings, torch.float64)), "nothing was rounded"


def test_a_resumed_run_has_the_same_bits_in_rounds_of_one(tmp_path):
    """The first window after resuming rounds each microbatch, too. All batches are one, so order does not matter."""

    def trained(fit=None):
        strategy = ours(num_microbatches=MICROBATCHES, round_microbatches=1, reduce_dtype="bfloat16")
        save = save_after(2, tmp_path / "at.ckpt")
        return _weights(run(strategy, Small(), _data(1) * 4, devices=2, callbacks=[] if fit else [save], fit=fit))

    whole = trained()
    assert all(map(torch.equal, whole, trained({"ckpt_path": tmp_path / "at.ckpt"})))


class Manual(Small):
    """Two losses a step, each with a backward of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in batch.chunk(2):
            loss = super().training_step(part, batch_idx) / 2
            self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def test_manual_optimization_rounds_what_each_backward_gives():
    result = _ours(module=Manual(), num_microbatches=None, plan="measured", reduce_dtype="bfloat16")
    assert _same(_weights(result), _by_hand(1, microbatches=2))


@pytest.mark.parametrize("round_microbatches", [2, 4])
def test_bytes_are_those_of_the_format_and_sums_do_not_travel_back(round_microbatches):
    rounds = MICROBATCHES // round_microbatches
    wide, narrow = (_ours(round_microbatches, reduce_dtype=dtype) for dtype in (None, "bfloat16"))
    numbers = 4 * (12 * 12 + 16)  # biases of 12, each to a multiple of 256 bytes
    assert _downloaded(wide) == rounds * 4 * (12 * 12 * 8 + 128 + 256)
    assert _downloaded(narrow) == rounds * 4 * (512 + 256) < rounds * numbers * 8
    for result, again in ((wide, rounds > 1), (narrow, False)):
        assert any(event["kind"] == "upload_gradients" for event in result.report["events"]) is again
        costs = result.report["costs"]["calls"]
        assert [call["reduced_bytes"] for call in costs] == [768 if result is narrow else None] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scaled_gradients_that_overflow_skip_the_step(dtype):
    """In fp16 what overflows on its way does so, too; bf16 has room for whatever the factor is."""

    class Wide(Small):
        def __init__(self):
            super().__init__()
            self.float()

        def training_step(self, batch, batch_idx):
            return super().training_step(batch.float(), batch_idx)

    plugin = RoundPipePrecision("16-mixed", GradScaler("cpu", init_scale=2.0**40, growth_interval=1000))
    # Autocast computes in fp16, where such a factor is infinite; without it only the way to the host is narrow.
    with torch.autocast("cpu", enabled=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autocast, "__init__", _disabled(torch.autocast.__init__))
        result = _ours(module=Wide(), reduce_dtype=dtype, precision_plugin=plugin)
    scale = plugin.scaler.get_scale()
    assert (scale < 2.0**40) == (dtype == "float16")
    assert all(p.isfinite().all() for p in _weights(result))


def _disabled(real):
    def init(self, device_type, *args, **kwargs):
        real(self, device_type, enabled=False)

    return init
