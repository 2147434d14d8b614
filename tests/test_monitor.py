"""``RoundPipeMonitor``: its figures, and one warning for each thing that makes training slow.

Layers here take time without using a core (`emulated_work`), so steps take what was planned whatever else the machine
does, unless a test makes something slow.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import test_replay
import test_timeline
import torch
from harness import MemoryLogger, loader, ours, quiet, trainer_of
from test_replay import calls
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeMonitor, RoundPipePrecision, RoundPipeWarning, step_monitor
from lightning_roundpipe.devices import emulated_work
from lightning_roundpipe.diagnosis import StepTimes, critical_path, diagnose, link_use, planned_step, stall_seconds
from lightning_roundpipe.replay import replay

FORWARD_S, BACKWARD_S = 0.01, 0.02
WIDTH = 16


class _TakeTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        emulated_work(forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        emulated_work(ctx.backward_s)
        return grad * 1.0, None, None


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return _TakeTime.apply(self.linear(x), FORWARD_S, BACKWARD_S)  # type: ignore[no-untyped-call,no-any-return]


class Slow(pl.LightningModule):
    """Eight blocks of equal length. Subclasses and arguments make something slow."""

    roundpipe_looks_away = True

    def __init__(self, width: int = WIDTH, code_s: float = 0.0, rate: float = 1e-3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.code_s, self.rate = code_s, rate

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 5:
                time.sleep(self.code_s)
            batch = block(batch)
        return (batch**2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class SlowSGD(torch.optim.SGD):
    """Its steps take as long for each parameter as a large model's do."""

    independent_parameters = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        time.sleep(0.1 * sum(p.grad is not None for group in self.param_groups for p in group["params"]))
        return result


class SlowUpdates(Slow):
    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters(), lr=1e-3)


class SlowBatches:
    """A data loader that takes its time."""

    def __init__(self, batches: Sequence[Tensor], seconds: float) -> None:
        self.batches, self.seconds = batches, seconds

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


class SlowHook(pl.Callback):
    roundpipe_looks_away = True

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(1.2)


