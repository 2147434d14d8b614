"""Mixtures of experts: recomputation routes as the forward did, and experts may be idle."""

from collections import defaultdict

import harness
import torch
import zoo
from harness import ours, run
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter


def test_recomputation_routes_as_the_forward_did(monkeypatch):
    """To the bit, and from the same numbers."""
    routed = defaultdict(list)
    real = GptOssTopKRouter.forward

    def forward(self, hidden):
        out = real(self, hidden)
        key = b"".join(t.detach().numpy().tobytes() for t in (hidden, self.weight, self.bias))
        routed[key].append(out[-1].detach().clone())
        return out

    monkeypatch.setattr(GptOssTopKRouter, "forward", forward)
    module = zoo.make_module("gpt_oss")
    plan = harness.per_call(5, 3)
    run(ours(num_microbatches=3, plan=plan), module, zoo.make_batches("gpt_oss"), devices=2)
    blocks = 2 * 3 * 3  # of three microbatches in three steps
    assert len(routed) == blocks
    for found in routed.values():
        assert len(found) >= 2  # its recomputation was given the same numbers
        assert all(torch.equal(found[0], other) for other in found)
