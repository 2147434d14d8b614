"""How ``Trainer(strategy="roundpipe")`` works in a program that never imports this package.

Lightning knows a strategy's name only if somebody put it into ``StrategyRegistry``, a global of
``lightning.pytorch.strategies``, before the Trainer is built; it has no plug-in mechanism. torch has one: at the end of
``import torch`` it calls every entry point of the group ``torch.backends``. Ours is `autoload`:

    import torch ──► autoload() ──► finder on sys.meta_path ── [1]
                                        │
    import lightning ──► ... ──► lightning.pytorch.strategies: found by the finders behind ours,
                                 executed by its own loader, ── [2]
                                 then "roundpipe" is put into its registry ── [3]
                                        │
    Trainer(strategy="roundpipe") ──► factory ──► import lightning_roundpipe.strategy ── [4]

Lightning is not imported at [1]: it imports torch, which is still being imported, and most programs that use torch
never need it. An error at [1] would make ``import torch`` fail for every program in the environment, so nothing here
raises before [4]; a registration that fails is logged instead. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches torch's
part off; ``import lightning_roundpipe`` then does the same.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "roundpipe"
ASYNC = "roundpipe_async"
"""The same with ``staleness=1``."""

_log = logging.getLogger(__name__)


def _make_strategy(**kwargs: Any) -> Any:
    """What ``lightning``'s registry calls for the name. Imports the strategy only now [4]."""
    from lightning_roundpipe.strategy import RoundPipeStrategy

    return RoundPipeStrategy(**kwargs)


def _make_strategy_of_the_other_flavour(**kwargs: Any) -> Any:
    """What ``pytorch_lightning``'s registry calls: its Strategy is another class."""
    from lightning_roundpipe.pytorch_lightning import RoundPipeStrategy

    return RoundPipeStrategy(**kwargs)


FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _make_strategy,
    "pytorch_lightning.strategies": _make_strategy_of_the_other_flavour,
}
"""The module that holds a flavour's ``StrategyRegistry``, and what that flavour's name makes."""


def register(module: ModuleType) -> None:
    """Puts the name into the registry of ``module``, one of `FACTORIES`, unless it is there. Never raises."""
    try:
        registry = module.StrategyRegistry
        what = "Round-robin offloaded pipeline stages on a pool of devices"
        for name, given in ((NAME, {}), (ASYNC, {"staleness": 1})):
            if name not in registry:
                registry.register(name, FACTORIES[module.__name__], description=what, **given)
    except Exception:
        _log.warning("strategy=%r could not be registered with %s", NAME, module.__name__, exc_info=True)


class _RegisterAfterExecution(Loader):
    """Stands in for a module's own loader while the module is loaded, then leaves no trace of itself."""

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
        self._original.exec_module(module)  # [2] an error in here is the module's own and passes through
        register(module)  # [3]


class _Finder(MetaPathFinder):
    """Finds only the modules of `FACTORIES`, by asking the finders behind it."""

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
    """Registers with every flavour of Lightning that is loaded, and with the others as soon as they are. Never raises.

    The entry point of the group ``torch.backends`` [1]. May be called any number of times.
    """
    for name in FACTORIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "StrategyRegistry"):
            register(module)
    if not any(getattr(finder, "is_roundpipe_finder", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
