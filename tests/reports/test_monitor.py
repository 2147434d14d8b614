"""``RoundPipeMonitor``: its figures, and what it says that steps wait for."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Learner, MemoryLogger, loader, ours, quiet, trainer_of
from patience import longer_each_try, until
from reports.test_planned import report as step_report
from reports.test_traces import calls
from torch import nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeMonitor
from lightning_roundpipe.reports import step_monitor
from lightning_roundpipe.reports.diagnosis import diagnose
from lightning_roundpipe.reports.planned import replay
from lightning_roundpipe.reports.step_times import StepTimes

BATCH = {"input_ids": torch.randint(0, 64, (4, 8)), "labels": torch.randint(0, 64, (4, 8))}


@pytest.fixture(scope="module")
def trained():
    monitor, logger = RoundPipeMonitor(every_n_steps=2), MemoryLogger()
    batches, callbacks = [BATCH] * 4, [Updated(), monitor]
    trainer = trainer_of(
        ours(num_microbatches=2), devices=2, callbacks=callbacks, logger=logger, accumulate_grad_batches=1
    )
    began = time.monotonic()
    with quiet():
        trainer.fit(Tokens(), loader(batches))
    took = {"run_s": time.monotonic() - began}
    return monitor, logger, dict(trainer.strategy.report()) | took


class Updated(pl.Callback):
    """Waits at the end of a batch for the update of the step before, so that the monitor finds how long that took."""

    roundpipe_passive_hooks = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx:
            until(lambda: trainer.strategy.report()["optimizer_lag_s"] is not None, "the step before is not updated")


class Tokens(Learner, optimizer=torch.optim.AdamW, lr=0.001):
    roundpipe_passive_hooks = True

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class SlowRows(list[Any]):
    """Rows that take ``seconds`` to load, longer than a step of `Tokens` takes."""

    def __init__(self, rows, seconds):
        super().__init__(rows)
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


def test_an_accumulation_window_is_one_step():
    """Times and tokens are those of an optimizer step, not of its last batch."""
    monitor, logger = RoundPipeMonitor(every_n_steps=1), MemoryLogger()
    batches = [{"input_ids": torch.randint(0, 64, (1, 8)), "labels": torch.randint(0, 64, (1, 8))} for _ in range(8)]
    trainer = trainer_of(ours(), devices=2, callbacks=[monitor], logger=logger, accumulate_grad_batches=4)
    with quiet():
        trainer.fit(Tokens(), loader(batches))
    lines = [line for _, line in logger.lines if "roundpipe/step_time_s" in line]
    assert len(lines) == 2
    assert lines[0]["roundpipe/tokens_per_s"] == pytest.approx(32 / lines[0]["roundpipe/step_time_s"])


NAMES = {
    "step_time_s", "planned_step_time_s", "tokens_per_s", "bubble_pct", "stall_weights_pct", "stall_activations_pct",
    "stall_gradients_pct", "loader_pct", "device_peak_gib", "device_planned_gib",
    "host_gib", "host_planned_gib", "optimizer_lag_s",
}  # fmt: skip


def test_every_figure_reaches_the_logger(trained):
    monitor, logger, report = trained
    mine = [(step, line) for step, line in logger.lines if any(name.startswith("roundpipe/") for name in line)]
    assert [step for step, _ in mine] == [1, 3]  # Lightning counts from 0
    last = {name.removeprefix("roundpipe/"): value for name, value in mine[-1][1].items()}
    assert last.keys() == NAMES  # with the optimizer's lag: the monitor looks at no weights, so training does not wait
    assert last["tokens_per_s"] == pytest.approx(32 / last["step_time_s"])
    assert last["device_planned_gib"] == report["planned_device_bytes"] / 2**30
    assert 0 < last["device_peak_gib"] <= max(report["peak_device_bytes"]) / 2**30 * 1.01
    total = 4 * sum(p.numel() for p in Tokens().parameters())  # weights; gradients; two moments of Adam
    assert 4 * total <= last["host_planned_gib"] * 2**30 < 5 * total
    assert 0 <= last["optimizer_lag_s"] < report["run_s"]
    for name in (name for name in NAMES if name.endswith("_pct")):
        assert 0 <= last[name] <= 100, name
    assert monitor.diagnosis is None  # emulated devices wait for the cores that they share


def test_under_another_strategy_times_are_logged_and_a_message_says_what_is_missing(monkeypatch):
    said = []
    monkeypatch.setattr(step_monitor, "rank_zero_info", said.append)
    monitor, logger = RoundPipeMonitor(), MemoryLogger()
    trainer = trainer_of("auto", callbacks=[monitor], logger=logger)
    with quiet():
        trainer.fit(Tokens(), loader([BATCH] * 2))
    assert logger.lines[-1][1].keys() == {f"roundpipe/{name}" for name in ("step_time_s", "tokens_per_s", "host_gib")}
    [text] = said
    assert "Trainer(strategy='roundpipe')" in text and "SingleDeviceStrategy" in text
    assert monitor.diagnosis is None


@pytest.mark.parametrize("value", [0, 2.5])
def test_an_interval_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"every_n_steps=.* must be a whole number of at least 1"):
        RoundPipeMonitor(every_n_steps=value)


def known(**changes):
    """A step that ran exactly as the simulator says."""
    planned = replay(step_report())
    assert planned is not None
    return {
        **planned, "events": [{"nbytes": 0, "call": 0, **event} for event in planned["events"]], "profiled": False,
        "costs": calls(30).to_dict(), "plan_policy": "measured", "planned_device_bytes": 1 << 20, "stalls": [],
        "optimizer_lag_s": 0.0, "waits_for_optimizer": False,
    } | changes  # fmt: skip


def times(between_s=0.0, updating_s=0.0):
    """Of two steps."""
    return StepTimes(2 * (known()["step_time_s"] + between_s), 2 * updating_s, steps=2)


def stalled(kind, seconds):
    """A step in which a worker waits for a copy."""
    copy = known()["events"][0] | {"kind": f"upload_{kind}", "start_s": 0.0, "end_s": seconds}
    stall = {"worker": copy["worker"], "start_s": 0.0, "end_s": seconds}
    return known(events=[copy, *known()["events"]], stalls=[stall])


def test_an_update_that_has_only_begun_is_not_waited_for():
    """Its lag is not known yet, which was taken for an optimizer that training waits for."""
    assert diagnose(known(optimizer_lag_s=None), times(between_s=1.0, updating_s=0.8), 0.0) is None


@pytest.mark.parametrize(
    ("report", "between", "waited_s", "what", "setting"),
    [
        (known(), {"between_s": 1.0}, 1.8, "the data loader, 900 ms", "num_workers="),
        (known(waits_for_optimizer=True), {"between_s": 1.0, "updating_s": 0.8}, 0.2, "the optimizer, 800 ms", "why"),
        (stalled("weights", 0.4), {}, 0.0, "weights, 100 ms", "accumulate_grad_batches="),
        (stalled("activations", 0.4), {}, 0.0, "activations, 100 ms", "stage_seconds="),
        (stalled("gradients", 0.4), {}, 0.0, "gradients, 100 ms", "reduce_dtype="),
    ],
)
def test_the_longest_wait_is_named_with_its_setting(report, between, waited_s, what, setting):
    """Waits for copies are the mean of four workers."""
    text = str(diagnose(report, times(**between), waited_s))
    assert f"waits longest for {what}:" in text and setting in text


@longer_each_try
def test_on_gpus_the_longest_wait_is_said_once(monkeypatch, times):
    said = []
    monkeypatch.setattr(step_monitor, "rank_zero_info", said.append)
    monkeypatch.setattr(step_monitor, "_emulated", lambda trainer: False)
    monitor = RoundPipeMonitor(every_n_steps=2)
    slow = DataLoader(SlowRows([BATCH] * 6, 0.1 * times), batch_size=None)
    with quiet():
        trainer_of(ours(num_microbatches=2), devices=2, callbacks=[monitor]).fit(Tokens(), slow)
    assert monitor.diagnosis is not None
    [text] = said
    assert text.startswith("roundpipe: a step takes ") and "It waits longest for the data loader" in text
