"""Checkpoint files that are whole or not there.

Lightning writes a checkpoint to the system's folder for temporary files and then moves it. Where that folder is another
file system, which is usual, the move is a copy to the final name: whoever is killed meanwhile has destroyed the
checkpoint that was there. Here it is written beside the final name, brought to the disk, and only then renamed. It also
goes to the file directly: Lightning first makes all of it in memory, which a model that just fits the host has not got.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written. One that is found later was left by a process that was killed."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's own format, written to a temporary name first."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``. Until that is done, ``path`` is what it was before.

        Raises:
            TypeError: ``storage_options`` is given.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)  # which refuses, or knows other file systems
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
    """Bring the new name to the disk, where folders can be opened for that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
