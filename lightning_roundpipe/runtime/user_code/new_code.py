"""Notices what user code does for the first time in a later batch.

Before the first batch, parts of a few samples are compared with the whole. That says nothing of a branch that only
later batches take, or other samples. `NewCode` finds these, so that they can be compared, too:

    a rehearsal ── the places in user code that call a torch function, which one, and the names that it logs ── [1]
    a step ── it finds a place, a function there, a name or an attribute that is set which is not known, or a place
              that only some microbatches reach, or a layer asks a tensor for a truth value that is not known ── [2]
              what it has called where, by which `log_rules` tells how a logged value was computed ── [4]
    another rehearsal ── what was found is known once it has run ── [3]

Code that calls no torch function, logs nothing and sets no attribute of a module is not seen.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType

from lightning_roundpipe.runtime.batch.logs import log_call

_SKIPPED = (
    "torch", "torchmetrics", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning",
    "lightning_roundpipe",
)  # fmt: skip
"""Packages whose code stands for that of its callers, as the standard library's does. What metrics do is compared by
their values."""
_TASKS = os.path.join(str(Path(__file__).parents[2]), "tasks", "")
"""The package's own modules, which are user code."""

_MOST_PLACES = 1 << 16
_MOST_TRUTHS = 8
"""Truth values of a layer's call: a loop may ask for any number of them."""
_TRIES = 3
Place = tuple[CodeType, tuple[int | None, ...] | int]
Key = Place | str
"""A place in user code, or what is logged there."""


class NewCode:
    """What earlier batches have shown of user code, and what the last one has done for the first time.

    Attributes:
        watched: whether a rehearsal has shown anything, so that there is something to compare with.
        follows: whether to note what a step calls even if that is not compared.
        found: what is new, as text for messages, and the microbatch that has done it.
        unknown: names of logged values among these.
    """

    def __init__(self) -> None:
        self.watched = self.follows = False
        self.found: dict[str, int] = {}
        self.unknown: list[str] = []
        self._known: set[Key | tuple[Key, str]] = set()
        """Places, what they have called, and what was logged or set."""
        self._awaited: set[Key | tuple[Key, str]] = set()
        """What is new and no rehearsal has done since."""
        self._done: dict[int, set[tuple[int, int, str]]] = {}
        """What each microbatch of the step has called where."""
        self._branches: set[tuple[Place, str]] = set()
        """What some microbatches of a step have called, and others have not."""
        self._values: Counter[str] = Counter()
        """How often each logged value was found."""
        self._passed: dict[tuple[int, int, str], tuple[CodeType, int]] = {}
        """What is known to be called where, by the id of the code, which is alive, so that it stays its own, and its
        number. To compare code by what is in it takes microseconds."""
        self._numbers: dict[tuple[Key, str], int] = {}
        """Numbers of what was called where."""

    # -- rehearsals ---------------------------------------------------------------------------------------------------

    def learn(self, frame: FrameType | None, called: str) -> None:
        """In a rehearsal, ``frame`` has called the torch function ``called`` [1] [3]."""
        if (found := _caller(frame)) is not None:
            place = _place(found.f_code, found.f_lasti)
            self._known.add(place)
            self._learn((place, called))

    def learn_names(self, names: Iterable[str]) -> None:
        """A rehearsal has logged values under ``names`` [1] [3]."""
        for name in names:
            self._learn(log_call(name))

    def learn_truths(self, layer: str, truths: Iterable[bool]) -> None:
        """In a rehearsal, ``layer`` has asked tensors for ``truths`` [1] [3]."""
        for number, truth in enumerate(truths):
            self._learn(_truth(layer, number, truth))

    def _learn(self, key: Key | tuple[Key, str]) -> None:
        self.watched = True
        self._known.add(key)
        self._awaited.discard(key)

    @property
    def is_awaited(self) -> bool:
        """Whether no rehearsal has done all that was found."""
        return bool(self._awaited)

    def accept(self) -> None:
        """Take what was found for known, whether or not a rehearsal has done it."""
        self.found.clear()
        self.unknown.clear()
        self._awaited.clear()

    # -- steps --------------------------------------------------------------------------------------------------------

    def note(self, microbatch: int) -> Callable[[FrameType | None, str], None] | None:
        """Return a function to call with the frame that calls a torch function, and which, in ``microbatch`` [2].

        None if there is nothing to compare with.
        """
        if not (self.watched or self.follows):
            return None
        done = self._done[microbatch] = set()
        return functools.partial(self._note, microbatch, done)

    def _note(
        self, microbatch: int, done: set[tuple[int, int, str]], frame: FrameType | None, called: str
    ) -> None:  # fmt: skip
        if (found := _caller(frame)) is None:
            return
        at = id(found.f_code), found.f_lasti, called
        done.add(at)
        if at in self._passed:
            return
        if len(self._passed) == _MOST_PLACES:  # of code that is compiled anew for each batch
            self._passed.clear()
        place = _place(found.f_code, found.f_lasti)
        self._passed[at] = found.f_code, self.number((place, called))
        if self.watched and (place, called) not in self._known:
            does = f"called {called}" if place in self._known else "ran"
            self._known.add(place)
            self._find((place, called), f"{_line(found)} {does} for the first time", microbatch)

    def note_branches(self) -> None:
        """The microbatches of a step have ended: find what only some of them have done [2].

        A branch on what is in the batch may be another one on the whole. Each line is found once.
        """
        done, self._done = self._done, {}
        if not self.watched or len({frozenset(places) for places in done.values()}) < 2:
            return
        by_part = {part: {self._key(at): at for at in places if at in self._passed} for part, places in done.items()}
        everywhere = set.intersection(*(set(keys) for keys in by_part.values()))
        for part, keys in by_part.items():
            for key in keys.keys() - everywhere - self._branches:
                self._branches.add(key)
                self._awaited.add(key)
                place, called = key
                line = place[1][0] if isinstance(place[1], tuple) else place[0].co_firstlineno
                where = f"line {line} of {os.path.basename(place[0].co_filename)}"
                self.found.setdefault(f"{where} called {called} in some microbatches only", part)

    def _key(self, at: tuple[int, int, str]) -> tuple[Place, str]:
        return _place(self._passed[at][0], at[1]), at[2]

    def number(self, call: tuple[Key, str]) -> int:
        """Return the number of what was called where."""
        return self._numbers.setdefault(call, len(self._numbers))

    def ran(self) -> frozenset[int] | None:
        """Return the numbers of what the step's microbatches have called [4]; None if that was not noted."""
        if not self._done:
            return None
        done = set[tuple[int, int, str]]().union(*self._done.values())
        return frozenset(self._passed[at][1] for at in done if at in self._passed)

    def note_truths(self, layer: str, truths: Iterable[bool], microbatch: int) -> None:
        """In ``microbatch``, ``layer`` has asked tensors for ``truths``, by which it takes its branches [2]."""
        for number, truth in enumerate(itertools.islice(truths, _MOST_TRUTHS)) if self.watched else ():
            if (key := _truth(layer, number, truth)) not in self._known:
                said = f"layer {layer!r} took a branch by a tensor that was {truth} for the first time"
                self._find(key, said, microbatch)

    def note_names(self, names: Iterable[str], microbatch: int) -> None:
        """``microbatch`` has logged values under ``names`` [2]."""
        if self.watched:
            for name in names:
                if (key := log_call(name)) not in self._known:
                    self._find(key, f"{name!r} was logged for the first time", microbatch)

    def note_values(self, names: Mapping[str, int]) -> list[str]:
        """Microbatches have logged values under ``names`` of which comparisons have shown too little [2].

        Each is found a few times, as another comparison may show as little. The others are returned.
        """
        others = []
        for name, microbatch in names.items():
            if not self.watched or self._values[name] == _TRIES:
                others.append(name)
                continue
            self._values[name] += 1
            self.unknown.append(name)
            self.found[f"{name!r} was logged with a value that no comparison has shown"] = microbatch
        return others

    def note_attributes(self, paths: Iterable[str], microbatch: int) -> None:
        """``microbatch`` has set the attributes ``paths``, which no batch before has [2].

        A rehearsal does not show them one by one, so none of them is awaited.
        """
        if self.watched:
            for path in paths:
                if path not in self._known:
                    self._known.add(path)
                    self.found.setdefault(f"attribute {path!r} was set for the first time", microbatch)

    def _find(self, key: Key | tuple[Key, str], what: str, microbatch: int) -> None:
        self._known.add(key)
        self._awaited.add(key)
        self.found.setdefault(what, microbatch)


