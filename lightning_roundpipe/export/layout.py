"""Which tensors in files make which parameters of a model.

Most are the same under the same name. Some architectures are stored otherwise than they compute: the files of
Qwen3-MoE have a tensor for each expert, the model one parameter for all. transformers converts when it loads a whole
model and back when it saves one. `Layout` does both for one group of tensors at a time, with the same rules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from lightning_roundpipe.export.weight_sources import Spec

_BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Group:
    """Tensors that are read and written together.

    Attributes:
        stored: their names in the files that are written.
        read: their names where they are read.
        parameters: names of what they are in the model; empty: nothing, and they are copied.
        rule: what converts them, if they are not the same; the parameter that is named for all; and the pattern that
            each of them matches.
    """

    stored: tuple[str, ...]
    read: tuple[str, ...]
    parameters: tuple[str, ...]
    rule: tuple[Any, str, tuple[str, ...]] | None = field(default=None, compare=False)


class OfFiles:
    """The groups of weights that are read from files.

    Args:
        model: the model on the meta device, before anything is wrapped in it.
        stored: what the files hold.
    """

    def __init__(self, model: PreTrainedModel, stored: Mapping[str, Spec]) -> None:
        self._model = model
        known = model.state_dict()
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        pristine = {pattern: rule for rule in deepcopy(converters) for pattern in rule.source_patterns}
        prefix = model.base_model_prefix
        found: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        for name in sorted(stored, key=dot_natural_key):
            parameter, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if parameter not in known and name in known:
                parameter, pattern = name, None
            found[parameter].append((name, pattern))
        used = [rule for rule in rules if not hasattr(rule, "was_used") or rule.was_used()]
        model._weight_conversions = used  # type: ignore[assignment]  # what `revert_weight_conversion` reads
        self.groups = [self._group(parameter, names, known, pristine, stored) for parameter, names in found.items()]

    def _group(
        self,
        parameter: str,
        names: list[tuple[str, str | None]],
        known: Mapping[str, Tensor],
        rules: Mapping[str, Any],
        stored: Mapping[str, Spec],
    ) -> Group:
        files = tuple(name for name, _ in names)
        patterns = tuple(pattern for _, pattern in names if pattern is not None)
        if parameter not in known:
            return Group(files, files, ())
        if not patterns:
            return Group(files, files, (parameter,))
        group = Group(files, files, (parameter,), (rules[patterns[0]], parameter, patterns))
        empty = {name: stored[name].empty() for name in files}
        return Group(files, files, tuple(self.parameters(group, empty)), group.rule)

    def parameters(self, group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that the group's tensors make, by name."""
        if group.rule is None:
            return dict(zip(group.parameters, (tensors[name] for name in group.read), strict=True))
        pristine, first, patterns = group.rule
        rule = deepcopy(pristine)
        for name, pattern in zip(group.read, patterns, strict=True):
            rule.add_tensor(first, name, pattern, tensors[name])
        made = rule.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def stored(self, group: Group, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the group's tensors as files hold them.

        Raises:
            ValueError: transformers does not give back what it took.
        """
        if group.rule is None:
            return dict(zip(group.stored, (parameters[name] for name in group.parameters), strict=True))
        found = as_stored(self._model, parameters)
        if found.keys() != set(group.stored):
            raise ValueError(
                f"weights of {self._model.config.model_type!r} cannot be written as they were stored: transformers "
                f"makes {min(group.parameters)} of {min(group.stored)}, and {min(found)} of that. Merge them with "
                "PEFT's merge_and_unload() instead."
            )
        return found


class OfParameters:
    """The groups of weights that are read as parameters: a group for each layer of the model.

    Args:
        model: the model on the meta device, before anything is wrapped in it.
        parameters: what there is, by the parameters' names.
    """

    def __init__(self, model: PreTrainedModel, parameters: Mapping[str, Spec]) -> None:
        self._model = model
        self.groups = []
        for names in blocks(parameters):
            empty = {name: parameters[name].empty() for name in names}
            self.groups.append(Group(tuple(as_stored(model, empty)), names, names))

    def parameters(self, group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name] for name in group.read}

    def stored(self, group: Group, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return as_stored(self._model, {name: parameters[name] for name in group.parameters})


def as_stored(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters of ``model`` as its files hold them."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(parameters))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def blocks(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the names in parts: a part for each of a model's layers, and one for each name outside of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=dot_natural_key):
        block = _BLOCK.match(name)
        found[block[1] if block else name].append(name)
    return [tuple(part) for part in found.values()]
