"""Loggers of ``roundpipe-train`` that need optional packages."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_roundpipe.extras import need


def tensorboard_logger(**settings: Any) -> TensorBoardLogger:
    """Return Lightning's TensorBoard logger.

    Raises:
        ImportError: tensorboard is not installed; the message names the extra.
    """
    need("tensorboard", "logger=tensorboard writes with tensorboard")
    return TensorBoardLogger(**settings)
