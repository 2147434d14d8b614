"""Optimizers of other libraries, and of the user's own: stepped layer by layer if declared, and else waited for.

Either way training is plain Lightning's, and resumes to the bit. `test_optimizer.py` has torch's own, and the plain
loop whose gradients come one step late.
"""

import functools
import threading
import time

import bitsandbytes
import harness
import peft
import pytest
import torch
import transformers
from harness import Learner, assert_same, assert_tensors_same, ours, run, seeded
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from test_optimizer import Apart, assert_losses_close, delayed
from torch import nn
from torch.optim import Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.tasks import MuonAdamW

WIDTH = 64
"""Matrices of 4,096 numbers, which is the least that low-bit optimizers quantise."""
LAYERS = ["Block"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Trained(Learner):
    """Residual blocks, with an optimizer that ``make`` makes of the module."""

    def __init__(self, make):
        super().__init__()
        with seeded(5):
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.make = make

    def loss(self, batch):
        return (self.blocks(batch) - 1).square().mean()

    def configure_optimizers(self):
        return self.make(self)

    def switch(self, mode):
        for optimizer in self.trainer.optimizers:
            getattr(optimizer, mode, lambda: None)()

    def on_train_epoch_start(self):
        self.switch("train")

    def on_train_epoch_end(self):
        self.switch("eval")


class Lion(Optimizer):
    """As in arXiv 2302.06675: elementwise, with a state for each parameter."""

    independent_parameters = True

    def __init__(self, params, lr=0.003):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    def with_gradients(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(momentum.lerp(p.grad, 1 - beta1).sign_(), alpha=group["lr"])
                    momentum.lerp_(p.grad, 1 - beta2)
        return loss


class ScheduleFree(Optimizer):
    """As in arXiv 2405.15682: a group counts its steps, and `train` and `eval` exchange the weights' meaning."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, weight, train):
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = train

    def train(self):
        self._move(1 - 0.9, True)

    def eval(self):
        self._move(1 - 1 / 0.9, False)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (1 - 0.9 * (1 - 1 / group["k"])))
                    z.sub_(p.grad, alpha=group["lr"])
        return loss


class Chained(Optimizer):
    """Two optimizers as one, as Lightning takes only one in automatic optimization."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self):
        return {"param_groups": [], "state": {}, "each": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optimizers, state_dict["each"], strict=True):
            optimizer.load_state_dict(state)


def declared(cls):
    """A class of another library, of which the user declares that it treats each parameter on its own."""
    return type(cls.__name__, (cls,), {"independent_parameters": True})


def torchao(name):
    def make(module):
        from torchao import optim

        return declared(getattr(optim, name))(module.parameters(), lr=0.01)

    return make


def matrices_and_others(module):
    matrices = [p for p in module.parameters() if p.ndim == 2]
    return matrices, [p for p in module.parameters() if p.ndim != 2]


def chained(module, **adamw):
    matrices, others = matrices_and_others(module)
    return Chained(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, **adamw))


BY_LAYER = {
    "MuonAdamW": lambda m: MuonAdamW(m.named_parameters(), lr=0.02, adamw_lr=0.01),
    "transformers.Adafactor": lambda m: declared(transformers.Adafactor)(m.parameters()),
    "Lion": lambda m: Lion(m.parameters()),
    "bitsandbytes.AdamW8bit": lambda m: declared(bitsandbytes.optim.AdamW8bit)(m.parameters(), lr=0.01),
    "torchao.AdamW8bit": torchao("AdamW8bit"),
    "torchao.AdamW4bit": torchao("AdamW4bit"),
    "torchao.AdamWFp8": torchao("AdamWFp8"),
}
WAITED_FOR = {
    "chained": (chained, "Chained is not known"),
    "schedule-free": (lambda m: ScheduleFree(m.parameters(), lr=0.5), "ScheduleFree is not known"),
}
MAKE = BY_LAYER | {name: make for name, (make, _) in WAITED_FOR.items()}


def batches(count=16):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def fit(module, count=16, *, devices=2, window=2, trainer=None, **options):
    """Train on ``count`` batches with these options of the strategy, and ``trainer``'s."""
    given = {"devices": devices, "accumulate_grad_batches": window} | (trainer or {})
    return run(ours(layers=LAYERS, **options), module, batches(count), **given)


def assert_same_bits(one, other):
    assert_tensors_same(one.state, other.state, rtol=0, atol=0)


@pytest.mark.parametrize(("devices", "window"), [(1, 1), (3, 4)])
@pytest.mark.parametrize("name", MAKE)
def test_as_in_plain_training(name, devices, window):
    module, apart = Trained(MAKE[name]), Apart()
    plain = run("auto", module, batches(), accumulate_grad_batches=window)
    result = fit(module, devices=devices, window=window, trainer={"callbacks": [apart]})
    assert apart.seen == {name in BY_LAYER}
    assert_same(plain, result, rtol=2e-4, atol=2e-5)  # more of rounding with each step


def test_muon_and_adamw_are_torchs():
    chain = functools.partial(chained, weight_decay=0.1, fused=True)
    one = lambda m: MuonAdamW(m.named_parameters(), 0.02, 0.01, adjust_lr_fn=None)  # noqa: E731
    assert_same_bits(*(run("auto", Trained(make), batches(4)) for make in (chain, one)))


def test_muon_and_adamw_do_not_block_under_bf16_true(monkeypatch):
    """The other default dtype changes no bit: without the declaration, steps wait until it is fp32 again."""
    found = []
    for declared in (True, False):
        monkeypatch.setattr(MuonAdamW, "explicit_dtypes", declared)
        apart = Apart()
        trainer = {"precision": "bf16-true", "callbacks": [apart]}
        found.append(fit(Trained(BY_LAYER["MuonAdamW"]), 8, trainer=trainer))
        assert apart.seen == {declared}
    assert_same_bits(*found)


@pytest.mark.parametrize("name", BY_LAYER)
def test_one_step_late(name):
    module = Trained(BY_LAYER[name])
    expected = harness.Result(losses=delayed(module, batches(), accumulate=4))
    assert_losses_close(expected, fit(module, devices=3, window=4, staleness=1, emulation={"delay_seed": 1}))


@pytest.mark.parametrize("name", WAITED_FOR)
def test_one_step_late_is_refused(name):
    make, reason = WAITED_FOR[name]
    with pytest.raises(MisconfigurationException, match=f"staleness=1 .*{reason}"):
        fit(Trained(make), devices=3, window=4, staleness=1)


class Compiles(Lion):
    """Its first step changes torch's generator meanwhile, as compilers do."""

    independent_parameters = True

    def step(self, closure=None):
        if any(p not in self.state for p in self.with_gradients()):
            with seeded(1):
                time.sleep(0.05)
        return super().step(closure)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_first_step_has_the_process_to_itself(staleness):
    kinds = [Trained(lambda m, kind=kind: kind(m.parameters())) for kind in (Lion, Compiles)]
    assert_same_bits(*(fit(kind, window=1, staleness=staleness, trainer={"watch": False}) for kind in kinds))


@pytest.mark.parametrize(
    ("name", "staleness", "device"),
    [
        *((name, 0, "cpu") for name in MAKE),
        *((name, 1, "cpu") for name in BY_LAYER),
        *(("MuonAdamW", staleness, "worker") for staleness in (0, 1)),
    ],
)
def test_resuming_goes_on_to_the_bit(name, staleness, device, tmp_path):
    """After the first epoch of two, from state that is mapped from the file."""
    module = Trained(MAKE[name])

    def train(path):
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        trainer = {"max_epochs": 2, "watch": False, "enable_checkpointing": True, "callbacks": [saving]}
        trainer["fit"] = {"ckpt_path": path}
        result = fit(module, 8, staleness=staleness, optimizer_device=device, trainer=trainer)
        assert result.trainer is not None and result.trainer.global_step == 8
        return result.state

    whole, resumed = train(None), train(tmp_path / "epoch=0.ckpt")
    assert [key for key, value in whole.items() if not torch.equal(value, resumed[key])] == []


# ------------------------------------------------------------------------------------------------ stepped on workers

ON_WORKERS = [name for name in BY_LAYER if not name.startswith("torchao")]
BF16 = {"precision": "bf16-mixed"}
LATE = {"poison": True, "delay_seed": 3}


class Adapted(Trained):
    """LoRA in the blocks, and their norms."""

    def __init__(self, make):
        super().__init__(make)
        with seeded(6):
            peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["up"]), self.blocks)
        for block in self.blocks:
            block.norm.requires_grad_(True)


