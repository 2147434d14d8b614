"""Runs `packing.c`, which the machine's C compiler compiles: 25 to 40 % of the time that torch's operations take."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.messages import warn

Place = tuple[Tensor, int]
"""A contiguous tensor, and the index of the first element that is meant."""
_SOURCE = Path(__file__).with_name("packing.c")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
_KINDS = ("join", "split", "load_bf16", "store_bf16", "load_int8", "store_int8")
"""The functions of `packing.c`, in its order."""


class _Pass(ctypes.Structure):
    """``struct pass`` of `packing.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "length", "place")),
        *((name, ctypes.c_void_p) for name in ("source", "also", "to", "beside")),
    )


class _Batch(threading.local):
    passes: list[_Pass] | None = None


_batch = _Batch()


def convert(
    name: str, length: int, source: Place, also: Place | None, to: Place, beside: Place | None = None, place: int = 0
) -> bool:
    """Make a pass of `packing.c`, or have the surrounding `together` make it.

    Args:
        name: one of `_KINDS`.
        length: how many numbers it converts.
        source, also, to, beside: the tensors that it reads and writes, as `packing.c` says.
        place: `store_bf16`'s place of the first number in the sequence of noise.

    Returns:
        False if there is no compiler, and nothing was done.
    """
    if _compiled() is None:
        return False
    addresses = map(_address, (source, also, to, beside))
    made = _Pass(_KINDS.index(name), length, place, *addresses)
    if _batch.passes is None:
        _run([made])
    else:
        _batch.passes.append(made)
    return True


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Make all passes of the context at its end, at once. They must not read what another one writes."""
    passes: list[_Pass] = []
    _batch.passes = passes
    try:
        yield
    finally:
        _batch.passes = None
    if passes:
        _run(passes)


def _run(passes: list[_Pass]) -> None:
    function = _compiled()
    assert function is not None, "there are passes"
    function(torch.get_num_threads(), len(passes), (_Pass * len(passes))(*passes))


def _address(place: Place | None) -> int | None:
    if place is None:
        return None
    tensor, first = place
    assert tensor.is_cpu and tensor.is_contiguous(), "a pass goes through host memory in order"
    return tensor.data_ptr() + first * tensor.itemsize


@functools.cache
def _compiled() -> Callable[..., Any] | None:
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
        "roundpipe: torch packs the weights and moments of the optimizer, which takes two to four times as long as "
        f"compiled code: {failures[-1]}. Install gcc, or set CC to a C compiler with OpenMP."
    )
    return None


def _compiled_by(compiler: str) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder:
        unlinked, library = os.path.join(folder, "packing.o"), os.path.join(folder, "packing.so")
        # Not linked to an OpenMP, so that it uses the one that torch has loaded, and that one's threads.
        for arguments in ([*_FLAGS, "-c", str(_SOURCE), "-o", unlinked], ["-shared", unlinked, "-o", library]):
            subprocess.run([compiler, *arguments], check=True, capture_output=True, text=True, errors="replace")
        function: Callable[..., Any] = ctypes.CDLL(library).convert
        return function
