"""Chooses the layers: the modules that are moved as a whole.

A layer is the smallest unit that goes to a worker, so it decides how finely stages can be cut and how many calls the
engine makes. With layers that are too large, stages cannot be balanced; with layers that are too small, an ordinary
network becomes hundreds of calls. The search goes from the top down and takes the outermost modules that are small
enough, except where a model declares what must stay whole (Hugging Face's ``_no_split_modules``) or shows it by
repetition (a list of blocks, or of one block that is called repeatedly). Modules without parameters are never layers:
they run as user code. So do modules compiled by TorchScript, because a copy of such a module does not reach its
weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

_PURE_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

LAYER_SHARE = 8
"""A module larger than the model's size divided by this is split, if there are modules inside to take instead."""


def find_layers(
    root: nn.Module, requested: Sequence[str | type] | None = None, *, needed: bool = True
) -> dict[str, nn.Module]:
    """Return the layers of ``root`` by qualified name, in registration order.

    Args:
        root: the user's LightningModule. It is never a layer itself: its ``training_step`` is user code.
        requested: module classes, class names or qualified module names. Each such module must be one layer.
        needed: whether there must be a layer.

    Raises:
        ValueError: a requested name matches no module, or a layer is needed and no module has parameters.
    """
    forced = find_requested(root, requested or ())
    search = _LayerSearch(root, forced)
    for name, child in root.named_children():
        search.visit(name, child)
    if needed and not search.found and _is_scripted(root):
        raise ValueError(
            f"all parameters of {type(root).__name__} are in modules compiled by TorchScript, which cannot be copied "
            "to a worker, so there is no layer to offload: give the LightningModule the modules themselves."
        )
    if needed and not search.found:
        raise ValueError(
            f"{type(root).__name__} has no submodule with parameters, so there is no layer to offload: register the "
            "model as an attribute of the LightningModule (self.model = ...) before or in configure_model()."
        )
    return search.found


class _LayerSearch:
    def __init__(self, root: nn.Module, forced: set[nn.Module]) -> None:
        self.forced = forced
        self.no_split = {n for m in root.modules() for n in getattr(type(m), "_no_split_modules", None) or ()}
        self.limit = _size(root) / LAYER_SHARE
        self.found: dict[str, nn.Module] = {}
        self._seen: set[int] = set()

    def visit(self, name: str, module: nn.Module, repeated: bool = False, listed: bool = False) -> None:
        if id(module) in self._seen or not any(True for _ in module.parameters()):
            return
        self._seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            return
        if self._is_layer(module, repeated, listed):
            self.found[name] = module
            self._seen.update(id(inner) for inner in module.modules())
            return
        siblings = Counter(_class_of(child) for child in module.children())
        holds_items = isinstance(module, _PURE_CONTAINERS)
        for child_name, child in module.named_children():
            item = holds_items and not isinstance(child, _PURE_CONTAINERS)
            in_list = item and isinstance(module, nn.ModuleList)
            self.visit(f"{name}.{child_name}", child, item and siblings[_class_of(child)] > 1, in_list)

    def _is_layer(self, module: nn.Module, repeated: bool, listed: bool) -> bool:
        if _is_scripted(module):
            return False  # modules inside it that are not scripted become layers
        if module in self.forced:
            return True
        if isinstance(module, _UNCALLED) or not self.forced.isdisjoint(module.modules()):
            return False
        if type(module).__name__ in self.no_split:
            return True
        if any(type(inner).__name__ in self.no_split for inner in module.modules()):
            return False
        if not _parts_of(module) or _wraps_one_leaf(module):
            return True
        if repeated and not (_size(module) > 3 * self.limit and _holds_blocks(module)):
            return True
        if listed and not _holds_blocks(module):
            return True
        return _size(module) <= self.limit


def find_requested(root: nn.Module, requested: Sequence[str | type]) -> set[nn.Module]:
    """Return the outermost modules of ``root`` that ``requested`` matches, see `find_layers`."""
    named = {n: m for n, m in root.named_modules(remove_duplicate=False) if m is not root}
    matched: dict[nn.Module, str | None] = {}
    """Each requested module, with the qualified name if it was requested by one."""
    for want in requested:
        hits = [
            m
            for n, m in named.items()
            if (issubclass(type(m), want) if isinstance(want, type) else want in (n, type(m).__name__))
        ]
        _check_matches(root, want, hits)
        by_name = want if isinstance(want, str) and want in named else None
        matched.update({m: by_name or matched.get(m) for m in hits})
    outermost = {m for m in matched if not any(m is not other and _inside(m, other) for other in matched)}
    for module, name in matched.items():
        if name is not None and module not in outermost:
            holder = next(n for n, m in named.items() if m in outermost and _inside(module, m))
            raise ValueError(
                f"layers={name!r} lies inside {holder!r}, which layers= names too: a layer is moved as a whole. Take "
                "one of the two out."
            )
    return outermost


def _check_matches(root: nn.Module, want: str | type, hits: Sequence[nn.Module]) -> None:
    shown = repr(want.__name__ if isinstance(want, type) else want)
    if not hits:
        classes = sorted({type(m).__name__ for m in root.modules() if m is not root})
        raise ValueError(
            f"layers={shown} matches no module of {type(root).__name__}. Give a module class, a class name or a "
            f"qualified module name; its module classes are {', '.join(classes)}."
        )
    if uncalled := next((m for m in hits if isinstance(m, _UNCALLED)), None):
        raise ValueError(
            f"layers={shown} names a {type(uncalled).__name__}, which is never called as a whole: name its items."
        )
    if any(map(_is_scripted, hits)):
        raise ValueError(
            f"layers={shown} names a module compiled by TorchScript, or one that holds such a module, which cannot be "
            "copied to a worker: give the LightningModule the module itself, or leave it out to have it run between "
            "the layers."
        )
    if not [parameter for module in hits for parameter in module.parameters()]:
        raise ValueError(
            f"layers={shown} names modules without parameters, which are not moved but run between the layers: take it "
            "out."
        )


def _is_scripted(module: nn.Module) -> bool:
    return any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules())


def _inside(module: nn.Module, other: nn.Module) -> bool:
    return any(module is inner for inner in other.modules())


def _size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was written: each parametrized module has a class of its own."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def _parts_of(module: nn.Module) -> list[nn.Module]:
    """Return the children, without what parametrizations (spectral norm, weight norm) keep of the weights."""
    theirs = module.parametrizations if is_parametrized(module) else None
    return [child for child in module.children() if child is not theirs]


def _wraps_one_leaf(module: nn.Module) -> bool:
    """Return whether a module is an adapter around a plain layer, as PEFT makes them: one leaf, and dicts of leaves."""
    if isinstance(module, _PURE_CONTAINERS):
        return False
    held = [c for c in module.children() if any(True for _ in c.parameters())]
    leaves = [c for c in held if not any(True for _ in c.children()) and not isinstance(c, _UNCALLED)]
    return len(leaves) == 1 and all(_is_dictionary_of_leaves(c) for c in held if c is not leaves[0])


def _is_dictionary_of_leaves(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return not any(True for item in module.values() for _ in item.children())
    return isinstance(module, (nn.ParameterDict, nn.ParameterList))


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a container inside has two modules of one class that have children."""
    containers = (inner for inner in module.modules() if isinstance(inner, _PURE_CONTAINERS))
    kinds = (Counter(type(c) for c in inner.children() if any(True for _ in c.children())) for inner in containers)
    return any(count > 1 for counts in kinds for count in counts.values())
