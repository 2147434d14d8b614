"""What a GPU's allocator would count is what was planned, and nothing that was given back is still held by somebody.

As ``test_memory_forecast`` does for emulated devices, which count what they are told of; here all that is there counts.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import harness
import pytest
import torch
import zoo
from between_layers import CALLS, batch, model
from counted_memory import counted
from harness import ours, run
from stress import all_reports

from lightning_roundpipe.devices import Event
from lightning_roundpipe.engine.worker import Worker
from lightning_roundpipe.memory.in_flight import IN_FLIGHT, InFlight

LLAMA = 6
WORKSPACE = 4 * 1024
"""cuBLAS's for the thread of a microbatch, or autograd's, see `fake_cuda`: planned, and not played here."""


@pytest.mark.parametrize(
    ("name", "lora", "plan", "options"),
    [
        ("llama", False, harness.halves(LLAMA, 4), {}),
        pytest.param("llama", True, harness.halves(LLAMA, 4), {}, marks=pytest.mark.slow),
        pytest.param("llama", False, harness.per_call(LLAMA, 4), {"token_tiles": 8}, marks=pytest.mark.slow),
        pytest.param("llama", False, harness.single(LLAMA, 4), {"staleness": 1}, marks=pytest.mark.slow),
        pytest.param("t5", False, harness.per_call(9, 4), {}, marks=pytest.mark.slow),
    ],
)
def test_one_worker_holds_what_was_planned(name: str, lora: bool, plan: str, options: dict[str, Any]) -> None:
    module, batch = zoo.make_module(name, lora), zoo.make_batches(name, 1, 8)[0]
    with counted() as found, all_reports() as made:
        run(ours(num_microbatches=4, plan=plan, **options), module, [batch] * 4, devices=1, watch=False)
        # Within, as reading a time may set the GPU's clock anew.
        reports = [report for make in made if not (report := make())["profiled"]]
    assert len(reports) == 3
    for report in reports:
        [peak], planned = report["peak_device_bytes"], report["planned_device_bytes"] - 5 * WORKSPACE
        before = max(call["input_bytes"] for call in report["costs"]["calls"])
        assert peak / planned > 0.93  # inputs of the next microbatch may come after the peak
        assert peak <= 1.05 * planned + IN_FLIGHT * before, "calls in flight keep their inputs"
    assert found.faults == []


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["elementwise", pytest.param("unet", marks=pytest.mark.slow)])
def test_what_user_code_makes_and_holds_is_planned(name: str, devices: int) -> None:
    """Several times as much as all else, if tensors between layers are many and layers are small."""
    options: dict[str, Any] = {"num_microbatches": 4, "plan": harness.per_call(CALLS, 4)}
    with counted() as found, all_reports() as made:
        run(ours(**options), model(name), [batch(name, 64)] * 4, devices=devices, watch=False)
        reports = [report for make in made if not (report := make())["profiled"]]
    assert len(reports) == 3
    for report in reports:
        peak, planned = max(report["peak_device_bytes"]), report["planned_device_bytes"] - 5 * WORKSPACE
        flying = IN_FLIGHT * max(call["input_bytes"] + call["returning_bytes"] for call in report["costs"]["calls"])
        assert peak <= 1.05 * planned + flying
        assert devices > 1 or peak >= 0.65 * planned
    assert devices > 1 or found.faults == []


def test_calls_in_flight_keep_memory_and_no_graphs() -> None:
    """A graph would keep what autograd has saved, and the inputs of the call that has made it."""
    flying, end = InFlight(), cast(Event, None)
    saved = torch.ones(3, requires_grad=True) * 2
    output = saved.sin().sum()
    graph, made = weakref.ref(saved.untyped_storage()), weakref.ref(output.untyped_storage())
    flying.add(end, [[output], saved.to_sparse()], counted=True)
    del output, saved
    gc.collect()
    assert graph() is None and made() is not None
    assert flying.nbytes == 4  # a sparse tensor has no storage of its own
    flying.land()
    assert made() is None and len(flying) == flying.nbytes == 0


@pytest.mark.slow
def test_calls_in_flight_are_part_of_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is as late as the host lets it be, so that all that may be in flight is."""
    most, planned, real = 0, {}, Worker.keep_until_computed

    def keep_until_computed(self: Worker, *tensors: Any, **more: Any) -> None:
        nonlocal most
        real(self, *tensors, **more)
        most = max(most, len(self._in_flight))

    monkeypatch.setattr(Worker, "keep_until_computed", keep_until_computed)
    batch, peaks = zoo.make_batches("llama", 1, 8)[0], {}
    for lead in (0, 60_000):
        most = 0
        used = ours(num_microbatches=4, plan=harness.per_call(LLAMA, 4))
        with counted(lead=lead) as found, all_reports() as made:
            run(used, zoo.make_module("llama"), [batch] * 2, devices=1, watch=False)
            reports = [report for make in made if not (report := make())["profiled"]]
        [planned[lead]] = {report["planned_device_bytes"] for report in reports}
        peaks[lead] = max(report["peak_device_bytes"][0] for report in reports)
        assert planned[lead] - planned[0] == pytest.approx(
            lead, abs=256
        )  # what is measured may differ by a few scalars
        assert peaks[lead] <= 1.05 * planned[lead]
        assert (most > IN_FLIGHT) == bool(lead)
        assert found.faults == []
    assert peaks[60_000] > peaks[0], "calls in flight take memory"
