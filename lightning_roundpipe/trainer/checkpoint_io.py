"""Writes checkpoint files that are either complete or absent.

Lightning writes a checkpoint to the system's temporary folder and then moves it. If that folder is on another file
system, as usual, the move copies to the final name, and a process killed meanwhile has destroyed the previous
checkpoint. `WholeCheckpointIO` writes beside the final name, flushes to the disk, and then renames. It also writes
straight to the file: Lightning serializes to memory first, which a model that just fits the host does not leave.

A process that is killed while it writes leaves an unfinished file as large as a checkpoint. A writer holds a lock on
its file, so a later one knows which files have lost theirs, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from lightning_roundpipe.messages import gib

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written. A killed process leaves such a file behind."""

_ABANDONED_S = 600
"""Seconds without a change after which an unfinished file is removed, if no process holds its lock. Some file systems
do not show locks to other machines."""


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
                _lock(file)
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, final)
        except BaseException as error:
            written = 0
            with contextlib.suppress(OSError):
                written = unfinished.stat().st_size
                unfinished.unlink()
            if (reason := _unwritable(final, error, written)) is not None:
                raise reason from error
            raise
        _sync_folder(final.parent)
        _remove_abandoned(final.parent)


def unfinished_name(final: Path) -> Path:
    """Return the name under which ``final`` is written first.

    Where jobs are requeued, Lightning goes on from the highest number in any name with ``ckpt_``, also of such a file.
    """
    return final.with_name(final.name.replace("ckpt_", "ckpt-") + UNFINISHED)


def _unwritable(final: Path, error: BaseException, written: int) -> OSError | None:
    """Return the error to raise if the system has refused to write ``final``; None if ``error`` says it all.

    torch closes a file that could not be written, and raises what fails then. The system's error is its context.
    """
    cause: BaseException | None = error if isinstance(error, (OSError, RuntimeError)) else None
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is None or cause.errno is None or cause.filename is not None:
        return None
    return OSError(
        cause.errno,
        f"{final} could not be written: {cause.strerror}, after {gib(written)}. Earlier checkpoints are as they "
        "were: a new one needs room beside the one that it replaces. Make room, or write to another disk: "
        "ModelCheckpoint(dirpath=...), or callbacks.checkpoint.dirpath= of roundpipe-train.",
    )


def _lock(file: IO[bytes]) -> bool:
    """Lock ``file`` until it is closed; return whether that was possible."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished checkpoints in ``folder`` that nobody writes to any more."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.ckpt" + UNFINISHED):
            with contextlib.suppress(OSError), open(path, "rb+") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime > _ABANDONED_S and _lock(file):
                    path.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush the new name to the disk, where the system can open folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
