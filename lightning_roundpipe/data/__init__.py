"""Ordinary LightningDataModules, from sources that need no download."""

from __future__ import annotations

from lightning_roundpipe.data.in_memory import PackedText, RandomTokens, pydoc_topics
from lightning_roundpipe.data.text_files import TextFiles

__all__ = ["PackedText", "RandomTokens", "TextFiles", "pydoc_topics"]
