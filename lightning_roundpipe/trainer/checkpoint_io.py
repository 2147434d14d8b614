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
            OSError: the file cannot be written, such as on a full disk. The message names it and the remedy.
        """
        if storage_options is not None or "://" in str(path):
            # Refuses, or writes to a remote file system.
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        unfinished = unfinished_name(final)
        try:
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, final)
        except BaseException as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            refused: BaseException | None = error
            while isinstance(refused, RuntimeError):  # torch's, for a file that it could not write
                refused = refused.__context__
            if isinstance(refused, OSError) and refused.errno is not None and refused.filename is None:
                raise OSError(
                    refused.errno,
                    f"{final} could not be written: {refused.strerror}. Earlier checkpoints are as they were: a new "
                    "one needs room beside the one that it replaces. Make room, or write to another disk: "
                    "ModelCheckpoint(dirpath=...), or callbacks.checkpoint.dirpath= of roundpipe-train.",
                ) from error
            raise
        with contextlib.suppress(OSError):  # where the system can open folders
            descriptor = os.open(final.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def unfinished_name(final: Path) -> Path:
    """Return the name under which ``final`` is written first.

    Where jobs are requeued, Lightning goes on from the highest number in any name with ``ckpt_``, also of such a file.
    """
    return final.with_name(final.name.replace("ckpt_", "ckpt-") + UNFINISHED)
