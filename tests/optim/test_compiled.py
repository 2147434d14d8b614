"""Conversions that the C compiler translates give the bits of torch's operations."""

import pytest
import torch

from lightning_roundpipe.optim import compiled, direct
from lightning_roundpipe.optim.narrow_gradient import NarrowGradient
from lightning_roundpipe.optim.packed_moments import pack, unpacked
from lightning_roundpipe.optim.split_masters import SplitTensor

LENGTH = 100_003
"""Enough for two threads, and no multiple of a vector or a block."""
EDGES = (
    0x0, 0x1, 0x8000, 0x18000, 0x7FFFFF, 0x800000, 0x3F808000, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001,
    0x7FFFFFFF,
)  # fmt: skip
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


def stepped(values, form, optimizer=torch.optim.AdamW, **settings):
    """A step of an optimizer from halves and packed moments."""
    halves = SplitTensor.of(values)
    state = {"step": torch.tensor(3.0), "exp_avg": values / 7, "exp_avg_sq": values.square()}
    if settings.get("amsgrad"):
        state["max_exp_avg_sq"] = values.square() / 2
    pack(state, form)
    [group] = optimizer([torch.zeros(1)], lr=1e-3, **settings).param_groups
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": torch.optim.Adam, "weight_decay": 0.1},
        {"betas": (0.3, 0.9), "maximize": True},
        {"amsgrad": True},
    ],
    ids=["AdamW", "Adam with decay", "maximize", "amsgrad"],
)
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_a_step_has_the_bits_of_torch(form, settings, monkeypatch):
    values = numbers()["small"][: LENGTH // 16 * 16]  # torch rounds what is left of its vectors otherwise
    mine = stepped(values, form, **settings)
    without_compiler(monkeypatch)
    with pytest.warns(UserWarning, match="no C compiler"):
        theirs = stepped(values, form, **settings)
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_from_narrow_gradients_is_one_from_widened_ones(dtype, form):
    """All numbers of 16 bits, two of which are added, scaled, clipped, and multiplied."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)
    parts = [every, every.roll(2**8), every.flip(0)]
    values = torch.randn(len(every), generator=torch.Generator().manual_seed(0))
    [group] = torch.optim.AdamW([torch.zeros(1)]).param_groups

    def gradient(count, bound):
        narrow = NarrowGradient(parts[:count], 1 / 3, torch.float32)
        for scale in (1 / 7, torch.tensor(0.9)) if bound is None else ():
            narrow.mul_(scale)
        if bound is not None:
            narrow.clamp_(-bound, bound)
        return narrow

    def after(given):
        halves, state = SplitTensor.of(values), {"step": torch.tensor(3.0)}
        state |= {"exp_avg": values / 7, "exp_avg_sq": values**2}
        pack(state, form)
        row = direct.row_of(0, group, halves, values.shape, state)
        assert direct.step((group,), [row], [given])
        return [halves.joined(), *unpacked(state).values()]

    for count, bound in ((1, None), (3, None), (2, 0.5)):
        narrow, wide = after(gradient(count, bound)), after(gradient(count, bound).widened())
        first, *others = (part.float() * torch.tensor(1 / 3) for part in parts[:count])
        by_hand = sum(others, first)
        by_hand = by_hand * torch.tensor(1 / 7) * torch.tensor(0.9) if bound is None else by_hand.clamp(-bound, bound)
        assert torch.equal(by_hand.nan_to_num(7.0), gradient(count, bound).widened().nan_to_num(7.0))
        for one, other in zip(narrow, wide, strict=True):
            assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def test_another_compiler_is_tried(monkeypatch):
    monkeypatch.setenv("CC", "false")
    assert compiled._compiled() is not None


def test_a_compiler_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: "false")
    with pytest.warns(UserWarning, match="false failed: .*set CC"):
        assert not compiled.convert(SplitTensor.of(numbers()["small"]).kept(0), torch.empty(LENGTH))