@pytest.fixture(autouse=True)
def enough_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices compute at once, as these layers use no core."""
    monkeypatch.setattr(step_monitor, "concurrent_devices", lambda: 4)


def fit(
    module: pl.LightningModule,
    strategy: Any,
    steps: int = 7,
    data: Callable[[list[Tensor]], Any] = loader,
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[RoundPipeMonitor, list[str], MemoryLogger]:
    """Train; return the monitor, the warnings that it gave, and what was logged."""
    monitor, logger = RoundPipeMonitor(every_n_steps=4), MemoryLogger()
    width = next(module.parameters()).shape[-1]
    batches = [torch.randn(8, width) for _ in range(steps)]
    trainer = trainer_of(strategy, devices=4, callbacks=[*callbacks, monitor], logger=logger, **options)
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data(batches))
    said = [
        str(w.message) for w in caught if issubclass(w.category, RoundPipeWarning) and "longer than" in str(w.message)
    ]
    return monitor, said, logger


# -- causes ------------------------------------------------------------------------------------------------------------


SLOW: dict[str, tuple[Callable[[], dict[str, Any]], str, str, str]] = {
    "link": (
        lambda: {"module": Slow(width=256), "strategy": ours(num_microbatches=4, emulation={"bandwidth": 2e6})},
        "link", "Waiting for copies, most of them weights", "batch_size=",
    ),
    "loader": (
        lambda: {"module": Slow(), "strategy": ours(num_microbatches=4), "data": lambda b: SlowBatches(b, 1.2)},
        "data loader", "Waiting for the next batch", "num_workers=",
    ),
    "code of the step": (
        lambda: {"module": Slow(code_s=0.2), "strategy": ours(num_microbatches=4)},
        "user code", "most of it between layers 'blocks.4' and 'blocks.5'", "accumulate_grad_batches=",
    ),
    "hook": (
        lambda: {"module": Slow(), "strategy": ours(num_microbatches=4), "callbacks": [SlowHook()]},
        "user code", "Code between two steps (hooks, callbacks, loggers)", "profiler='simple'",
    ),
    "uneven plan": (
        lambda: {
            "module": Slow(),
            "strategy": ours(num_microbatches=4, plan="forward 0-5; fused 6-7; backward 0-5; round 4"),
        },
        "imbalance", "(the longest: backward, blocks.0 … blocks.5)", "Leave plan= out",
    ),
    "optimizer": (
        lambda: {"module": SlowUpdates(), "strategy": ours(num_microbatches=4)},
        "host", "Waiting for weights that the optimizer has not updated yet", "staleness=1",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slow", SLOW)
def test_the_warning_names_the_cause_and_the_setting(slow: str) -> None:
    make, cause, what, setting = SLOW[slow]
    monitor, said, _ = fit(**make())
    assert monitor.diagnosis is not None
    assert monitor.diagnosis.cause == cause, (monitor.diagnosis.lost_s, str(monitor.diagnosis))
    [text] = said
    assert text == f"roundpipe: {monitor.diagnosis}" or f"Cause: {cause}." in text
    assert what in text and setting in text
    taken, planned = monitor.diagnosis.step_s, monitor.diagnosis.planned_s
    assert taken > 1.2 * planned


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[RoundPipeMonitor, MemoryLogger, dict[str, Any]]:
    monitor, logger = RoundPipeMonitor(every_n_steps=2), MemoryLogger()
    batches = [{"input_ids": torch.randint(0, 64, (4, 8)), "labels": torch.randint(0, 64, (4, 8))}] * 4
    trainer = trainer_of(
        ours(num_microbatches=2), devices=2, callbacks=[monitor], logger=logger, accumulate_grad_batches=1
    )
    with quiet():
        trainer.fit(Tokens(), loader(batches))
    return monitor, logger, dict(trainer.strategy.report())  # type: ignore[attr-defined]


class Tokens(pl.LightningModule):
    roundpipe_looks_away = True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_an_accumulation_window_is_one_step() -> None:
    """Times and losses are those of an optimizer step, not of its last batch."""

    class Losses(pl.Callback):
        roundpipe_looks_away = True

        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(outputs["loss"]))

    monitor, losses = RoundPipeMonitor(every_n_steps=1), Losses()
    batches = [{"input_ids": torch.randint(0, 64, (1, 8)), "labels": torch.randint(0, 64, (1, 8))} for _ in range(8)]
    trainer = trainer_of(ours(), devices=2, callbacks=[monitor, losses], accumulate_grad_batches=4)
    with quiet():
        trainer.fit(Tokens(), loader(batches))
    assert [record["step"] for record in monitor.history] == [1, 2]
    assert [record["loss"] for record in monitor.history] == pytest.approx([sum(losses.seen[:4]), sum(losses.seen[4:])])
    whole = sum(record["step_time_s"] for record in monitor.history)
    assert whole <= monitor.history[-1]["elapsed_s"]
    assert monitor.history[0]["tokens_per_s"] == pytest.approx(32 / monitor.history[0]["step_time_s"])


NAMES = {
    "step_time_s", "planned_step_time_s", "tokens_per_s", "bubble_pct", "stall_weights_pct", "stall_activations_pct",
    "stall_gradients_pct", "link_up_pct", "link_down_pct", "loader_pct", "device_peak_gib", "device_planned_gib",
    "host_gib", "host_planned_gib", "optimizer_lag_s",
}  # fmt: skip


def test_every_figure_reaches_the_logger(trained: tuple[RoundPipeMonitor, MemoryLogger, dict[str, Any]]) -> None:
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
    assert 0 <= last["optimizer_lag_s"] < last["step_time_s"]
    for name in (name for name in NAMES if name.endswith("_pct")):
        assert 0 <= last[name] <= 100, name
    assert [record["step"] for record in monitor.history] == [2, 4]
    assert monitor.history[-1]["loss"] > 0 and len(monitor.history[-1]["device_gib"]) == 2


def test_an_fp16_run_logs_its_loss_scale() -> None:
    monitor, logger = RoundPipeMonitor(every_n_steps=1), MemoryLogger()
    batches = [{"input_ids": torch.randint(0, 64, (4, 8)), "labels": torch.randint(0, 64, (4, 8))}] * 2
    trainer = trainer_of(
        ours(num_microbatches=2),
        devices=2,
        callbacks=[monitor],
        logger=logger,
        plugins=[RoundPipePrecision("16-mixed")],
    )
    with quiet():
        trainer.fit(Tokens(), loader(batches))
    assert logger.lines[-1][1]["roundpipe/loss_scale"] == trainer.precision_plugin.scaler.get_scale()  # type: ignore[attr-defined]


def test_under_another_strategy_times_are_logged_and_a_message_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(step_monitor, "rank_zero_info", said.append)
    monitor, logger = RoundPipeMonitor(), MemoryLogger()
    trainer = trainer_of("auto", callbacks=[monitor], logger=logger)
    with quiet():
        trainer.fit(Slow(), loader([torch.randn(8, WIDTH)] * 2))
    assert logger.lines[-1][1].keys() == {
        f"roundpipe/{name}" for name in ("step_time_s", "samples_per_s", "loader_pct", "host_gib")
    }
    [text] = said
    assert "Trainer(strategy='roundpipe')" in text and "SingleDeviceStrategy" in text
    assert monitor.diagnosis is None


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "5"])
def test_an_interval_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps=.* must be a whole number of at least 1"):
        RoundPipeMonitor(every_n_steps=value)


def test_history_is_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_monitor, "MOST_RECORDS", 4)
    monitor = RoundPipeMonitor(every_n_steps=1)
    with quiet():
        trainer_of("auto", callbacks=[monitor]).fit(Slow(), loader([torch.randn(2, WIDTH)] * 11))
    steps = [record["step"] for record in monitor.history]
    assert steps == [1, 5, 9]


# -- the diagnosis of a step that is known -----------------------------------------------------------------------------


def known(plan: str = test_timeline.PLAN, **changes: Any) -> dict[str, Any]:
    """A step that ran exactly as the simulator says."""
    planned = replay(test_replay.report() | test_timeline.synthetic(text=plan))
    assert planned is not None
    events = [{"nbytes": 0, "call": 0, **event} for event in planned["events"]]
    return {
        **planned, "events": events, "profiled": False, "costs": calls(30).to_dict(), "plan_policy": "measured",
        "planned_device_bytes": 1 << 20, "stalls": [], "optimizer_lag_s": 0.0,
    } | changes  # fmt: skip


def times(
    report: dict[str, Any], between_s: float = 0.0, fetch_s: float = 0.0, update_s: float = 0.0
) -> list[StepTimes]:
    return [StepTimes(report["step_time_s"] + between_s, fetch_s, update_s)] * 3


def delayed(report: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The step in which everything begins later by ``seconds``."""
    events = [e | {"start_s": e["start_s"] + seconds, "end_s": e["end_s"] + seconds} for e in report["events"]]
    return report | {"events": events, "step_time_s": report["step_time_s"] + seconds}


