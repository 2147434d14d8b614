"""Tensors in files without a name, for what is collected for a checkpoint.

The first machine writes the optimizer's state of all machines into one file, and has room in memory for its own part
only. Collected in anonymous memory, the rest would have to fit as well, and so would the sums of gradients in an open
accumulation window. Here it lies in files, mapped into memory: the
tensors are ordinary ones, and the kernel writes their pages out and drops them where memory is short.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_roundpipe.messages import PREFIX, gib, warn

SMALL = 2**20
"""Bytes below which a tensor lies in memory."""


class FileTensors:
    """Makes tensors in files of a folder. A file is gone with its tensor, or with the process.

    Args:
        folder: where there is room for as much as will be collected, on a disk. It is made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Path | None = folder

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor, in memory if it is small, or if the folder has no room: then warn once."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._folder is not None and nbytes >= SMALL:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # a page that the disk lacks would end the process
                    return torch.from_file(file.name, True, math.prod(shape), dtype=dtype).view(tuple(shape))
            except OSError as error:
                warn(
                    f"{PREFIX}gradients and optimizer state for a checkpoint are collected in memory, as "
                    f"{self._folder} does not take {gib(nbytes)} more ({error.strerror}): give ModelCheckpoint a "
                    "dirpath, or the Trainer a default_root_dir, on a disk with room for them."
                )
                self._folder = None
        return torch.empty(tuple(shape), dtype=dtype)
