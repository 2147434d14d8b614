"""Checkpoints are plain Lightning checkpoints: resuming continues bit for bit, and either side loads the other's.

The interrupted run stops in the middle of training and a new Trainer, a new module and a new strategy go on from its
file. Its first step is then a sequential, trace-finding one where the uninterrupted run is pipelined, so equality to
the bit also says that the two ways of running a step agree to the bit.
"""

import copy
import functools
import os
import signal
import time
from collections import Counter

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_identical, callback, loader, ours, run, save_after, trainer_of
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


class Scheduled(zoo.CausalLM):
    def configure_optimizers(self):
        optimizer = adamw(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fresh(name="llama", lora=False):
    """A module whose optimizer has state, and a schedule."""
    if name == "llama":
        return Scheduled(zoo.make_module(name, lora).model)
    module = zoo.make_module(name, lora)
    module.make_optimizer = adamw
    return module


BATCH = zoo.make_batches("llama", 1)[0]
PLAIN, OURS = "plain", "ours"


def strategy(kind, **options):
    return "auto" if kind == PLAIN else ours(**({"num_microbatches": 3, "loss_weight": "targets"} | options))


def devices(kind):
    return 1 if kind == PLAIN else 2


def train(kind, module, batches, seed=1, **options):
    chosen = strategy(kind, **options.pop("strategy_options", {}))
    return run(chosen, module, batches, devices=options.pop("devices", devices(kind)), seed=seed, **options)


def assert_continues(whole, resumed, done):
    """``resumed`` is the rest of ``whole`` after ``done`` steps, to the bit."""
    assert len(resumed.losses) == len(whole.losses) - done
    rest = copy.copy(whole)
    rest.losses, rest.grads = whole.losses[done:], whole.grads[done:]
    rest.logged = resumed.logged = None
    assert_identical(rest, resumed)
    optimizers = [result.trainer.optimizers[0].state_dict() for result in (whole, resumed)]
    harness.assert_tensors_same(*optimizers, rtol=0.0, atol=0.0, what="optimizer")


# ------------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("name", "lora", "done", "staleness"), [("llama", False, 2, 1), ("gpt2", False, 1, 0), ("qwen3", True, 2, 0)]
)
def test_resume_continues_bit_for_bit(name, lora, done, staleness, tmp_path):
    """Saved in the middle of an epoch, after the first step or a planned one, and resumed on another number of workers.
    Every batch is the same one, so the order of data does not matter. A run that is one step late goes on from the
    newest weights when it has saved them.
    """
    module, batches = fresh(name, lora), zoo.make_batches(name, 1) * 5
    options = {"strategy_options": {"staleness": staleness}}
    whole = train(OURS, module, batches, callbacks=[save_after(done, tmp_path / "at.ckpt")], **options)
    resumed = train(OURS, fresh(name, lora), batches, devices=3, fit={"ckpt_path": tmp_path / "at.ckpt"}, **options)
    assert_continues(whole, resumed, done)


def test_a_checkpoint_of_another_model_names_a_few_tensors(tmp_path):
    """All of a model's tensors were listed, which is pages of text."""
    path = tmp_path / "at.ckpt"
    train(OURS, fresh("qwen3"), zoo.make_batches("qwen3", 1), callbacks=[save_after(1, path)])
    with pytest.raises(RuntimeError, match=r"has adapters \(LoRA\), and the other has none") as raised:
        train(OURS, fresh("qwen3", lora=True), zoo.make_batches("qwen3", 1), fit={"ckpt_path": path})
    assert len(str(raised.value)) < 1000
    assert "Missing key(s) in state_dict: " in str(raised.value)


@pytest.mark.parametrize("at", ["on_before_zero_grad", "on_after_backward"])
@pytest.mark.parametrize(("windows", "saves"), [(1, False), (2, True)])
def test_state_that_is_read_within_a_batch_changes_nothing(at, windows, saves, tmp_path):
    """Before the loss was differentiated, the batch lost its gradients; afterwards, a checkpoint had it step twice."""

    def read(batch, trainer, *_):
        if trainer.fit_loop.epoch_loop.batch_idx != batch:
            return
        if saves:
            trainer.save_checkpoint(tmp_path / "within.ckpt")
        else:
            trainer.model.state_dict()

    options = {"steps": 4, "accumulate_grad_batches": windows}
    undisturbed = train(OURS, fresh(), BATCH, **options)
    for batch in (0, 3):
        reads = callback(passive=True, **{at: functools.partial(read, batch)})
        result = train(OURS, fresh(), BATCH, callbacks=[reads], **options)
        assert_identical(undisturbed, result)


