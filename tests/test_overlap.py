"""training_step returns when all losses are known, and what is left of the step goes on meanwhile.

Layers here can be held up: `Gate` lets a layer's backward wait until something else has happened, which without the
overlap it never would. Numbers are those of other tests; here it is who runs beside whom, and in which order.
"""

import random
import threading
import time

import harness
import lightning.pytorch as pl
import pytest
import torch
from harness import Learner, callback, ours, run, seeded
from patience import PATIENCE_S, until
from torch import nn

from lightning_roundpipe.devices.errors import StreamAborted
from lightning_roundpipe.engine.user_sections import UserSections
from lightning_roundpipe.memory.layer_weights import LayerWeights
from lightning_roundpipe.updates import bucket_stepper
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

PLAN = harness.per_call(4, 2)
ONE_STAGE = "forward none; fused 0-3; backward none; round 2"
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(5)]


class Gate:
    """Holds up the backward of a layer of one batch until it is opened.

    Args:
        batch: its number; -1 for none.
        part: the microbatch that is held up; None for both.
    """

    def __init__(self, batch, part=None):
        self.batch, self.part = batch, part
        self.reached, self.opened = threading.Event(), threading.Event()
        self.in_vain = False

    def pass_through(self, batch, part):
        if batch == self.batch and self.part in (None, part):
            self.reached.set()
            self.in_vain |= not self.opened.wait(PATIENCE_S)

    def __deepcopy__(self, memo):
        return self


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, which):
        ctx.gate, ctx.which = gate, which.tolist()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.gate.pass_through(*ctx.which)
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, gate=None):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.gate = gate

    def forward(self, x, which):
        time.sleep(3e-3)  # more than `LONG_S`, so that others run meanwhile
        h = torch.tanh(self.lin(x))
        if self.gate is not None:
            h = _Held.apply(h, self.gate, which)
        return h


def which(batch, batch_idx):
    """Numbers of the batch and of the microbatch."""
    return torch.tensor([batch_idx, int(batch[0, 0] == BATCHES[batch_idx % 5][2, 0])])


class Gated(Learner):
    """Four layers, the first of which is held up in backward."""

    def __init__(self, gate, opens=lambda module, batch: None):
        super().__init__()
        with seeded(0):
            self.layers = nn.ModuleList([Layer(gate), Layer(), Layer(), Layer()])
        self.gate, self.opens = gate, opens

    def training_step(self, batch, batch_idx):
        self.opens(self, batch_idx)
        h = batch
        for layer in self.layers:
            h = layer(h, which(batch, batch_idx))
        return h.square().mean()


def fit(module, *callbacks, staleness=0, plan=PLAN, **options):
    strategy = ours(
        num_microbatches=2, layers=["Layer"], plan=plan, staleness=staleness, watchdog_timeout=3 * PATIENCE_S
    )
    return run(strategy, module, BATCHES, devices=2, callbacks=callbacks, watch=False, **options)


def test_training_step_returns_before_its_backward_is_over():
    gate = Gate(2)

    def end(batch):
        if batch == 2:
            gate.opened.set()

    plain = run("auto", Gated(Gate(-1)), BATCHES, watch=False)
    result = fit(Gated(gate), callback(passive=True, on_train_batch_end=lambda t, m, o, b, batch_idx: end(batch_idx)))
    assert gate.reached.is_set() and not gate.in_vain
    harness.assert_tensors_same(plain.state, result.state)


@pytest.mark.parametrize(("plan", "part"), [(PLAN, None), (ONE_STAGE, 1)], ids=["in other stages", "in the same stage"])
def test_layers_are_stepped_while_earlier_ones_still_run_backward(plan, part, monkeypatch):
    """A layer is, once the last microbatch's backward has left it."""
    gate, stepped = Gate(2, part), list[int]()
    real = BucketStepper._apply

    def apply(updates, step, gathered):
        real(updates, step, gathered)
        if step.number == 3 and not gate.opened.is_set():
            stepped.extend(bucket.index for bucket in gathered)
            if {2, 3, 4} <= set(stepped):  # in any order: an optimizer that is late finds several at once
                gate.opened.set()

    monkeypatch.setattr(BucketStepper, "_apply", apply)
    monkeypatch.setattr(bucket_stepper, "PIECE", 0)
    fit(Gated(gate), plan=plan)
    assert gate.reached.is_set() and not gate.in_vain, stepped


