"""Copies in chunks, between which others on the same link pass."""

import pytest
import torch

from lightning_roundpipe.devices.base import chunks


@pytest.mark.parametrize("nbytes", [1, 24, 4096])
def test_chunks_are_the_whole(nbytes):
    dst, src = torch.zeros(3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    pieces = chunks(dst, src, nbytes)
    for there, here in pieces:
        assert there.numel() * 8 <= max(nbytes, 8)
        there.copy_(here)
    assert torch.equal(dst, src)
    assert len(pieces) == {1: 21, 24: 7, 4096: 1}[nbytes]


def test_what_is_not_contiguous_goes_whole():
    dst, src = torch.zeros(7, 3).t(), torch.randn(3, 7)
    assert [t.shape for pair in chunks(dst, src, 8) for t in pair] == [(3, 7), (3, 7)]
