"""Conversions that the C compiler translates give the bits of torch's operations."""

import pytest
import torch

from lightning_roundpipe.optim import compiled, direct
from lightning_roundpipe.optim.packed_moments import pack, unpacked
from lightning_roundpipe.optim.split_masters import SplitTensor

LENGTH = 100_003
"""Enough for two threads, and no multiple of a vector or a block."""
EDGES = (
    0x0,
    0x1,
    0x8000,
    0x18000,
    0x7FFFFF,
    0x800000,
    0x3F808000,
    0x7F7F8000,
    0x7F7FFFFF,
    0x7F800000,
    0x7F800001,
    0x7FFFFFFF,
)
"""Bits of zero, subnormal numbers, ties, the largest numbers, infinity and NaN."""


@pytest.fixture(autouse=True)
def compile_again():
    compiled._compiled.cache_clear()
    yield
    compiled._compiled.cache_clear()


def numbers():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (LENGTH,), generator=generator).int()
    edges = torch.tensor([*EDGES, *(edge - 2**31 for edge in EDGES)], dtype=torch.int32)
    bits[: len(edges)] = edges
    return {"any bits": bits.view(torch.float32), "small": torch.randn(LENGTH, generator=generator) * 1e-5}


def split(values):
    halves = SplitTensor(torch.empty(LENGTH, dtype=torch.bfloat16), torch.empty(LENGTH, dtype=torch.int16))
    halves.split_all(values)
    low = halves.low.where(~values.isnan(), halves.low.new_zeros(()))  # torch rounds NaN to one of two bf16 numbers
    return [halves.high, low, halves.join_all(torch.empty(LENGTH))]


def packed(values, form):
    state = {"step": torch.tensor(3.0), "exp_avg": values.clone(), "exp_avg_sq": values.abs()}
    pack(state, form)
    return [*state.values(), *unpacked(state).values()]


def stepped(values, form):
    """A step of AdamW from halves and packed moments."""
    halves = SplitTensor.of(values)
    state = {"step": torch.tensor(3.0), "exp_avg": values / 7, "exp_avg_sq": values.square()}
    pack(state, form)
    [group] = torch.optim.AdamW([torch.zeros(1)], lr=1e-3).param_groups
    row = direct.row_of(0, group, halves, values.shape, state)
    assert row is not None
    assert direct.step((group,), [row], [values / 3])
    return [*halves, *state.values()]


def without_compiler(monkeypatch):
    compiled._compiled.cache_clear()
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)


@pytest.mark.parametrize("values", numbers().values(), ids=numbers())
@pytest.mark.parametrize("form", ["halves", "bf16", "int8"])
def test_bits_are_those_of_torch(form, values, monkeypatch):
    def convert():
        return split(values) if form == "halves" else packed(values, form)

    mine = convert()
    assert compiled._compiled() is not None
    without_compiler(monkeypatch)
    with pytest.warns(UserWarning, match="no C compiler was found. Install gcc"):
        theirs = convert()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        there = ~one.isnan()
        assert torch.equal(one[there], other[there])
        assert torch.equal(one[there].signbit(), other[there].signbit())


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_a_step_has_the_bits_of_torch(form, monkeypatch):
    values = numbers()["small"]
    mine = stepped(values, form)
    without_compiler(monkeypatch)
    with pytest.warns(UserWarning, match="no C compiler"):
        theirs = stepped(values, form)
    assert all(map(torch.equal, mine, theirs))


def test_another_compiler_is_tried(monkeypatch):
    monkeypatch.setenv("CC", "false")
    assert compiled._compiled() is not None


def test_a_compiler_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: "false")
    with pytest.warns(UserWarning, match="false failed: .*set CC"):
        assert not compiled.convert("join", 0, (numbers()["small"], 0), None, (numbers()["small"], 0))