def test_saving_within_a_window_leaves_updates_one_step_late(tmp_path):
    """The next step had all updates instead. A resumed run differed, as `ModelCheckpoint` saves again at its first
    batch.
    """
    saves, batches = save_after(3, tmp_path / "within.ckpt"), zoo.make_batches("llama", 1) * 8
    options = {"strategy_options": {"staleness": 1}}
    undisturbed = train(OURS, fresh(), batches, accumulate_grad_batches=2, **options)
    result = train(OURS, fresh(), batches, accumulate_grad_batches=2, callbacks=[saves], **options)
    assert (tmp_path / "within.ckpt").exists()
    assert_identical(undisturbed, result)


class HandlesSignals(pl.Callback):
    """Reads weights and saves in the handler of a signal. ``batch`` is the number of the batch."""

    roundpipe_passive_hooks = True

    def __init__(self, path):
        self.path, self.saved, self.batch = path, list[int](), -1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch = batch_idx

    def on_train_start(self, trainer, pl_module):
        def handle(*args):
            pl_module.state_dict()
            trainer.save_checkpoint(self.path)
            self.saved.append(trainer.global_step)

        self.former = signal.signal(signal.SIGUSR1, handle)

    def teardown(self, trainer, pl_module, stage):
        signal.signal(signal.SIGUSR1, self.former)


def test_a_signals_handler_may_save(tmp_path, monkeypatch):
    """Lightning's own handler for SLURM does. It took apart the step that it interrupted, which raised an error."""
    real, results = nn.Linear.forward, []
    for sends in ((), (1, 3, 5)):
        handles, calls = HandlesSignals(tmp_path / "handled.ckpt"), Counter[int]()

        def forward(self, x, sends=sends, handles=handles, calls=calls):
            calls[handles.batch] += 1
            if handles.batch in sends and calls[handles.batch] == 20:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.05)  # the main thread handles it meanwhile, unless it is deferred
            return real(self, x)

        monkeypatch.setattr(nn.Linear, "forward", forward)
        results.append(train(OURS, fresh(), BATCH, callbacks=[handles], steps=8))
        assert len(handles.saved) == len(sends)
    assert_identical(*results)


# --------------------------------------------------------------------------------------------------- to and from others


def test_plain_training_takes_a_checkpoint_from_within_a_window(tmp_path):
    """And goes on without the window's first gradients, as it does from its own."""
    resumed = []
    for kind in (PLAIN, OURS):
        path = tmp_path / f"{kind}.ckpt"
        train(kind, fresh(), BATCH, steps=6, accumulate_grad_batches=3, callbacks=[save_after(4, path)])
        resumed.append(train(PLAIN, fresh(), BATCH, steps=6, accumulate_grad_batches=3, fit={"ckpt_path": path}))
    harness.assert_same(*resumed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "lora", "before", "after"), [("gpt2", False, OURS, PLAIN), ("qwen3", True, PLAIN, OURS)]
)
def test_others_go_on_from_our_checkpoints_and_we_from_theirs(name, lora, before, after, tmp_path):
    module, batches = fresh(name, lora), zoo.make_batches(name, 1) * 4
    expected = train(PLAIN, module, batches)
    train(before, module, batches, callbacks=[save_after(2, tmp_path / "at.ckpt")], max_steps=2)
    resumed = train(after, fresh(name, lora), batches, fit={"ckpt_path": tmp_path / "at.ckpt"})
    expected.losses, expected.grads, expected.logged = expected.losses[2:], expected.grads[2:], None
    harness.assert_same(expected, resumed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "lora"), [("gpt2", False), ("qwen3", True)])
def test_the_file_is_what_plain_lightning_writes(name, lora, tmp_path):
    """Same keys, shapes, types and device, tied weights tied, and no larger but by a few kilobytes."""
    for kind in (PLAIN, OURS):
        train(
            kind,
            fresh(name, lora),
            zoo.make_batches(name, 1) * 2,
            callbacks=[save_after(2, tmp_path / f"{kind}.ckpt")],
            max_steps=2,
        )
    plain, own = (torch.load(tmp_path / f"{kind}.ckpt", weights_only=True) for kind in (PLAIN, OURS))
    assert list(own["state_dict"]) == list(plain["state_dict"])
    assert own.keys() == plain.keys()
    for key, value in plain["state_dict"].items():
        mine = own["state_dict"][key]
        assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device), key
        assert mine.untyped_storage().nbytes() == value.untyped_storage().nbytes(), f"{key} saves more than itself"
    assert own["optimizer_states"][0]["param_groups"] == plain["optimizer_states"][0]["param_groups"]
    states = [loaded["optimizer_states"][0]["state"] for loaded in (plain, own)]
    assert states[1].keys() == states[0].keys()
    for key, state in states[0].items():
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in states[1][key].items()}
    sizes = [(tmp_path / f"{kind}.ckpt").stat().st_size for kind in (PLAIN, OURS)]
    assert sizes[1] <= sizes[0] + 8192, sizes


