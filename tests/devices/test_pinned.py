"""Host memory for GPUs. CUDA's part is played by a fake, so this holds for the bookkeeping and not for CUDA."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_roundpipe.devices import pinned


class FakeCudart:
    """Registers whatever it is given, until told to refuse."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        assert nbytes % mmap.PAGESIZE == 0
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert any(start <= address < end for start, end in mappings()), "unregistered after it was unmapped"
        del self.registered[address]
        return 0


def mappings() -> list[tuple[int, int]]:
    """The address ranges that this process has mapped."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    fake = FakeCudart()
    monkeypatch.setattr(pinned, "_cudart", lambda: fake)
    monkeypatch.setattr(pinned, "_forget_last_error", lambda: None)
    monkeypatch.setattr(pinned, "_warned", False)
    yield fake
    assert not fake.registered, "something stayed registered"


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (mmap.PAGESIZE, 1), (3 * mmap.PAGESIZE + 1, 4)])
def test_exact_to_the_page_and_unregistered_with_the_last_view(cudart: FakeCudart, nbytes: int, pages: int) -> None:
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


def test_a_forked_child_shares_the_memory_and_leaves_the_registration_alone(cudart: FakeCudart) -> None:
    buffer = pinned.host_buffer(100, "on")
    if (child := os.fork()) == 0:
        buffer.fill_(7)
        del buffer
        os._exit(0 if cudart.registered else 1)  # no test machinery in the child
    assert os.waitpid(child, 0)[1] == 0, "the child called CUDA"
    assert buffer.eq(7).all()
    del buffer


def test_falls_back_with_one_warning(cudart: FakeCudart) -> None:
    cudart.error = 2
    with pytest.warns(UserWarning, match=r"could not be pinned.*pin_memory='off'"):
        assert pinned.host_buffer(100, "auto").shape == (100,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pinned.host_buffer(100, "auto").shape == (100,)


def test_on_means_on_and_off_means_off(cudart: FakeCudart) -> None:
    cudart.error = 2
    with pytest.raises(pinned.RegistrationError, match="pin_memory='auto'"):
        pinned.host_buffer(100, "on")
    cudart.error = 0
    buffer = pinned.host_buffer(100, "off")
    assert not cudart.registered
    assert not pinned.host_like(buffer, "off").is_pinned()


def test_boundaries_fall_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_warned", False)

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.pop("pin_memory", False):
            raise RuntimeError("no pinned memory left")
        return empty_strided(*args, **kwargs)

    empty_strided = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", refuse)
    t = torch.zeros(2, 3).t()
    with pytest.warns(UserWarning, match="no pinned memory left"):
        assert pinned.host_like(t, "auto").stride() == t.stride()
    with pytest.raises(RuntimeError, match="no pinned memory left"):
        pinned.host_like(t, "on")


def test_made_in_inference_mode_it_can_still_be_trained_on(cudart: FakeCudart) -> None:
    with torch.inference_mode():
        buffer = pinned.host_buffer(100, "on")
    assert not buffer.is_inference()
    del buffer
