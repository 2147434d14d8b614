"""Parameters between layers are on the host. Where no torch function shows them, the error says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import test_bypass as there


def test_the_error_has_a_remedy(devices: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="on the same device") as caught:
        there.train(there.make(between=there.HIDDEN["another thread"]), 1, 1)
    assert devices
    assert any(".to(x.device)" in note for note in caught.value.__notes__)
