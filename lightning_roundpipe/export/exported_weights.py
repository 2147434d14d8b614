"""The weights of an exported model, one part after another.

A part is what has to be in memory together: usually one tensor, with adapters those of one module. Its weights are
read, changed and given on; then they are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_roundpipe.export.layout import Group, OfFiles, OfParameters
from lightning_roundpipe.export.merging import Adapters
from lightning_roundpipe.export.skeleton import Skeleton
from lightning_roundpipe.export.weight_sources import Source, Spec, spec_of
from lightning_roundpipe.messages import plural


@dataclass(frozen=True)
class _Part:
    groups: tuple[Group, ...]
    modules: tuple[str, ...]


class Weights:
    """The model's weights, with adapters merged into them if there are any.

    Args:
        skeleton: the model.
        source: the base model's weights, or all that was trained.
        layout: which of them make which parameters.
        adapters: those to merge.
        dtype: dtype of the result; None: as ``dtypes`` says, else as ``source`` has them.
        dtypes: dtype of weights by their stored names.
        setting: how an error names ``source``.

    Attributes:
        specs: what `stored` yields, in its order.
        parameters: what `by_parameter` yields, in its order.
        modules: how many modules have adapters.
        untied: whether weights that the configuration ties are now different.

    Raises:
        ValueError: the weights are not those of the model.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        source: Source,
        layout: OfFiles | OfParameters,
        adapters: Adapters | None,
        dtype: torch.dtype | None,
        dtypes: Mapping[str, torch.dtype],
        setting: str,
    ) -> None:
        self._source, self._layout, self._adapters = source, layout, adapters
        self._dtype, self._dtypes, self._setting = dtype, dtypes, setting
        self._replaced = {} if adapters is None else adapters.replaced
        modules = {} if adapters is None else adapters.modules
        self.modules = len(modules)
        self._changed = {*self._replaced, *(name for names in modules.values() for name in names)}
        self.untied = False
        groups = self._with_shared(skeleton, layout.groups)
        self._check(skeleton, groups)
        self._parts = _parts(groups, modules)
        self.specs = {name: spec for part in self._parts for name, spec in self._stored_specs(part)}
        self.parameters = {
            name: Spec(skeleton.shapes[name], torch.float32)
            for part in self._parts
            for group in part.groups
            for name in group.parameters
        }

    @property
    def nbytes(self) -> int:
        """The size of all that `stored` yields."""
        return sum(spec.nbytes for spec in self.specs.values())

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as the model's files hold them, in their dtype."""
        for part in self._parts:
            tensors = self._source.read({name for group in part.groups for name in group.read})
            changed = self._merged(part, tensors)
            for group in part.groups:
                if any(name in changed for name in group.parameters) or isinstance(self._layout, OfParameters):
                    own = self._parameters(group, tensors, changed)
                    if group.rule is not None:  # a conversion copies: better what is small
                        own = {name: tensor.to(self.specs[group.stored[0]].dtype) for name, tensor in own.items()}
                    found = self._layout.stored(group, own)
                else:
                    found = {name: tensors[read] for name, read in zip(group.stored, group.read, strict=True)}
                for name in group.stored:
                    yield name, found.pop(name).to(self.specs[name].dtype).contiguous()

    def by_parameter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their names in the model, in the dtype that they were read or merged in."""
        for part in self._parts:
            tensors = self._source.read({name for group in part.groups for name in group.read})
            changed = self._merged(part, tensors)
            for group in part.groups:
                yield from self._parameters(group, tensors, changed).items()

    def _merged(self, part: _Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part's parameters that the adapters change."""
        changed: dict[str, Tensor] = {}
        if self._adapters is None:
            return changed
        for group in part.groups:
            if not any(name in self._changed for name in group.parameters):
                continue
            for name, tensor in self._layout.parameters(group, tensors).items():
                changed[name] = self._replaced.get(name, tensor)
        for module in part.modules:
            weights = {name: changed[name].float() for name in self._adapters.modules[module]}
            changed |= self._adapters.merge(module, weights)
        return changed

    def _parameters(
        self, group: Group, tensors: Mapping[str, Tensor], changed: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if not any(name in changed for name in group.parameters):
            return self._layout.parameters(group, tensors)
        return {name: changed[name] for name in group.parameters}

    def _with_shared(self, skeleton: Skeleton, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with one for each name of a shared parameter, where adapters tell its names apart.

        Otherwise a parameter is written once, and a second copy of it in the source is left out.
        """
        groups = list(groups)
        for names in skeleton.shared:
            homes = {name: group for group in groups for name in names if name in group.parameters}
            if not homes:
                continue  # `_check` says that it is missing
            first = next(iter(homes))
            if not self._changed.intersection(names):
                copies = set(homes) - {first}
                groups = [group for group in groups if copies.isdisjoint(group.parameters)]
                continue
            if not skeleton.embeddings.issuperset(names):
                raise ValueError(
                    f"{self._setting}: {' and '.join(names)} are one weight, and adapters would change one of them "
                    "only. Such adapters cannot be merged: use them with PEFT."
                )
            self.untied = True
            read = homes[first].read[homes[first].parameters.index(first)]
            groups += [Group((name,), (read,), (name,)) for name in names if name not in homes]
        return groups

    def _check(self, skeleton: Skeleton, groups: Sequence[Group]) -> None:
        known = self._source.specs
        for group in groups:
            for name, read in zip(group.parameters, group.read, strict=False) if group.rule is None else ():
                if known[read].shape != skeleton.shapes.get(name, known[read].shape):
                    raise ValueError(
                        f"{self._setting} is another model: {read} has the shape {known[read].shape}, and "
                        f"{skeleton.shapes[name]} by the configuration. Name the model that was trained with base=."
                    )
        there = {name for group in groups for name in group.parameters}
        shared = {name: names for names in skeleton.shared for name in names}
        lacking = [name for name in skeleton.shapes if there.isdisjoint(shared.get(name, (name,)))]
        if lacking:
            raise ValueError(
                f"{self._setting} lacks {plural(len(lacking), 'weight')} of the configuration, such as {lacking[0]}. "
                "Name the model that was trained with base=."
            )

    def _stored_specs(self, part: _Part) -> Iterator[tuple[str, Spec]]:
        for group in part.groups:
            if isinstance(self._layout, OfParameters):
                pairs = zip(group.parameters, group.read, strict=True)
                empty = {name: self._source.specs[read].empty() for name, read in pairs}
                found = {name: spec_of(tensor) for name, tensor in self._layout.stored(group, empty).items()}
            else:
                found = {name: self._source.specs[read] for name, read in zip(group.stored, group.read, strict=True)}
            for name in group.stored:
                yield name, Spec(found[name].shape, self._dtype_of(name, found[name].dtype))

    def _dtype_of(self, name: str, own: torch.dtype) -> torch.dtype:
        if not own.is_floating_point:
            return own
        return self._dtype or self._dtypes.get(name, own)


def _parts(groups: Sequence[Group], modules: Mapping[str, tuple[str, ...]]) -> list[_Part]:
    """Return the groups, those together that a module needs together."""
    home = {name: number for number, group in enumerate(groups) for name in group.parameters}
    leader = list(range(len(groups)))

    def lead(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for names in modules.values():
        first, *others = sorted({lead(home[name]) for name in names}) or [0]
        for number in others:
            leader[number] = first
    members: dict[int, list[int]] = {}
    for number in range(len(groups)):
        members.setdefault(lead(number), []).append(number)
    inside: dict[int, list[str]] = {}
    for module, names in modules.items():
        inside.setdefault(lead(home[names[0]]), []).append(module)
    return [
        _Part(tuple(groups[number] for number in numbers), tuple(inside.get(first, ())))
        for first, numbers in members.items()
    ]
