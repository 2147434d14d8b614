"""Moments of Adam and AdamW in fewer bytes: unpacked piece by piece into a small fp32 buffer, stepped, and packed.

``"bf16"`` rounds a number up or down with a probability by its distance from both: with beta2 = 0.999 a second moment
changes by less than half a unit in bf16's last place, and rounding to nearest would never let it fall. The choice
depends on the step and on the number's place alone, so a resumed run makes the same one.

``"int8"`` keeps a code of a byte for each number, and the largest magnitude of each 256 in fp32, as bitsandbytes' 8-bit
optimizers do, with its dynamic map of codes (Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv 2110.02861). A number is rounded to bf16 before the nearest code is looked up.

Packed moments lie where torch's optimizer has its own: ``state[p]["exp_avg"]`` is a bf16 tensor, or one of codes, with
``state[p]["exp_avg_largest"]`` beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_roundpipe.optim import compiled
from lightning_roundpipe.optim.compiled import Kept
from lightning_roundpipe.optim.split_masters import piece, pieces, scratch

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""The keys of moments in the state of a parameter, in the order of torch's kernels."""
LARGEST = "_largest"
"""What the key of a block's largest magnitudes ends with."""
FP32 = "fp32"
"""The form of moments that torch's optimizers have; others are packed (`config.OPTIMIZER_STATES`)."""
BLOCK = 256
_TAKEN = 2**16
_KEPT = -_TAKEN
"""The bits of fp32 that bf16 keeps, as a mask."""
_STRIDE = 40_503
"""How far the noise moves from one step to the next: odd, so that all of it is used."""


class Moment(Protocol):
    """A moment of one parameter."""

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    def kept(self, first: int, step: int) -> Kept:
        """Return the numbers from ``first`` on, to be loaded, and stored after the optimizer's step of that number."""

    def load(self, first: int, last: int, out: Tensor) -> Tensor:
        """Write numbers ``first`` to ``last`` to ``out``, fp32, and return it."""

    def store(self, first: int, last: int, numbers: Tensor, step: int) -> None:
        """Keep numbers ``first`` to ``last`` after the optimizer's step of that number. ``numbers`` may be changed."""


class Bf16Moment(NamedTuple):
    """A moment in bf16.

    Attributes:
        packed: the numbers, contiguous.
        which: which of the parameter's moments it is.
    """

    packed: Tensor
    which: int

    @property
    def shape(self) -> torch.Size:
        return self.packed.shape

    def kept(self, first: int, step: int) -> Kept:
        return Kept("bf16", (self.packed, first), place=self._noisy(first, step))

    def _noisy(self, first: int, step: int) -> int:
        return (first + _STRIDE * (step + 7 * self.which)) % _TAKEN

    def load(self, first: int, last: int, out: Tensor) -> Tensor:
        if not compiled.convert(self.kept(first, 0), out):
            out.copy_(self.packed.view(-1)[first:last])
        return out

    def store(self, first: int, last: int, numbers: Tensor, step: int) -> None:
        if not compiled.convert(self.kept(first, step), numbers, stores=True):
            start = self._noisy(first, step)
            numbers.view(torch.int32).add_(_noise(piece())[start : start + last - first]).bitwise_and_(_KEPT)
            self.packed.view(-1)[first:last].copy_(numbers)


