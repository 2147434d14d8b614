"""What crosses a layer call: how often it is copied, and when."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import ours, run
from patience import longer_each_try
from torch import Tensor, nn

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import emulated_work, make_devices
from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.planning.memory import device_bytes
from lightning_roundpipe.runtime.core.activation_store import ActivationStore, PrefetchBudget
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.reporting.events import Recorder

WIDTH = 8


class Block(nn.Module):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, h: Tensor, keep: Tensor) -> Tensor:
        if self.seconds:
            emulated_work(self.seconds)
        return torch.tanh(self.lin(h)) * keep


class Blocks(pl.LightningModule):
    """One after another, all with the same mask."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(s) for s in seconds)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        keep = (batch[:, :1] > -1).float()
        h = batch
        for block in self.blocks:
            h = block(h, keep)
        return h.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def report_of(module: Blocks, devices: int, plan: str, microbatches: int = 2, **options: Any) -> dict[str, Any]:
    batches = [torch.randn(2 * microbatches, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    strategy = ours(num_microbatches=microbatches, layers=["Block"], plan=plan, **options)
    report = run(strategy, module, batches, steps=2, devices=devices, watch=False).report
    assert report is not None
    return report


# In the backward of 1-2 start from h2, keep, h1, and in that of 0 from x, keep. The fused stage, 3, saves nothing.
@pytest.mark.parametrize(
    ("devices", "down", "up"),
    [
        # x, keep, h1 and h2 are saved, once each. Nothing else travels: the next stage is on the same worker.
        pytest.param(1, 4, 5, id="one worker"),
        # h3 goes on to the fused stage, and the gradients of h3 and h1 go back. Up go the inputs of stage 2 (h2, keep)
        # and of the fused one (h3, keep), too.
        pytest.param(2, 4 + 1 + 2, 5 + 2 + 2 + 2, id="two workers"),
    ],
)
def test_each_tensor_is_saved_once_and_stays_where_it_is_needed(devices: int, down: int, up: int) -> None:
    report = report_of(Blocks(0, 0, 0, 0), devices, "forward 0-1 2; fused 3; backward 1-2 0; round 2")
    if report["slots"][0]["worker"] != 0:
        up += 2  # x and keep, which are found on the first worker
    copies = Counter((e["kind"], e["microbatch"]) for e in report["events"] if e["kind"].endswith("_activations"))
    assert copies == {
        **{("download_activations", m): down for m in (0, 1)},
        **{("upload_activations", m): up for m in (0, 1)},
    }


@longer_each_try
def test_what_a_microbatch_needs_is_there_before_its_turn(times: float) -> None:
    """It comes while the one in front of it computes, and no earlier; without room, it comes in its turn."""
    plan = "forward 0; fused 1; backward 0; round 4"
    module = Blocks(0.0, 0.04 * times)
    need: int | None = None
    for _ in range(2):  # within a budget, what user code holds leaves for the host, which takes less
        report = report_of(Blocks(0.0, 0.0), 2, plan, 4, memory_budget=need)
        need = device_bytes(Plan.parse(plan), Costs.from_dict(report["costs"]), 2)
    for budget, ahead in ((None, True), (need, False)):
        report = report_of(module, 2, plan, 4, memory_budget=budget)
        slot = next(s for s in report["slots"] if s["phase"] == "fused")
        mine = [e for e in report["events"] if e["worker"] == slot["worker"]]
        turns = {m: [e for e in mine if e["slot"] == slot["slot"] and e["microbatch"] == m] for m in range(4)}
        for m in (2, 3):
            copies = [e for e in mine if e["kind"] == "upload_activations" and e["microbatch"] == m]
            began = min(e["start_s"] for e in copies)
            before = max(e["end_s"] for e in turns[m - 1] if e["kind"] == "backward")
            assert (began < before) is ahead, (m, budget)
            assert began > max(e["end_s"] for e in turns[m - 2] if e["kind"] == "backward"), "two microbatches ahead"


@longer_each_try
def test_a_report_says_how_long_workers_wait_for_copies(times: float) -> None:
    plan = "forward 0; fused 1; backward 0; round 1"
    stalls = [
        report_of(Blocks(0, 0), 2, plan, emulation={"latency": latency * times}, prefetch=0)["stall_pct"]
        for latency in (0.0, 0.02)
    ]
    assert 0 <= stalls[0] < stalls[1] <= 100
    assert stalls[1] > 30, "nothing here takes time but copies"


@longer_each_try
def test_prefetch_says_whether_weights_come_ahead(times: float) -> None:
    """While the stage in front of theirs runs, or when it has ended."""
    for prefetch in (0, 1):
        module, plan = Blocks(0.01 * times, 0.01 * times), "forward 0; fused 1; backward 0; round 2"
        report = report_of(module, 1, plan, 2, prefetch=prefetch)
        begins: dict[int, float] = {}
        ends: dict[int, float] = {}
        for event in report["events"]:
            if event["kind"] == "upload_weights":
                begins[event["slot"]] = event["start_s"]
            elif event["kind"] in ("forward", "backward"):
                ends[event["slot"]] = max(ends.get(event["slot"], 0.0), event["end_s"])
        slots = [slot["slot"] for slot in report["slots"]]
        assert len(slots) == 3
        for before, slot in pairwise(slots):
            assert (begins[slot] < ends[before]) is bool(prefetch), (prefetch, slot)


def test_what_is_there_does_not_wait_behind_what_is_still_on_its_way() -> None:
    """A microbatch's saved inputs go up while the gradient of the next one, which was asked for first, is computed."""
    first, second = make_devices("cpu", [torch.device("cpu")] * 2, Emulation(bandwidth=1e6))
    try:
        store, room = ActivationStore(0, Recorder()), PrefetchBudget()
        room.limit = None
        late = store.save(torch.full((125_000,), 3.0), first)  # half a second
        there = HostTensor(torch.ones(4), None)
        store.bring(second, [late, there], room)
        here = store._here[second]
        here[id(there)].end.wait()
        assert late.ready is not None and not late.ready.done()
        here[id(late)].end.wait()
        assert bool((here[id(late)].tensor == 3.0).all()), "it waits for its own download"
    finally:
        for device in (first, second):
            device.close()
