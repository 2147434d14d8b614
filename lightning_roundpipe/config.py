"""The strategy's options, parsed and checked before anything is allocated.

All checks of user settings are here, so other modules can rely on the values. Each message names the setting and the
remedy. This module imports no other module of the package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
"""The supported precision flags, in Lightning's spelling."""

PRECISION_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's short forms of the precision flags."""

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
"""Bytes of each unit, in capitals."""
_LEAST_PLAIN = dict.fromkeys(("memory_budget", "host_memory", "memory"), 1000)
"""Least bytes without a unit, by option. Smaller values without a unit are usually a missing GiB suffix."""


class RoundPipeError(RuntimeError):
    """The user's model or step does something that the engine cannot run without changing its meaning."""


def parse_bytes(value: float | str, name: str) -> int:
    """Return a size such as ``"20GiB"``, ``"512 MB"`` or a number in bytes. ``name`` is the setting, for errors."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].upper() not in _UNITS:
            raise ValueError(f"{name}={value!r} is not a size: write it like '20GiB', '512MB' or 1000000.")
        size = float(match[1]) * _UNITS[match[2].upper()]
    elif is_number(value) and math.isfinite(value):
        size = value
    else:
        raise ValueError(f"{name}={value!r} is not a size: write it like '20GiB', '512MB' or 1000000.")
    if size < 1:
        raise ValueError(f"{name}={value!r} must be at least 1 byte.")
    if size < _LEAST_PLAIN.get(name, 1) and str(value).strip().replace(".", "", 1).isdigit():
        raise ValueError(f"{name}={value!r} says bytes, as it has no unit: write {name}={str(value).strip()}GiB.")
    return int(size)


def refuse_taken(folder: str | Path, name: str) -> Path:
    """Return the absolute path of a folder to write, which must be new or empty. ``name``: the setting."""
    path = Path(folder).expanduser().absolute()
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ValueError(f"{name}={folder} is there and not empty: name a new folder.")
    return path


def is_number(value: object) -> bool:
    """Return whether ``value`` is a number, which ``True`` is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Return whether ``value`` is a whole number, which ``True`` is not."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Emulation:
    """How emulated devices behave. Only ``accelerator="cpu"`` reads it.

    Args:
        memory: memory of each device in bytes (or ``"2GiB"``). Exceeding it raises an out-of-memory error. ``None``: no
            limit.
        bandwidth: bytes per second of each direction of a device's link. ``None``: as fast as the host copies.
        latency: seconds before the first byte of each copy arrives.
        poison: fill buffers with NaN when they are allocated and freed, so that a read too early or too late yields
            wrong numbers.
        delay_seed: seed of random delays before copies, layers and user code, which reveal missing waits. ``None``: no
            delays.
    """

    memory: int | str | None = None
    bandwidth: float | str | None = None
    latency: float = 0.0
    poison: bool = False
    delay_seed: int | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory, "emulation.memory"))
        if self.bandwidth is not None:
            object.__setattr__(self, "bandwidth", float(parse_bytes(self.bandwidth, "emulation.bandwidth")))
        if not (is_number(self.latency) and 0 <= self.latency < math.inf):
            raise ValueError(f"emulation.latency={self.latency!r} must be 0 or more seconds, as a number.")
        if not isinstance(self.poison, bool):
            raise ValueError(f"emulation.poison={self.poison!r} must be True or False.")
        if self.delay_seed is not None and not is_whole(self.delay_seed):
            raise ValueError(f"emulation.delay_seed={self.delay_seed!r} must be a whole number, or None for no delays.")

    @classmethod
    def of(cls, value: Emulation | Mapping[str, Any] | None) -> Emulation:
        """Return ``value`` as an ``Emulation``: from one, from a mapping of its fields (Hydra), or from None."""
        if isinstance(value, Emulation):
            return value
        known = {f.name for f in fields(cls)}
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(
                f"emulation={value!r} must be a mapping such as {{'memory': '2GiB'}}, of {', '.join(sorted(known))}."
            )
        given = dict(value or {})
        if unknown := sorted(set(given) - known, key=str):
            raise ValueError(f"emulation has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}.")
        return cls(**given)


