"""Memory for gradients: what is in flight, not a copy of the model."""

import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import harness
import lightning.pytorch as pl
import pytest
import torch
from harness import Learner, ours, run
from patience import PATIENCE_S
from torch import nn

from lightning_roundpipe.devices import Event
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.grad_buffers import GradientLayout, GradientPool, HostGradSums
from lightning_roundpipe.memory.host_layer import host_layers, make_buckets
from lightning_roundpipe.memory.split_buffer import SplitBuffer
from lightning_roundpipe.optim.narrow_gradient import NarrowGradient
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.bucket_stepper import BucketStepper
from lightning_roundpipe.updates.current_optimizer import CurrentOptimizer
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.updates.loss_handle import StepGradients

SIZE = 8
BYTES = 4 * SIZE * SIZE
"""Of a layer's gradients."""
LAYERS = 12


class Module(Learner, lr=0.01):
    """Layers of one size, of which the last is never called and the first is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS + 2))
        self.layers[0].requires_grad_(requires_grad=False)

    def loss(self, batch):
        for layer in self.layers[:-1]:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()

    def validation_step(self, batch, batch_idx):
        self.layers[1](batch)


class LooksAtGradients(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        assert pl_module.layers[1].weight.grad is not None


class Asked(pl.Callback):
    """Memory of gradients that training asks for, by batch, and how many blocks of it live at the end of each batch."""

    roundpipe_passive_hooks = True

    def __init__(self, patch):
        self.when = Counter()
        self.living = []
        self._batch = None
        self._storages = []
        real = EmulatedDevice.host_buffer

        def host_buffer(device, nbytes):
            made = real(device, nbytes)
            if self._batch is not None and nbytes == BYTES:  # a gradient's, and not a bf16 copy's
                self.when[self._batch] += 1
                self._storages.append(weakref.ref(made.untyped_storage()))
            return made

        patch.setattr(EmulatedDevice, "host_buffer", host_buffer)

    def on_train_start(self, trainer, pl_module):
        self._batch = -1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._batch = batch_idx

    def on_train_batch_end(self, *_):
        self.living.append(self.alive)

    @property
    def alive(self):
        """The blocks that live now."""
        return sum(storage() is not None for storage in self._storages)


def fit(asked, module, *callbacks, **options):
    used = ours(num_microbatches=2, layers=["Linear"], **options.pop("strategy", {}))
    batches = list(torch.randn(5, 4, SIZE, generator=torch.Generator().manual_seed(1)))
    run(used, module, batches, callbacks=[asked, *callbacks], watch=False, **options)


@pytest.fixture
def slow_optimizer(monkeypatch):
    """Gradients come when the optimizer's step has begun, faster than it uses them."""
    real_step, real_room = PartialOptimizer.step, HostGradSums.make_room

    def step(self, *args):
        time.sleep(0.02)
        real_step(self, *args)

    def make_room(self, scope=None):
        end = time.monotonic() + PATIENCE_S
        while self._pool.keeps and self._pool.draining is None and time.monotonic() < end:
            if scope is None:
                return False
            time.sleep(0.001)
        return real_room(self, scope)

    monkeypatch.setattr(PartialOptimizer, "step", step)
    monkeypatch.setattr(HostGradSums, "make_room", make_room)
    monkeypatch.setattr("lightning_roundpipe.updates.bucket_stepper.PIECE", 1)


@pytest.mark.parametrize("kind", ["32-true", "bf16-true", "dropout"])
def test_downloads_wait_for_a_slow_optimizer(kind, monkeypatch, slow_optimizer):
    """The first window has all sums at once; their memory is freed. Later ones have what is in flight."""
    asked, module = Asked(monkeypatch), Module()
    if kind == "dropout":
        module.layers[3].register_forward_hook(lambda layer, args, output: nn.functional.dropout(output, 0.1))
    fit(asked, module, precision="bf16-true" if kind == "bf16-true" else "32-true")
    assert asked.when[0] == LAYERS
    assert 1 <= asked.living[-1] <= 4, "three, and one that arrives when the optimizer has no complete one left"


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}], ids=["layer by layer", "clipping by norm"])
def test_narrowed_gradients_are_fp32_only_while_they_are_used(options, monkeypatch, request):
    """Later windows have one round: nothing is added to what arrives. Clipping needs all of it before any is used."""
    if options:
        monkeypatch.setattr("lightning_roundpipe.updates.bucket_stepper.PIECE", 1)
    else:
        request.getfixturevalue("slow_optimizer")
    held = {"take": [], "take_wide": []}
    for name, most in held.items():
        monkeypatch.setattr(GradientPool, name, counting(getattr(GradientPool, name), most))
    wide, real = [], NarrowGradient.widened

    def widened(gradient, out=None):
        wide.append(out.numel())
        return real(gradient, out)

    monkeypatch.setattr(NarrowGradient, "widened", widened)
    asked = Asked(monkeypatch)
    plan = f"forward none; fused 0-{LAYERS}; backward none; round 2"
    fit(asked, Module(), strategy={"reduce_dtype": "bfloat16", "plan": plan}, **options)
    assert set(wide) == {SIZE * SIZE}, "SGD needs them, in memory of a layer"
    assert not held["take_wide"]
    assert max(held["take"]) == LAYERS if options else 1 <= max(held["take"]) <= 4


