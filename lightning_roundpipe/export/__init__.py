"""Writes what was trained as a Hugging Face model, with adapters merged.

Weights pass through memory one layer at a time, so a model is exported on a host that cannot hold it.
"""

from __future__ import annotations

from lightning_roundpipe.export.job import MAX_SHARD_SIZE, Exported, export

__all__ = ["MAX_SHARD_SIZE", "Exported", "export"]