_COMPILE_SETTINGS = ("backend", "dynamic", "fullgraph", "mode", "options")
"""The arguments of ``torch.compile`` that users may set."""


def _compile_settings(value: Any) -> dict[str, Any] | None:
    if value is None or isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise ValueError(
            f"compile_layers={value!r} must be True, False or a mapping of arguments for torch.compile, such as "
            "{'backend': 'inductor', 'dynamic': True}."
        )
    given = {key: dict(v) if isinstance(v, Mapping) else v for key, v in value.items()}
    if unknown := sorted(set(given) - set(_COMPILE_SETTINGS), key=str):
        raise ValueError(f"compile_layers has no setting {unknown[0]!r}; it has {', '.join(_COMPILE_SETTINGS)}.")
    inner = given.get("options")
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(
            f"compile_layers['options']={inner!r} must be a mapping of settings of the backend, such as "
            "{'max_autotune': True}."
        )
    if (
        given.get("backend") == "cudagraphs"
        or given.get("mode") in ("reduce-overhead", "max-autotune")
        or (inner or {}).get("triton.cudagraphs")
    ):
        raise ValueError(
            f"compile_layers={given!r} asks for CUDA graphs, which keep the addresses of weights, and these lie "
            "elsewhere in each stage: use mode='max-autotune-no-cudagraphs', or no mode, and no such backend."
        )
    return given


LossWeight = Callable[[Any], Any]

NETWORK_DTYPES = ("bfloat16", "float32")
"""The dtypes in which gradients can travel between machines."""

