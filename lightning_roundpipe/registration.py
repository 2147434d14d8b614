"""Makes ``Trainer(strategy="roundpipe")`` work in a program that never imports this package.

Lightning knows a strategy's name only if it is in ``StrategyRegistry``, a global of ``lightning.pytorch.strategies``,
before the Trainer is created. Lightning has no plug-in mechanism. torch has one: at the end of ``import torch`` it
calls every entry point of the group ``torch.backends``. Ours is `autoload`:

    import torch ──► autoload() ──► finder on sys.meta_path ── [1]
                                        │
    import lightning ──► ... ──► lightning.pytorch.strategies: found by the finders behind ours,
                                 executed by its own loader, ── [2]
                                 then "roundpipe" is put into its registry ── [3]
                                        │
    Trainer(strategy="roundpipe") ──► factory ──► import lightning_roundpipe.strategy ── [4]

[1] does not import Lightning: Lightning imports torch, which is still being imported, and most programs that use torch
never need it. An error at [1] would make ``import torch`` fail for every program in the environment, so nothing here
raises before [4]; a registration that fails is logged. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables torch's part;
``import lightning_roundpipe`` then does the same.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "roundpipe"
ASYNC = "roundpipe_async"
"""The strategy with ``staleness=1``."""

_log = logging.getLogger(__name__)


def _strategy_of(home: str) -> Callable[..., Any]:
    """Return a function that creates the strategy of a module of this package, which is imported only then [4]."""

    def make(**kwargs: Any) -> Any:
        return import_module(f"lightning_roundpipe.{home}").RoundPipeStrategy(**kwargs)

    return make


FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _strategy_of("strategy"),
    "pytorch_lightning.strategies": _strategy_of("pytorch_lightning"),
}
"""Per module with a ``StrategyRegistry``, the factory of that flavour's strategy."""


def register(module: ModuleType) -> None:
    """Register the names with ``module``, one of `FACTORIES`, unless they are there already. Never raises."""
    try:
        registry = module.StrategyRegistry
        what = "Round-robin offloaded pipeline stages on a pool of devices"
        for name, given in ((NAME, {}), (ASYNC, {"staleness": 1})):
            if name not in registry:
                registry.register(name, FACTORIES[module.__name__], description=what, **given)
    except Exception:
        _log.warning("strategy=%r could not be registered with %s", NAME, module.__name__, exc_info=True)


class _RegisterAfterExecution(Loader):
    """Replaces a module's loader while the module is loaded, and then restores it."""

    def __init__(self, original: Loader) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        self._original.exec_module(module)  # [2] errors of the module itself propagate
        register(module)  # [3]


class _Finder(MetaPathFinder):
    """Finds only the modules of `FACTORIES`, by asking the other finders."""

    is_roundpipe_finder = True  # not isinstance: a second copy of this module must know the first one's finder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FACTORIES:
            return None
        for finder in list(sys.meta_path):
            if getattr(finder, "is_roundpipe_finder", False) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _RegisterAfterExecution(spec.loader)
            return spec
        return None


def autoload() -> None:
    """Register with every flavour of Lightning that is loaded, and with the others when they are. Never raises.

    This is the entry point of the group ``torch.backends`` [1]. Idempotent.
    """
    for name in FACTORIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "StrategyRegistry"):  # not while it is being imported
            register(module)
    if not any(getattr(finder, "is_roundpipe_finder", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