def test_workers_step_adapters_as_the_host_does():
    """Muon for LoRA's matrices, AdamW on the host for the norms."""
    module = Adapted(lambda m: MuonAdamW((entry for entry in m.named_parameters() if entry[1].requires_grad), 0.02))
    assert_same_bits(*(fit(module, optimizer_device=device) for device in ("cpu", "worker")))


@pytest.mark.parametrize(
    ("name", "staleness", "window", "trainer"),
    [
        *((name, 0, 2, {}) for name in ON_WORKERS),
        ("MuonAdamW", 0, 1, {}),
        ("MuonAdamW", 1, 4, {}),
        ("MuonAdamW", 0, 2, {"gradient_clip_val": 0.01}),
        ("MuonAdamW", 0, 2, BF16),
        ("MuonAdamW", 1, 2, BF16),
    ],
)
def test_workers_step_as_the_host_does(name, staleness, window, trainer):
    """To the bit, where they compute with the same kernels. Weights that are split into halves, too."""
    options = {"staleness": staleness, "window": window, "emulation": LATE, "trainer": trainer}
    module = Trained(BY_LAYER[name])
    host, worker = (fit(module, devices=3, optimizer_device=device, **options) for device in ("cpu", "worker"))
    assert_same_bits(host, worker)
    assert host.losses == worker.losses


