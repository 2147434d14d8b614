"""``16-mixed`` and ``16-true``: losses are scaled, and steps whose gradients overflow skipped, as in plain training.

Lightning takes bf16 instead where the flag says ``16-mixed`` on the CPU, but not where the plugin is given.
"""

import copy

import harness
import pytest
import torch
import zoo
from harness import assert_identical, assert_same, assert_tensors_same, ours, run, save_after
from lightning.pytorch.plugins.precision import MixedPrecision
from test_precision_true import by_hand
from torch.amp import GradScaler

from lightning_roundpipe import RoundPipePrecision

BATCHES = zoo.make_batches("mlp", 7)
BATCHES[4] = {**BATCHES[4], "x": BATCHES[4]["x"] * 1e5}  # which overflows whatever the factor is
TOO_LARGE = 2.0**19
"""The first steps are skipped with it, and then it is grown again every two steps."""


class Module(zoo.PlainClassifier):
    """The zoo's MLP with AdamW and a schedule."""

    def __init__(self):
        super().__init__(copy.deepcopy(zoo.make_module("mlp").model))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, foreach=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.fixture(autouse=True)
def one_thread():
    """What is compared to the bit is summed by as many threads: a device has its share of them, plain training all."""
    torch.set_num_threads(1)


def scaler(scale=TOO_LARGE):
    return GradScaler("cpu", init_scale=scale, growth_interval=2)


def plain(batches=BATCHES, **options):
    return run("auto", Module(), batches, plugins=[MixedPrecision("16-mixed", "cpu", scaler())], **options)


def train(batches=BATCHES, precision="16-mixed", strategy=None, **options):
    plugin = RoundPipePrecision(precision, options.pop("scaler", None) or scaler())
    chosen = ours(**(strategy or {}), precision_plugin=plugin)
    return run(chosen, Module(), batches, **({"devices": 2} | options))


def state(result):
    trainer = result.trainer
    scaling = trainer.precision_plugin.scaler.state_dict()
    return {**scaling, "steps": trainer.global_step, "lr": trainer.optimizers[0].param_groups[0]["lr"]}


def without_gradients(result):
    """Those that are overheard are scaled still."""
    result.grads, result.logged = [], None
    return result


@pytest.mark.parametrize(
    ("options", "blocking"),
    [
        ({}, False),
        ({"gradient_clip_val": 0.3}, False),
        ({"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, True),
        ({"accumulate_grad_batches": 3}, True),
    ],
)
def test_equals_lightnings(options, blocking):
    """Bit for bit, and the sums of a window within rounding."""
    expected = plain(**options)
    overflows = [any(not g.isfinite().all() for g in grads.values()) for grads in expected.grads]
    assert any(overflows) and not all(overflows)  # or what is compared were ordinary training
    result = train(blocking=blocking, **options)
    assert state(result) == state(expected)
    same = assert_same if "accumulate_grad_batches" in options else assert_identical
    same(without_gradients(expected), without_gradients(result))


def test_in_parts():
    """As plain Lightning with a loader of the parts: each part's gradient is rounded, and may overflow, by itself."""
    parts = [part for batch in BATCHES for part in harness.split(batch, 3)]
    expected, result = (plain(parts, accumulate_grad_batches=3), train(strategy={"num_microbatches": 3}))
    assert state(result) == state(expected)
    assert_tensors_same(expected.state, result.state)


@pytest.mark.parametrize(
    ("precision", "staleness", "done"), [("16-mixed", 0, 6), ("16-mixed", 1, 10), ("16-true", 0, 4)]
)
def test_resuming_goes_on_bit_for_bit(precision, staleness, done, tmp_path):
    """Between the steps after which the factor grows or was halved, and after these."""
    path, batches = tmp_path / "at.ckpt", BATCHES[:1] * 12
    options = {"precision": precision, "strategy": {"staleness": staleness}}
    options["accumulate_grad_batches"] = 2
    whole = train(batches, callbacks=[save_after(done, path)], **options)
    assert "RoundPipePrecision" not in torch.load(path, weights_only=True)
    resumed = train(batches, fit={"ckpt_path": path}, scaler=scaler(32.0), **options)
    whole.losses = whole.losses[len(whole.losses) - len(resumed.losses) :]
    assert_identical(without_gradients(whole), without_gradients(resumed))
    assert state(whole) == state(resumed)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_a_factor_that_moves_within_a_window(precision):
    """An update that is one step late decides the factor while a window goes on, and a look finds out.

    The losses that were still to come were "differentiated with different factors".
    """
    options = {"precision": precision, "strategy": {"staleness": 1}, "accumulate_grad_batches": 3}
    undisturbed = train(BATCHES[:3] * 4, **options)

    def look(trainer, *_):
        if trainer.fit_loop.epoch_loop.batch_idx % 3 < 2:
            trainer.model.state_dict()
            trainer.strategy._engine.evaluate(lambda: None)

    looking = train(BATCHES[:3] * 4, callbacks=[harness.callback(passive=True, on_train_batch_end=look)], **options)
    assert_identical(without_gradients(undisturbed), without_gradients(looking))
    assert state(undisturbed) == state(looking)


@pytest.mark.parametrize("first", ["ours", "lightning"])
def test_checkpoints_cross_over(first, tmp_path):
    path, batches = tmp_path / "at.ckpt", BATCHES[:1] * 6
    runs = {"lightning": plain, "ours": train}
    whole = runs.pop(first)(batches, callbacks=[save_after(3, path)])
    [other] = runs.values()
    resumed = other(batches, fit={"ckpt_path": path})
    whole.losses = whole.losses[3:]
    assert state(whole) == state(resumed)
    assert_identical(without_gradients(whole), without_gradients(resumed))


def test_in_fp16_alone():
    """As a loop by hand without scaling, where nothing vanishes and nothing overflows."""
    module, batches = zoo.make_module("mlp"), zoo.make_batches("mlp", 4)
    expected = by_hand(module, batches, 3, torch.float16)
    plugin = RoundPipePrecision("16-true", scaler(2.0**10))
    result = run(ours(num_microbatches=3, precision_plugin=plugin), module, batches, devices=2)
    expected.losses = [loss.to(result.losses[0].dtype) for loss in expected.losses]
    assert_same(without_gradients(expected), without_gradients(result), rtol=2e-3, atol=1e-3)
    assert plugin.scaler.get_scale() == 2.0**12
