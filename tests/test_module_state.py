"""State that user code keeps on modules while microbatches overlap: what each finds, and what is left.

User code between the same two layers runs microbatch after microbatch. So state that is read and written there is
carried on in order; state that is put back before ``training_step`` ends belongs to each microbatch alone.
"""

import lightning.pytorch as pl
import pytest
import torch
from harness import Learner, loader
from plain_oracle import assert_equal, assert_plain, kept, on_devices
from torch import nn

DEVICES = on_devices(2)
WINDOWS = pytest.mark.parametrize("window", [1, 4])


class Block(nn.Module):
    """A layer that keeps state of its own: a flag that others set, and what its first call has shown."""

    def __init__(self):
        super().__init__()
        self.linear, self.adapter = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("offset", torch.zeros(6))
        self.adapted, self.initialized, self.uses = True, False, 0

    def forward(self, x):
        y = self.linear(x) + self.adapter(x) if self.adapted else self.linear(x)
        return x + torch.tanh(y - self.offset)


class Net(Learner, lr=0.1, momentum=0.9):
    """Each subclass keeps state in ``step``, which gets the batch."""

    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4)).double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch, batch_idx):
        loss = self.step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def step(self, x, index):
        return self(x).square().mean()


class RunningMeanInBuffer(Net):
    """The same in a buffer that is written in place, and in one that is assigned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.ones((), dtype=torch.float64))
        self.register_buffer("assigned", torch.ones((), dtype=torch.float64))

    def step(self, x, index):
        loss = super().step(x, index)
        self.running.mul_(0.9).add_(loss.detach(), alpha=0.1)
        self.assigned = 0.5 * self.assigned + 0.5 * loss.detach()
        return loss / (self.running + self.assigned)


class BuffersByOutAndView(Net):
    """Buffers that torch functions write by ``out``, as `nn.utils.spectral_norm` does, and through a view."""

    def __init__(self):
        super().__init__()
        self.register_buffer("summed", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros(6, dtype=torch.float64))

    def step(self, x, index):
        mean = x.mean(0)
        torch.add(self.summed, mean, out=self.summed)
        self.rows.view(2, 3)[1].copy_(mean[:3])
        return super().step(x + self.summed + self.rows, index)


class Outputs(Net):
    """The usual list that is read at the epoch's end."""

    def __init__(self):
        super().__init__()
        self.outs = []

    def step(self, x, index):
        loss = super().step(x, index)
        self.outs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.calls.append(("outputs", kept(self.outs)))
        self.log("mean of outputs", torch.stack(self.outs).mean())
        self.outs.clear()


class Initializing(Net):
    """The first batch ever decides a scale."""

    initialized, scale = False, 0.0

    def step(self, x, index):
        if not self.initialized:
            self.scale = float(x.std())
            self.initialized = True
        return super().step(x / self.scale, index)


class InitializingBlock(Block):
    """A layer's first call ever decides its offset; every call counts."""

    def forward(self, x):
        if not self.initialized:
            self.offset = x.detach().mean(0)
            self.initialized = True
        self.uses += 1
        return super().forward(x)


class AveragingBlock(Block):
    """A layer keeps a running mean of its inputs, as a normalization does, in place."""

    def forward(self, x):
        with torch.no_grad():
            self.offset.lerp_(x.mean(0), 0.1)
        return super().forward(x) + 0.1 * self.offset.clone()


class ReadsOfLayers(Net):
    """Code between layers reads a buffer that a layer changes: a microbatch found what later ones had left there."""

    def __init__(self):
        super().__init__(AveragingBlock)

    def step(self, x, index):
        return (self(x) * self.blocks[0].offset).square().mean()


class WritesToThoseOfLayers(ReadsOfLayers):
    def step(self, x, index):
        h = self(x)
        with torch.no_grad():
            self.blocks[0].offset.add_(h.mean(0))
        return h.square().mean()


class Left(Net):
    """Hooks read what ``training_step`` of their batch has left: numbers, text, tensors that the next one writes to."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())

    def step(self, x, index):
        self.seen.add_(1)
        self.seen = self.seen.clone()
        self.index, self.text, self.rows = index, f"batch {index}", x[:, 0]
        self.blocks[0].last_index = index
        return super().step(x, index)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert (self.index, self.text, self.blocks[0].last_index) == (batch_idx, f"batch {batch_idx}", batch_idx)
        self.calls.append(("left", float(outputs["loss"]), self.index, kept(self.rows), kept(self.seen)))
        self.log("left", float(self.index))


KINDS = {kind.__name__: kind for kind in (RunningMeanInBuffer, BuffersByOutAndView, Outputs, Initializing, Left)}
IN_ORDER = {kind.__name__: kind for kind in (ReadsOfLayers, WritesToThoseOfLayers)}
KINDS |= {kind.__name__: lambda kind=kind: Net(kind) for kind in (InitializingBlock, AveragingBlock)}


def batches():
    return loader(torch.randn(11, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).unbind())


@DEVICES
@WINDOWS
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_modules(devices, window, kind):
    """Attributes, buffers and logs are those of plain Lightning: at each hook, and at the end."""
    plain, other = assert_plain(devices, KINDS[kind], batches, accumulate_grad_batches=window, max_epochs=2)
    for name, module in plain.module.named_modules():
        if not isinstance(module, pl.LightningModule):
            assert_equal(_own(module), _own(other.module.get_submodule(name)), name)


@DEVICES
@pytest.mark.parametrize("kind", IN_ORDER)
def test_buffers_that_code_between_layers_uses(devices, kind, caplog):
    """Microbatches run one after another, and a message says why."""
    with caplog.at_level("INFO"):
        assert_plain(devices, IN_ORDER[kind], batches, accumulate_grad_batches=4)
    assert caplog.text.count("code between layers reads or writes it") == 1


def _own(module):
    return kept({name: value for name, value in vars(module).items() if name[0] != "_"})


class Switching(Net):
    """Some batches set what they and later ones find behind each layer, which earlier ones of the window have not."""

    factor = 1.0

    def step(self, x, index):
        if index in (0, 6, 9):
            self.factor = -0.5 * self.factor
        for block in self.blocks:
            x = block(x) * self.factor
        return x.square().mean()


def test_no_microbatch_finds_what_a_later_one_has_set():
    """One device runs the first stage of all microbatches before the second stage of any."""
    options = {"plan": "forward 0-1; fused 2-3; backward 0-1; round 4"}
    assert_plain(1, Switching, batches, accumulate_grad_batches=4, max_epochs=2, options=options)


class ReadsFirstWritesLast(Net):
    """Reads in front of the layers what it writes behind them."""

    running = None

    def step(self, x, index):
        x = x if self.running is None else x / (1 + self.running)
        loss = super().step(x, index)
        self.running = loss.detach()
        return loss


HELD = {}


class GlobalState(Net):
    """Keeps the same outside of modules."""

    def step(self, x, index):
        for i, block in enumerate(self.blocks):
            x = block(x)
            HELD["last"] = x if i == 1 else HELD.get("last")
        return (x * HELD["last"]).mean()


@DEVICES
@WINDOWS
@pytest.mark.parametrize("kind", [ReadsFirstWritesLast, GlobalState])
def test_without_overlap(devices, window, kind):
    """``overlap=False``: one microbatch after another, whole. Then state that microbatches share is exact, too."""
    assert_plain(devices, kind, batches, accumulate_grad_batches=window, options={"overlap": False})