class Waits(Lion):
    """From the second update on, it sets ``waits`` and waits for ``goes_on``."""

    independent_parameters = True
    goes_on, waits = threading.Event(), threading.Event()

    def step(self, closure=None):
        if any(p in self.state for p in self.with_gradients()):
            self.waits.set()
            assert self.goes_on.wait(60)
        return super().step(closure)


class Fails(Trained):
    """The third step fails while the update of the second one is under way."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            assert Waits.waits.wait(60)
            raise ArithmeticError("in the third step")
        return super().training_step(batch, batch_idx)


def test_an_update_on_workers_ends_though_the_next_step_fails(monkeypatch):
    """Devices are aborted then. The update goes on behind that, and the weights are those of two whole steps."""
    Waits.goes_on.clear()
    Waits.waits.clear()
    abort = EmulatedDevice.abort

    def aborted(device):
        abort(device)
        Waits.goes_on.set()

    monkeypatch.setattr(EmulatedDevice, "abort", aborted)
    plain = run("auto", Trained(BY_LAYER["Lion"]), batches(2))
    module = Fails(lambda m: Waits(m.parameters()))
    trainer = harness.trainer_of(ours(layers=LAYERS, optimizer_device="worker"), devices=2, max_epochs=1)
    with pytest.raises(ArithmeticError, match="in the third step") as failed:
        trainer.fit(module, harness.loader(batches(4)))
    assert not any("optimizer step" in note for note in getattr(failed.value, "__notes__", []))
    assert_tensors_same(plain.state, module.state_dict())


NEEDED = 8 * 4 * WIDTH**2
"""Bytes of a step on a worker: eight numbers for each of the largest matrix."""


def fit_in(memory):
    options = {"optimizer_device": "worker", "emulation": {"memory": memory}}
    return fit(Trained(BY_LAYER["MuonAdamW"]), 8, window=4, trainer={"watch": False}, **options)


def test_steps_on_workers_have_memory_of_the_budget():
    """A plan has what is left, and no worker holds more."""
    report = fit_in(2 * NEEDED).report
    planned = report["planned_device_bytes"]
    assert NEEDED < planned <= 2 * NEEDED
    assert max(report["peak_device_bytes"]) <= planned


def test_a_budget_without_room_for_steps_on_workers_names_them():
    with pytest.raises(ValueError, match=r"optimizer steps \(optimizer_device='worker', 131,072 bytes\) keep"):
        fit_in(NEEDED + 2**14)


class Noisy(Lion):
    """Layers that run on the device would find its generator changed."""

    independent_parameters = True

    def step(self, closure=None):
        for p in self.with_gradients():
            p.grad += torch.randn_like(p.grad)
        return super().step(closure)


class Remembers(Lion):
    independent_parameters = True

    def step(self, closure=None):
        for p in self.with_gradients():
            self.state[p]["history"] = [p.grad.clone()]
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Noisy, r"draws random numbers \(aten.randn_like"), (Remembers, "Remembers keeps a list in state.*'history'")],
)
def test_steps_that_workers_cannot_run_are_refused(kind, error):
    with pytest.raises(RoundPipeError, match=rf"{error}.*Set optimizer_device='cpu'"):
        fit(Trained(lambda m: kind(m.parameters())), 4, window=1, optimizer_device="worker")
