"""Runs `packing.c`, which the machine's C compiler translates: a third of the time that torch's operations take."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_roundpipe.messages import warn

_SOURCE = Path(__file__).with_name("packing.c")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")


def convert(name: str, length: int, *arguments: int | tuple[Tensor, int]) -> bool:
    """Call a function of `packing.c`.

    Args:
        name: the function's name.
        length: how many numbers it converts.
        arguments: numbers; and for each pointer a contiguous tensor with the index of the first element.

    Returns:
        False if there is no compiler, and nothing was done.
    """
    if (library := _library()) is None:
        return False
    library[name](ctypes.c_int64(length), torch.get_num_threads(), *map(_argument, arguments))
    return True


def _argument(value: int | tuple[Tensor, int]) -> ctypes.c_int64 | ctypes.c_void_p:
    if isinstance(value, int):
        return ctypes.c_int64(value)
    tensor, first = value
    return ctypes.c_void_p(tensor.data_ptr() + first * tensor.itemsize)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Compile `packing.c`, in 0.4 s. Nothing is kept for the next process, whose machine may be another one."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    try:
        if compiler is None:
            raise OSError("no C compiler was found")
        with tempfile.TemporaryDirectory() as folder:
            unlinked, library = os.path.join(folder, "packing.o"), os.path.join(folder, "packing.so")
            # Not linked to an OpenMP, so that it uses the one that torch has loaded, and that one's threads.
            for arguments in ([*_FLAGS, "-c", str(_SOURCE), "-o", unlinked], ["-shared", unlinked, "-o", library]):
                subprocess.run([compiler, *arguments], check=True, capture_output=True, text=True)
            return ctypes.CDLL(library)
    except OSError as error:
        _warn(str(error))
    except subprocess.CalledProcessError as error:
        _warn(f"{compiler} failed: {error.stderr.strip()}")
    return None


def _warn(reason: str) -> None:
    warn(
        "roundpipe: torch packs the weights and moments of the optimizer, which takes about twice as long as compiled "
        f"code: {reason}. Install gcc, or set CC to a C compiler with OpenMP."
    )