# ----------------------------------------------------------------------------------------------- weights after training


def test_weights_are_ordinary_after_training(tmp_path):
    """After fit the module is a plain CPU module: it computes, trains and saves without the strategy."""
    module = fresh()
    before = {name: (p.shape, p.dtype, p.requires_grad, p.is_leaf) for name, p in module.named_parameters()}
    trainer_of(strategy(OURS), devices=2).fit(module, loader([BATCH] * 3))
    assert {name: (p.shape, p.dtype, p.requires_grad, p.is_leaf) for name, p in module.named_parameters()} == before
    assert all(p.device.type == "cpu" for p in module.parameters())
    expected = train(PLAIN, fresh(), BATCH, steps=3)
    harness.assert_tensors_same(expected.state, dict(module.state_dict()), rtol=1e-4, atol=1e-5)
    loss, _ = module.loss_and_logits(BATCH)
    loss.backward()
    torch.save(module.model.lm_head.weight, tmp_path / "one.pt")
    weight = module.model.lm_head.weight
    assert (tmp_path / "one.pt").stat().st_size < weight.numel() * 4 + 4096, "one tensor's file holds others as well"


# ------------------------------------------------------------------------------------------------- other ways to a file


class Saved(zoo.PlainClassifier):
    """Made again from what its checkpoint holds."""

    def __init__(self, lr):
        super().__init__(zoo.make_module("mlp").model)
        self.save_hyperparameters()
        self.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=lr, eps=1e-3)


def test_by_class_and_by_the_last(tmp_path):
    """``load_from_checkpoint`` gives a module that trains on; ``ckpt_path="last"`` finds the newest file."""
    batches = zoo.make_batches("mlp", 1) * 3

    def keeping(kind):
        return ModelCheckpoint(tmp_path / kind, filename="{step}", every_n_train_steps=2, save_last=True)

    found = []
    for kind in (PLAIN, OURS):
        options = {"enable_checkpointing": True, "max_epochs": 2}
        train(kind, Saved(0.01), batches, callbacks=[keeping(kind)], max_steps=4, **options)
        last = train(kind, Saved(0.02), batches, callbacks=[keeping(kind)], fit={"ckpt_path": "last"}, **options)
        module = Saved.load_from_checkpoint(tmp_path / kind / "step=6.ckpt")
        assert module.hparams["lr"] == 0.02 and module.device.type == "cpu"
        found.append([last, train(kind, module, batches)])
    for plain, own in zip(*found, strict=True):
        harness.assert_same(plain, own, rtol=1e-4, atol=1e-5)


def test_optimizer_state_stays_on_the_cpu(tmp_path):
    """``torch.optim`` puts state where the parameters are, Lightning's strategies where their first device is."""

    class OnTheWay(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            [optimizer] = trainer.optimizers
            for parameter, state in optimizer.state.items():
                seen.update((v.device, v.dtype) for v in state.values() if isinstance(v, Tensor))
                assert parameter.device == torch.device("cpu")

    class Elsewhere(RoundPipeStrategy):
        """As on a GPU: the first device is none that state may be moved to."""

        away = False

        @property
        def root_device(self):
            return torch.device("meta" if self.away else "cpu")

        def load_optimizer_state_dict(self, checkpoint):
            self.away = True
            super().load_optimizer_state_dict(checkpoint)
            self.away = False

    seen = set()
    train(PLAIN, fresh(), BATCH, steps=2, callbacks=[save_after(1, tmp_path / "at.ckpt")])
    run(Elsewhere(num_microbatches=3), fresh(), BATCH, devices=2, callbacks=[OnTheWay()], steps=3,
        fit={"ckpt_path": tmp_path / "at.ckpt"})  # fmt: skip
    assert seen == {(torch.device("cpu"), torch.float32)}