def test_the_next_forward_begins_before_backward_is_over():
    gate = Gate(2, 1)

    def opens(module, batch):
        if batch == 3:  # user code of the next step, whose first layers run behind it
            gate.opened.set()

    fit(Gated(gate, opens), staleness=1)
    assert gate.reached.is_set() and not gate.in_vain


class Reading(Gated):
    """Code between layers reads a weight, in backward too; and a hook there asks for the lock."""

    def __init__(self, gate):
        super().__init__(gate)
        self.scale = nn.Parameter(torch.ones(6))

    def training_step(self, batch, batch_idx):
        h = batch * self.scale
        for layer in self.layers:
            h = layer(h, which(batch, batch_idx)) * self.scale
        return h.square().mean()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("forgets", [False, True])
def test_weights_that_user_code_reads(staleness, forgets, monkeypatch):
    """They are stepped when all microbatches have ended; the next user code waits for that, without the baton."""
    if forgets:  # as if user code had not read it before
        monkeypatch.setattr(UserSections, "enter", _forgetting(UserSections.enter))
    gate = Gate(-1)
    plain = run("auto", Reading(gate), BATCHES, watch=False)
    with monkeypatch.context() as patch:
        real = LayerWeights.upload
        patch.setattr(LayerWeights, "upload", lambda *args: (time.sleep(0.002), real(*args))[1])
        result = fit(Reading(gate), staleness=staleness)
    if not staleness:
        harness.assert_tensors_same(plain.state, result.state, rtol=1e-5, atol=1e-6)


def _forgetting(real):
    def enter(self, *args):
        self.context.learned.read_by_user_code = frozenset()
        real(self, *args)

    return enter


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("fetching", [False, True])
def test_what_fails_in_backward_is_raised_at_the_next_step(staleness, fetching, monkeypatch):
    """Whether the optimizer waits for the next layer to come, or for its gradients that are coming down then."""
    begun = []
    stepped, real = threading.Event(), BucketStepper._apply

    def apply(updates, step, gathered):
        real(updates, step, gathered)
        if step.number == 3 and not fetching:
            stepped.set()

    class Failing(Gate):
        def pass_through(self, batch, part):
            if batch == self.batch:
                assert stepped.wait(PATIENCE_S), "no layer behind it is stepped"
                raise ZeroDivisionError("planted")

    def gather(updates, bucket, step):
        if fetching and updates.applying and step.number == 3:
            stepped.set()
            until(lambda: any(cancel_scope.failed for cancel_scope in running))
            raise StreamAborted("a device was aborted because another thread failed.")
        return real_gather(updates, bucket, step)

    def attach(updates, cancel_scope):
        running.append(cancel_scope)
        real_attach(updates, cancel_scope)

    running = []
    real_gather, real_attach = BucketStepper._gather, AsyncOptimizer.attach
    monkeypatch.setattr(AsyncOptimizer, "attach", attach)
    monkeypatch.setattr(BucketStepper, "_gather", gather)
    monkeypatch.setattr(BucketStepper, "_apply", apply)
    monkeypatch.setattr(bucket_stepper, "PIECE", 0)
    with pytest.raises(ZeroDivisionError, match="planted") as error:
        fit(Gated(Failing(2), lambda module, batch: begun.append(batch)), staleness=staleness)
    assert max(begun) in (2, 3)
    notes = "".join(error.value.__notes__)
    assert "backward pass, microbatch" in notes
    assert "go on from a checkpoint" in notes, "layers behind it were stepped"
    assert "failed too" not in notes
    assert harness.roundpipe_threads() == []


def test_a_step_that_fails_lets_the_one_before_end():
    """Its update is a whole one."""
    trained = []

    def opens(module, batch):
        if batch == 3:
            trained.append(module)
            threading.Timer(0.2, module.gate.opened.set).start()
            raise ZeroDivisionError("planted")

    for train in (lambda module: run("auto", module, BATCHES, watch=False), fit):
        with pytest.raises(ZeroDivisionError):
            train(Gated(Gate(2, 1) if train is fit else Gate(-1), opens))
    harness.assert_tensors_same(*(dict(module.state_dict()) for module in trained))


