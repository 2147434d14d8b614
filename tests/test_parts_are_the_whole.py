"""Parts are the whole: what training_step gives in parts of a batch is compared with what it gives on the whole batch.

Each kind of training_step equals plain training, by parts or by the calls of its model, or is refused by name.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from harness import assert_same, loader, ours, run, trainer_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.modes.model_step import ModelStep
from lightning_roundpipe.runtime.profile.parts_check import PartsCheck
from lightning_roundpipe.runtime.profile.verdict import Verdict

Batch = dict[str, Tensor]
WIDTH = 16
SLOW = pytest.mark.slow
COUNTS = [(2, 2), *(pytest.param(*counts, marks=SLOW) for counts in ((1, 1), (4, 1), (4, 2)))]
"""Microbatches and devices."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Module(pl.LightningModule):
    """``step`` is what a test is about: called with the module, the logits and the batch, it returns the loss."""

    def __init__(self, step: Callable[[Any, Tensor, Batch], Any], **attributes: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model = Net()
        self.step = step
        for name, value in attributes.items():
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.step(self, self.model(batch["x"]), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(count: int = 3, samples: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(samples, 6, generator=generator),
            "y": torch.randint(0, 5, (samples,), generator=generator),
        }
        for _ in range(count)
    ]


def entropy(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"])


LAYERS = ["Linear", "Block"]


def trained(module: Any, data: Any, microbatches: int, devices: int, **options: Any) -> Any:
    strategy = ours(num_microbatches=microbatches, layers=LAYERS, **options)
    return run(strategy, module, data, devices=devices)


def cut_by(result: Any) -> str:
    """What was cut, as the slots show: a step in parts has a fused stage."""
    return "step" if "fused" in {slot["phase"] for slot in result.report["slots"]} else "model"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from lightning_roundpipe import strategy

    lines: list[str] = []
    monkeypatch.setattr(strategy, "rank_zero_info", lines.append)
    yield lines


# ------------------------------------------------------------------------------- what counts in training_step (kind 13)


def anneals(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.calls += 1
    return entropy(module, logits, batch) * (1 - 0.1 * module.calls)


def moves_a_buffer(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = F.mse_loss(logits, module.center.clone().expand_as(logits))
    module.center.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
    return loss


def moves_its_data(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = F.mse_loss(logits, module.center.clone().expand_as(logits))
    module.center.data.mul_(0.9).add_(logits.data.mean(0), alpha=0.1)
    module.counts.numpy()[0] += 1
    return loss / float(module.counts)


def fills_a_codebook(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    near = torch.cdist(logits, module.codes).argmin(1)
    loss = F.mse_loss(logits, module.codes[near])
    with torch.no_grad():
        for code in near.unique():
            module.codes[code] += 0.3 * (logits[near == code].mean(0) - module.codes[code])
    return loss


def keeps_a_queue(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    keys = torch.stack(list(module.queue)) if module.queue else logits.new_zeros(1, 5)
    module.queue.append(logits.detach().mean(0))
    return entropy(module, logits, batch) + 0.1 * (logits @ keys.T).square().mean()


def takes_the_next(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return entropy(module, logits, batch) * next(module.scales)


def draws_of_its_own(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return entropy(module, logits, batch) * float(module.generator.random())


class Schedule:
    """A helper that is no module."""

    def __init__(self) -> None:
        self.seen = 0

    def step(self) -> float:
        self.seen += 1
        return 1 / self.seen


def asks_a_helper(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return entropy(module, logits, batch) * module.schedule.step()


def keeps_outputs(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    module.outputs.append(float(loss))
    return loss


COUNTING: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "anneals": (anneals, lambda: {"calls": 0}),
    "moves a buffer": (moves_a_buffer, lambda: {"center": torch.zeros(5)}),
    "moves its data": (moves_its_data, lambda: {"center": torch.zeros(5), "counts": torch.ones(1)}),
    "fills a codebook": (fills_a_codebook, lambda: {"codes": torch.eye(5)}),
    "keeps a queue": (keeps_a_queue, lambda: {"queue": []}),
    "takes the next": (takes_the_next, lambda: {"scales": itertools.count(1)}),
    "draws of its own": (draws_of_its_own, lambda: {"generator": np.random.default_rng(1)}),
    "asks a helper": (asks_a_helper, lambda: {"schedule": Schedule()}),
    "keeps outputs": (keeps_outputs, lambda: {"outputs": []}),
}


def left_on(module: Any) -> Any:
    helper = getattr(module, "schedule", None)
    generator = getattr(module, "generator", None)
    return (
        getattr(module, "calls", None), list(getattr(module, "queue", ())), helper and helper.seen,
        repr(getattr(module, "scales", None)), generator and generator.bit_generator.state["state"],
    )  # fmt: skip


@pytest.mark.parametrize(("microbatches", "devices"), COUNTS)
@pytest.mark.parametrize("kind", COUNTING)
def test_what_counts_how_often_it_runs(kind: str, microbatches: int, devices: int) -> None:
    step, attributes = COUNTING[kind]
    data = batches()
    plain = run("auto", Module(step, **attributes()), data)
    result = trained(Module(step, **attributes()), data, microbatches, devices)
    assert_same(plain, result)
    if kind != "keeps a queue":
        assert left_on(result.module) == left_on(plain.module)
    else:
        torch.testing.assert_close(result.module.queue, plain.module.queue)
    if kind == "keeps outputs":
        assert result.module.outputs == pytest.approx(plain.module.outputs, rel=1e-4)
    if microbatches > 1:
        assert cut_by(result) == "model"


@pytest.mark.parametrize("kind", ["anneals", "moves a buffer", "keeps a queue"])
def test_asserted_parts_that_count_are_refused(kind: str) -> None:
    step, attributes = COUNTING[kind]
    with pytest.raises(RoundPipeError, match=r"is .* instead of .*microbatch_scope='model'.*num_microbatches=1"):
        trained(Module(step, **attributes()), batches(), 2, 2, microbatch_scope="step")


# ------------------------------------------------------------------------ what is kept around the module (kinds 13, 15)


class Tally(pl.Callback):
    """A user's callback, which training_step reaches through the trainer."""

    def __init__(self) -> None:
        self.calls, self.seen, self.total = 0, [], torch.zeros(())


class Curriculum(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.data, self.level, self.table = batches(count), 0, torch.zeros(600, 600)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Batch:
        return self.data[index]


def tally_of(module: Any) -> Tally:
    return next(callback for callback in module.trainer.callbacks if isinstance(callback, Tally))


def decays_the_rate(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.9
    return entropy(module, logits, batch)


def steps_the_scheduler(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.lr_schedulers().step()
    return entropy(module, logits, batch)


def counts_on_a_callback(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    tally_of(module).calls += 1
    tally_of(module).seen.append(len(logits))
    return entropy(module, logits, batch)


def adds_up_on_a_callback(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    tally_of(module).total += loss.detach()
    return loss


def stops(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    if loss > 1.9:
        module.trainer.should_stop = True
    return loss


def counts_on_the_trainer(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.trainer.mine = getattr(module.trainer, "mine", 0) + 1
    return entropy(module, logits, batch)


def raises_the_level(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.trainer.train_dataloader.dataset.level += 1
    return entropy(module, logits, batch)


AROUND = [
    decays_the_rate, steps_the_scheduler, counts_on_a_callback, adds_up_on_a_callback, counts_on_the_trainer,
    raises_the_level,
]  # fmt: skip


class Around(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def kept_around(step: Any, strategy: Any, devices: int, count: int = 3) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module, tally, curriculum = Around(step), Tally(), Curriculum(count)
    trainer = trainer_of(strategy, devices=devices, callbacks=[tally], max_epochs=2)
    trainer.fit(module, torch.utils.data.DataLoader(curriculum, batch_size=None))
    settings = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizers[0].param_groups]
    kept = (
        settings, trainer.lr_scheduler_configs[0].scheduler.state_dict(), tally.calls, tally.seen,
        getattr(trainer, "mine", None), curriculum.level, trainer.should_stop, trainer.global_step,
    )  # fmt: skip
    return kept, [tally.total, *module.parameters()]


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("step", AROUND)
def test_what_is_kept_around_the_module(step: Any, microbatches: int, devices: int) -> None:
    """Neither the parts nor a rehearsal show on the trainer, optimizers, schedulers, callbacks and data sets."""
    plain, weights = kept_around(step, "auto", 1)
    kept, ours_ = kept_around(step, ours(num_microbatches=microbatches, layers=LAYERS), devices)
    assert kept == plain
    torch.testing.assert_close(ours_, weights)


def test_parts_do_not_stop_training() -> None:
    """Samples of the first batch raise the flag, and no batch does."""
    alone = F.cross_entropy(Module(stops).model(batches()[0]["x"]), batches()[0]["y"], reduction="none")
    assert (alone > 1.9).any()
    plain, _ = kept_around(stops, "auto", 1, count=2)
    assert plain[-2:] == (False, 4)
    kept, _ = kept_around(stops, ours(num_microbatches=8, layers=LAYERS), 1, count=2)
    assert kept == plain


@pytest.mark.parametrize("step", [decays_the_rate, steps_the_scheduler, counts_on_the_trainer])
def test_asserted_parts_that_change_settings_are_refused(step: Any) -> None:
    with pytest.raises(RoundPipeError, match=r"(optimizer 0|ExponentialLR|trainer).* is .* instead of"):
        kept_around(step, ours(num_microbatches=2, layers=LAYERS, microbatch_scope="step"), 2)


class Large(Tally):
    """Keeps more than is copied, and what cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [[i] for i in range(5000)]
        self.stream = (i for i in range(3))
        self.table = torch.zeros(1 << 20)


def test_a_large_callback_has_its_numbers_compared(said: list[str]) -> None:
    plain, tally = Large(), Large()
    trainer_of(callbacks=[plain]).fit(Around(counts_on_a_callback), loader(batches()))
    strategy = ours(num_microbatches=2, layers=LAYERS)
    trainer_of(strategy, devices=2, callbacks=[tally]).fit(Around(counts_on_a_callback), loader(batches()))
    assert (tally.calls, tally.seen) == (plain.calls, plain.seen) and len(tally.rows) == 5000
    assert not [line for line in said if "put back" in line]


# ------------------------------------------------------------------------------- what code collects outside of modules

COLLECTED: list[float] = []
TOTALS: dict[str, Any] = {"calls": 0, "loss": 0.0}
TIMES = 0


def to_a_list(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    COLLECTED.append(loss.item())
    return loss


def to_a_dict(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    TOTALS["calls"] += 1
    TOTALS["loss"] += loss.detach()
    return loss


def to_a_global(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    global TIMES
    TIMES += 1
    return entropy(module, logits, batch)


def to_its_class(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    type(module).times += 1
    return entropy(module, logits, batch)


def to_a_default(module: Any, logits: Tensor, batch: Batch, kept: list[int] = COLLECTED, *, by: Any = TOTALS) -> Tensor:
    kept.append(len(logits))
    by["calls"] += 1
    return entropy(module, logits, batch)


class OfClass(Module):
    times: ClassVar[int] = 0
    woken: ClassVar[float] = 0.0


def to_two_cells() -> tuple[Any, Callable[[], Any]]:
    """Two functions whose variables have one name."""

    def counter(start: int) -> tuple[Callable[[], None], Callable[[], int]]:
        count = start

        def add() -> None:
            nonlocal count
            count += 1

        return add, lambda: count

    (one, read_one), (other, read_other) = counter(0), counter(7)
    still, read_still = counter(100)

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        one()
        other()
        if module is None:
            still()
        return entropy(module, logits, batch)

    return step, lambda: (read_one(), read_other(), read_still())


def collected(kind: str, strategy: Any) -> Any:
    global TIMES
    TIMES, OfClass.times = 0, 0
    COLLECTED.clear()
    TOTALS.update(calls=0, loss=0.0)
    step, read = to_two_cells() if kind == "cells" else (COLLECTING[kind], lambda: ())
    torch.manual_seed(0)
    trainer_of(strategy, devices=2 if strategy != "auto" else 1).fit(OfClass(step), loader(batches()))
    return [*COLLECTED, *map(float, TOTALS.values()), TIMES, OfClass.times, *read()]


COLLECTING: dict[str, Any] = {
    "list": to_a_list, "dict": to_a_dict, "global": to_a_global, "class": to_its_class, "default": to_a_default,
    "cells": None,
}  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("kind", COLLECTING)
def test_what_code_collects_outside_of_modules(kind: str, microbatches: int) -> None:
    """A list of losses has one for each batch, as in plain training, and none of the rehearsal."""
    plain = collected(kind, "auto")
    assert collected(kind, ours(num_microbatches=microbatches, layers=LAYERS)) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("kind", COLLECTING)
def test_asserted_parts_collect_for_each_part(kind: str, said: list[str]) -> None:
    collected(kind, ours(num_microbatches=2, layers=LAYERS, microbatch_scope="step"))
    [line] = [line for line in said if "for each microbatch" in line]
    assert "what is kept in" in line or "the length of" in line


class Beat(threading.Thread):
    """Notes the time on itself, as tqdm's monitor does."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.due, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        while True:
            self.due.acquire()
            self.woken = OfClass.woken = time.perf_counter()
            self.done.release()


BEAT = Beat()
RUNS: queue.SimpleQueue[None] = queue.SimpleQueue()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_what_another_thread_does_now_and_then(at: int, said: list[str]) -> None:
    """The run of training_step in which it does so differs from the others, in the whole batch or in parts."""
    while not RUNS.empty():
        RUNS.get()

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        RUNS.put(None)
        if RUNS.qsize() == at:
            BEAT.due.release()
            BEAT.done.acquire()
        return entropy(module, logits, batch)

    result = trained(OfClass(step), batches(), 2, 2)
    assert_same(run("auto", OfClass(entropy), batches()), result)
    assert cut_by(result) == "step" and not [line for line in said if "for each microbatch" in line]


def by_numpy(module: Any, logits: Tensor, batch: Batch) -> dict[str, Any]:
    share = float(batch["y"].numpy().mean()) + 1
    return {"loss": (logits.square().mean(1) * batch["y"]).mean() / share, "samples": len(batch["y"])}


def test_a_returned_whole_number_beside_arrays_of_numpy(said: list[str]) -> None:
    result = trained(Module(by_numpy), batches(), 2, 2)
    assert cut_by(result) == "model" and not [line for line in said if "could not be compared" in line]
    assert_same(run("auto", Module(by_numpy), batches()), result, outputs=True)


# ----------------------------------------------------------------------------------------------- loss weights (kind 14)


def padded(samples: int = 8, *, evenly: bool = False) -> list[Batch]:
    data = batches(samples=samples)
    for batch in data:
        batch["y"][1 : (1 if evenly else samples // 2)] = -100
        batch["z"] = batch["x"][:, :5] * 2
    return data


def logs_another(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.log("entropy", F.cross_entropy(logits, batch["y"]))
    return F.mse_loss(logits, batch["z"])


def adds_another(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"]) + F.mse_loss(logits, batch["z"])


def masks_its_own(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    mask = (batch["y"] >= 0).float()
    return ((logits - batch["z"]).square().mean(1) * mask).sum() / mask.sum()


def contrasts(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    scores = F.normalize(logits, dim=1) @ F.normalize(batch["z"], dim=1).T
    return F.cross_entropy(scores * 5, torch.arange(len(scores)))


def takes_the_root(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(logits, batch["z"]).sqrt()


def sums_rows(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return (logits - batch["z"]).square().sum() / 10


def spreads(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(logits, batch["z"]) - 0.1 * logits.std(0).mean()


LOSSES = {
    "logs another": logs_another,
    "adds another": adds_another,
    "masks its own": masks_its_own,
    "contrasts": contrasts,
    "takes the root": takes_the_root,
    "sums rows": sums_rows,
    "spreads": spreads,
}


@pytest.mark.parametrize(("microbatches", "devices"), COUNTS)
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_that_are_no_mean_by_their_targets(kind: str, microbatches: int, devices: int) -> None:
    data = padded()
    plain = run("auto", Module(LOSSES[kind]), data)
    result = trained(Module(LOSSES[kind]), data, microbatches, devices)
    assert_same(plain, result)
    if microbatches > 1:
        assert cut_by(result) == ("step" if kind in ("logs another", "masks its own") else "model")


def follows_a_policy(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """As PPO does in its first epoch: the ratio is one, and advantages have a mean of zero, so the loss is zero."""
    chosen = logits.log_softmax(1).gather(1, batch["y"][:, None]).squeeze(1)
    gained = batch["x"].sum(1)
    gained = (gained - gained.mean()) / (gained.std() + 1e-8)
    return -((chosen - chosen.detach()).exp() * gained).mean()


def balances(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """Each of two losses over its own value, so that the loss is two."""
    one, other = entropy(module, logits, batch), logits.square().mean()
    return one / one.detach() + other / other.detach()


def stops_a_factor(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    one, other = entropy(module, logits, batch), logits.square().mean()
    return one + other * (one / other).detach()


@pytest.mark.parametrize(("microbatches", "devices"), COUNTS)
@pytest.mark.parametrize("loss", [follows_a_policy, balances, stops_a_factor])
def test_losses_whose_value_says_nothing_of_their_gradient(loss: Any, microbatches: int, devices: int) -> None:
    module, data = Module(loss), batches()
    result = trained(module, data, microbatches, devices)
    assert_same(run("auto", module, data), result)
    assert microbatches == 1 or cut_by(result) == "model"


def weighs_classes(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    weights = 1 / (1 + torch.bincount(batch["label"], minlength=100)[batch["label"]])
    return ((logits - batch["z"]).square().mean(1) * weights).sum() / weights.sum()


def pairs_classes(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    z, labels = F.normalize(logits, dim=1), batch["label"]
    pairs = (labels[:, None] == labels).float() - torch.eye(len(z))
    return F.mse_loss(logits, batch["z"]) - ((z @ z.T) * pairs).sum() / pairs.sum().clamp(min=1)


@pytest.mark.parametrize("samples", [8, 11])
@pytest.mark.parametrize("loss", [weighs_classes, pairs_classes])
def test_losses_that_show_only_where_two_samples_are_alike(loss: Any, samples: int) -> None:
    """All samples of the first batch are of different classes, as few samples of many classes usually are."""
    data = padded(samples)
    for batch, of_a_class in zip(data, (1, 2, 4), strict=True):
        batch["label"] = torch.arange(samples) // of_a_class
    plain = run("auto", Module(loss), data)
    result = trained(Module(loss), data, 2, 1)
    assert_same(plain, result)
    assert cut_by(result) == "model"


@pytest.mark.parametrize("known", [True, False])
def test_a_cross_entropy_beside_another_loss_on_a_rare_batch(*, known: bool) -> None:
    """In the first batch each sample has as many targets as any other, so that parts are the whole there.

    Negative targets are known to be ignored before the batch is trained on; others are not.
    """
    data = [padded(evenly=True)[0], padded()[1]]
    if known:
        result = trained(Module(adds_another), data, 2, 2)
        assert_same(run("auto", Module(adds_another), data), result)
        assert cut_by(result) == "model"
        return

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits, batch["y"], ignore_index=7) + F.mse_loss(logits, batch["z"])

    for batch in data:
        batch["y"][batch["y"] < 0] = 7
    with pytest.raises(RoundPipeError, match=r"a cross entropy and something else .*spread over the microbatches"):
        trained(Module(step), data, 2, 2)
    result = trained(Module(step), data, 2, 2, microbatch_scope="model")
    assert_same(run("auto", Module(step), data), result)


def test_given_weights_that_are_wrong_are_said() -> None:
    with pytest.warns(RoundPipeWarning, match=r"^roundpipe: with the given loss_weight.*the loss is .* instead of"):
        trained(Module(masks_its_own), padded(), 2, 2, loss_weight=lambda batch: len(batch["x"]))


def test_given_weights_that_are_right(recwarn: pytest.WarningsRecorder) -> None:
    data = padded()
    result = trained(Module(masks_its_own), data, 2, 2, loss_weight=lambda batch: (batch["y"] >= 0).sum())
    assert_same(run("auto", Module(masks_its_own), data), result)
    assert not [w for w in recwarn if "loss_weight" in str(w.message)]


def test_what_a_hook_inside_a_layer_collects_keeps_the_scope() -> None:
    """It runs for each part in either scope. A loss that needs all samples has its calls cut nevertheless."""
    count = [0]
    for step, scope in ((entropy, "step"), (takes_the_root, "model")):
        module = Module(step)
        module.model.blocks[0].inner.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        count[0] = 0
        result = trained(module, padded(evenly=True), 2, 1)
        assert cut_by(result) == scope
        assert count[0] == 2 * 3


# ---------------------------------------------------------------------------------------------- logged values (kind 15)


class Logging(Module):
    """Logs what is no mean."""

    def __init__(self) -> None:
        super().__init__(entropy)
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        right = (logits.argmax(1) == batch["y"]).float()
        self.log("perplexity", loss.exp())
        self.log("samples", float(len(logits)))
        self.log("targets", (batch["y"] >= 0).sum().float())
        self.log("rmse", (logits.softmax(1) - F.one_hot(batch["y"].clamp(min=0), 5)).square().mean().sqrt())
        self.log("largest", logits.max())
        self.log("smallest", logits.min())
        self.log("accuracy", right.mean())
        self.log("rate", 0.1)
        return loss


@pytest.mark.parametrize(("microbatches", "devices"), COUNTS)
def test_logged_values_follow_from_those_of_parts(microbatches: int, devices: int) -> None:
    data = batches(samples=9)
    for batch in data:
        batch["y"][:3] = -100  # means over samples are no means over targets
    plain, result = run("auto", Logging(), data), trained(Logging(), data, microbatches, devices)
    assert_same(plain, result)
    if microbatches > 1:
        assert cut_by(result) == "step"


def spread(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.log("spread", logits.std())
    return entropy(module, logits, batch)


def sums_in_a_metric(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    module.total(loss)
    module.log("total", module.total)
    return loss


def lists(module: Any, logits: Tensor, batch: Batch) -> Any:
    return {"loss": entropy(module, logits, batch), "means": [logits.detach().mean()] * 2, "names": ["a", "b", "c"]}


def grows_with_parts(module: Any, logits: Tensor, batch: Batch) -> Any:
    return {"loss": entropy(module, logits, batch), "chunks": [len(logits)]}


OTHERS: dict[str, tuple[Any, Callable[[], dict[str, Any]], str]] = {
    "spread": (spread, dict, "model"),
    "sums in a metric": (sums_in_a_metric, lambda: {"total": torchmetrics.SumMetric()}, "step"),
    "lists": (lists, dict, "step"),
    "grows with parts": (grows_with_parts, dict, "model"),
}


@pytest.mark.parametrize(("microbatches", "devices"), COUNTS)
@pytest.mark.parametrize("kind", OTHERS)
def test_logged_values_and_outputs_that_do_not(kind: str, microbatches: int, devices: int) -> None:
    step, attributes, scope = OTHERS[kind]
    data = batches()
    plain = run("auto", Module(step, **attributes()), data)
    result = trained(Module(step, **attributes()), data, microbatches, devices)
    assert_same(plain, result)
    for one, other in zip(plain.outputs, result.outputs, strict=True):
        if isinstance(one, dict):
            assert other.get("chunks") == one.get("chunks") and other.get("names") == one.get("names")
    if microbatches > 1:
        assert cut_by(result) == scope


def test_a_value_that_is_zero_at_first_is_looked_at_again() -> None:
    """A count that is zero is the sum and the mean of its parts."""

    def counts_rare(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        module.log("rare", (batch["y"] == 4).sum().float())
        return entropy(module, logits, batch)

    data = batches(4)
    data[0]["y"].clamp_(max=3)
    data[1]["y"][:] = 4
    assert_same(run("auto", Module(counts_rare), data), trained(Module(counts_rare), data, 2, 2))


def test_an_attribute_that_is_equal_by_chance_is_looked_at_again() -> None:
    """An accuracy on few samples is zero at first, for the parts as for the whole."""

    class Keeping(Module):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("accuracy", float(self.accuracy))

    def keeps_the_accuracy(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        module.accuracy = (batch["y"] == 4).float().mean()
        return entropy(module, logits, batch)

    data = batches(4)
    for batch, rare in zip(data, (0, 0, 1, 1), strict=True):
        batch["y"].clamp_(max=3)
        batch["y"][:5] = 4 if rare else 1
    module = Keeping(keeps_the_accuracy, accuracy=None)
    assert_same(run("auto", module, data), trained(module, data, 2, 2))


def test_a_metric_beside_what_is_looked_at_again() -> None:
    """It has seen parts of the batch before, and counts them."""

    def keeps_both(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        module.length = len(batch["y"]) * 0
        return averages_in_a_metric(module, logits, batch)

    module = Module(keeps_both, average=torchmetrics.MeanMetric(), length=None)
    result = trained(module, batches(4), 2, 2)
    assert cut_by(result) == "step"
    assert_same(run("auto", module, batches(4)), result)


def logs_a_rare_target(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    rare = batch["y"] == 4
    module.log("counted", F.cross_entropy(logits, torch.where(rare, batch["y"], -100)))
    if module.by_hand:
        module.log("by hand", logits.square().mean(1).masked_fill(rare == 0, math.nan).nanmean())
    return F.mse_loss(logits, F.one_hot(batch["y"], 5).float())


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_part_without_what_a_logged_value_is_a_mean_of(by_hand: bool) -> None:
    """By what the engine counts, it weighs nothing. Else the first batch shows it: parts of it have none, too."""
    data = batches(2)
    for batch in data:
        batch["y"][:] = torch.tensor([4, 1, 2, 4, 4, 4, 1, 1])
    data[1]["y"][4:] = 1
    module = Module(logs_a_rare_target, by_hand=by_hand)
    result = trained(module, data, 2, 2)
    assert cut_by(result) == ("model" if by_hand else "step")
    assert_same(run("auto", module, data), result)


def test_a_later_part_without_what_a_logged_value_is_a_mean_of() -> None:
    data = batches(2)
    data[0]["y"][:] = 4
    data[1]["y"][:] = torch.tensor([4, 1, 2, 4, 1, 1, 1, 1])
    module = Module(logs_a_rare_target, by_hand=True)
    result = trained(module, data, 2, 2)
    assert cut_by(result) == "model"
    assert_same(run("auto", module, data), result)
    with pytest.warns(RoundPipeWarning, match="the logged 'by hand' is nan instead of"):
        trained(module, data, 2, 2, microbatch_scope="step")


def keeps_a_prototype_of_each_class(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch) + 0.1 * (logits - module.prototypes[batch["y"]]).square().mean()
    for number in batch["y"].unique().tolist():
        mean = logits.detach()[batch["y"] == number].mean(0)
        module.prototypes[number] = 0.9 * module.prototypes[number] + 0.1 * mean
    return loss


def counts_users(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    for number in set(batch["y"].tolist()):
        module.seen[number] = module.seen.get(number, 0) + 1
    return entropy(module, logits, batch)


@pytest.mark.parametrize("samples", [8, 16])
@pytest.mark.parametrize("step", [keeps_a_prototype_of_each_class, counts_users])
def test_what_is_kept_for_a_class_that_comes_in_several_parts(step: Any, samples: int, said: list[str]) -> None:
    """No class of the samples that are compared need come in both parts; one of them does."""
    data = batches(4, samples)
    for batch in data:
        batch["y"][:] = torch.arange(samples) % 4 if samples > 8 else torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    module = Module(step, prototypes=torch.zeros(5, 5), seen={})
    ours_ = trained(module, data, 4, 2)
    assert_same(run("auto", module, data), ours_)
    assert cut_by(ours_) == "model" and "microbatch_scope" in "".join(said)


def seeds_in_a_fork(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        noise = torch.randn_like(logits)
    return F.mse_loss(logits, noise)


def seeds_for_good(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    torch.manual_seed(int(module.global_step))
    return F.mse_loss(logits, torch.rand(len(logits), 5).log())


def seeds_everything(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    with pl.utilities.seed.isolate_rng():
        pl.seed_everything(3, verbose=False)
        kept = torch.empty_like(logits).bernoulli_(0.5)
    return entropy(module, logits * kept, batch)


@pytest.mark.parametrize("step", [seeds_in_a_fork, seeds_for_good, seeds_everything])
def test_noise_that_is_seeded_in_the_step(step: Any) -> None:
    """Each part had the same noise as the others, as each seeds anew."""
    ours_ = trained(Module(step), batches(), 4, 2)
    assert_same(run("auto", Module(step), batches()), ours_)
    assert cut_by(ours_) == "model"


def test_a_seed_for_what_is_no_samples(said: list[str]) -> None:
    def draws_weights(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            weights = torch.rand(5)
        return F.cross_entropy(logits * weights, batch["y"])

    ours_ = trained(Module(draws_weights), batches(), 4, 2)
    assert_same(run("auto", Module(draws_weights), batches()), ours_)
    assert cut_by(ours_) == "step" and "compared" not in "".join(said)


def stops_at_a_high_loss(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    if module.global_step == 2 and loss > 0:
        module.trainer.should_stop = True
    return loss


def test_a_part_that_stops_training_is_said() -> None:
    """In the third batch, of which no samples were compared."""
    with pytest.warns(RoundPipeWarning, match="training_step has set trainer.should_stop.*on_train_batch_end"):
        trained(Module(stops_at_a_high_loss), batches(5), 2, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="roundpipe: training_step has set")
        for alone in ({"microbatch_scope": "model"}, {"microbatches": 1}):
            trained(Module(stops_at_a_high_loss), batches(5), **{"microbatches": 2, "devices": 2, **alone})
        trained(Module(entropy), batches(5), 2, 2)


# ---------------------------------------------------------------------------------------------------- later batches


class Listed(torchmetrics.CatMetric):
    """A mean that keeps what it is given."""

    def compute(self) -> Tensor:
        return torch.as_tensor(super().compute()).mean()


def averages_in_a_metric(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    module.average(loss)
    module.log("average", module.average, on_step=False, on_epoch=True)
    return loss


def leaves_the_odd_one_out(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    even = len(logits) // 2 * 2
    return entropy(module, logits[:even], {"y": batch["y"][:even]})


def test_batches_that_are_cut_unevenly_are_another_kind(said: list[str]) -> None:
    """Even parts are the whole, and uneven ones are not: such batches stay whole."""
    data = [*batches(), *batches(2, samples=9)]
    result = trained(Module(leaves_the_odd_one_out), data, 2, 2)
    assert_same(run("auto", Module(leaves_the_odd_one_out), data), result)
    assert result.report["microbatches"] == 1
    assert len([line for line in said if line.startswith("roundpipe: in parts of unequal sizes")]) == 1


def test_a_metric_that_takes_unequal_parts_for_equal_ones_is_said() -> None:
    """A list of means has one for each part; what is added to a sum is merged."""
    data = [*batches(), *batches(2, samples=7)]
    module = Module(averages_in_a_metric, average=torchmetrics.MeanMetric())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        assert_same(run("auto", module, data), trained(module, data, 2, 2))
    module = Module(averages_in_a_metric, average=Listed())
    assert_same(run("auto", module, batches()), trained(module, batches(), 2, 2))
    with pytest.warns(RoundPipeWarning, match="^roundpipe: in parts of unequal sizes, metric 'average'.*='model'"):
        trained(module, data, 2, 2)


def test_a_tensor_that_all_samples_share() -> None:
    """Has as many rows as the last batch has samples."""

    def classifies(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits @ batch["shared"].T, batch["y"] % 3)

    data = [*batches(), *batches(1, samples=3)]
    for batch in data:
        batch["shared"] = torch.arange(15.0).reshape(3, 5).cos()
    assert_same(run("auto", Module(classifies), data), trained(Module(classifies), data, 2, 2))


class LossHead(nn.Linear):
    """Computes the loss itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


def test_a_cross_entropy_inside_a_layer_is_said(said: list[str]) -> None:
    class Inside(Module):
        def __init__(self) -> None:
            super().__init__(entropy)
            self.loss = LossHead(5, 5)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss: Tensor = self.loss(self.model(batch["x"]), batch["y"])
            return loss

    with pytest.raises(RoundPipeError, match=r"the loss is .* instead of"):
        run(ours(num_microbatches=2, layers=[*LAYERS, "LossHead"]), Inside(), padded(), devices=2)
    [line] = [line for line in said if "computes a cross entropy itself" in line]
    assert line.startswith("roundpipe: layer 'loss'") and "loss_weight" in line
    weighed = ours(num_microbatches=2, layers=[*LAYERS, "LossHead"], loss_weight=lambda batch: (batch["y"] >= 0).sum())
    assert_same(run("auto", Inside(), padded()), run(weighed, Inside(), padded(), devices=2))


# ---------------------------------------------------------------------------------------------------- the check itself


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    found: list[Verdict] = []
    real = PartsCheck.find_out

    def find_out(self: Any, models: Any) -> Verdict:
        found.append(real(self, models))
        return found[-1]

    monkeypatch.setattr(PartsCheck, "find_out", find_out)
    return found


def test_it_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What training_step does to all that it can reach is as if it had never been rehearsed."""
    seen: list[Any] = []
    tally = {"calls": 0, "inner": [0]}
    number = 0

    class Leaving(Module):
        kept: ClassVar[list[int]] = []

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            nonlocal number
            number += 1
            seen.append(len(batch["x"]))
            tally["calls"] += 1
            tally["inner"][0] += 1
            self.kept.append(1)
            self.fresh = True
            self.table[0] = 5
            self.counter += 1
            next(self.steps)
            self.array += 1
            self.generator.random()
            self.logger.log_metrics({"directly": 1.0})
            self.accuracy(torch.ones(2), torch.ones(2))
            self.lr_schedulers().step()
            self.optimizers().param_groups[0]["momentum"] *= 0.5
            with torch.no_grad():
                self.scale.add_(1)
            return entropy(self, self.model(batch["x"]), batch)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    found: dict[str, Any] = {}
    real = PartsCheck.find_out

    def state(engine: Any) -> Any:
        module = engine.model.module
        return repr(
            (
                seen, tally, number, module.kept, hasattr(module, "fresh"), module.table.tolist(),
                module.counter.tolist(), module.steps, module.array.tolist(), module.generator.bit_generator.state,
                module.accuracy.update_count, module.trainer.lr_scheduler_configs[0].scheduler.state_dict(),
                [{k: v for k, v in g.items() if k != "params"} for g in module.optimizers().param_groups],
                module.scale.tolist(),
                torch.get_rng_state().tolist(), np.random.get_state()[2],
            )
        )  # fmt: skip

    def find_out(self: Any, models: Any) -> Any:
        found["before"] = state(self._engine)
        verdict = real(self, models)
        found["after"], found["verdict"] = state(self._engine), verdict
        raise KeyboardInterrupt

    monkeypatch.setattr(PartsCheck, "find_out", find_out)
    module = Leaving(
        entropy, table=torch.zeros(2), counter=torch.zeros(()), steps=itertools.count(), array=np.zeros(2),
        generator=np.random.default_rng(0), accuracy=torchmetrics.Accuracy("binary"), scale=nn.Parameter(torch.ones(2)),
    )  # fmt: skip
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trained(module, batches(), 2, 2)
    assert found["verdict"].why_not == "" and found["verdict"].parts is not None
    assert found["after"] == found["before"]


@pytest.mark.parametrize(
    "draws",
    [
        *("dropout", "noise", "drop path", "reparametrises", "timesteps"),
        *("fills a row for each token", "noise of each token", "Gumbel noise of pairs", "of a table's rows"),
        *("picks by probabilities", "varies around means", "of a size"),
    ],
)
def test_random_numbers_are_the_same_for_a_sample(draws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        if draws == "dropout":
            logits = F.dropout(logits, 0.5, module.training)
        elif draws == "noise":
            logits = logits + torch.randn_like(logits)
        elif draws == "drop path":
            logits = logits * logits.new_empty((len(logits), 1)).bernoulli_(0.5)
        elif draws == "reparametrises":
            logits = torch.distributions.Normal(logits, logits.exp()).rsample()
        elif draws == "fills a row for each token":  # as sparse routers do
            logits = logits + torch.empty_like(logits.reshape(-1, 1)).exponential_().log().view_as(logits)
        elif draws == "noise of each token":
            logits = logits * torch.rand(logits.numel(), 2).mean(1).view_as(logits)
        elif draws == "Gumbel noise of pairs":
            pairs = torch.cat([logits, logits], 1).view(-1, 5)
            logits = logits + (pairs - torch.rand_like(pairs).log().neg().log()).softmax(-1).view(-1, 2, 5).sum(1)
        elif draws == "picks by probabilities":
            logits = logits * torch.bernoulli(logits.sigmoid())
        elif draws == "varies around means":
            logits = torch.normal(logits.detach(), 0.1) + logits
        elif draws == "of a size":
            logits = logits * torch.rand(size=(len(logits), 5))
        elif draws == "of a table's rows":  # whose number is a multiple of every part's samples
            logits = logits * torch.rand(12, 5).mean(0)
        else:
            logits = logits * torch.randint(1, 9, (len(logits),)).unsqueeze(1)
        return entropy(module, logits, batch)

    found = looked_at(monkeypatch)
    trained(Module(step), batches(1), 2, 2)
    assert [(v.parts, v.why_not) for v in found] == [(None, "")]


def test_random_numbers_that_parts_cannot_share_are_said_once(said: list[str]) -> None:
    def mixes(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return entropy(module, 0.5 * logits + 0.5 * logits[torch.randperm(len(logits))], batch)

    trained(Module(mixes), batches(), 2, 2)
    [line] = [line for line in said if "could not be compared" in line]
    assert line.startswith("roundpipe: ") and "random numbers" in line and "num_microbatches=1" in line


def test_the_scope_is_said_once(said: list[str]) -> None:
    trained(Module(contrasts), padded(), 2, 2)
    [line] = [line for line in said if "microbatch_scope='model'" in line]
    assert line.startswith("roundpipe: ") and " instead of " in line


def test_whole_batches_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked_at(monkeypatch)
    trained(Module(contrasts), padded(), 1, 2)
    trained(Module(contrasts), padded(), 1, 2, microbatch_scope="model")
    assert not found


def test_neither_is_refused_with_the_value_and_the_remedies() -> None:
    """The model's own forward couples the samples, so that cutting its calls does not help."""

    class Coupled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    module = Module(entropy)
    module.model = Coupled()
    error = r"the loss is [\d.]+ instead of [\d.]+ \(compared on 8 samples.*loss_weight.*microbatch_scope='model'.*=1"
    with pytest.raises(RoundPipeError, match=error):
        trained(module, batches(), 2, 2)


class CoupledNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class MixedNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.5 * x + 0.5 * x[torch.randperm(len(x))])


@pytest.mark.parametrize("step", [entropy, contrasts])
def test_calls_that_are_cut_as_asked_are_compared(step: Any) -> None:
    module = Module(step)
    module.model = CoupledNet()
    error = r"microbatch_scope='model' cuts its calls of the model: .* instead of .*num_microbatches=1"
    with pytest.raises(RoundPipeError, match=error):
        trained(module, padded(), 2, 2, microbatch_scope="model")
    assert_same(run("auto", module, padded()), trained(module, padded(), 1, 2, microbatch_scope="model"))


def test_calls_that_cannot_be_compared_are_said(said: list[str]) -> None:
    module = Module(entropy)
    module.model = MixedNet()
    trained(module, batches(), 2, 2, microbatch_scope="model")
    [line] = [line for line in said if "could not be compared" in line]
    assert "calls of the model" in line and "random numbers" in line and "num_microbatches=1" in line


class Keeps(Module):
    """Keeps what it returns for the end of the epoch, beside a layer with batch statistics or one with a buffer."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__(entropy, outputs=[])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.model.blocks[0] = norm()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(WIDTH), lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))])
def test_beside_statistics_of_a_batch_the_rest_is_compared(norm: Any, said: list[str]) -> None:
    """They would hide what else differs, here and where calls are cut."""
    module = Keeps(norm)
    strategy = ours(num_microbatches=2, layers=["Linear", "Block", type(module.model.blocks[0])])
    trainer_of(strategy).fit(module, loader(batches()))
    assert len(module.outputs) == 3
    [line] = [line for line in said if "microbatch_scope='model'" in line]
    assert "the length of 'outputs' is 2 instead of 1" in line


def test_an_error_names_what_training_step_changes() -> None:
    with pytest.raises(RoundPipeError, match=r"is [\d.]+ instead of [\d.]+ .*another value in 'calls', which"):
        trained(Module(anneals, calls=0), batches(), 2, 2, microbatch_scope="step")


class Writes(Module):
    """To the batch, in place, in one way or another."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        batch["x"][:, 0] *= 3
        x, y = batch.pop("x"), batch.pop("y")
        return F.cross_entropy(self.model(x), y)


@pytest.mark.parametrize("samples", [4, 8])
def test_the_batch_is_as_it_was(samples: int) -> None:
    """Whether a few of its samples are rehearsed or all."""
    results = [run("auto", Writes(entropy), batches(samples=samples))]
    results.append(trained(Writes(entropy), batches(samples=samples), 2, 2))
    assert_same(*results)


class FailsOnEleven(Module):
    """Before any layer is waited for."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if len(batch["x"]) == 11:
            raise ValueError("eleven samples")
        return super().training_step(batch, batch_idx)


def test_what_is_accumulated_outlives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rehearsal between two batches: gradients of the first one are on their way to the host."""
    failed, real = [], PartsCheck._rehearse
    monkeypatch.setattr(
        PartsCheck, "_rehearse", lambda *args: (verdict := real(*args), failed.append(verdict.why_not))[0]
    )
    data = [*batches(1), *batches(1, samples=13), *batches(2)]
    options: Any = {"accumulate_grad_batches": 2, "blocking": False, "watch": False}
    slow = {"bandwidth": 3e5, "latency": 0.003}
    strategy = ours(num_microbatches=2, layers=LAYERS, emulation=slow)
    result = run(strategy, FailsOnEleven(entropy), data, devices=2, **options)
    assert_same(run("auto", FailsOnEleven(entropy), data, **options), result)
    assert "ValueError: eleven samples" in failed


@SLOW
def test_without_the_check_training_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above see what they are about."""
    monkeypatch.setattr(PartsCheck, "find_out", lambda self, models: Verdict(0))
    for kind in ("takes the root", "contrasts"):
        with pytest.raises(AssertionError):
            assert_same(run("auto", Module(LOSSES[kind]), padded()), trained(Module(LOSSES[kind]), padded(), 2, 2))
    with pytest.raises(AssertionError):
        assert_same(run("auto", Logging(), batches()), trained(Logging(), batches(), 2, 2))


def test_a_model_step_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    real = ModelStep.__init__
    monkeypatch.setattr(ModelStep, "__init__", lambda self, *a, **k: (ran.append(True), real(self, *a, **k))[1])
    trained(Module(takes_the_root), padded(), 2, 2)
    assert len(ran) == 3 and math.isfinite(len(ran))


class SinglePrecision(pl.LightningModule):
    """A model in double precision whose loss, or what is logged, is in single precision, as in language models."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Sequential(Net(), nn.Linear(5, 9))
        self.kind, self.mean = kind, torchmetrics.MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, y = self.model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        single = F.cross_entropy(logits.float(), y)
        if self.kind == "number":
            self.log("value", single.item())
        elif self.kind == "tensor":
            self.log("value", single.detach())
        elif self.kind == "metric":
            self.mean(single.detach(), weight=len(y))
            self.log("mean", self.mean)
        return single if self.kind in ("loss", "number") else F.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["loss", "number", "tensor", "metric"])
def test_single_precision_in_a_model_of_double_precision(kind: str, said: list[str]) -> None:
    """Its rounding was taken for a difference, and the step refused or its model's calls cut."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 11, 6, generator=generator, dtype=torch.float64)
        batch = {"x": x, "y": torch.randint(0, 9, (2, 11), generator=generator)}
        trainer = trainer_of(ours(num_microbatches=2), precision="64-true", max_steps=1)
        trainer.fit(SinglePrecision(kind, seed), loader([batch]))
    assert not [line for line in said if "compared" in line]
