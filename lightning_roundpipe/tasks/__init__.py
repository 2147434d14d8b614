"""Ordinary LightningModules that come with the package. None of them knows anything of RoundPipe."""

from __future__ import annotations

from lightning_roundpipe.tasks.causal_lm import CausalLM

__all__ = ["CausalLM"]
