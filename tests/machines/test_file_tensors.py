"""Tensors in files: ordinary ones, that need a disk with room for them."""

import errno
import os
from pathlib import Path

import pytest
import torch

from lightning_roundpipe.machines.file_tensors import SMALL, FileTensors
from lightning_roundpipe.messages import RoundPipeWarning


def mapped(folder):
    """The number of files of ``folder`` that are in use. They have no names any more."""
    assert not list(folder.glob("*"))
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def test_a_large_tensor_lies_in_a_file_that_goes_with_it(tmp_path):
    folder = tmp_path / "new"
    room = FileTensors(folder)
    large = room.empty([SMALL // 64, 16], torch.float32)
    small = room.empty([], torch.float32)
    assert (large.shape, small.shape, large.dtype) == ((SMALL // 64, 16), (), torch.float32)
    assert mapped(folder) == 1
    large.normal_()
    assert torch.equal(large.clone(), large)
    torch.save({"large": large}, tmp_path / "saved")
    assert torch.equal(torch.load(tmp_path / "saved")["large"], large)
    del large
    assert not mapped(folder)


def test_where_the_disk_is_full_tensors_lie_in_memory(tmp_path, monkeypatch):
    """A page of a file that the disk has no room for ends the process when it is written to."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    room = FileTensors(tmp_path)
    with pytest.warns(RoundPipeWarning, match=r"collected in memory, as .* does not take 1 MiB more \(No space left"):
        one = room.empty([SMALL], torch.uint8)
    other = room.empty([SMALL], torch.uint8)
    assert one.shape == other.shape == (SMALL,)
    assert not mapped(tmp_path)
