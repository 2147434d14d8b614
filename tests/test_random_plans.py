"""Two thousand plans, one for each window, with delays, odd calls and errors, give the bits of a simple plan."""

import os
import random

import harness
import lightning.pytorch as pl
import pytest
import stress
import torch
from faulty import PLANTED, Boom, PassBackward
from stress import CALLS, StressModule

from lightning_roundpipe.devices import emulated
from lightning_roundpipe.planning.schedule import Plan

FITS, WINDOWS = 40, 50
PARTS = 4
DELAY_S = 3e-4
"""Longest random delay: about as long as a call takes."""
PLACES = ["user code", "layer", "layer backward", "callback", "loader"]


class Fragile(stress.Block):
    """Has places for errors: ``layer`` and ``layer backward``."""

    def forward(self, h, keep):
        PLANTED("layer")
        return PassBackward.apply(super().forward(h, keep), None, "layer backward")


class FragileModule(StressModule):
    """Has a place for an error of user code."""

    def __init__(self):
        super().__init__()
        for block in (self.net.twice, self.net.frozen, self.net.last):
            block.__class__ = Fragile

    def training_step(self, batch, batch_idx):
        PLANTED("user code")
        return super().training_step(batch, batch_idx)


class Batches(torch.utils.data.IterableDataset):
    """Has a place for an error of the data loader."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        for batch in self._batches:
            PLANTED("loader")
            yield batch


class Changing(pl.Callback):
    """Gives each window another plan. The first one learns the calls, and reserves memory for all of them at once."""

    roundpipe_passive_hooks = True

    def __init__(self, plans):
        self._plans, self.used = plans, 0

    def on_train_batch_start(self, trainer, module, batch, index):
        PLANTED("callback")
        learned = trainer.strategy._engine.context.learned
        if index:
            learned.plan = self._plans[index]
            self.used += 1


def odd_batches(draw, microbatches):
    """Batches of many sizes. Some microbatches leave a layer out, call one more often, or have no target."""
    found = []
    for index in range(WINDOWS):
        case = stress.Case(None, microbatches=microbatches, sizes=(draw.randint(3, 9),))
        [batch] = stress.batches(case)
        batch["x"] = torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
        parts = stress.parts_of(len(batch["y"]), microbatches)
        odd = parts[draw.randrange(len(parts))]
        if index:  # the first window learns the calls
            kind = draw.choice(["", "", "skips", "extra", "empty"])
            if kind == "empty" and len(parts) > 1:
                batch["y"][odd] = -100
            elif kind in batch:
                batch[kind][odd] = 1.0 if kind == "skips" else float(draw.randint(1, 3))
        found.append(batch)
    return found


def trained(batches, plans, microbatches, devices, **options):
    """The trained module, and the number of plans that it has used."""
    changing = Changing(plans)
    with harness.seeded(7):
        module = FragileModule()
    strategy = harness.ours(
        num_microbatches=microbatches, loss_weight="targets", layers=["Linear", "Fragile"],
        plan=harness.single(CALLS, microbatches), watchdog_timeout=stress.WATCHDOG, **options,
    )  # fmt: skip
    trainer = harness.trainer_of(strategy, devices=devices, callbacks=[changing])
    torch.manual_seed(1)
    trainer.fit(module, torch.utils.data.DataLoader(Batches(batches), batch_size=None))
    return module, changing.used


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_thousand_plans(part, monkeypatch):
    """The same ones each time; another ``STRESS_SEED`` gives others. A failed run leaves nothing behind that the next
    one in the process would find."""
    monkeypatch.setattr(emulated, "MAX_DELAY", DELAY_S)
    monkeypatch.setattr(stress, "GLUE_S", 0.0)
    for number in range(part, FITS, PARTS):
        draw = random.Random(f"{os.environ.get('STRESS_SEED', '0')}/{number}")
        microbatches, staleness, devices = draw.randint(2, 5), draw.choice([0, 0, 1]), draw.randint(1, 4)
        batches = odd_batches(draw, microbatches)
        plans = [stress.random_plan(draw, microbatches) for _ in batches]
        simple = [Plan.parse(harness.single(CALLS, microbatches))] * WINDOWS
        hard = {"emulation": {"poison": True, "delay_seed": number, "latency": draw.choice([0.0, 3e-4])}}
        expected, _ = trained(batches, simple, microbatches, 1, staleness=staleness)
        if draw.random() < 0.5:
            PLANTED.plant(draw.choice(PLACES), time=draw.randrange(2, WINDOWS))
            with pytest.raises(Boom):
                trained(batches, plans, microbatches, devices, staleness=staleness, **hard)
            assert harness.roundpipe_threads() == []
            PLANTED.clear()
        found, used = trained(batches, plans, microbatches, devices, staleness=staleness, **hard)
        assert used == WINDOWS - 1
        for name, value in expected.state_dict().items():
            assert torch.equal(value, found.state_dict()[name]), f"{name} of fit {number}"