def test_a_step_as_planned_loses_nothing() -> None:
    report = known()
    found = diagnose([report], times(report))
    assert found is not None
    assert found.planned_s == pytest.approx(report["step_time_s"])
    assert not found.slow
    assert sum(found.lost_s.values()) == pytest.approx(0, abs=1e-3)
    path = critical_path(report)
    assert path.compute == pytest.approx(report["step_time_s"], rel=1e-3)


def test_the_path_adds_up_to_the_step() -> None:
    report = delayed(known(), 0.3)
    path = critical_path(report)
    total = path.compute + sum(path.link.values()) + path.update + path.code
    assert total == pytest.approx(report["step_time_s"])
    assert path.code == pytest.approx(0.3, abs=1e-3)


def test_the_first_copy_of_weights_counts_for_the_link_and_what_comes_before_it_for_the_update() -> None:
    report = delayed(known(), 0.3)
    first = min((e for e in report["events"] if e["kind"] == "forward"), key=lambda e: float(e["start_s"]))
    copy = first | {"kind": "upload_weights", "microbatch": -1, "start_s": 0.2, "end_s": 0.3}
    path = critical_path(report | {"events": [copy, *report["events"]]})
    assert path.update == pytest.approx(0.2, abs=1e-3)
    assert path.link["weights"] == pytest.approx(0.1, abs=1e-3)


