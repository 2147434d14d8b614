"""What ``roundpipe-plan`` is asked to plan.

This module imports neither torch nor transformers, so that a mistake of the command line shows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_roundpipe.estimates.conf_files import Settings
from lightning_roundpipe.planning.pipeline import Staleness
from lightning_roundpipe.planning.profile import Precision
from lightning_roundpipe.planning.search import SEARCH_SECONDS

Tiles = int | tuple[tuple[str, int], ...]
"""The strategy's ``token_tiles``; a mapping as its items."""


@dataclass(frozen=True)
class PlanRequest:
    """The values of the command's options; sizes in bytes, rates in bytes/s. None: the command chooses, or none."""

    model: str = ""
    model_settings: Settings = ()
    lora: str = "none"
    lora_settings: Settings = ()
    precision: Precision = "bf16-mixed"
    max_positions: int | None = None

    gpu: str | None = None
    gpus: int | None = None
    host_memory: int | None = None
    hardware: str | None = None
    machines: int = 1
    network: float | None = None

    sequence_length: int | None = None
    microbatch_size: int | None = None
    microbatches: int | None = None
    workers: int | None = None
    staleness: Staleness = 0
    memory: int | None = None
    token_tiles: Tiles | None = None
    reduce_dtype: str | None = None
    optimizer_state: str = "fp32"
    carry_products: bool = False
    gradient_clip_val: float | None = None

    plan: str | None = None
    search_seconds: float = SEARCH_SECONDS

    @property
    def updates_at_once(self) -> bool:
        """Whether an update needs all gradients first: to clip them by norm, or to skip steps that overflow."""
        return self.precision.startswith("16-") or self.gradient_clip_val is not None

    def changed(self, changes: Mapping[str, Any]) -> PlanRequest:
        """Return the request with other values of some options. ``model.NAME`` and ``lora.NAME`` are settings."""
        options: dict[str, Any] = {}
        for name, value in changes.items():
            group, dot, setting = name.partition(".")
            field = f"{group}_settings" if dot else name
            before = options.get(field, getattr(self, field))
            options[field] = tuple({**dict(before), setting: value}.items()) if dot else value
        return replace(self, **options)
