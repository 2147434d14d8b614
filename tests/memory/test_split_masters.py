"""fp32 masters that share the memory of their bf16 working copies."""

import math

import pytest
import torch
from harness import trainer_of
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.memory.flat_buffer import FlatBuffer
from lightning_roundpipe.optim.split_masters import SplitTensor

SPECIAL = [0.0, -0.0, math.inf, -math.inf, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45]


def split(numbers):
    halves = SplitTensor(torch.empty(numbers.numel(), dtype=torch.bfloat16), torch.empty(numbers.numel()).short())
    halves.split_all(numbers)
    return halves


def bits(numbers):
    return numbers.view(torch.int32).long()


def test_all_but_ties_keep_their_bits():
    numbers = torch.randint(-(2**31), 2**31, (2**20,)).int().view(torch.float32)
    numbers = torch.cat([numbers[numbers.isfinite()], torch.tensor(SPECIAL)])
    halves = split(numbers)
    assert torch.equal(halves.high, numbers.bfloat16())
    tie = (bits(numbers) & 0x1FFFF) == 0x8000
    off = bits(numbers) - bits(halves.joined_like(numbers))
    assert torch.equal(off, tie.long())  # one unit in the last place nearer to zero


def test_nan_stays_nan():
    numbers = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32).view(torch.float32)
    assert numbers.isnan().all()
    halves = split(numbers)
    assert halves.high.isnan().all()
    assert halves.joined_like(numbers).isnan().all()


class Net(LightningModule):
    def __init__(self, optimizer=torch.optim.AdamW, lr=1e-2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(24, 3)
        self.losses = []
        self.evaluated = []
        self._of = optimizer, lr

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        reads = self.layers[1][0].weight.float().sum() + self.head.weight.detach().float().norm()
        self.evaluated.append((self(batch[0]).float().sum() + reads).item())

    def configure_optimizers(self):
        cls, lr = self._of
        return cls(self.parameters(), lr=lr)


def fit(precision, *callbacks, module=None, epochs=2, save=None, resume=None):
    module = module or Net()
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(48, 24), torch.randint(0, 3, (48,))), batch_size=6)
    options = {"callbacks": list(callbacks), "accumulate_grad_batches": 2, "num_sanity_val_steps": 2}
    trainer = trainer_of("roundpipe", devices=2, precision=precision, max_epochs=epochs, **options)
    trainer.fit(module, data, data, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


def apart(monkeypatch):
    monkeypatch.setattr(FlatBuffer, "_may_share", False)


def values(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Looks(Callback):
    """Reads weights in evaluations and after them, and writes to one."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, module):
        self.seen.append(values(module).double().sum().item())
        with torch.no_grad():
            module.layers[0][0].weight.mul_(0.99)

    def on_validation_batch_end(self, trainer, module, *_):
        self.seen.append(values(module).double().sum().item())


class Counts(Callback):
    """Counts the buffers that masters and uploads share, without looking at weights."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.sharing = 0

    def on_train_batch_end(self, trainer, *_):
        flats = [flat for layer in trainer.strategy._engine.model.layers for flat in layer.weights.flats]
        self.sharing = sum(flat.shares for flat in flats)


class Writes(Net):
    """Writes to weights in evaluations by their ``.data``, and restores one."""

    def validation_step(self, batch, index):
        self.layers[0][0].weight.data.mul_(0.999)
        before = self.head.weight.data.clone()
        self.head.weight.data.mul_(0.5)
        super().validation_step(batch, index)
        self.head.weight.data.copy_(before)


class Keeps(Net):
    """Asks for the whole state in evaluations, before and after, and keeps tensors of weights."""

    def validation_step(self, batch, index):
        self.evaluated.append(sum(weight.float().sum().item() for weight in self.state_dict().values()))
        kept = [parameter.data for parameter in self.parameters()]
        super().validation_step(batch, index)
        self.evaluated[-1] += sum(weight.float().sum().item() for weight in (*kept, *self.state_dict().values()))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", [Writes, Keeps])
def test_evaluations_may_write_to_weights_and_keep_them(kind, precision, monkeypatch):
    shared = fit(precision, module=kind())
    apart(monkeypatch)
    separate = fit(precision, module=kind())
    assert shared.evaluated == pytest.approx(separate.evaluated, rel=1e-6)
    assert torch.allclose(values(shared), values(separate), rtol=2**-22, atol=0.0)


class Asks(Net):
    """Asks for the whole state in a training_step behind the first one."""

    def training_step(self, batch, index):
        if index == 5:
            self.state_dict()
        return super().training_step(batch, index)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_state_within_training_step_is_refused(precision):
    module = Asks()
    with pytest.raises(RoundPipeError, match="Do it in a hook, such as on_train_batch_end"):
        fit(precision, module=module)
    assert values(module).isfinite().all()


class Holds(Callback):
    """Keeps the memory of a weight from the first validation on, and sees it change."""

    def __init__(self):
        self.held = []
        self.seen = []

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking and not self.held:
            self.held = [module.layers[0][0].weight.data]
        self.seen += [weight.double().sum().item() for weight in self.held]


def test_memory_that_user_code_holds_is_not_shared(monkeypatch):
    counts, holds = Counts(), [Holds(), Holds()]
    fit("bf16-mixed", counts, holds[0], epochs=3)
    assert counts.sharing == 4
    apart(monkeypatch)
    fit("bf16-mixed", holds[1], epochs=3)
    assert holds[0].seen == pytest.approx(holds[1].seen, rel=1e-9)
    assert len(set(holds[0].seen)) > 1


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_resumed_run_is_equal_to_the_bit(precision, tmp_path):
    whole = fit(precision, epochs=2)
    fit(precision, epochs=1, save=tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=False)["state_dict"]
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert torch.equal(values(whole), values(fit(precision, epochs=2, resume=tmp_path / "a.ckpt")))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("looks", [False, True])
def test_numbers_are_those_of_separate_copies(precision, optimizer, looks, monkeypatch):
    counts, seen = Counts(), [Looks(), Looks()]
    shared = fit(precision, counts, *([seen[0]] if looks else []), module=Net(optimizer))
    assert counts.sharing == {"bf16-mixed": 5, "bf16-true": 9}[precision]  # layer norms are not cast
    apart(monkeypatch)
    separate = fit(precision, *([seen[1]] if looks else []), module=Net(optimizer))
    assert shared.losses == separate.losses
    assert shared.evaluated == separate.evaluated
    assert torch.allclose(values(shared), values(separate), rtol=2**-22, atol=0.0)  # ties
    assert seen[0].seen == pytest.approx(seen[1].seen, rel=1e-9)
