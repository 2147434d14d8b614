"""Random numbers where the host has a generator of its own, and where backward runs on autograd's threads."""

import threading

import fake_cuda
import harness
import pytest
import torch
from harness import assert_identical, ours, run
from test_randomness import DROPPING, DROPPING_LAYERS, LEARNING, CheckpointedModule, _wide, assert_linear

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.thread_owner import context_of_thread

PLAN = harness.per_call(5, 4)


def strategy(layer="Sequential", **options):
    return ours(num_microbatches=4, layers=[layer], plan=PLAN, **options)


def test_numbers_are_those_of_emulated_devices():
    """And the caller finds the host's generator as it was."""
    expected = run(ours(num_microbatches=4, layers=DROPPING_LAYERS), LEARNING, _wide(3), devices=2)
    with pytest.MonkeyPatch.context() as patch:
        fake_cuda.trainers_on_gpus(patch)
        for devices in (1, 3):
            assert_identical(expected, run(strategy(), LEARNING, _wide(3), devices=devices), rng=True)


def test_who_begins_to_draw_on_the_host_later_is_refused(gpus, monkeypatch):
    calls = 0

    def forward(self, h):
        nonlocal calls
        calls += 1
        return torch.nn.functional.linear(h, self[0].weight) + (torch.rand(()) if calls > 100 else 0.0)

    monkeypatch.setattr(torch.nn.Sequential, "forward", forward)
    # Which of the two workers' stages finds the generator moved is a matter of time.
    with pytest.raises(RoundPipeError, match=r"random numbers were drawn (where none were|in .*layer .* or beside it)"):
        run(strategy(), DROPPING, _wide(8), devices=2)


def test_autograds_threads_know_which_layer_they_run(gpus, monkeypatch):
    """Else what forks a generator there, as a checkpoint inside a layer does, would not take its turn with others."""
    seen = []
    real = CheckpointedModule().model.layers[0].__class__._slowly

    def slowly(self, x):
        seen.append((threading.current_thread().name, (context_of_thread().runner.inside or ("",))[0]))
        return real(self, x)

    module = CheckpointedModule()
    monkeypatch.setattr(type(module.model.layers[0]), "_slowly", slowly)
    assert_linear(module, run(strategy("Checkpointed"), module, _wide(3), devices=2))
    theirs = {layer for thread, layer in seen if thread == "autograd"}
    assert theirs == {f"model.layers.{i}" for i in range(5)}
