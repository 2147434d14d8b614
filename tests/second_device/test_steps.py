"""Whole steps on devices that are not the host: the numbers are those of plain training on the CPU."""

import pytest
import test_bypass
from harness import assert_same, assert_tensors_same, ours, run
from test_checkpointed_code import KINDS, PLACES, batches, build
from test_composed_optimizers import BY_LAYER, LAYERS, Trained
from test_composed_optimizers import batches as rows
from zoo_runs import expected, train

from second_device.late import late
from second_device.play import trainers_on_devices

of_one_or_two_devices = pytest.mark.parametrize("shared", [False, True])
"""Of two workers, each has a device of its own, or both have one."""


@of_one_or_two_devices
@pytest.mark.parametrize(("name", "lora"), [("mlp", False), ("llama", True)])
def test_equals_plain(name, lora, shared, monkeypatch):
    wanted = expected(name, lora, 3)
    made = trainers_on_devices(monkeypatch, shared=shared)
    result = train(name, lora, 2, num_microbatches=3)
    assert [str(device.torch_device) for device in made] == ["played:0", "played:0" if shared else "played:1"]
    assert_same(wanted, result)


@of_one_or_two_devices
@pytest.mark.parametrize("trainer", [{}, {"precision": "bf16-mixed"}], ids=["fp32", "halves"])
def test_devices_step_as_the_host_does(trainer, shared, monkeypatch):
    """A parameter's copies, its step and its way back are in no order but that of events."""

    def fit(device):
        strategy = ours(layers=LAYERS, optimizer_device=device)
        module = Trained(BY_LAYER["MuonAdamW"])
        return run(strategy, module, rows(6), devices=2, accumulate_grad_batches=2, watch=False, **trainer)

    with late() as queues:
        trainers_on_devices(monkeypatch, shared=shared)
        host, device = fit("cpu"), fit("worker")
        assert queues.streams.delays, "everything was done at once"
    assert_tensors_same(host.state, device.state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_equals_the_same_without_checkpoints(place, kind, devices):
    """Layers are called again in a backward of user code, which autograd runs on threads of its own."""
    results = [run(ours(num_microbatches=2), build(place, each), batches(), devices=2) for each in ("", kind)]
    assert_same(*results)


def test_parameters_on_the_host_have_an_error_with_a_remedy(devices):
    """Parameters between layers are there, and no torch function shows the use of these."""
    with pytest.raises(RuntimeError, match="on the same device") as caught:
        test_bypass.train(test_bypass.make(between=test_bypass.HIDDEN["another thread"]), 1, 1)
    assert devices
    assert any(".to(x.device)" in note for note in caught.value.__notes__)
