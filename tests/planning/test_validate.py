from __future__ import annotations

import pytest

from lightning_roundpipe.planning import Plan

CALLS = ["embed", *(f"layers.{number}" for number in range(6)), "head"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "forward 0-3; fused 4-9; backward 0-3; round 4",
            r"the fused stage \(4-9\) is out of range: the trace has 8 calls, 0 to 7, and ends with call 7 \('head'\)",
        ),
        (
            "forward 0-3 3-4; fused 5-7; backward 0-4; round 4",
            r"forward stage 2 \(3-4\) repeats call 3 \('layers.2'\) in the forward pass: forward stage 1 \(0-3\) has",
        ),
        (
            "forward 0-3; fused 4-7; backward 2-4 0-1; round 4",
            r"the fused stage \(4-7\) repeats call 4 \('layers.3'\) in the backward pass: backward stage 1 \(2-4\)",
        ),
        (
            "forward 1-3; fused 4-7; backward 0-3; round 4",
            r"call 0 \('embed'\) is missed by the forward pass: forward stage 1 \(1-3\) has the next calls",
        ),
        (
            "forward 2-3 0-1; fused 4-7; backward 0-3; round 4",
            r"forward stage 2 \(0-1\), with call 0 \('embed'\), is reordered: it runs after forward stage 1 \(2-3\)"
            r".*in the forward pass. Exchange them: forward stages ascend",
        ),
        (
            "forward 0-3; fused 4-7; backward 0-1 2-3; round 4",
            r"backward stage 2 \(2-3\), with call 2 \('layers.1'\), is reordered: it runs after backward stage 1"
            ".*backward stages descend, deepest calls first",
        ),
    ],
)
def test_error_names_stage_call_layer_and_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.parse(text).validate(CALLS)
