"""A model without its weights: what they are called, how large they are, and which of them are the same."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Skeleton:
    """A causal language model on the meta device.

    Attributes:
        model: the model, which adapters may be put into later.
        shapes: shapes of its own parameters, by all of their names.
        shared: the names of each parameter that has several.
        embeddings: names of the weights of the input embedding and of the output layer.
    """

    model: PreTrainedModel
    shapes: Mapping[str, tuple[int, ...]]
    shared: tuple[tuple[str, ...], ...]
    embeddings: frozenset[str]


def skeleton_of(config: PretrainedConfig) -> Skeleton:
    """Return the causal language model of ``config``, without adapters."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    ends = [cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()]
    embeddings = {id(end.weight) for end in ends if end is not None}
    return Skeleton(
        model,
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        tuple(tuple(shared) for shared in names.values() if len(shared) > 1),
        frozenset(name for name, parameter in parameters.items() if id(parameter) in embeddings),
    )


def once(names: Iterable[str], skeleton: Skeleton) -> list[str]:
    """Return the names with one for each parameter, of those that have several."""
    names = list(names)
    extra = {name for shared in skeleton.shared for name in [name for name in shared if name in names][1:]}
    return [name for name in names if name not in extra]
