"""Settings with which a model would fit, if it does not fit as asked. The same planner tries each of them.

The order is from the least change to the largest: settings that do not change the step, that change how it is computed,
what is trained, and what the model sees; then the least host memory that is enough. If no setting alone is enough,
several are tried together. There are at most `TRIES`, which are counted, so that no busy machine changes the answer.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from lightning_roundpipe.config import OPTIMIZER_STATES, parse_bytes
from lightning_roundpipe.estimates.model_shape import USUAL_TILE, ModelShape
from lightning_roundpipe.estimates.outlook import MEMORY_SHARE, Outlook, look_at, shape_of
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.planning.memory import size_text, total

TRIES = 16
"""Most tries. Each takes about a second."""

_SEARCH_SECONDS = 1.0
"""Longest search for the plan of a try."""

_SHORTEST, _LEAST_PART = 128, 16
"""Least tokens of a shortened sequence, which is also at least a 16th of the original."""

_NARROWER = {"32-true": "bf16-mixed"}
"""Precision to try, by that of the request. Mixed precision is estimated as if all were in 16 bits, so ``*-true`` would
change no figure of it."""

_FOUR_BITS = {"model.quantization": "nf4"}
"""Packs the frozen weights beside adapters."""

Changes = Mapping[str, Any]
"""Options and their values."""


@dataclass(frozen=True)
class Remedy:
    """Changed options with which the model fits, and the estimates for them."""

    changes: Changes
    outlook: Outlook

    @property
    def settings(self) -> str:
        """The options to add to the command line."""
        return _settings(self.changes)


def _settings(changes: Changes) -> str:
    texts = {name: size_text(value) if name == "host_memory" else str(value) for name, value in changes.items()}
    return " ".join(f"{name}={shlex.quote(text)}" for name, text in texts.items())


def find_remedies(outlook: Outlook) -> Remedies:
    """Return remedies for an outlook that does not fit, by at most `TRIES` tries."""
    tries = Remedies(outlook)
    for ways in tries.alone():
        tries.first_that_fits(ways)
    if not tries.found:
        tries.first_that_fits(tries.together())
    needs = [(total(one.host_items), changes) for changes, one in tries.refused if one.fits_device]
    for nbytes, changes in needs[:1] if tries.found else sorted(needs, key=lambda pair: pair[0])[:1]:
        tries.first_that_fits([{**changes, "host_memory": parse_bytes(size_text(nbytes), "host_memory")}])
    return tries


class Remedies:
    """Tries changes of the request of ``outlook``.

    Attributes:
        found: what fits, the least change first.
        refused: changes that do not fit, and their outlooks. The first is no change at all.
        hopeless: the changes that do not fit, as settings.
        device_memory: bytes of a device, or of ``memory=`` if the request sets it, that would be enough; None if
            workers are large enough.
    """

    def __init__(self, outlook: Outlook) -> None:
        self._outlook, self._request, self._left = outlook, outlook.request, TRIES
        self._shapes: dict[PlanRequest, ModelShape] = {}
        self.found: list[Remedy] = []
        self.refused: list[tuple[Changes, Outlook]] = [({}, outlook)]
        self.hopeless: list[str] = []
        share = 1.0 if outlook.request.memory else MEMORY_SHARE
        self.device_memory = None if outlook.fits_device else int(total(outlook.device_items) / share)

    def alone(self) -> Iterator[list[Changes]]:
        """Yield the changes of each kind, the least first. The answer names the first of each kind that fits."""
        request, found = self._request, self._outlook
        size, count = request.microbatch_size or 1, found.microbatches
        if found.weights_fit:
            smaller = [s for s in (8, 4, 2, 1) if s < size and size * count % s == 0]
            yield [{"microbatch_size": s, "microbatches": count * size // s} for s in smaller]
            if request.token_tiles is None and not found.fits_device:
                yield [{"token_tiles": USUAL_TILE}]
        if request.staleness:
            yield [{"staleness": 0}]
        if found.weights_fit:
            yield [{"microbatches": count >> n} for n in range(1, 6) if 0 < count >> n < found.workers]
        if request.precision in _NARROWER:
            yield [{"precision": _NARROWER[request.precision]}]
        if not found.fits_host:
            forms = list(OPTIMIZER_STATES)
            yield [{"optimizer_state": form} for form in forms[forms.index(request.optimizer_state) + 1 :]]
        if request.lora == "none":
            yield [{"lora": lora} for lora in self._adapters()]
        elif found.shape.quantization is None:
            yield [_FOUR_BITS]
        longest = found.longest.tokens if found.longest else 0
        if found.weights_fit and max(_SHORTEST, found.sequence_length // _LEAST_PART) <= longest:
            yield [{"sequence_length": longest, "microbatch_size": 1}] if longest < found.sequence_length else []

    def together(self) -> list[Changes]:
        """Return combinations of precision, adapters and four bits."""
        request, ways = self._request, list[Changes]()
        if request.precision in _NARROWER:
            ways.append({"precision": _NARROWER[request.precision]})
        if request.lora == "none":
            ways.append({"lora": self._adapters()[-1]})
        if self._outlook.shape.quantization is None:
            ways.append(_FOUR_BITS)
        small: Changes = {} if request.microbatch_size in (None, 1) else {"microbatch_size": 1}
        return [
            {name: value for way in (small, *chosen) for name, value in way.items()}
            for count in range(2, len(ways) + 1)
            for chosen in combinations(ways, count)
            if request.lora != "none" or _FOUR_BITS not in chosen or any("lora" in way for way in chosen)
        ]

    def _adapters(self) -> tuple[str, ...]:
        """Return choices of adapters from most to fewest. For experts, only those of attention are a small change."""
        return ("attention",) if self._outlook.shape.has_experts else ("all_linear", "attention")

    def first_that_fits(self, ways: list[Changes]) -> None:
        """Try ``ways`` in their order until one fits."""
        for changes in ways:
            if not self._left:
                return
            self._left -= 1
            seconds = min(self._request.search_seconds, _SEARCH_SECONDS)
            request = replace(self._request, search_seconds=seconds).changed(changes)
            try:
                outlook = look_at(self._shape(request), request, longest=False)
            except ValueError:  # the adapters do not fit the model
                self.hopeless.append(_settings(changes))
                continue
            if outlook.fits:
                self.found.append(Remedy(changes, outlook))
                return
            self.refused.append((changes, outlook))
            self.hopeless.append(_settings(changes))

    def _shape(self, request: PlanRequest) -> ModelShape:
        machine = self._outlook.shape.hardware
        if request.host_memory is not None:
            machine = replace(machine, host_memory=request.host_memory)
        key = replace(request, microbatch_size=None, microbatches=None, sequence_length=None, host_memory=None)
        if key not in self._shapes:
            self._shapes[key] = shape_of(request, machine)
        shape = self._shapes[key]
        return shape if machine == shape.hardware else shape.on(machine)
