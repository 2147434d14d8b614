"""Host memory for GPUs. CUDA's part is played by a fake, so this holds for the bookkeeping and not for CUDA."""

import mmap
import os
import platform
import re
import warnings
from pathlib import Path

import pytest
import torch

from lightning_roundpipe.devices import pinned


class FakeCudart:
    """Registers whatever it is given, until told to refuse; at most ``most`` pages."""

    def __init__(self):
        self.registered = {}
        self.error = self.calls = 0
        self.most = 1_000_000
        self.without_pages = 0
        """Bytes that had no memory yet when they were registered last."""

    def cudaHostRegister(self, address, nbytes, flags):
        assert address % mmap.PAGESIZE == 0
        assert nbytes % mmap.PAGESIZE == 0
        self.calls += 1
        if not self.error and sum(self.registered.values()) + nbytes > self.most * mmap.PAGESIZE:
            return 2
        if not self.error:
            self.registered[address] = nbytes
            self.without_pages = nbytes - resident(address, nbytes)
        return self.error

    def cudaHostUnregister(self, address):
        assert any(start <= address < end for start, end in mappings()), "unregistered after it was unmapped"
        del self.registered[address]
        return 0


def mappings():
    """The address ranges that this process has mapped."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def resident(address, nbytes):
    """Bytes of this range that have pages. It may be a few mappings, as advice was given for parts."""
    total = 0
    for entry in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        found = re.search(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB", entry, re.MULTILINE | re.DOTALL)
        if found is not None and address <= int(found[1], 16) and int(found[2], 16) <= address + nbytes:
            total += 1024 * int(found[3])
    return total


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart()
    monkeypatch.setattr(pinned, "_cudart", lambda: fake)
    monkeypatch.setattr(pinned, "_forget_last_error", lambda: None)
    monkeypatch.setattr(pinned, "_warned", False)
    slabs = pinned.Slabs(pinned.registered, slab=mmap.PAGESIZE)
    monkeypatch.setattr(pinned, "_slabs", slabs)
    yield fake
    slabs.give_back()
    assert not fake.registered, "something stayed registered"


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (mmap.PAGESIZE, 1), (3 * mmap.PAGESIZE + 1, 4)])
def test_exact_to_the_page_and_unregistered_with_the_last_view(cudart, nbytes, pages):
    buffer = pinned.host_buffer(nbytes, "on")
    assert buffer.shape == (nbytes,)
    assert buffer.dtype == torch.uint8
    assert list(cudart.registered.values()) == [pages * mmap.PAGESIZE]
    view = buffer[nbytes // 2 :].view(torch.int8)
    del buffer
    assert cudart.registered
    view.fill_(1)
    del view
    assert not cudart.registered


def test_all_pages_are_there_before_cuda_locks_them(cudart):
    """Page-locking would allocate them in one thread."""
    assert pinned.host_buffer((9 << 20) + 1, "on").eq(0).all()
    assert cudart.without_pages == 0


def test_a_forked_child_shares_the_memory_and_leaves_the_registration_alone(cudart):
    buffer = pinned.host_buffer(100, "on")
    if (child := os.fork()) == 0:
        buffer.fill_(7)
        del buffer
        os._exit(0 if cudart.registered else 1)  # no test machinery in the child
    assert os.waitpid(child, 0)[1] == 0, "the child called CUDA"
    assert buffer.eq(7).all()
    del buffer


def test_falls_back_with_one_warning(cudart):
    cudart.error = 2
    with pytest.warns(UserWarning, match=r"could not be pinned.*pin_memory='off'"):
        assert pinned.host_buffer(100, "auto").shape == (100,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pinned.host_buffer(100, "auto").shape == (100,)


@pytest.mark.parametrize(
    ("system", "remedy"),
    [("6.8.0-generic", "docker run --memory"), ("5.15.90.1-microsoft-standard-WSL2", ".wslconfig")],
)
def test_the_warning_says_what_helps(system, remedy, cudart, monkeypatch):
    """What CUDA pins is not counted as locked memory, whose limit is the usual suspect."""
    monkeypatch.setattr(platform, "release", lambda: system)
    cudart.error = 2
    with pytest.warns(UserWarning, match=r"^roundpipe: .*GiB of host memory are free") as caught:
        pinned.host_buffer(100, "auto")
    assert remedy in str(caught[0].message)
    assert "ulimit" not in str(caught[0].message)


def test_on_means_on_and_off_means_off(cudart):
    cudart.error = 2
    with pytest.raises(pinned.RegistrationError, match="pin_memory='auto'"):
        pinned.host_buffer(100, "on")
    cudart.error = 0
    buffer = pinned.host_buffer(100, "off")
    assert not cudart.registered
    assert not pinned.host_like(buffer, "off").is_pinned()


def test_memory_is_used_again_when_its_last_view_is_gone(cudart):
    def one(pages):
        return pinned.host_like(torch.empty(pages * mmap.PAGESIZE, dtype=torch.uint8), "on")

    first, second = one(5), one(3)
    addresses = {first.data_ptr(), second.data_ptr()}
    view = first[10:]
    del first, second
    second = one(3)
    assert second.data_ptr() in addresses, "the same memory"
    third = one(5)
    assert third.data_ptr() not in addresses, "a view of the first one lives"
    view.fill_(1)
    third.fill_(2)
    second.fill_(3)
    assert view.eq(1).all() and third.eq(2).all(), "blocks overlap"
    del view, second, third
    pinned.give_back()
    assert not cudart.registered


def test_what_nobody_uses_is_given_back_before_locking_fails(cudart):
    page = torch.empty(mmap.PAGESIZE, dtype=torch.uint8)  # a slab of its own each
    kept = [pinned.host_like(page, "on") for _ in range(4)]
    cudart.most = 4
    del kept
    large = pinned.host_like(torch.empty(4 * mmap.PAGESIZE, dtype=torch.uint8), "on")
    assert list(cudart.registered.values()) == [4 * mmap.PAGESIZE]
    with pytest.raises(pinned.RegistrationError):
        pinned.host_like(page, "on")
    del large
