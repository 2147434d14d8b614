"""``roundpipe-plan hardware=auto``: the file that it writes, probes on emulated and on played GPUs, refusals."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import fake_cuda
import pytest
import torch

from lightning_roundpipe.commands import this_machine
from lightning_roundpipe.commands.this_machine import probe
from lightning_roundpipe.devices import DeviceOutOfMemory
from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.estimates.nominal import EMULATED, GPU
from lightning_roundpipe.planning.profile import read_hardware


@pytest.fixture
def quick(monkeypatch):
    """A machine with little free memory, and short measurements."""
    monkeypatch.setattr(this_machine, "_SECONDS", 1e-3)
    monkeypatch.setattr(this_machine, "free_bytes", lambda: 8 * 2**20)


@pytest.fixture
def gpus(monkeypatch, quick):
    """By number, the names of two GPUs that are played."""
    names = dict.fromkeys(range(2), "NVIDIA H100")
    made = []

    def make(kind, torch_devices, *_):
        assert (kind, torch_devices) == ("cuda", [torch.device("cuda", i) for i in range(len(torch_devices))])
        made[:] = [CudaDevice(i, torch.device("cpu"), "off", 1) for i in range(len(torch_devices))]
        numbers = itertools.cycle(names)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: names[next(numbers)])
        return made

    fake_cuda.play_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**22, 3 * 2**30))
    monkeypatch.setattr(this_machine, "make_devices", make)
    yield names
    assert all(device._switch.closed for device in made)


@pytest.fixture
def command(plan_command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return plan_command


def is_plausible(machine):
    numbers = [value for value in vars(machine).values() if isinstance(value, float)]
    return all(0 < number < math.inf for number in [*numbers, *machine.flops.values(), machine.host_memory])


def test_emulated_devices_share_the_processor(quick):
    said = []
    machine = probe(2, said.append)
    assert is_plausible(machine) and machine.emulated
    assert (machine.workers, machine.memory) == (2, None)
    assert machine.host_memory == this_machine.total_bytes() > 2**28
    assert machine.matmul_efficiency == machine.memory_efficiency == 1
    assert 0 < (machine.attention_efficiency or 0) <= 1
    assert said[0] == "2 emulated devices, as torch sees no GPU" and "bf16 products" in said


class TestGpus:
    """Played on the CPU: what is enqueued is done at once."""

    def test_all_of_them_are_measured_together(self, gpus, monkeypatch):
        computing = []
        acquire = CudaDevice.acquire_core
        monkeypatch.setattr(
            CudaDevice, "acquire_core", lambda device: computing.append(device.index) or acquire(device)
        )
        said = []
        machine = probe(None, said.append)
        assert is_plausible(machine) and not machine.emulated
        assert (machine.title, machine.workers, machine.memory) == ("2 x H100", 2, 3 * 2**30)
        assert computing.count(0) == computing.count(1) > 0
        assert said[0] == "2 CUDA devices"

    def test_a_full_gpu_is_named(self, gpus, monkeypatch, command):
        def full(device, nbytes, purpose):
            raise DeviceOutOfMemory(f"{nbytes} bytes for {purpose} do not fit.")

        monkeypatch.setattr(CudaDevice, "allocate", full)
        code, out, err = command("hardware=auto")
        assert (code, out) == (2, "")
        progress, message = err.splitlines()
        assert ", operations, links (" in progress
        assert re.match(
            r"roundpipe-plan: hardware=auto: the probe of links failed: DeviceOutOfMemory: \d+ bytes for a probe",
            message,
        )
        assert "hardware=FILE" in message
        assert not list(Path().iterdir())


def test_the_file_gives_the_same_numbers(tmp_path):
    odd = replace(
        GPU, kernel_s=1.03e-05, hop_s=9.51e-05, issue_s=1.94e-06, upload=956e6, download=0.1 + 0.2,
        memory_efficiency=1.0, attention_efficiency=0.182, optimizer_bandwidth=37.2e9, call_s=5e-4, turn_s=0.0,
        host_memory=25276502016, title='4 x "GPU": #1',
    )  # fmt: skip
    file = tmp_path / "machine.yaml"
    file.write_text(this_machine.written(odd))
    assert read_hardware(file) == odd


@pytest.fixture
def measured(monkeypatch):
    """The workers that were asked for; nothing is measured."""
    asked = []

    def instead(workers, say):
        asked.append(workers)
        for what in ("4 emulated devices", "links", "optimizer"):
            say(what)
        return replace(EMULATED, workers=workers or 4, optimizer_bandwidth=21e9, attention_efficiency=0.5)

    monkeypatch.setattr(this_machine, "probe", instead)
    monkeypatch.setattr(this_machine.platform, "node", lambda: "my host.local")
    return asked


def test_alone_it_writes_and_prints_the_file(command, measured):
    code, out, err = command("hardware=auto", "workers=3")
    assert (code, measured) == (0, [3])
    assert out == Path("my-host.local.yaml").read_text()
    progress, other = err.splitlines()
    assert re.fullmatch(r"roundpipe-plan: measuring 4 emulated devices: links, optimizer \(\d+ s\)", progress)
    assert other == (
        "roundpipe-plan: my-host.local.yaml has the numbers: hardware=my-host.local.yaml plans with them again."
    )


def test_with_a_model_it_plans_with_the_file(command, measured):
    options = ("model=tiny_llama", "sequence_length=64", "search_seconds=0", "microbatch_size=1", "format=json")
    code, out, err = command(*options, "hardware=auto", "hardware_file=here.yaml")
    assert code == 0 and "here.yaml has the numbers" in err
    again = command(*options, "hardware=here.yaml")
    assert again == (0, out, "")
    assert json.loads(out)["workers"] == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("hardware=auto",), "would overwrite my-host.local.yaml. Plan with it by hardware=my-host.local.yaml"),
        (("hardware=auto", "hardware_file=my-host.local.yaml"), "hardware_file=OTHER.yaml"),
        (("hardware=auto", "hardware_file=nowhere/a.yaml"), "cannot be written: there is no folder nowhere"),
        (("hardware=auto", "hardware_file=a.yaml,b.yaml"), "hardware_file=a.yaml,b.yaml must be one file"),
        (("hardware=auto", "precision=32-true"), "precision= is about a plan: say for which model=NAME"),
        (("hardware=auto", "model=tiny_llama", "gpus=2"), "leave gpu= and gpus= out"),
        (("hardware=auto", "model=tiny_llama", "lora=al_linear"), "There is no lora=al_linear."),
        (("hardware=auto", "model=tiny_llama", "plan=foo"), "expected text like 'forward 0-3"),
        (("hardware=cpu", "model=tiny_llama", "hardware_file=a.yaml"), "hardware_file= is what hardware=auto writes"),
        (("model=tiny_llama",), "hardware=auto measures this machine"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_anything_is_measured(refused, measured, given, message):
    Path("my-host.local.yaml").write_text("mine")
    refused(message, *given)
    assert measured == [] and Path("my-host.local.yaml").read_text() == "mine"
