"""The run's own plan counts updates as they will be: what they wait for, and the bytes that they touch."""

import pytest
import torch
from harness import Chain, ours, run
from torch import nn

from lightning_roundpipe.engine import planner


class Net(Chain, optimizer=torch.optim.AdamW, lr=0.01):
    """Three layers."""


@pytest.mark.parametrize(
    ("given", "options", "at_once", "nbytes"),
    [
        ({}, {}, False, 28),
        ({"gradient_clip_val": 0.5}, {}, True, 28 + 8),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {}, False, 28),
        ({"precision": "bf16-true"}, {}, False, 28),
        ({"precision": "bf16-true"}, {"staleness": 1}, False, 30),
        ({}, {"staleness": 1}, False, 32),
        ({"precision": "16-true"}, {}, True, 30),
        ({}, {"optimizer_state": "bf16"}, False, 20),
        ({"blocking": True}, {}, False, 28),
    ],
)
def test_rules_of_updates(monkeypatch, given, options, at_once, nbytes):
    seen, rules = [], planner.rules_of
    monkeypatch.setattr(planner, "rules_of", lambda *args, **kinds: seen.append(rules(*args, **kinds)) or seen[-1])
    run(
        ours(num_microbatches=2, **options),
        Net(nn.Linear(4, 4) for _ in range(3)),
        torch.ones(4, 4),
        devices=2,
        steps=1,
        **given,
    )
    [found] = seen
    assert (found.updates.at_once, found.updates.blocking) == (at_once, "blocking" in given)
    assert found.sums_per_s / found.updates.bytes_per_s == pytest.approx(nbytes / 12)