# ------------------------------------------------------------------------------------------------------ ordering rules


class Looking(pl.Callback):
    """Finds state of the process between steps, and changes it."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.on_its_way = []
        self.found = []

    def on_train_batch_end(self, trainer, *_):
        engine = getattr(trainer.strategy, "_engine", None)
        self.on_its_way.append(engine is not None and engine._step_in_flight is not None)
        for _ in range(20):
            time.sleep(1e-4)  # lets other threads of the process run
            self.found += [torch.rand(()).item(), random.random(), torch.get_default_dtype()]


@pytest.mark.parametrize("always_away", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_who_shares_the_process_takes_turns(precision, always_away, monkeypatch):
    """Layers that draw go on beside the next step, and neither they nor the main thread find what the other one has
    done to generators or to torch's default dtype."""
    if always_away:
        monkeypatch.setattr("lightning_roundpipe.engine.worker.LONG_S", 0.0)
    begin, drawing, dtypes, disturbed = AsyncOptimizer.begin, threading.Event(), set(), list[bool]()

    def slowly(self, *, zero_grad):
        drawing.clear()
        drawing.wait(0.2)  # the main thread is in the engine, and a layer, if a step is in flight, draws
        begin(self, zero_grad=zero_grad)

    monkeypatch.setattr(AsyncOptimizer, "begin", slowly)

    class Noting(Layer):
        def forward(self, x, which):
            for _ in range(10):
                time.sleep(5e-4)
                dtypes.add(torch.get_default_dtype())
            return super().forward(x, which)

    class Dropping(Layer):
        def forward(self, x, which):
            h = super().forward(x, which)
            drawing.set()
            for _ in range(10):
                before = torch.get_rng_state()
                time.sleep(2e-3)
                disturbed.append(not torch.equal(before, torch.get_rng_state()))
                h = nn.functional.dropout(h, 0.05)
            return h

    def train(strategy):
        module, looking = Gated(Gate(-1)), Looking()
        with seeded(3):
            module.layers[0], module.layers[1], module.layers[2] = Noting(), Dropping(), Noting()
            torch.manual_seed(5)
            random.seed(5)
            result = run(strategy, module, BATCHES, devices=2, callbacks=[looking], watch=False, precision=precision)
        return looking, result.module.state_dict()

    layers = {"num_microbatches": 2, "layers": ["Layer", "Dropping", "Noting"]}
    before = random.getstate()
    try:
        beside, weights = train(ours(plan=PLAN, **layers))
        assert beside.on_its_way == [False] + [True] * 4
        assert not any(disturbed)
        assert dtypes == {torch.float32 if precision == "32-true" else torch.bfloat16}
        alone, expected = train(ours(overlap=False, **layers))
    finally:
        random.setstate(before)
    assert not any(alone.on_its_way)
    assert beside.found == alone.found and set(beside.found[2::3]) == {torch.float32}
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


class Counted(nn.Module):
    """Takes time in training only, and notes how many of its kind compute at once."""

    inside, crowds, lock = [0], [], threading.Lock()

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        if self.training:
            with self.lock:
                self.inside[0] += 1
                self.crowds.append(self.inside[0])
            time.sleep(2e-2)
            with self.lock:
                self.inside[0] -= 1
        return torch.tanh(self.lin(x))


class Crowd(Learner):
    def __init__(self):
        super().__init__()
        with seeded(0):
            self.layers = nn.ModuleList([Counted() for _ in range(4)])

    def training_step(self, batch, batch_idx):
        h = batch
        for layer in self.layers:
            h = layer(h)
        return h.square().mean()

    validation_step = training_step


def test_layers_that_were_short_in_validation_overlap_in_training():
    strategy = ours(num_microbatches=2, layers=["Counted"], plan=PLAN, watchdog_timeout=3 * PATIENCE_S)
    Counted.crowds.clear()
    run(strategy, Crowd(), BATCHES, devices=2, watch=False, val_batches=BATCHES[:1], num_sanity_val_steps=1)
    assert max(Counted.crowds) > 1