class Int8Moment(NamedTuple):
    """A moment in codes of a byte.

    Attributes:
        codes: uint8, contiguous.
        largest: the largest magnitude of each `BLOCK` of numbers, fp32, 1-D.
        signed: whether there are negative numbers.
    """

    codes: Tensor
    largest: Tensor
    signed: bool

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def kept(self, first: int, step: int) -> Kept:
        values, nearest = _tables(self.signed)
        return Kept("int8", (self.codes, first), (self.largest, first // BLOCK), values=values, nearest=nearest)

    def load(self, first: int, last: int, out: Tensor) -> Tensor:
        if compiled.convert(self.kept(first, 0), out):
            return out
        values, _ = _tables(self.signed)
        torch.index_select(values, 0, self.codes.view(-1)[first:last].int(), out=out)
        whole = (last - first) // BLOCK * BLOCK
        blocks = self.largest[first // BLOCK : -(-last // BLOCK)]
        out[:whole].view(-1, BLOCK).mul_(blocks[: whole // BLOCK, None])
        out[whole:].mul_(blocks[-1])
        return out

    def store(self, first: int, last: int, numbers: Tensor, step: int) -> None:
        if compiled.convert(self.kept(first, step), numbers, stores=True):
            return
        _, nearest = _tables(self.signed)
        whole = (last - first) // BLOCK * BLOCK
        blocks = self.largest[first // BLOCK : -(-last // BLOCK)]
        _scale(numbers[:whole].view(-1, BLOCK), blocks[: whole // BLOCK])
        _scale(numbers[None, whole:], blocks[whole // BLOCK :])
        place = numbers.bfloat16().view(torch.int16).int().bitwise_and_(_TAKEN - 1)
        torch.index_select(nearest, 0, place, out=self.codes.view(-1)[first:last])


def _scale(rows: Tensor, largest: Tensor) -> None:
    """Divide each row by its largest magnitude, and write that to ``largest``."""
    if rows.numel():
        torch.amax(torch.abs(rows, out=scratch(-2, rows.numel()).view(rows.shape)), dim=1, out=largest)
        rows.div_(largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None])


def moment_of(state: Mapping[str, Any], key: str) -> Tensor | Moment | None:
    """Return a moment in the state of a parameter: a tensor, or a packed one; None if there is none."""
    own = state.get(key)
    if not isinstance(own, Tensor) or own.dtype not in (torch.bfloat16, torch.uint8):
        return own
    if own.dtype is torch.bfloat16:
        return Bf16Moment(own, MOMENTS.index(key))
    return Int8Moment(own, state[key + LARGEST], signed=key == MOMENTS[0])


def first_state(parameter: Tensor, form: str, *, amsgrad: bool) -> dict[str, Any]:
    """Return what Adam's and AdamW's fused kernels begin with, moments in ``form``: those of fp32 parameters."""
    keys, shape = MOMENTS[: 3 if amsgrad else 2], parameter.shape
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
    if form == FP32 or parameter.dtype is not torch.float32:
        return state | {key: torch.zeros(shape, dtype=parameter.dtype) for key in keys}
    if form == "bf16":
        return state | {key: torch.zeros(shape, dtype=torch.bfloat16) for key in keys}
    for key in keys:
        _, nearest = _tables(signed=key == MOMENTS[0])
        state[key] = torch.full(shape, int(nearest[0]), dtype=torch.uint8)
        state[key + LARGEST] = torch.zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32)
    return state


def pack(state: dict[str, Any], form: str) -> None:
    """Pack the fp32 moments in the state of a parameter.

    Args:
        state: the state, which is changed.
        form: one of `config.OPTIMIZER_STATES`.
    """
    for key in MOMENTS if form != FP32 else ():
        moment = state.get(key)
        if not isinstance(moment, Tensor) or moment.dtype is not torch.float32:
            continue
        packed: Moment
        if form == "bf16":
            state[key] = torch.empty(moment.shape, dtype=torch.bfloat16)
            packed = Bf16Moment(state[key], MOMENTS.index(key))
        else:
            state[key] = torch.empty(moment.shape, dtype=torch.uint8)
            state[key + LARGEST] = torch.empty(-(-moment.numel() // BLOCK), dtype=torch.float32)
            packed = Int8Moment(state[key], state[key + LARGEST], signed=key == MOMENTS[0])
        for first, last in pieces(moment.numel()):
            part = scratch(0, last - first).copy_(moment.reshape(-1)[first:last])
            packed.store(first, last, part, int(state["step"]))


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its moments in fp32. Other entries are the same objects."""
    found = {key: value for key, value in state.items() if not key.endswith(LARGEST)}
    for key in MOMENTS:
        moment = moment_of(state, key)
        if moment is None or isinstance(moment, Tensor):
            continue
        numbers = torch.empty(moment.shape.numel(), dtype=torch.float32)
        for first, last in pieces(numbers.numel()):
            moment.load(first, last, numbers[first:last])
        found[key] = numbers.view(moment.shape)
    return found


class _Kept:
    """Hides a packed moment from ``Optimizer.load_state_dict``, which would convert it to the parameter's dtype."""

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed


def load(optimizer: Optimizer, saved: Mapping[str, Any], form: str) -> None:
    """Call ``optimizer.load_state_dict(saved)``, and leave moments in ``form``, whatever form ``saved`` has.

    Raises:
        ValueError, KeyError: ``saved`` does not fit the optimizer.
    """
    states = {
        key: {name: _Kept(value) if name in kept else value for name, value in state.items()}
        if (kept := _packed_in(state))
        else state
        for key, state in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": states})
    for parameter, state in list(optimizer.state.items()):
        if not isinstance(state, dict):
            continue
        state.update({name: value.packed.contiguous() for name, value in state.items() if isinstance(value, _Kept)})
        if parameter.dtype is not torch.float32 or (before := form_of(state)) == form:
            continue  # torch's own moments of a bf16 parameter are bf16, too
        if before != FP32:
            state = optimizer.state[parameter] = unpacked(state)
        pack(state, form)


def _packed_in(state: Any) -> list[str]:
    """Return the names of packed moments in a saved state."""
    if not isinstance(state, Mapping) or form_of(state) == FP32:
        return []
    return [name for name in state if name.removesuffix(LARGEST) in MOMENTS]


def form_of(state: Mapping[str, Any]) -> str:
    """Return the form in which a parameter's state has its moments, one of `config.OPTIMIZER_STATES`."""
    first = state.get(MOMENTS[0])
    forms = {torch.bfloat16: "bf16", torch.uint8: "int8"}
    return forms.get(first.dtype, FP32) if isinstance(first, Tensor) else FP32


@functools.cache
def _noise(length: int) -> Tensor:
    """Return all numbers from 0 to 65,535, of which the first ``length`` follow again: slices may begin anywhere."""
    x = torch.arange(_TAKEN, dtype=torch.int32) * 40_503 & 0xFFFF
    x = (x ^ x >> 7) * 30_023 & 0xFFFF
    return (x ^ x >> 8).repeat(2 + -(-length // _TAKEN))


@functools.cache
def _tables(signed: bool) -> tuple[Tensor, Tensor]:
    """Return the value of each code, and the code of each bf16 number by its bits."""
    values = dynamic_map(signed)
    numbers = torch.arange(_TAKEN, dtype=torch.int32).short().view(torch.bfloat16).float().nan_to_num(0.0)
    between = (values[1:] + values[:-1]) / 2
    return values, torch.bucketize(numbers, between).to(torch.uint8)


def dynamic_map(signed: bool) -> Tensor:
    """Return the 256 values of bitsandbytes' dynamic map: a sign, an exponent of ten, and a linear fraction."""
    bits = 7 if signed else 8
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2 ** (exponent + bits - 7) + 1
        edges = torch.linspace(0.1, 1.0, count, dtype=torch.float64)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)
        values += means.tolist() + ([-mean for mean in means.tolist()] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)
