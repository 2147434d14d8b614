"""Whole steps on devices that believe they are GPUs: what profilers show, budgets, and what libraries keep.

A fake plays CUDA on the CPU, so numbers are those of plain training.
"""

import copy
import threading
from collections import Counter

import fake_cuda
import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.devices.cuda import CudaDevice


class Ranges(pl.Callback):
    """What a profiler shows of the third step."""

    roundpipe_passive_hooks = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        fake_cuda.RANGES.clear()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.names = list(fake_cuda.RANGES)


def test_ranges_name_the_slots(gpus):
    module, batches = zoo.make_module("llama"), zoo.make_batches("llama", 3)
    expected = run("auto", copy.deepcopy(module), batches)
    ranges = Ranges()
    used = ours(num_microbatches=2, plan="forward 0 1-3; fused 4-5; backward 2-3 0-1; round 2")
    result = run(used, module, batches, devices=2, callbacks=[ranges], watch=False)
    assert len(gpus) == 2
    harness.assert_tensors_same(expected.state, result.state)
    slots = {name.split(" of ")[0] for name in ranges.names if name.startswith("forward")}
    assert len(slots) == 6, ranges.names
    assert all(" slot " in name for name in ranges.names)


def test_a_budget_may_be_a_fraction(monkeypatch):
    """Of what the worker's GPU has, of which two workers that share it have half each. A plan that wants 60 % of that:
    given, as one that is found depends on measured times."""
    gpus = fake_cuda.trainers_on_gpus(monkeypatch, limited=True)
    monkeypatch.setattr(CudaDevice, "lead_bytes", 0)  # of which there would be as much as is left
    free, plan = 1_000_000, harness.single(6, 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))

    def planned(budget):
        used = ours(num_microbatches=2, memory_budget=budget, layers=["Linear", "ResidualBlock"], plan=plan)
        result = run(used, zoo.make_module("mlp"), zoo.make_batches("mlp", 2), devices=2, watch=False)
        return int(result.report["planned_device_bytes"])

    needed = planned(None)
    share = int(needed / 0.6)
    free = 2 * share - 200  # which torch has reserved
    assert planned(1.0) == needed
    assert planned(0.5) <= share // 2 < needed, "the arena has less"
    allowed = share // 4 - gpus[0].library_bytes()
    with pytest.raises(ValueError, match=f"plan: it needs .* but memory_budget allows {allowed:,}"):
        planned(0.25)


def test_what_libraries_keep_is_no_room(monkeypatch):
    """It comes out of the budget, is part of the forecast, and is there before the first layer is measured; and again
    when libraries have given it back."""
    fake_cuda.trainers_on_gpus(monkeypatch)
    warmed = []
    monkeypatch.setattr(CudaDevice, "warm_up", lambda self: warmed.append(threading.current_thread().name))
    reports = []
    for kib in (0, 30):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", f":{kib}:1")
        plan = "forward 0 1-3; fused 4-5; backward 2-3 0-1; round 2"
        used = ours(num_microbatches=2, layers=["Linear", "ResidualBlock"], plan=plan)
        reports.append(run(used, zoo.make_module("mlp"), zoo.make_batches("mlp", 2), devices=2, watch=False).report)
    assert reports[1]["planned_device_bytes"] - reports[0]["planned_device_bytes"] == 3 * 30 * 1024
    # Each microbatch, as its calls are measured, warms up once on each GPU; in both runs.
    assert Counter(warmed) == {f"roundpipe-microbatch{n}": 4 for n in range(2)}


BY_HAND = {"plan": "forward none; fused 0-5; backward none; round 4", "num_microbatches": 4}


@pytest.mark.parametrize(
    ("kib", "samples", "how", "limit", "threads"),
    [
        (70, 8, {}, "workers may use 10,240 bytes", 2),
        (210, 8, BY_HAND, "memory_budget allows 92,160", 4),
        (None, 8, {}, "workers may use 10,240 bytes", 2),
    ],
)
def test_a_limit_that_nobody_set_is_explained(kib, samples, how, limit, threads, monkeypatch):
    """What libraries keep was taken off. Another message for each: a layer, a cut, a plan by hand, the GPU itself.

    After the first batch, libraries keep something for each microbatch's thread, too: half of it for each worker here.
    """
    fake_cuda.trainers_on_gpus(monkeypatch, limited=kib is None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":30:1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * 1024, 140 * 1024))
    whole = "the device's memory" if kib is None else f"memory_budget, {kib * 1024:,} bytes,"
    budget = None if kib is None else kib * 1024
    used = ours(layers=["Linear", "ResidualBlock"], memory_budget=budget, **{"num_microbatches": 2, **how})
    with pytest.raises(ValueError, match=limit) as raised:
        run(used, zoo.make_module("mlp"), zoo.make_batches("mlp", 1, samples), devices=2, watch=False)
    assert str(raised.value).endswith(f" Of {whole} libraries such as cuBLAS keep {threads * 30_720:,} bytes.")


class Arms(pl.Callback):
    """Says when the second batch begins."""

    roundpipe_passive_hooks = True
    armed = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.armed = batch_idx == 1


def test_out_of_memory_in_a_layer(gpus, monkeypatch):
    """What the GPU held is said, by purpose, and which settings help; the GPU counts what is no arena by itself."""
    arms, real = Arms(), zoo.ResidualBlock.forward

    def forward(self, h):
        if arms.armed:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(self, h)

    monkeypatch.setattr(zoo.ResidualBlock, "forward", forward)
    used = ours(num_microbatches=2, layers=["Linear", "ResidualBlock"])
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate") as caught:
        run(used, zoo.make_module("mlp"), zoo.make_batches("mlp", 3), devices=2, callbacks=[arms])
    place, room = caught.value.__notes__
    assert "layer 'model.blocks.0', forward pass" in place
    assert " held " in room and "weights and gradients" in room and "other tensors" in room
    assert "Use smaller microbatches (half the batch size, or twice num_microbatches), shorter sequences" in room
    assert harness.roundpipe_threads() == []
