"""No thread that drives a device waits for it, once the first batches have taught the engine what there is to know.

A thread that waits while it holds the baton keeps all microbatches waiting, too. The main thread
waits in one place: it reads the losses that a step's microbatches have computed, as Lightning asks for the loss.
"""

import functools
import re
import threading
import time
from collections import defaultdict

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import Learner, ours, run

from lightning_roundpipe.engine.sync import Baton, Runner
from lightning_roundpipe.tasks.causal_lm import CausalLM
from second_device import backend

STEADY = 4
"""The batch from which on nothing is new."""


class Listens(pl.Callback):
    """Notes waits from batch ``STEADY`` on, and those who hold the baton meanwhile."""

    roundpipe_passive_hooks = True

    def __init__(self, patch, waiting_s=0.0):
        self.waiting_s = waiting_s
        """How long a wait takes."""
        self.waits = []
        self.holding = []
        self._listening = False
        self._mine = threading.local()
        self._follow(patch)

    def _follow(self, patch):
        sleep, acquire, release = Runner.sleep, Baton.acquire, Baton.release

        def slept(runner):
            sleep(runner)
            self._mine.held = True

        def acquired(baton, *args):
            acquire(baton, *args)
            self._mine.held = True

        def released(baton, **computes):
            self._mine.held = False
            release(baton, **computes)

        patch.setattr(Runner, "sleep", slept)
        patch.setattr(Baton, "acquire", acquired)
        patch.setattr(Baton, "release", released)

    def hear(self, wait):
        if self._listening and not (
            wait.thread == "MainThread" and "outputs.py" in str(wait) and re.search(r" joined(_loss)? <", str(wait))
        ):
            self.waits.append(wait)
            if getattr(self._mine, "held", False):
                self.holding.append(wait)
            time.sleep(self.waiting_s)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._listening = batch_idx >= STEADY

    def on_train_end(self, trainer, pl_module):
        self._listening = False


def _packaged(name, count):
    """With the attention that reads no number of a padded mask, as all others of transformers do."""
    model = zoo.make_module(name).model
    model.set_attn_implementation("eager")
    return CausalLM(model, functools.partial(torch.optim.SGD, lr=0.1)), zoo.make_batches(name, count)


def _normed(count):
    """Layers with running statistics, in training and frozen."""
    blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(4))
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 5))
    return zoo.PlainClassifier(model), zoo.make_batches("mlp", count)


TASKS = {
    **{f"packaged {name}": functools.partial(_packaged, name) for name in ("llama", "gemma", "gpt2")},
    "running statistics": _normed,
    "mlp": lambda count: (zoo.make_module("mlp"), zoo.make_batches("mlp", count)),
}


def _strategy(name):
    if name != "running statistics":
        return ours(num_microbatches=2)
    plan = "forward 0-1; fused 2-4; backward 0-1; round 2"  # whose layers run again on the other device
    return ours(num_microbatches=2, layers=[f"model.{i}" for i in range(5)], plan=plan)


def _heard(name, patch):
    torch.manual_seed(0)
    module, batches = TASKS[name](STEADY + 3)
    listens = Listens(patch)
    with backend.listening(listens.hear):
        run(_strategy(name), module, batches, devices=2, callbacks=[listens], watch=False)
    return listens


def _told(waits):
    return "\n".join(sorted({str(wait)[:600] for wait in waits}))


@pytest.mark.parametrize("name", TASKS)
def test_no_thread_waits(name, devices, monkeypatch):
    heard = _heard(name, monkeypatch)
    assert heard.holding == [], _told(heard.holding)
    assert heard.waits == [], _told(heard.waits)


outside = defaultdict(float)
"""What user code sums up elsewhere than on modules, by layer."""


class Reads(Learner, lr=0.01):
    """Reads numbers of the device between all of its layers, in all ways."""

    def __init__(self, read):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.read = read
        self.total = 0.0
        outside.clear()

    def training_step(self, batch, batch_idx):
        h = batch["x"]
        for i, layer in enumerate(self.layers):
            h = layer(h).relu()
            outside[i] += self.read(h.detach())
        self.total += (h.detach() * 0 + 1).sum().item()
        return h.square().mean()


READ = {
    "item": lambda h: h.sum().item(),
    "bool": lambda h: bool((h > 0.1).any()),
    "cpu": lambda h: h.cpu().numpy().sum().item(),
    "by a mask": lambda h: len(h[h > 0]),
    "into host state": lambda h: float(torch.zeros(8).add_(h.sum(0)).sum()),
}
FAST = {"item"}


def _read(read, **options):
    """What user code has summed up, the total first."""
    generator = torch.Generator().manual_seed(2)
    batches = [{"x": torch.randn(6, 8, generator=generator)} for _ in range(STEADY + 3)]
    torch.manual_seed(0)
    module = Reads(read)
    strategy = options.pop("strategy", "auto")
    result = run(strategy, module, batches, watch=False, **options)
    return [result.module.total, *outside.values()]


@pytest.mark.parametrize("way", [w if w in FAST else pytest.param(w, marks=pytest.mark.slow) for w in READ])
def test_user_code_that_waits_gives_the_baton_on(way, devices, monkeypatch):
    """What it sums up meanwhile is all there: no other microbatch is in the same piece of code."""
    expected = _read(READ[way])
    listens = Listens(monkeypatch, waiting_s=0.003)
    strategy = ours(num_microbatches=3, plan="forward 0 1-2; fused 3; backward 2 0-1; round 3")
    with backend.listening(listens.hear):
        result = _read(READ[way], strategy=strategy, devices=2, callbacks=[listens])
    assert listens.waits and listens.holding == [], _told(listens.holding)
    # A truth value says something else of three parts than of the whole.
    count = 1 if way == "bool" else 5
    assert result[0] > 0 and result[:count] == pytest.approx(expected[:count], rel=1e-4)
