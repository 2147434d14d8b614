"""Writes checkpoint files that are either complete or absent.

Lightning writes a checkpoint to the system's temporary folder and then moves it. If that folder is on another file
system, as usual, the move copies to the final name, and a process killed meanwhile has destroyed the previous
checkpoint. `WholeCheckpointIO` writes beside the final name, flushes to the disk, and then renames. It also writes
straight to the file: Lightning serializes to memory first, which a model that just fits the host does not leave.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written. A killed process leaves such a file behind."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint format, written under a temporary name first.

    Attributes:
        maps: whether tensors that are loaded stay in the file, mapped into memory, until they are copied or written to.
    """

    maps = False

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.maps and zipfile.is_zipfile(path):  # no remote file, none of an old format, none that is cut short
            with contextlib.suppress(RuntimeError):  # a file system that cannot map
                loaded: dict[str, Any] = torch.load(path, "cpu", mmap=True, weights_only=kwargs.get("weights_only"))
                return loaded
        return super().load_checkpoint(path, *args, **kwargs)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``. Until that is complete, ``path`` keeps its old content.

        Raises:
            TypeError: ``storage_options`` is given.
        """
        if storage_options is not None or "://" in str(path):
            # Refuses, or writes to a remote file system.
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        unfinished = final.with_name(final.name + UNFINISHED)
        try:
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, final)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the new name to the disk, where the system can open folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
