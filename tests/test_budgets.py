"""The options that say what memory may be used: each does what it says, from a configuration too."""

import re

import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.config import Emulation, Options
from lightning_roundpipe.devices import host_memory, make_devices
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.memory.budget import device_for, worker_bytes


@pytest.mark.parametrize(("budget", "allowed"), [(1000, 1000), (1e6, 6000), ("2KiB", 2048), (0.5, 3000), (None, 5400)])
def test_a_budget_is_bytes_or_a_share_of_the_smallest_device(budget, allowed, monkeypatch):
    devices = make_devices("cpu", [torch.device("cpu")] * 3, Emulation())
    monkeypatch.setattr(EmulatedDevice, "capacity", lambda self: (None, 8000, 6000)[self.index])
    assert worker_bytes(Options(memory_budget=budget), devices) == allowed
    for device in devices:
        device.close()


@pytest.mark.parametrize("budget", [0.3, 5000, None])
def test_a_device_of_the_advised_size_has_that_budget(budget, monkeypatch):
    options, devices = Options(memory_budget=budget), make_devices("cpu", [torch.device("cpu")], Emulation())
    size = device_for(5000, options)
    monkeypatch.setattr(EmulatedDevice, "capacity", lambda self: size)
    assert worker_bytes(options, devices) == 5000
    devices[0].close()


def test_what_fits_the_hosts_memory_is_pinned(monkeypatch):
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 100)
    assert [host_memory.worth_copying(n, "auto") for n in (0, 75, 76)] == [True, True, False]
    assert [host_memory.worth_copying(10**18, pin) for pin in ("on", "off")] == [True, False]


def test_a_jobs_limit_counts(tmp_path, monkeypatch):
    """A scheduler's, say: of a control group that the process is in, or one around it."""
    mine, step = tmp_path / "mine", tmp_path / "slurm" / "job" / "step"
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    monkeypatch.setattr(host_memory, "_MINE", mine)
    step.mkdir(parents=True)
    mine.write_text("0::/slurm/job/step\n")
    for group, limit in ((step, "max"), (step.parent, "9000")):
        (group / "memory.current").write_text("5000\n")
        (group / "memory.stat").write_text("inactive_file 700\n")
        (group / "memory.max").write_text(f"{limit}\n")
    assert host_memory.free_bytes() == 4700
    (step / "memory.max").write_text("4000\n")
    assert host_memory.free_bytes() == 0, "less than is in use"
    assert host_memory.total_bytes() == 4000


def test_an_error_names_settings_that_work():
    """Each with its value, as Python: the planner has tried it with the measured costs."""
    module, batches = zoo.make_module("mlp"), zoo.make_batches("mlp", 2, samples=600)
    options = {"num_microbatches": 4, "memory_budget": "80KB"}
    with pytest.raises(ValueError, match="workers may use 80,000 bytes") as raised:
        run(ours(**options), module, batches, devices=2)
    [said] = re.findall(r"Set (.*?)\. Or name smaller modules", str(raised.value))
    ways = [way.partition(" (")[0] for way in said.split(", or ")]
    assert [way.partition("=")[0] for way in ways] == ["memory_budget", "num_microbatches"]
    for way in ways:
        setting = eval(f"dict({way})")
        assert run(ours(**options | setting), module, batches, devices=2).report


@pytest.mark.parametrize(("samples", "budget", "proposed"), [(1, "50KiB", False), (4, "90KiB", True)])
def test_only_cuts_that_batches_allow_are_proposed(samples, budget, proposed):
    batches = [{name: value[:samples] for name, value in batch.items()} for batch in zoo.make_batches("llama")]
    with pytest.raises(DoesNotFit, match="memory_budget=") as raised:
        run(ours(memory_budget=budget), zoo.make_module("llama"), batches)
    assert ("num_microbatches=" in str(raised.value)) is proposed
