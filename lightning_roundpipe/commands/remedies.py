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
from lightning_roundpipe.config import parse_bytes
from lightning_roundpipe.planning.memory import least
from lightning_roundpipe.planning.profile import Hardware, Precision

TRIES = 16
"""Most tries. Each takes about a second."""

_SEARCH_SECONDS = 1.0
"""Longest search for the plan of a try."""

_SHORTEST = 128
"""Least tokens of a shortened sequence, which is also at least a 16th of the original."""

_LEAST_PART = 16

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

_ENDLESS = 2**60
"""Bytes of host memory that limit nothing."""

_FASTER = 1.05
"""Least speedup for which the answer names a larger host."""

_MOST_GPUS = 8
"""Most GPUs of a proposed machine."""

_NARROWER: Mapping[Precision, tuple[Precision, ...]] = {
    "32-true": ("bf16-true",),
}
"""Precisions to try, by the precision of the wish. Mixed precision is estimated as if all were in 16 bits, so
``*-true`` would change no figure of it."""

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
        given = [(name, value) for name, value in self.changes.items() if value is not None]
        texts = [size_text(value) if name == "host_memory" else shlex.quote(str(value)) for name, value in given]
        added = " ".join(f"{name}={text}" for (name, _), text in zip(given, texts, strict=True))
        left_out = ", ".join(f"{name}=" for name, value in self.changes.items() if value is None)
        return ", ".join(part for part in (added, left_out and f"without {left_out}") if part)

    @property
    def note(self) -> str:
        """What the settings imply without naming it; empty if nothing."""
        if not {"gpus", "hardware"} & self.changes.keys():
            return ""
        return f"with {size_text(self.outlook.hardware.host_memory)} of host memory"


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

    found: tuple[Remedy, ...]
    hopeless: tuple[str, ...]
    untried: tuple[str, ...]
    device_memory: int | None = None


def size_text(nbytes: int) -> str:
    """Return a size as an option takes it, in whole units that are no less than ``nbytes``."""
    name, unit = next((pair for pair in _UNITS if nbytes >= pair[1]), _UNITS[-1])
    return f"{-(-nbytes // unit)}{name}"


def find_remedies(outlook: Outlook) -> Remedies:
    """Return remedies for an outlook that does not fit, by at most `TRIES` tries."""
    return _Tries(outlook).run()


