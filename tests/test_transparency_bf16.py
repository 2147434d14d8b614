"""Mixed precision equals Lightning's own: each microbatch is rounded as in plain training, within fp32's tolerances."""

from __future__ import annotations

import harness
import pytest
from harness import assert_identical, assert_same
from zoo_runs import calls, plain, train

bf16_models = pytest.mark.parametrize(
    ("name", "lora"),
    [("llama", False), ("qwen3", True)],
)


@bf16_models
@pytest.mark.parametrize("window", [3])
def test_bf16_mixed_equals_lightnings(name: str, lora: bool, window: int) -> None:
    expected = plain(name, lora, precision="bf16-mixed", window=window)
    result = train(name, lora, 2, precision="bf16-mixed", window=window)
    assert_same(expected, result, outputs=True)
    assert all(value.dtype == expected.state[name].dtype for name, value in result.state.items())


def test_bf16_mixed_really_computes_in_bf16() -> None:
    result = train("llama", False, 2, precision="bf16-mixed", window=3)
    with pytest.raises(AssertionError):
        assert_same(plain("llama", False, window=3), result, rtol=20 * harness.RTOL, atol=20 * harness.ATOL)


@pytest.mark.slow
def test_bf16_mixed_does_not_depend_on_workers_or_plan() -> None:
    reference = train("llama", False, 1, precision="bf16-mixed", window=3)
    for devices, plan in ((2, None), (4, None), (2, harness.per_call(calls("llama", False)))):
        result = train("llama", False, devices, precision="bf16-mixed", window=3, plan=plan)
        assert_identical(reference, result)
