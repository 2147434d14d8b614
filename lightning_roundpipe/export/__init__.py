"""Writes what a training run has learned as an ordinary Hugging Face model, a GGUF file or PEFT adapters.

The weights pass through memory a few tensors at a time, so a model is exported on a host that cannot hold it.
"""

from __future__ import annotations

from lightning_roundpipe.export.job import MAX_SHARD_SIZE, Exported, export
from lightning_roundpipe.export.trained import from_checkpoint, from_run

__all__ = ["MAX_SHARD_SIZE", "Exported", "export", "from_checkpoint", "from_run"]
