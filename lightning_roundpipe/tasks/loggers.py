"""Loggers of ``roundpipe-train`` that ask for more than the package does."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_roundpipe.extras import need


def tensorboard_logger(**settings: Any) -> TensorBoardLogger:
    """Lightning's, if the package it writes with is there.

    Raises:
        ImportError: it is not; the message names the extra.
    """
    need("tensorboard", "logger=tensorboard writes with tensorboard")
    return TensorBoardLogger(**settings)