def _truth(layer: str, number: int, truth: bool) -> Key:
    return f"truth {number} of {layer}: {truth}"


def place_of(frame: FrameType | None) -> Key | None:
    """Return the place in user code from which ``frame`` was called; None if there is none."""
    found = _caller(frame)
    return None if found is None else _place(found.f_code, found.f_lasti)


def line_of(frame: FrameType | None) -> str:
    """Return the line of that place as text for messages; empty if there is none."""
    found = _caller(frame)
    return "" if found is None else _line(found)


def _line(frame: FrameType) -> str:
    return f"line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)}"


def _place(code: CodeType, at: int) -> Place:
    """Return the place in the source of an instruction.

    Python 3.11 calls a function by another instruction of the same place once it has seen it some times. Code that is
    compiled anew for each batch is equal.
    """
    place = next(itertools.islice(code.co_positions(), at // 2, None))
    return code, at if None in place else place


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame of user code from which ``frame`` was called; None if there is none.

    What calls the step is not asked: in the main thread the user's script does, and in a worker's nothing.
    """
    while frame is not None and _is_skipped(frame.f_code.co_filename):
        frame = None if frame.f_code.co_filename.startswith(_loops()) else frame.f_back
    return frame


@functools.cache
def _is_skipped(path: str) -> bool:
    library = sysconfig.get_path("stdlib") + os.sep
    is_library = path.startswith(library) and "site-packages" not in path[len(library) :].split(os.sep)
    return is_library or (path.startswith((*_folders(), "<frozen")) and not path.startswith(_TASKS))


@functools.cache
def _loops() -> tuple[str, ...]:
    """Return the folders of Lightning's loops, which call the step."""
    return tuple(os.path.join(folder, *names, "loops", "") for folder in _folders() for names in ((), ("pytorch",)))


@functools.cache
def _folders() -> tuple[str, ...]:
    found = (importlib.util.find_spec(name) for name in _SKIPPED)  # one may be imported later
    return tuple(os.path.join(folder, "") for spec in found if spec for folder in spec.submodule_search_locations or ())
