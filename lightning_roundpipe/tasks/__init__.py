"""A LightningModule and an optimizer that do not depend on RoundPipe."""

from __future__ import annotations

from lightning_roundpipe.tasks.causal_lm import CausalLM
from lightning_roundpipe.tasks.float8 import convert_to_float8
from lightning_roundpipe.tasks.muon import MuonAdamW

__all__ = ["CausalLM", "MuonAdamW", "convert_to_float8"]
