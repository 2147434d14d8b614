"""The strategy for the package ``pytorch_lightning``.

    from lightning_roundpipe.pytorch_lightning import RoundPipeStrategy

``lightning.pytorch`` and ``pytorch_lightning`` are the same source under two names, and so two sets of classes: the
Trainer of one accepts no strategies, callbacks or plugins of the other. So this module executes the source of our
modules that use Lightning's classes once more, with the names exchanged, as Lightning itself builds its second package
from its first. The engine does not import Lightning, and both share it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from types import ModuleType
from typing import Any

_PARTS = (
    "trainer.checkpoint_io",
    "trainer.refusals",
    "precision",
    "trainer.hook_audit",
    "trainer.several_machines",
    "trainer.lookahead",
    "trainer.windows",
    "trainer.evaluation_window",
    "trainer.stepping",
    "reports.announcements",
    "trainer.fit",
    "reports.step_times",
    "reports.step_monitor",
    "strategy",
)
"""The modules that import Lightning. Each comes after those that it imports."""

_NAMES = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    **{f"lightning_roundpipe.{part}": f"{__name__}.{part}" for part in _PARTS},
}


class _Exchange(ast.NodeVisitor):
    """Exchanges the package's names in imports, and in strings that begin with a module's name."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        node.module = _exchanged(node.module or "")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            node.value = _exchanged(node.value)


def _exchanged(name: str) -> str:
    for mine, other in _NAMES.items():
        if name == mine or name.startswith(f"{mine}."):
            return other + name[len(mine) :]
    return name


def _execute(part: str) -> ModuleType:
    spec = importlib.util.find_spec(f"lightning_roundpipe.{part}")
    assert spec is not None and spec.origin is not None and spec.loader is not None
    source = spec.loader.get_source(spec.name)  # type: ignore[attr-defined]
    tree = ast.parse(source)
    _Exchange().visit(tree)
    module = ModuleType(f"{__name__}.{part}")
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    exec(compile(tree, spec.origin, "exec"), vars(module))
    return module


_parts = {part: _execute(part) for part in _PARTS}

RoundPipeStrategy: Any = _parts["strategy"].RoundPipeStrategy
RoundPipeMonitor: Any = _parts["reports.step_monitor"].RoundPipeMonitor
RoundPipePrecision: Any = _parts["precision"].RoundPipePrecision
