"""Moments of Adam in bf16 and int8."""

from pathlib import Path

import pytest
import torch
from harness import ours, trainer_of
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.packed_moments import (
    BLOCK,
    Bf16Moment,
    Int8Moment,
    dynamic_map,
    form_of,
    load,
    pack,
    unpacked,
)
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer


class Net(LightningModule):
    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(40, 3)
        self.losses = []
        self.optimizer = optimizer

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.head(self.layers(batch[0])).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=3e-3)


def fit(form, tmp=None, *, epochs=3, resume=None, optimizer=torch.optim.AdamW, module=None, **options):
    """Train with moments in that form, or plainly."""
    torch.manual_seed(1)
    x = torch.randn(96, 40)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()), batch_size=12)
    module = module or Net(optimizer)
    strategy = "auto" if form == "plain" else ours(optimizer_state=form)
    trainer = trainer_of(strategy, devices=1 if form == "plain" else 2, max_epochs=epochs, **options)
    trainer.fit(module, data, ckpt_path=resume)
    if tmp is not None:
        trainer.save_checkpoint(tmp / "last.ckpt")
    return module, trainer


def values(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def states(trainer):
    return [trainer.optimizers[0].state[p] for group in trainer.optimizers[0].param_groups for p in group["params"]]


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_training_goes_on_as_with_fp32(form, precision):
    exact, _ = fit("fp32", precision=precision)
    module, trainer = fit(form, precision=precision)
    held = sum(t.nbytes for state in states(trainer) for key, t in state.items() if key != "step")
    blocks = sum(-(-p.numel() // BLOCK) * 4 * 2 for p in module.parameters()) if form == "int8" else 0
    whole = {"bf16": 2, "int8": 1}[form]
    assert held == 2 * whole * values(module).numel() + blocks
    assert module.losses[0] == exact.losses[0]
    assert module.losses[-1] < 0.8 * module.losses[0]
    assert module.losses[-1] == pytest.approx(exact.losses[-1], rel=0.1)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_resumed_run_is_equal_to_the_bit(form, tmp_path):
    whole, _ = fit(form, epochs=2)
    fit(form, tmp_path, epochs=1)
    resumed, trainer = fit(form, epochs=2, resume=tmp_path / "last.ckpt")
    assert torch.equal(values(whole), values(resumed))
    assert {form_of(state) for state in states(trainer)} == {form}


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_a_first_step_needs_no_fp32_copies_and_leaves_what_torchs_own_leaves(form: str) -> None:
    torch.manual_seed(0)
    numbers, gradient = torch.randn(70, 1001), torch.randn(70, 1001)
    plain = nn.Parameter(numbers.clone())
    plain.grad = gradient.clone()
    torchs = torch.optim.AdamW([plain], amsgrad=True, fused=True)
    torchs.step()
    pack(torchs.state[plain], form)
    master = nn.Parameter(numbers.clone())
    ours = torch.optim.AdamW([master], amsgrad=True)
    partial, values = PartialOptimizer(ours, [master], form=form), Hyperparameters.of(ours)
    with partial.prepared(values):
        assert not ours.state, "a master without a gradient gets no state"
        partial.step(values, {id(master): gradient})
    assert torch.equal(master, plain)
    torch.testing.assert_close(ours.state[master], torchs.state[plain], rtol=0, atol=0)


class Mapped(Callback):
    """Counts the moments that lie in the checkpoint's file, before and after each window."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.before = []
        self.after = []

    def on_train_batch_start(self, trainer, *_):
        self.before.append(self.count(trainer))

    def on_train_batch_end(self, trainer, *_):
        trainer.strategy._engine.settle()
        self.after.append(self.count(trainer))

    @staticmethod
    def count(trainer):
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "last.ckpt" in line]
        spans = [[int(end, 16) for end in addresses.split("-")] for addresses, *_ in lines]
        moments = [t for state in states(trainer) if state for key, t in state.items() if key != "step"]
        return sum(any(start <= t.data_ptr() < end for start, end in spans) for t in moments)


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_moments_stay_in_the_file_until_their_first_update(form, tmp_path):
    fit(form, tmp_path, epochs=1)
    mapped = Mapped()
    fit(form, epochs=2, resume=tmp_path / "last.ckpt", callbacks=[mapped])
    assert mapped.before[0] == 2 * len(list(Net().parameters()))
    assert set(mapped.before[1:]) == set(mapped.after) == {0}


@pytest.mark.parametrize("saved", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_any_form_resumes_any_other(saved, form, tmp_path):
    fit(saved, tmp_path, epochs=1)
    module, trainer = fit(form, epochs=2, resume=tmp_path / "last.ckpt")
    assert {form_of(state) for state in states(trainer)} == {form}
    assert {int(state["step"]) for state in states(trainer)} == {16}
    assert module.losses[-1] < 1.2


class Counted(torch.optim.AdamW):
    """An optimizer with an entry of its own in its state."""

    independent_parameters = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.state["count"] = 8


def test_other_entries_of_a_state_are_left(tmp_path):
    fit("fp32", tmp_path, epochs=1, optimizer=Counted)
    _, trainer = fit("fp32", epochs=2, resume=tmp_path / "last.ckpt", optimizer=Counted)
    assert trainer.optimizers[0].state["count"] == 8


class Bf16Net(Net):
    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)

    def training_step(self, batch, index):
        return super().training_step([batch[0].bfloat16(), batch[1]], index)


def test_bf16_parameters_have_bf16_moments_of_their_own(tmp_path):
    fit("fp32", tmp_path, epochs=1, module=Bf16Net())
    _, trainer = fit("fp32", epochs=2, resume=tmp_path / "last.ckpt", module=Bf16Net())
    assert {state["exp_avg"].dtype for state in states(trainer)} == {torch.bfloat16}


def test_plain_lightning_takes_a_checkpoint_in_bf16(tmp_path):
    fit("bf16", tmp_path, epochs=1)
    _, trainer = fit("plain", epochs=2, resume=tmp_path / "last.ckpt")
    assert {state["exp_avg"].dtype for state in states(trainer)} == {torch.float32}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adamax])
def test_an_optimizer_without_such_moments_is_refused(optimizer):
    with pytest.raises(Exception, match=r"optimizer_state='bf16' .* Set optimizer_state='fp32'"):
        fit("bf16", optimizer=optimizer)


def test_bf16_rounds_without_bias_and_falls():
    packed = torch.full((2**16,), 1.0, dtype=torch.bfloat16)
    moment = Bf16Moment(packed, 1)
    for step in range(1, 501):
        numbers = moment.load(0, 2**16, torch.empty(2**16))
        moment.store(0, 2**16, numbers.mul_(0.999), step)
    assert packed.float().mean() == pytest.approx(0.999**500, rel=2e-3)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("length", [1, 255, 256, 1000])
def test_int8_keeps_the_nearest_code(signed, length):
    torch.manual_seed(0)
    numbers = torch.randn(length) if signed else torch.randn(length) ** 2
    moment = Int8Moment(torch.empty(length, dtype=torch.uint8), torch.empty(-(-length // BLOCK)), signed)
    moment.store(0, length, numbers.clone(), 1)
    blocks = torch.nn.functional.pad(numbers, (0, -length % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    assert torch.equal(moment.largest, largest)
    nearest = (blocks / largest[:, None])[..., None].sub(dynamic_map(signed)).abs().amin(-1) * largest[:, None]
    off = (moment.load(0, length, torch.empty(length)) - numbers).abs()
    assert (off <= nearest.flatten()[:length] + numbers.abs() * 2**-7 + 1e-12).all()


def test_the_dynamic_map_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        assert torch.allclose(dynamic_map(signed), functional.create_dynamic_map(signed), atol=1e-7)


def test_moments_of_other_strides_are_loaded_in_order():
    parameter = nn.Parameter(torch.zeros(8, 4))
    optimizer = torch.optim.AdamW([parameter])
    moment = torch.arange(32.0).view(8, 4).bfloat16()
    turned = moment.t().contiguous().t()
    state = {"step": torch.tensor(1.0), "exp_avg": turned, "exp_avg_sq": turned.clone()}
    load(optimizer, {**optimizer.state_dict(), "state": {0: state}}, "bf16")
    assert torch.equal(unpacked(optimizer.state[parameter])["exp_avg"], moment.float())
