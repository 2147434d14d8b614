"""Runs `packing.c`, which the machine's C compiler compiles.

Conversions take 25 to 40 % of the time of torch's operations. A step of Adam on split weights or packed moments, or
from narrow gradients, is one pass over memory. It has the bits of torch's fused kernel wherever that one uses fused
multiply-add, as on all x86 machines with AVX2, and whole vectors.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.messages import warn

Place = tuple[Tensor, int]
"""A contiguous tensor, and the index of the first element that is meant."""
_SOURCE = Path(__file__).with_name("packing.c")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_FORMS = {"fp32": -1, "halves": 0, "bf16": 1, "int8": 2, "fp16": 3}
"""The numbers of forms in `packing.c`."""


class Kept(ctypes.Structure):
    """``struct kept`` of `packing.c`: an array of numbers in one of its forms. It does not own the memory.

    Args:
        form: one of `_FORMS`. `convert` takes no ``"fp32"``, and stores no ``"fp16"``.
        packed, beside: where the numbers are, as `packing.c` says.
        place: the place of the first number in the sequence of noise, of ``"bf16"``.
        values, nearest: the tables of ``"int8"``, which outlive this.
    """

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("place", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("packed", "beside", "values", "nearest")),
    )

    def __init__(
        self, form: str, packed: Place, beside: Place | None = None, *, place: int = 0,
        values: Tensor | None = None, nearest: Tensor | None = None,
    ) -> None:  # fmt: skip
        tables = (None if table is None else (table, 0) for table in (values, nearest))
        super().__init__(_FORMS[form], place, *map(_address, (packed, beside, *tables)))


class _Factors(ctypes.Structure):
    """``struct adam`` of `packing.c`."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in ("sign", "decay", "penalty", "weight1", "beta2", "weight2", "step_size", "correction2", "eps")
    )


class Gradient(ctypes.Structure):
    """``struct gradient`` of `packing.c`. It does not own the memory of its ``parts``."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("parts", ctypes.POINTER(Kept)),
        ("factor", ctypes.c_float),
        ("scales", ctypes.c_float * 2),
        ("bound", ctypes.c_float),
    )

    def __init__(
        self, parts: Sequence[Kept], *, factor: float = 1.0, scales: Sequence[float] = (), bound: float = math.inf
    ) -> None:
        first, second = [*scales, 1.0, 1.0][:2]
        super().__init__(len(parts), (Kept * len(parts))(*parts), factor, (first, second), bound)
        assert len(scales) <= 2, "a loss scale and a factor of clipping"


def convert(kept: Kept, numbers: Tensor, *, stores: bool = False) -> bool:
    """Write what is kept to ``numbers``, fp32, or keep them if ``stores``. Returns whether there is a compiler for it.

    If not, nothing was done.
    """
    if (library := _compiled()) is None:
        return False
    length, address = ctypes.c_int64(numbers.numel()), ctypes.c_void_p(_address((numbers, 0)))
    library.convert(torch.get_num_threads(), ctypes.byref(kept), length, address, int(stores))
    return True


def adam(group: Mapping[str, Any], count: int, length: int, gradient: Gradient, kept: tuple[Kept, Kept, Kept]) -> bool:
    """Step weights by Adam or AdamW.

    Args:
        group: the hyperparameters, without ``amsgrad``.
        count: the number of the step, from 1.
        length: the number of weights.
        gradient: their gradient.
        kept: the weights, and the averages of gradients and of their squares.

    Returns:
        False if there is no compiler, and nothing was done.
    """
    if (library := _compiled()) is None:
        return False
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    factors = _Factors(
        sign=-1.0 if group["maximize"] else 1.0,
        decay=1 - lr * decay if decoupled else 1.0,
        penalty=0.0 if decoupled else decay,
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        step_size=-(lr / (1 - beta1**count)),
        correction2=math.sqrt(1 - beta2**count),
        eps=group["eps"],
    )
    arguments = ctypes.byref(factors), ctypes.c_int64(length), ctypes.byref(gradient), (Kept * 3)(*kept)
    library.adam(torch.get_num_threads(), *arguments)
    return True


def is_there() -> bool:
    """Return whether there is a compiler."""
    return _compiled() is not None


def _address(place: Place | None) -> int | None:
    if place is None:
        return None
    tensor, first = place
    assert tensor.is_cpu and tensor.is_contiguous(), "a pass goes through host memory in order"
    return tensor.data_ptr() + first * tensor.itemsize


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    """Compile `packing.c`, in 0.4 s. Nothing is kept for the next process, whose machine may be another one."""
    failures = ["no C compiler was found"]
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        if (compiler := shutil.which(name)) is not None:
            try:
                return _compiled_by(compiler)
            except subprocess.CalledProcessError as error:
                failures.append(f"{compiler} failed: {error.stderr.strip()}")
            except OSError as error:
                failures.append(f"{compiler} failed: {error}")
    warn(
        "roundpipe: torch packs the weights and moments of the optimizer, and widens its gradients, which takes three "
        f"to six times as long as in compiled code: {failures[-1]}. Install gcc, or set CC to a C compiler with OpenMP."
    )
    return None


def _compiled_by(compiler: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        unlinked, library = os.path.join(folder, "packing.o"), os.path.join(folder, "packing.so")
        # Not linked to an OpenMP, so that it uses the one that torch has loaded, and that one's threads.
        for arguments in ([*_FLAGS, "-c", str(_SOURCE), "-o", unlinked], ["-shared", unlinked, "-o", library]):
            subprocess.run([compiler, *arguments], check=True, capture_output=True, text=True, errors="replace")
        return ctypes.CDLL(library)