def test_all_layers_slower_is_the_host_and_has_no_remedy_on_emulated_devices() -> None:
    report = known()
    slow = [e | {"start_s": 2 * e["start_s"], "end_s": 2 * e["end_s"]} for e in report["events"]]
    report |= {"events": slow, "step_time_s": 2 * report["step_time_s"]}
    found = diagnose([report], times(report))
    assert found is not None and found.slow and found.cause == "host"
    assert "2.0 times as long as in the batch that the plan was made from" in str(found) and found.remedy
    emulated = diagnose([report], times(report), cores=4)
    assert emulated is not None and emulated.cause == "host" and not emulated.remedy


def test_code_that_waits_for_the_machines_cores_is_not_the_cause() -> None:
    """Other programs slow emulated devices and the code between layers alike; on GPUs, only the code uses cores."""
    planned = known()
    slow = [e | {"start_s": 3 * e["start_s"], "end_s": 3 * e["end_s"]} for e in planned["events"]]
    report = delayed(planned | {"events": slow, "step_time_s": 3 * planned["step_time_s"]}, 3 * planned["step_time_s"])
    emulated, gpus = diagnose([report], times(report), cores=4), diagnose([report], times(report))
    assert emulated is not None and emulated.cause == "host"
    assert emulated.lost_s["user code"] == pytest.approx(planned["step_time_s"], rel=0.1)
    assert gpus is not None and gpus.cause == "user code"


@pytest.mark.parametrize(("policy", "cause"), [("text", "imbalance"), ("measured", None)])
def test_an_uneven_plan_by_hand_is_compared_with_the_planners(policy: str, cause: str | None) -> None:
    """The planner's own plan of the same costs is the reference; a measured plan is its own."""
    report = known("forward 0-25; fused 26-29; backward 0-25; round 4", plan_policy=policy)
    found = diagnose([report], times(report))
    assert found is not None and found.slow == (cause is not None)
    if cause:
        assert found.cause == cause
        assert "(the longest: backward, layers.0 … layers.25)" in str(found) and "Leave plan= out" in str(found)


@pytest.mark.parametrize(
    ("between", "cause", "what"),
    [
        ({"between_s": 1.0, "fetch_s": 0.9}, "data loader", "Waiting for the next batch"),
        ({"between_s": 1.0, "fetch_s": 0.1}, "user code", "Code between two steps"),
        ({"between_s": 1.0, "update_s": 0.9}, "host", "The optimizer's step, which training waits for"),
    ],
)
def test_what_lies_between_steps(between: dict[str, float], cause: str, what: str) -> None:
    report = known(optimizer_lag_s=None)
    found = diagnose([report], times(report, **between))
    assert found is not None and found.slow and found.cause == cause
    assert what in str(found)


def test_a_loader_that_is_hidden_behind_the_step_costs_nothing() -> None:
    report = known()
    found = diagnose([report], times(report, fetch_s=0.5))
    assert found is not None and found.lost_s["data loader"] == 0


@pytest.mark.parametrize("changes", [{"profiled": True}, {"costs": None}, {"slots": []}])
def test_a_step_without_a_plan_is_not_compared(changes: dict[str, Any]) -> None:
    report = known() | changes
    assert planned_step(report) is None
    assert diagnose([report], times(report)) is None


def test_nominal_costs_are_replaced_by_times() -> None:
    report = known(plan_policy="static", costs=calls(30, seconds=1e-6).to_dict())
    for event in report["events"]:
        assert event["kind"] in ("forward", "recompute", "backward")
    planned = planned_step(report)
    assert planned is not None and planned.seconds > 1e-3


def test_stalls_are_told_apart_by_the_copy_that_ends_them() -> None:
    copies = [
        {"kind": kind, "worker": 0, "start_s": start, "end_s": end}
        for kind, start, end in (
            ("upload_weights", 0.0, 1.0),
            ("upload_activations", 1.0, 1.5),
            ("upload_gradients", 4.0, 4.5),
            ("download_activations", 5.0, 6.0),
        )
    ]
    waits = [{"worker": 0, "start_s": start, "end_s": end} for start, end in ((0.5, 1.0), (1.2, 1.5), (4.4, 4.5))]
    report = {"events": copies, "stalls": waits, "workers": 1, "step_time_s": 10.0}
    assert stall_seconds(report) == pytest.approx({"weights": 0.5, "activations": 0.3, "gradients": 0.1})
    assert link_use(report) == pytest.approx({"up": 0.2, "down": 0.1})