REDUCE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes in which gradients can be copied, and the bytes of a number in each."""


def reduce_dtype_of(value: Any, name: str = "reduce_dtype") -> str | None:
    """Return one of `REDUCE_DTYPES` for a name or ``torch.dtype``, None for None. ``name``: the setting."""
    found = str(value).removeprefix("torch.")
    if value is not None and found not in REDUCE_DTYPES:
        raise ValueError(
            f"{name}={value!r} is no format that gradients can travel in: set 'bfloat16' for half the bytes, 'float16' "
            "(with precision='16-mixed' or '16-true' only), 'float32', or None for the format that they are summed in."
        )
    return None if value is None else found


def refuse_unscaled(reduce_dtype: str | None, precision: str) -> None:
    """Raise ``ValueError`` if gradients are copied in fp16 without a loss scale: small ones would become zero."""
    if reduce_dtype == "float16" and not precision.startswith("16-"):
        raise ValueError(
            f"reduce_dtype='float16' with precision={precision!r}: gradients below 6e-8 are zero in float16, and only "
            "precision='16-mixed' and '16-true' scale the loss against that. Set reduce_dtype='bfloat16', which has "
            "the range of float32 in as many bytes."
        )


OPTIMIZER_STATES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256}
"""The forms of moments in host memory, and the bytes of a number in each."""


def optimizer_state_of(value: Any, name: str = "optimizer_state") -> str:
    """Return one of `OPTIMIZER_STATES`. ``name``: the setting."""
    if not isinstance(value, str) or value not in OPTIMIZER_STATES:
        raise ValueError(
            f"{name}={value!r} is no form of an optimizer's moments: set 'fp32', which is exact, 'bf16' for half the "
            "bytes, or 'int8' for a quarter."
        )
    return str(value)


_SWITCHES = {
    "overlap": "True or False (one microbatch after another, each as a whole)",
    "carry_products": "True (products of the forward go to the host and back where that is faster) or False (backward "
    "computes them again)",
    "shard_optimizer": "True (on several machines, each has the optimizer's state of some layers) or False (each has "
    "all)",
}
"""Options that are true or false, and what that means."""

OPTIMIZER_DEVICES = ("cpu", "worker")
"""Where the optimizer steps what no fused kernel of the host steps."""

PLAN_POLICIES = ("measured", "static")
"""How a plan is made: from the times of the first batch, or from the shapes of its calls."""


@dataclass(frozen=True)
class Options:
    """The options of ``RoundPipeStrategy``, whose docstring explains each field."""

    num_microbatches: int | None = None
    microbatch_size: int | None = None
    round_microbatches: int | None = None
    layers: Sequence[str | type] | None = None
    plan: str | None = "measured"
    loss_weight: LossWeight | Literal["targets", "sum"] | None = None
    overlap: bool = True
    staleness: int = 0
    memory_budget: int | float | str | None = None
    pin_memory: Literal["auto", "on", "off"] | bool = "auto"
    prefetch: int = 1
    watchdog_timeout: float = 600.0
    evaluation_batches: int = 2
    stage_seconds: float | None = None
    compile_layers: bool | Mapping[str, Any] | None = False
    reduce_dtype: Any = None
    optimizer_state: str = "fp32"
    optimizer_device: str = "cpu"
    carry_products: bool = False
    machine_timeout: float = 60.0
    shard_optimizer: bool = True
    network_dtype: Any = None
    token_tiles: int | Mapping[str, int] | None = None
    emulation: Emulation = field(default_factory=Emulation)

    def __post_init__(self) -> None:
        object.__setattr__(self, "emulation", Emulation.of(self.emulation))
        for name in ("num_microbatches", "microbatch_size", "round_microbatches", "evaluation_batches"):
            value = getattr(self, name)
            if (value is not None or name == "evaluation_batches") and not (is_whole(value) and value >= 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        for name, meaning in _SWITCHES.items():
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be {meaning}.")
        if self.num_microbatches is not None and self.microbatch_size is not None:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} and microbatch_size={self.microbatch_size} are both set, "
                "and each decides the other: set only one of them."
            )
        self._check_layers()
        self._check_plan()
        if self.loss_weight not in (None, "targets", "sum") and not callable(self.loss_weight):
            raise ValueError(
                f"loss_weight={self.loss_weight!r} must be 'targets' (microbatches count by the targets of their mean "
                "cross entropy), 'sum' (the losses of a batch's parts add up), a function of a microbatch, or None "
                "(parts count by their samples)."
            )
        self._check_budget()
        self._check_tiles()
        if not (is_number(self.watchdog_timeout) and self.watchdog_timeout > 0):
            raise ValueError(f"watchdog_timeout={self.watchdog_timeout!r} must be a number of more than 0 seconds.")
        if not (is_number(self.machine_timeout) and self.machine_timeout >= 5):
            raise ValueError(
                f"machine_timeout={self.machine_timeout!r} must be a number of at least 5 seconds: machines say every "
                "half second that they are alive."
            )
        network = str(self.network_dtype).removeprefix("torch.")
        if self.network_dtype is not None and network not in NETWORK_DTYPES:
            raise ValueError(
                f"network_dtype={self.network_dtype!r} must be 'bfloat16' (half the bytes between machines, rounded) "
                "or None, for the format of the gradients."
            )
        object.__setattr__(self, "network_dtype", None if self.network_dtype is None else network)
        self._check_seconds()
        object.__setattr__(self, "compile_layers", _compile_settings(self.compile_layers))
        object.__setattr__(self, "reduce_dtype", reduce_dtype_of(self.reduce_dtype))
        object.__setattr__(self, "optimizer_state", optimizer_state_of(self.optimizer_state))
        if self.optimizer_device not in OPTIMIZER_DEVICES:
            raise ValueError(
                f"optimizer_device={self.optimizer_device!r} must be 'cpu', or 'worker' to step on workers' devices "
                "what the host has no fused kernel for, such as Muon's matrices."
            )
        if self.optimizer_device == "worker" and self.optimizer_state != "fp32":
            raise ValueError(
                f"optimizer_state={self.optimizer_state!r} is for the host's fused kernel of Adam and AdamW, and "
                "optimizer_device='worker' for optimizers without one: set only one of them."
            )
        pin = ("on" if self.pin_memory else "off") if isinstance(self.pin_memory, bool) else self.pin_memory
        if pin not in ("auto", "on", "off"):
            raise ValueError(f"pin_memory={self.pin_memory!r} must be 'auto', 'on' or 'off'.")
        object.__setattr__(self, "pin_memory", pin)
        if not (is_whole(self.prefetch) and self.prefetch in (0, 1)):
            raise ValueError(f"prefetch={self.prefetch!r} must be 0 or 1, the stages that are uploaded ahead.")
        self._check_modes()

    @property
    def plan_text(self) -> str | None:
        """The stages as the user wrote them; None where a policy makes the plan."""
        return None if self.plan in PLAN_POLICIES else self.plan

    @property
    def plan_policy(self) -> str:
        """One of `PLAN_POLICIES`, or ``"text"``."""
        return "text" if self.plan_text is not None else str(self.plan)

    def _check_plan(self) -> None:
        if self.plan is None:
            object.__setattr__(self, "plan", "measured")
        example = "'forward 0-3; fused 4-7; backward 0-3; round 4'"
        if not isinstance(self.plan, str):
            raise ValueError(f"plan={self.plan!r} must be 'measured', 'static' or stages as text, such as {example}.")
        if self.plan not in PLAN_POLICIES and re.fullmatch(r"[^\s;\d]+", self.plan):  # one word; stages have numbers
            close = get_close_matches(self.plan.lower(), PLAN_POLICIES, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"plan={self.plan!r} is neither 'measured' nor 'static' nor stages as text, such as {example}.{hint}"
            )

    def _check_layers(self) -> None:
        layers: Any = self.layers
        if layers is None:
            return
        listed = isinstance(layers, (Sequence, Set)) and not isinstance(layers, str) and layers
        if not listed or not all(isinstance(item, (str, type)) for item in layers):
            raise ValueError(
                f"layers={layers!r} must be a list of module classes, class names or qualified module names, "
                "such as ['Block', 'model.head']; None finds them."
            )

    def _check_seconds(self) -> None:
        seconds = self.stage_seconds
        if seconds is None:
            return
        if not (is_number(seconds) and 0 < seconds < 10**9):
            raise ValueError(
                f"stage_seconds={seconds!r} must be a number of more than 0 seconds; None lets stages take any time."
            )
        if self.plan_text is not None:
            raise ValueError(
                f"stage_seconds={seconds!r} says how long stages may be, and plan= says where each ends: set only one "
                "of them."
            )
        if self.plan == "static":
            raise ValueError(
                f"stage_seconds={seconds!r} counts the seconds that the first batch takes, and plan='static' does not "
                "measure any: set plan='measured', or leave stage_seconds out."
            )

    def _check_tiles(self) -> None:
        tiles: Any = self.token_tiles
        if tiles is None:
            return
        named = isinstance(tiles, Mapping) and len(tiles) > 0 and all(isinstance(name, str) and name for name in tiles)
        if not all(is_whole(n) and n >= 1 for n in (tiles.values() if named else [tiles])):
            raise ValueError(
                f"token_tiles={tiles!r} must be a whole number of tokens of at least 1, a mapping of modules' names to "
                "such numbers, as {'mlp': 1024}, or None for no tiles."
            )
        if named:
            object.__setattr__(self, "token_tiles", dict(tiles))
        if self.compile_layers not in (None, False):
            raise ValueError(
                f"token_tiles={tiles!r} and compile_layers are both set, and a layer that is compiled as a whole has "
                "no modules left to run in tiles: set only one of them."
            )

    def _check_budget(self) -> None:
        budget = self.memory_budget
        if isinstance(budget, float) and not budget.is_integer():
            if not 0 < budget < 1:
                raise ValueError(
                    f"memory_budget={budget!r} is neither a fraction of the device's memory (up to 1.0) nor whole "
                    "bytes: write 0.9, 2000000000 or '20GiB'."
                )
        elif budget is not None and not (isinstance(budget, float) and budget == 1):
            object.__setattr__(self, "memory_budget", parse_bytes(budget, "memory_budget"))

    def _check_modes(self) -> None:
        if not is_whole(self.staleness) or self.staleness not in (0, 1):
            raise ValueError(
                f"staleness={self.staleness!r} must be 0 (exact training) or 1 (gradients one optimizer step late)."
            )
