"""Host memory for GPUs. CUDA's part is played by a fake, so this holds for the bookkeeping and not for CUDA."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

from lightning_roundpipe.devices import pinned


class FakeCudart:
    """Registers whatever it is given, until told to refuse; at most ``most`` pages."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.error = self.calls = 0
        self.most = 1_000_000

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        assert nbytes % mmap.PAGESIZE == 0
        self.calls += 1
        if not self.error and sum(self.registered.values()) + nbytes > self.most * mmap.PAGESIZE:
            return 2
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
    pages = pinned.Pages(pinned.registered, mmap.PAGESIZE)
    monkeypatch.setattr(pinned, "_pages", pages)
    yield fake
    pages.give_back()
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


def test_boundaries_fall_back_too(cudart: FakeCudart) -> None:
    cudart.error = 2
    t = torch.zeros(2, 3).t()
    with pytest.warns(UserWarning, match=r"could not be pinned.*pin_memory='off'"):
        assert pinned.host_like(t, "auto").stride() == t.stride()
    with pytest.raises(pinned.RegistrationError, match="pin_memory='auto'"):
        pinned.host_like(t, "on")


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(3, 5).t(),
        torch.arange(4.0).expand(3, 4),
        torch.randn(2, 3, 4)[:, ::2],
        torch.zeros(0, 3),
        torch.tensor(2.0),
        torch.arange(7) > 2,
        torch.randn(5000, dtype=torch.bfloat16),
    ],
    ids=["transposed", "expanded", "with gaps", "empty", "number", "bool", "large"],
)
def test_a_boundary_has_its_form_and_no_page_more(cudart: FakeCudart, t: torch.Tensor) -> None:
    like = pinned.host_like(t, "on")
    assert (like.shape, like.stride(), like.dtype) == (t.shape, t.stride(), t.dtype)
    pages = -(-max(like.untyped_storage().nbytes(), 1) // mmap.PAGESIZE)
    assert list(cudart.registered.values()) == [pages * mmap.PAGESIZE]
    assert pages == (3 if t.numel() == 5000 else 1)
    if t.stride().count(0) == 0:
        assert torch.equal(like.copy_(t), t)


def test_pages_are_used_again_and_never_more_of_them_than_were_needed_at_once(cudart: FakeCudart) -> None:
    def one(pages: int) -> torch.Tensor:
        return pinned.host_like(torch.empty(pages * mmap.PAGESIZE, dtype=torch.uint8), "on")

    first, second = one(5), one(3)
    addresses = {first.data_ptr(), second.data_ptr()}
    assert sum(cudart.registered.values()) == 8 * mmap.PAGESIZE
    view = first[10:]
    del first, second
    second = one(3)
    assert second.data_ptr() in addresses, "the same pages"
    assert one(5).data_ptr() not in addresses, "a view of the first one lives"
    assert cudart.calls == 3
    del view
    for pages in (1, 7, 2, 11, 3, 4, 5, 6) * 2:  # batches of other lengths
        assert one(pages).data_ptr()
        assert sum(cudart.registered.values()) <= 14 * mmap.PAGESIZE
    del second
    pinned.give_back()
    assert not cudart.registered


def test_what_nobody_uses_is_given_back_before_locking_fails(cudart: FakeCudart) -> None:
    page = torch.empty(mmap.PAGESIZE, dtype=torch.uint8)
    kept = [pinned.host_like(page, "on") for _ in range(4)]
    cudart.most = 4
    del kept
    large = pinned.host_like(torch.empty(4 * mmap.PAGESIZE, dtype=torch.uint8), "on")
    assert list(cudart.registered.values()) == [4 * mmap.PAGESIZE]
    with pytest.raises(pinned.RegistrationError):
        pinned.host_like(page, "on")
    del large


def test_made_in_inference_mode_it_can_still_be_trained_on(cudart: FakeCudart) -> None:
    with torch.inference_mode():
        buffer = pinned.host_buffer(100, "on")
    assert not buffer.is_inference()
    del buffer
