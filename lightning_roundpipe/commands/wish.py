"""The request of ``roundpipe-plan``: its options, and what they may not say together.

This module imports neither torch nor transformers, so that a mistake of the command line shows at once.
"""

# ruff: noqa: RUF009 (`_option` is `dataclasses.field`)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from lightning_roundpipe.commands.command_line import Reader, Settings, one_of, positive, seconds, whole, yes_or_no
from lightning_roundpipe.config import (
    PRECISION_ALIASES,
    optimizer_state_of,
    parse_bytes,
    reduce_dtype_of,
    refuse_unscaled,
)
from lightning_roundpipe.planning.network import parse_rate
from lightning_roundpipe.planning.pipeline import Staleness
from lightning_roundpipe.planning.profile import Precision
from lightning_roundpipe.planning.search import SEARCH_SECONDS

Tiles = int | tuple[tuple[str, int], ...]
"""The strategy's ``token_tiles``; a mapping as its items."""


def read_precision(text: str, name: str) -> str:
    """Return Lightning's precision, for any of its spellings."""
    found: str = one_of(*get_args(Precision))(PRECISION_ALIASES.get(text, text), name)
    return found


def read_tiles(text: str, name: str) -> Tiles:
    """Return the tokens of a tile, alone or with names of modules, as the strategy takes them."""
    pairs = [part.rpartition(":") for part in text.split("+")]
    named = all(module for module, _, _ in pairs)
    if not all(n.isdecimal() and int(n) >= 1 for _, _, n in pairs) or not (named or text.isdecimal()):
        raise ValueError(
            f"{name}={text!r} must be a whole number of tokens of at least 1, or such numbers with names of modules, "
            "as mlp:1024 or mlp:1024+experts:512."
        )
    return tuple((module, int(n)) for module, _, n in pairs) if named else int(text)


def _option(text: str, metavar: str = "NAME", read: Reader | None = None, default: Any = None, group: str = "") -> Any:
    """Return a field that is an option, the first one of ``group`` if that is named."""
    return field(default=default, metadata={"option": (text, read, metavar), "group": group})


_MODEL = "model (model.NAME= and lora.NAME= change its settings)"


@dataclass(frozen=True)
class Wish:
    """Request for a plan: the command's options with their help and defaults, sizes in bytes and rates in bytes/s."""

    model: str = _option("choice of conf/model, or a config.json", default="", group=_MODEL)
    lora: str = _option("adapters: choice of conf/lora", default="none")
    precision: Precision = _option("default: bf16-mixed", "NAME", read_precision, "bf16-mixed")
    max_positions: int | None = _option("tokens, beyond the model's", "N", whole(1, 2**24))

    gpu: str | None = _option("as rtx4090; a wrong one lists all", group="machine")
    gpus: int | None = _option("how many of them (default: 1)", "N", whole())
    host_memory: int | None = _option("of the host, as 256GiB", "SIZE", parse_bytes)
    hardware: str | None = _option("rtx4090x4, cpu, auto (this one), a file")
    machines: int = _option("that share the work of a step", "N", whole(1, 1024), 1)
    network: float | None = _option("between them, as 25Gbit", "RATE", parse_rate)

    sequence_length: int | None = _option("in tokens (default: 2048)", "N", whole(1, 2**24), group="step")
    microbatch_size: int | None = _option("in sequences (default: the fastest)", "N", whole(1, 65536))
    microbatches: int | None = _option("of a step (default: two a worker)", "N", whole(1, 4096))
    workers: int | None = _option("devices that take stages (default: all)", "N", whole(1, 1024))
    staleness: Staleness = _option("1: updates one step late (default: 0)", "N", whole(0, 1), 0)
    memory: int | None = _option("of a worker (default: 90 %% of a GPU's)", "SIZE", parse_bytes)
    token_tiles: Tiles | None = _option("tokens of a tile, or as mlp:1024 (default: none)", "N", read_tiles)
    reduce_dtype: str | None = _option("gradients travel in (default: float32)", "NAME", reduce_dtype_of)
    optimizer_state: str = _option(
        "Adam's moments: fp32, bf16 or int8 (default: fp32)", "NAME", optimizer_state_of, "fp32"
    )
    carry_products: bool = _option("true: to the host and back (default: false)", "BOOL", yes_or_no, False)
    gradient_clip_val: float | None = _option("norm that gradients are clipped to", "N", positive)

    plan: str | None = _option("judge this one: 'forward 0-3; ...'", "TEXT", group="plan")
    search_seconds: float = _option(f"longest (default: {SEARCH_SECONDS:g})", "N", seconds, SEARCH_SECONDS)

    lora_settings: Settings = ()
    model_settings: Settings = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], settings: Mapping[str, Settings]) -> Wish:
        """Return what the options ask for. Raises ``ValueError`` if they contradict each other."""
        known = {item.name for item in fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        wish = cls(**given, model_settings=settings["model"], lora_settings=settings["lora"])
        if wish.plan is not None and "search_seconds" in values:
            raise ValueError("search_seconds= is about finding a plan, and plan= gives its stages: leave one out.")
        if wish.machines > 1 and wish.network is None:
            raise ValueError(f"machines={wish.machines} exchange gradients and weights: say over what: network=25Gbit.")
        if wish.network is not None and wish.machines == 1:
            raise ValueError("network= is between several machines: say how many, as machines=2, or leave it out.")
        refuse_unscaled(wish.reduce_dtype, wish.precision)
        return wish

    @property
    def updates_at_once(self) -> bool:
        """Whether an update needs all gradients first: to clip them by norm, or to skip steps that overflow."""
        return self.precision.startswith("16-") or self.gradient_clip_val is not None

    def changed(self, changes: Mapping[str, Any]) -> Wish:
        """Return the wish with other values of some options. ``model.NAME`` and ``lora.NAME`` are settings."""
        options: dict[str, Any] = {}
        for name, value in changes.items():
            group, dot, setting = name.partition(".")
            field = f"{group}_settings" if dot else name
            before = options.get(field, getattr(self, field))
            options[field] = tuple({**dict(before), setting: value}.items()) if dot else value
        return replace(self, **options)


def options() -> Iterator[tuple[str, str, tuple[str, Reader | None, str]]]:
    """Yield name, heading of its group if it is the first of one, and help of each option of a `Wish`."""
    for item in fields(Wish):
        if "option" in item.metadata:
            yield item.name, item.metadata["group"], item.metadata["option"]
