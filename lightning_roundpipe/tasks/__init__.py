"""Ordinary LightningModules that do not depend on RoundPipe."""

from __future__ import annotations

from lightning_roundpipe.tasks.causal_lm import CausalLM

__all__ = ["CausalLM"]
