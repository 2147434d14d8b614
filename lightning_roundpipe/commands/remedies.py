"""Settings with which a model would fit, if it does not fit as asked. The same planner tries each of them.

The order is from the least change to the largest: settings that do not change the step, that change how it is computed,
what is trained, and what the model sees; then the machine: the least host memory that is enough, or more GPUs if their
host has more memory. If no setting alone is enough, several are tried together, and then with more host memory. The
answer names only what fits. There are at most `TRIES`, which are counted, so that no busy machine changes the answer;
the answer names what was not tried, too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from lightning_roundpipe.commands.machines import choose_machine, is_path
from lightning_roundpipe.commands.plan_model import (
    MEMORY_SHARE,
    Outlook,
    find_longest,
    look_at,
    memory_of,
    shape_of,
    total,
)
from lightning_roundpipe.commands.plan_shape import USUAL_TILE, ModelShape, Wish
from lightning_roundpipe.config import OPTIMIZER_STATES
from lightning_roundpipe.planning.memory import least, size_text
from lightning_roundpipe.planning.profile import Hardware

TRIES = 16
"""Most tries. Each takes about a second."""

_SEARCH_SECONDS = 1.0
"""Longest search for the plan of a try."""

_SHORTEST, _LEAST_PART = 128, 16
"""Least tokens of a shortened sequence, which is also at least a 16th of the original."""

_ENDLESS = 2**60
"""Bytes of host memory that limit nothing."""

_FASTER = 1.05
"""Least speedup for which the answer names a larger host."""

_MOST_GPUS = 8
"""Most GPUs of a proposed machine."""

_NARROWER = {"32-true": "bf16-mixed"}
"""Precision to try, by that of the wish. Mixed precision is estimated as if all were in 16 bits, so ``*-true`` would
change no figure of it."""

_FOUR_BITS = {"model.quantization": "nf4"}
"""Packs the frozen weights beside adapters."""

Changes = Mapping[str, Any]
"""Options and their values; None removes an option."""


@dataclass(frozen=True)
class Remedy:
    """Changed options with which the model fits, and the estimates for them."""

    changes: Changes
    outlook: Outlook

    @property
    def settings(self) -> str:
        """The options to add to the command line, then those to remove from it."""
        return _settings(self.changes)

    @property
    def note(self) -> str:
        """What the settings imply without naming it; empty if nothing."""
        if not {"gpus", "hardware"} & self.changes.keys():
            return ""
        return f"with {size_text(self.outlook.hardware.host_memory)} of host memory"


def _settings(changes: Changes) -> str:
    added = [
        f"{name}={size_text(value) if name == 'host_memory' else shlex.quote(str(value))}"
        for name, value in changes.items()
        if value is not None
    ]
    left_out = [f"{name}=" for name, value in changes.items() if value is None]
    return ", ".join([*([" ".join(added)] if added else []), *([f"without {', '.join(left_out)}"] if left_out else [])])


@dataclass(frozen=True)
class Remedies:
    """Result of all tries.

    Attributes:
        found: remedies that fit, the least change first.
        hopeless: settings that do not fit.
        untried: settings for which no try was left.
        device_memory: bytes of a device that would be enough, of which a worker may use the usual share. If the wish
            sets ``memory``, its value that would be enough. None if workers are large enough.
    """

    found: list[Remedy]
    hopeless: list[str]
    untried: list[str]
    device_memory: int | None = None


def find_remedies(outlook: Outlook) -> Remedies:
    """Return remedies for an outlook that does not fit, by at most `TRIES` tries."""
    return _Tries(outlook).run()


class _Tries:
    def __init__(self, outlook: Outlook) -> None:
        self._outlook, self._wish, self._left = outlook, outlook.wish, TRIES
        self._shapes: dict[tuple[Any, ...], ModelShape] = {}
        self._refused: list[tuple[Changes, Outlook]] = [({}, outlook)]
        """Changes that do not fit."""
        self._found: list[Remedy] = []
        self._hopeless: list[str] = []
        self._untried: list[str] = []

    def run(self) -> Remedies:
        alone = [self._first_that_fits(ways) for ways in self._ways()]
        if not any(alone):
            self._together()
        self._more_host_memory(self._refused[:1] if self._found else list(self._refused))
        self._first_that_fits(list(self._more_gpus()))
        share = 1.0 if self._wish.memory else MEMORY_SHARE
        needed = None if self._outlook.fits_device else int(total(self._outlook.device_items) / share)
        return Remedies(self._found, self._hopeless, self._untried, needed)

    def _ways(self) -> Iterator[list[Changes]]:
        """Yield the changes of each kind, the least first. The answer names the first of each kind that fits."""
        wish, found = self._wish, self._outlook
        if own := [name for name in ("plan", "min_round", "max_fused") if getattr(wish, name) is not None]:
            yield [dict.fromkeys(own)]
        fewer, size, count = found.weights_fit, wish.microbatch_size or 1, found.microbatches
        if fewer:
            smaller = [s for s in (8, 4, 2, 1) if s < size and size * count % s == 0]
            yield [{"microbatch_size": s, "microbatches": count * size // s} for s in smaller]
        if fewer and wish.token_tiles is None and not found.fits_device:
            yield [{"token_tiles": USUAL_TILE}]
        if wish.staleness:
            yield [{"staleness": 0}]
        if fewer:
            yield [{"microbatches": count >> n} for n in range(1, 6) if 0 < count >> n < found.workers]
        if wish.precision in _NARROWER:
            yield [{"precision": _NARROWER[wish.precision]}]
        if not found.fits_host:
            if wish.gradient_clip_val is not None:
                yield [{"gradient_clip_val": None}]
            forms = list(OPTIMIZER_STATES)
            yield [{"optimizer_state": form} for form in forms[forms.index(wish.optimizer_state) + 1 :]]
        if wish.lora == "none":
            yield [{"lora": lora} for lora in self._adapters()]
        elif self._shape(wish).quantization is None:
            yield [_FOUR_BITS]
        if fewer and (shorter := self._shorter({})):
            yield [shorter]

    def _together(self) -> None:
        """Try combinations of precision, adapters and four bits, then each of them with shorter sequences."""
        wish = self._wish
        ways: list[Changes] = []
        if wish.precision in _NARROWER:
            ways.append({"precision": _NARROWER[wish.precision]})
        if wish.lora == "none":
            ways.append({"lora": self._adapters()[-1]})
        if self._shape(wish).quantization is None:
            ways.append(_FOUR_BITS)
        small: Changes = {} if wish.microbatch_size in (None, 1) else {"microbatch_size": 1}
        merged = [
            {name: value for way in (small, *chosen) for name, value in way.items()}
            for count in range(1, len(ways) + 1)
            for chosen in combinations(ways, count)
            if wish.lora != "none" or _FOUR_BITS not in chosen or any("lora" in way for way in chosen)
        ]
        if any(self._first_that_fits([changes]) for changes in merged if len(changes) > 1):
            return
        for changes in merged:
            if (shorter := self._shorter(changes)) and self._first_that_fits([{**changes, **shorter}]):
                return

    def _more_host_memory(self, refused: list[tuple[Changes, Outlook]]) -> None:
        """Try more host memory where only the host is too small.

        That is for the wish itself, and for the changes that need the least memory: the least that is enough, and that
        of the fastest plan, whose rounds are larger, if it is faster.
        """
        needs = [(total(o.host_items), changes) for changes, o in refused if o.fits_device and not o.fits_host]
        others = sorted((pair for pair in needs if pair[1]), key=lambda pair: pair[0])[:1]
        for nbytes, changes in [pair for pair in needs if not pair[1]] + others:
            enough = _rounded_up(nbytes)
            if not self._first_that_fits([{**changes, "host_memory": enough}]):
                continue
            if not self._left:
                self._untried.append(f"more host_memory than {size_text(enough)}, which may be faster")
            elif (most := self._try({**changes, "host_memory": _ENDLESS})) is not None:
                used = _rounded_up(total(most.outlook.host_items))
                slow, fast = (one.outlook.tokens_per_s for one in (self._found[-1], most))
                if used > enough and fast > _FASTER * slow:
                    shape = most.outlook.shape.on(replace(most.outlook.hardware, host_memory=used))
                    self._found.append(Remedy({**changes, "host_memory": used}, replace(most.outlook, shape=shape)))

    def _more_gpus(self) -> Iterator[Changes]:
        """Yield larger numbers of the same GPU, if only the host is too small and the command line does not set it.

        The host's memory is assumed to grow with the number of GPUs.
        """
        wish, found = self._wish, self._outlook
        if found.fits_host or not found.fits_device or wish.host_memory or wish.workers or found.hardware.emulated:
            return
        named = None if is_path(wish.hardware or "") else re.fullmatch(r"([^+]+?)(?:(?<=\d)x\d+)?", wish.hardware or "")
        for count in (found.workers * 2**n for n in range(1, 4) if found.workers * 2**n <= _MOST_GPUS):
            if wish.gpu is not None:
                yield {"gpus": count}
            elif named:
                yield {"hardware": f"{named[1]}x{count}"}

    def _adapters(self) -> tuple[str, ...]:
        """Return choices of adapters from most to fewest. For experts, only those of attention are a small change."""
        return ("attention",) if self._shape(self._wish).has_experts else ("all_linear", "attention")

    def _first_that_fits(self, ways: list[Changes]) -> bool:
        for changes in ways:
            if not self._left:
                self._untried.append(_settings(changes))
                return False
            if (found := self._try(changes)) is not None:
                self._found.append(found)
                return True
            self._hopeless.append(_settings(changes))
        return False

    def _try(self, changes: Changes) -> Remedy | None:
        self._left -= 1
        wish = replace(self._wish, search_seconds=min(self._wish.search_seconds, _SEARCH_SECONDS)).changed(changes)
        try:
            outlook = look_at(self._shape(wish), wish, longest=False)
        except ValueError:  # the adapters do not fit the model
            return None
        if outlook.fits:
            return Remedy(changes, outlook)
        self._refused.append((changes, outlook))
        return None

    def _shorter(self, changes: Changes) -> Changes | None:
        """Return the change to the longest sequence that fits with ``changes``, if it is long enough."""
        wish, found = self._wish.changed(changes), self._outlook
        longest = found.longest
        if changes or longest is None:
            if not self._left:
                return None
            self._left -= 1
            try:
                shape = self._shape(wish)
            except ValueError:
                return None
            memory = least(memory_of(wish, shape.hardware))
            longest = find_longest(shape, found.workers, found.microbatches, memory, wish.min_round)
        wanted = found.sequence_length
        if not max(_SHORTEST, wanted // _LEAST_PART) <= longest.tokens < wanted:
            return None
        return {"sequence_length": longest.tokens, "microbatch_size": 1}

    def _shape(self, wish: Wish) -> ModelShape:
        key = (
            wish.lora, wish.precision, wish.staleness, wish.model_settings, wish.token_tiles, wish.optimizer_state,
            wish.gradient_clip_val,
        )  # fmt: skip
        if key not in self._shapes:
            self._shapes[key] = shape_of(wish, self._outlook.hardware)
        shape, machine = self._shapes[key], self._machine(wish)
        return shape if machine == shape.hardware else shape.on(machine)

    def _machine(self, wish: Wish) -> Hardware:
        own = self._wish
        if (wish.gpus, wish.hardware) != (own.gpus, own.hardware):
            return choose_machine(wish.hardware, wish.gpu, wish.gpus, None, None)[0]
        if wish.host_memory != own.host_memory and wish.host_memory is not None:
            return replace(self._outlook.hardware, host_memory=wish.host_memory)
        return self._outlook.hardware


def _rounded_up(nbytes: int) -> int:
    """Return the bytes of `size_text`."""
    unit = next(unit for unit in (2**30, 2**20, 2**10) if nbytes >= unit or unit == 2**10)
    return -(-nbytes // unit) * unit
