"""Gradients that user code wants in validation: layers then run on the host, also where inputs are on a device."""

from __future__ import annotations

from typing import Any

import pytest
import test_evaluation_gradients as there
import zoo
from harness import assert_same, ours, run


@pytest.mark.parametrize("kind", there.KINDS)
def test_equal_plain(kind: type[there.Validated], devices: list[Any]) -> None:
    module, batches = kind(), zoo.make_batches("mlp", 4)
    more: dict[str, Any] = {
        "val_batches": zoo.make_batches("mlp", 2, seed=5), "val_check_interval": 2, **there.WITH_GRAPHS
    }  # fmt: skip
    plain = run("auto", module, batches, **more)
    result = run(ours(num_microbatches=2, layers=there.LAYERS), module, batches, devices=2, **more)
    assert devices
    assert_same(plain, result)