class _Tries:
    def __init__(self, outlook: Outlook) -> None:
        self._outlook, self._wish, self._left = outlook, outlook.wish, TRIES
        self._shapes: dict[tuple[Any, ...], ModelShape] = {}
        self._refused: list[tuple[Changes, Outlook]] = []
        """Changes that do not fit."""
        self._found: list[Remedy] = []
        self._hopeless: list[str] = []
        self._untried: list[str] = []

    def run(self) -> Remedies:
        alone = [self._first_that_fits(ways) for ways in self._ways()]
        if not any(alone):
            self._together()
        enough = bool(self._found)
        self._refused.insert(0, ({}, self._outlook))
        self._more_host_memory(self._refused[:1] if enough else self._refused)
        self._first_that_fits(list(self._more_gpus()))
        share = 1.0 if self._wish.memory else MEMORY_SHARE
        needed = None if self._outlook.fits_device else int(total(self._outlook.device_items) / share)
        return Remedies(tuple(self._found), tuple(self._hopeless), tuple(self._untried), needed)

    def _ways(self) -> Iterator[list[Changes]]:
        """Yield the changes of each kind, the least first. The answer names the first of each kind that fits."""
        wish, found = self._wish, self._outlook
        own = [name for name in ("plan", "min_round", "max_fused") if getattr(wish, name) is not None]
        if own:
            yield [dict.fromkeys(own)]
        fewer = found.weights_fit
        if fewer and (size := wish.microbatch_size) is not None and size > 1:
            smaller = [s for s in (8, 4, 2, 1) if s < size and size * found.microbatches % s == 0]
            yield [{"microbatch_size": s, "microbatches": found.microbatches * size // s} for s in smaller]
        if fewer and wish.token_tiles is None and not found.fits_device:
            yield [{"token_tiles": USUAL_TILE}]
        if wish.staleness:
            yield [{"staleness": 0}]
        if fewer:
            counts = [found.microbatches >> n for n in range(1, 6) if found.microbatches >> n]
            yield [{"microbatches": count} for count in counts if count < found.workers]
        if narrower := _NARROWER.get(wish.precision):
            yield [{"precision": precision} for precision in narrower]
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
        if narrower := _NARROWER.get(wish.precision):
            ways.append({"precision": narrower[-1]})
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

        That is for the wish itself, and for the changes that need the least memory.
        """
        needs = [(total(o.host_items), changes) for changes, o in refused if o.fits_device and not o.fits_host]
        own = [(nbytes, changes) for nbytes, changes in needs if not changes]
        others = sorted((pair for pair in needs if pair[1]), key=lambda pair: pair[0])[:1]
        for nbytes, changes in own + others:
            least = parse_bytes(size_text(nbytes), "host_memory")
            if self._first_that_fits([{**changes, "host_memory": least}]):
                self._faster_host(changes, least)

    def _faster_host(self, changes: Changes, least: int) -> None:
        """Add the host memory of the fastest plan, whose rounds are larger, if it is faster than with the least."""
        slow = self._found[-1].outlook.tokens_per_s
        if not self._left:
            self._untried.append(f"more host_memory than {size_text(least)}, which may be faster")
            return
        if (found := self._try({**changes, "host_memory": _ENDLESS})) is None:
            return
        enough = parse_bytes(size_text(total(found.outlook.host_items)), "host_memory")
        if enough > least and found.outlook.tokens_per_s > _FASTER * slow:
            machine = replace(found.outlook.hardware, host_memory=enough)
            outlook = replace(found.outlook, hardware=machine)
            self._found.append(Remedy({**changes, "host_memory": enough}, outlook))

    def _more_gpus(self) -> Iterator[Changes]:
        """Yield larger numbers of the same GPU, if only the host is too small and the command line does not set it.

        The host's memory is assumed to grow with the number of GPUs.
        """
        wish, found = self._wish, self._outlook
        helps = found.fits_device and not found.fits_host
        if not helps or wish.host_memory is not None or wish.workers is not None or is_path(wish.hardware or ""):
            return
        for count in (found.workers * 2**n for n in range(1, 4) if found.workers * 2**n <= _MOST_GPUS):
            if (changes := self._counted(count)) is not None:
                yield changes

    def _counted(self, count: int) -> Changes | None:
        """Return the change to ``count`` of the wish's GPUs, if their number is free."""
        if self._wish.gpu is not None:
            return {"gpus": count}
        hardware = name_of_larger(self._wish.hardware or "", count // self._outlook.workers)
        try:
            self._machine(replace(self._wish, hardware=hardware))
        except ValueError:
            return None
        return {"hardware": hardware}

    def _adapters(self) -> tuple[str, ...]:
        """Return choices of adapters from most to fewest. For experts, only those of attention are a small change."""
        return ("attention",) if self._shape(self._wish).has_experts else ("all_linear", "attention")

    def _first_that_fits(self, ways: list[Changes]) -> bool:
        for changes in ways:
            text = Remedy(changes, self._outlook).settings
            if not self._left:
                self._untried.append(text)
                return False
            if (found := self._try(changes)) is not None:
                self._found.append(found)
                return True
            self._hopeless.append(text)
        return False

    def _try(self, changes: Changes) -> Remedy | None:
        self._left -= 1
        wish = self._wish
        wish = replace(wish, search_seconds=min(wish.search_seconds, _SEARCH_SECONDS)).changed(changes)
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
        key = wish.lora, wish.precision, wish.staleness, wish.model_settings, wish.token_tiles
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


def name_of_larger(hardware: str, times: int) -> str:
    """Return what names a machine with ``times`` as many GPUs of each kind: of rtx4090, rtx4090x4 or several kinds."""
    kinds = [re.fullmatch(r"(.*?)(?:(?<=\d)x(\d+))?", part) for part in hardware.split("+")]
    return "+".join(f"{kind[1]}x{int(kind[2] or 1) * times}" for kind in kinds if kind)