def counting(real, most):
    """``real``, which notes how many of the blocks that it gave live, once the first window is over."""
    given = []

    def take(pool, nbytes):
        block = real(pool, nbytes)
        given[:] = [ref for ref in given if (other := ref()) is not None and other is not block]
        given.append(weakref.ref(block))
        if pool.keeps:
            most.append(len(given))
        return block

    return take


@pytest.mark.parametrize(("hook", "copies"), [("on_before_optimizer_step", 1), ("on_before_zero_grad", 2)])
def test_the_last_steps_gradients_have_no_memory_beside_the_next_ones(hook, copies, monkeypatch):
    """Plain training drops them before backward, which runs within training_step here. They were there twice."""
    asked, living = Asked(monkeypatch), list[int]()
    looks = harness.callback(**{hook: lambda *_: None})
    counts = harness.callback(passive=True, on_before_zero_grad=lambda *_: living.append(asked.alive))
    fit(asked, Module(), looks, counts)
    assert living == [LAYERS] + 4 * [copies * LAYERS]
    assert set(asked.when) <= set(range(copies + 1)), "later batches find memory"


@pytest.mark.parametrize("why", ["clipping by norm", "a hook that finds .grad"])
def test_where_all_gradients_are_needed_each_layer_has_memory(why, monkeypatch):
    asked = Asked(monkeypatch)
    if why == "clipping by norm":
        fit(asked, Module(), gradient_clip_val=0.1)
    else:
        fit(asked, Module(), LooksAtGradients())
    assert asked.living[-1] == LAYERS


@pytest.fixture
def layer(device):
    module = nn.Linear(SIZE, SIZE, bias=False)
    [made] = host_layers({"layer": module}, device, Formats(), double_buffered=False, mapped=())
    make_buckets([made], module.parameters())
    made.device = device
    return made


class _Step:
    has_ready = True


def waiting(pool):
    """A download that waits until the pool is not full."""
    thread = threading.Thread(target=pool.wait, args=(pool.is_full, BYTES, CancelScope()), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread


def test_a_full_pool_waits_only_for_complete_gradients(layer):
    pool = GradientPool(layer.device, limit=BYTES, largest=BYTES)
    held = pool.take(BYTES)
    assert not pool.is_full(BYTES), "no step uses gradients layer by layer"
    pool.draining = step = _Step()
    thread = waiting(pool)
    pool.give(held, None)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    pool.take(BYTES)
    step.has_ready = False
    pool.wait(pool.is_full, BYTES, CancelScope())  # the optimizer lacks gradients, which may be those that wait


def test_what_only_the_first_window_adds_has_no_memory_behind_it(layer):
    pool = GradientPool(layer.device, limit=BYTES, largest=BYTES)
    blocks = [pool.take_landing(BYTES), pool.take_landing(BYTES)]
    memory = [weakref.ref(block.flat.untyped_storage()) for block in blocks]
    pool.give(blocks.pop(0), None)
    pool.begin_window(keeps=True)
    assert [one() is not None for one in memory] == [False, True]


def test_gradients_in_flight_have_no_memory_while_masters_join(monkeypatch):
    """Then a layer's weights exist twice."""
    asked, living = Asked(monkeypatch), list[int]()
    real = SplitBuffer.join

    def join(buffer):
        if buffer.is_split:
            living.append(asked.alive)
        real(buffer)

    monkeypatch.setattr(SplitBuffer, "join", join)
    fit(asked, Module(), precision="bf16-true")
    assert asked.living[-1] >= 1
    assert set(living) == {0}


def test_room_that_is_found_is_taken(layer):
    """Or the thread that has found it, and keeps all microbatches waiting, would wait for an update after all."""
    pool = GradientPool(layer.device, limit=BYTES, largest=BYTES)
    pool.draining = _Step()
    first, second = (HostGradSums(layer, GradientLayout(layer), pool) for _ in range(2))
    assert first.make_room() and not second.make_room()
    first.release()
    assert second.make_room() and len(second.flat) == BYTES


def test_taking_memory_waits_for_no_download(layer):
    """Microbatches take it with the baton held, and a sum that nothing took may still be on its way."""

    class OnItsWay(Event):
        over = False
        wait = time = None

        def done(self):
            return self.over

    pool, download = GradientPool(layer.device, limit=4 * BYTES, largest=BYTES), OnItsWay()
    pool.begin_window(keeps=True)
    pool.give(dropped := pool.take(BYTES), download)
    assert pool.take(BYTES) is not dropped
    download.over = True
    assert pool.take(BYTES) is dropped


def test_a_bucket_without_gradients_wakes_downloads(layer):
    """It may be the last complete one, and the optimizer lacks what waits."""
    pool, readiness = GradientPool(layer.device, limit=1, largest=BYTES), GradReadiness([layer.bucket])
    pool.take(BYTES)
    pool.draining = readiness
    readiness.forward_ended(())
    thread = waiting(pool)
    updates = AsyncOptimizer(BucketStepper([layer.bucket], pool, CurrentOptimizer(lambda: None, [layer.bucket])))
    batch = StepGradients([], [], 1.0, readiness)
    step = SimpleNamespace(window=batch, keeps=False, outside=frozenset(), number=1)
    updates.stepper._finish(step, layer.bucket)
    thread.join(PATIENCE_S)
    updates.close()
    assert not thread.is_alive()
