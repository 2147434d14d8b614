"""Rounds of one microbatch run side by side: every worker computes, and no bit depends on it."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
from harness import ours
from patience import until
from torch import Tensor, nn

from lightning_roundpipe.engine import worker as engine_worker
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

WIDTH, MICROBATCHES = 64, 4


class Model(pl.LightningModule):
    """Layers that take equally long, with dropout, and with running statistics, which depend on their order."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.layers = nn.ModuleList(self._layer(normed) for _ in range(3))

    def _layer(self, normed: bool) -> nn.Module:
        parts = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
        return nn.Sequential(*parts, *([nn.BatchNorm1d(WIDTH)] if normed else []))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = x.square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def trained(devices: int, *, normed: bool = True, steps: int = 4, **options: Any) -> tuple[Any, Any]:
    """The result of a run, and the report of its last step."""
    strategy = ours(num_microbatches=MICROBATCHES, layers=["Sequential"], **options)
    batches = list(torch.randn(steps, 128 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1)))
    result = harness.run(strategy, Model(normed), batches, devices=devices, watch=False)
    return result, strategy.report()


@pytest.mark.parametrize("staleness", [0, 1])
def test_running_means_see_microbatches_in_order(staleness: int) -> None:
    options = {"normed": not staleness, "staleness": staleness}
    one, _ = trained(1, **options)
    plan = "forward none; fused 0-2; backward none; round 1"
    for devices in (2, 3):
        several, report = trained(devices, plan=plan, emulation={"delay_seed": devices, "poison": True}, **options)
        harness.assert_identical(one, several)
        assert {slot["worker"] for slot in report["slots"]} == set(range(devices))


def test_a_model_that_fits_each_worker_is_trained_on_all_of_them() -> None:
    one, _ = trained(1, normed=False, memory_budget="1GiB", plan="static")
    two, report = trained(2, normed=False, memory_budget="1GiB", plan="static")
    harness.assert_identical(one, two)
    assert report["plan"] == "forward none; fused 0-2; backward none; round 1"
    assert [slot["worker"] % 2 for slot in report["slots"]] in ([0, 1, 0, 1], [1, 0, 1, 0])


class Gated(nn.Module):
    """A layer whose backward calls ``gate`` first."""

    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, gate: Callable[[], None]) -> Tensor:
            ctx.gate = gate
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            ctx.gate()
            return grads[0], None

    def __init__(self, gate: Callable[[], None]) -> None:
        super().__init__()
        self.lin, self.gate = nn.Linear(WIDTH, WIDTH), gate

    def forward(self, x: Tensor) -> Tensor:
        passed: Tensor = Gated.Passed.apply(self.lin(x), self.gate)  # type: ignore[no-untyped-call]
        return passed


class GatedModel(Model):
    """Six layers, the first of which has the gate."""

    def __init__(self, gate: Callable[[], None]) -> None:
        super().__init__(normed=False)
        self.layers = nn.ModuleList(Gated(gate if i == 0 else lambda: None) for i in range(6))


class Sent:
    """Holds up the backward of each round's first layer until gradients of its last layers are on their way.

    In the last round, the optimizer must have begun to step, too.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.closed: list[float] = []
        self.stepped: list[tuple[int, float]] = []
        """Number of the update, and when one of its calls began."""
        self._begun: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self._gates: Counter[int] = Counter()
        real_send, real_close = engine_worker.GradientSender._send, engine_worker.Worker.close_slot
        real_apply = BucketStepper._apply

        def send(sender: Any, slot: Any, call: int, *args: Any) -> None:
            real_send(sender, slot, call, *args)
            if len(slot.layers) == 6:  # not in the first window, in which each call has a slot of its own
                self._begun[slot.round, call].append(sender.device.gradients_down.record())

        def close_slot(worker: Any, slot: Any, *args: Any) -> None:
            self.closed.append(time.perf_counter())
            real_close(worker, slot, *args)

        def apply(stepper: BucketStepper, step: Any, *args: Any) -> None:
            self.stepped.append((step.number, time.perf_counter()))
            real_apply(stepper, step, *args)

        patch.setattr(engine_worker.GradientSender, "_send", send)
        patch.setattr(engine_worker.Worker, "close_slot", close_slot)
        patch.setattr(BucketStepper, "_apply", apply)

    def gate(self) -> None:
        microbatch = int(threading.current_thread().name.removeprefix("roundpipe-microbatch"))
        planned = self._gates[microbatch]
        self._gates[microbatch] += 1
        for call in (5, 4) if planned else ():
            begun = self._begun[microbatch, call]
            until(lambda: len(begun) >= planned and begun[planned - 1].done(), f"call {call} waits for the round's end")  # noqa: B023
        if planned and microbatch == MICROBATCHES - 1:
            until(lambda: planned + 1 in {number for number, _ in self.stepped}, "the optimizer waits for the end")

    def __deepcopy__(self, memo: Any) -> Sent:
        return self


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bfloat16"}], ids=str)
def test_gradients_leave_while_their_round_runs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round, and the optimizer steps the last layers before the last slot is closed."""
    sent = Sent(monkeypatch)
    strategy = ours(
        num_microbatches=MICROBATCHES,
        layers=["Gated"],
        plan="forward none; fused 0-5; backward none; round 1",
        **options,
    )
    torch.manual_seed(0)
    batches = [torch.randn(MICROBATCHES, WIDTH) for _ in range(3)]
    harness.run(strategy, GatedModel(sent.gate), batches, devices=2, watch=False)
    report = strategy.report()
    for slot in report["slots"]:
        rows = [row for row in report["events"] if row["slot"] == slot["slot"]]
        last = max(row["end_s"] for row in rows if row["kind"] == "backward")
        left = {row["call"]: row["start_s"] for row in rows if row["kind"] == "download_gradients"}
        assert left.keys() == set(range(6))
        assert left[5] < last and left[4] < last, f"gradients of round {slot['round']} wait for its end"
    assert min(when for number, when in sent.stepped if number == len(batches)) < max(sent.closed)


def test_gradients_of_a_call_are_added_in_the_order_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the second round leave last, at the end of its slot. Later rounds wait for them."""
    sender = engine_worker.GradientSender
    real = sender.send

    def send(self: Any, slot: Any, calls: Any, *args: Any) -> Any:
        whole = isinstance(calls, list) and len(calls) == len(slot.gradients.on_worker)  # all that are left
        return [] if slot.round == 1 and not whole else real(self, slot, calls, *args)

    one, _ = trained(1)
    monkeypatch.setattr(sender, "send", send)
    several, _ = trained(3, plan="forward none; fused 0-2; backward none; round 1")
    harness.assert_identical(one, several)


def test_weights_come_for_the_first_microbatch_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer publishes them layer by layer, and both slots of a worker wait for all of them."""
    real = BucketStepper._finish

    def finish(self: BucketStepper, *args: Any) -> None:
        time.sleep(0.02)
        real(self, *args)

    one, _ = trained(1)
    monkeypatch.setattr(BucketStepper, "_finish", finish)
    several, report = trained(2, plan="forward none; fused 0-2; backward none; round 1")
    harness.assert_identical(one, several)
    uploads = [row for row in report["events"] if row["kind"] == "upload_weights"]
    slots = sorted({row["slot"] for row in uploads})
    assert len(slots) == MICROBATCHES and len(uploads) == 3 * MICROBATCHES
    for first, second in zip(slots, slots[2:], strict=False):
        last = max(row["end_s"] for row in uploads if row["slot"] == first)
        assert last <= min(row["start_s"] for row in uploads if row["slot"] == second)
