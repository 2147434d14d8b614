"""Weights that bitsandbytes has quantised, read as numbers.

A weight of four bits is stored with the tensors that say how to decode it: ``NAME.absmax``, ``NAME.quant_map``,
``NAME.quant_state.bitsandbytes__nf4`` and, quantised twice, ``NAME.nested_absmax`` and ``NAME.nested_quant_map``. One
of eight bits has the scale of each row beside it, as ``SCB``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.export.sources import Source, Spec
from lightning_roundpipe.extras import need
from lightning_roundpipe.model.quantize_weight import shape_to_unpack

_STATE = ".quant_state.bitsandbytes__"
_SCALES, _FORMAT = "SCB", "weight_format"


class Dequantised:
    """``source`` with each quantised weight as one tensor of 16 bits.

    Args:
        setting: how an error names the weights.
        dtype: dtype of weights that do not say in which 16 bits they were: those of eight bits, and those that were
            quantised from fp32. What is read of those is fp32.

    Raises:
        ImportError: bitsandbytes is not installed.
    """

    def __init__(self, source: Source, setting: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._source = source
        self._bitsandbytes: Any = need("bitsandbytes.functional", f"{setting} is quantised by bitsandbytes")
        self._states: dict[str, Any] = {}
        self._scales: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        stored = source.specs
        helpers = set()
        for name in stored:
            if (at := name.find(_STATE)) >= 0:
                weight = name[:at]
                parts = [other for other in stored if other.startswith(f"{weight}.")]
                helpers.update(parts)
                tensors = {part.removeprefix(f"{weight}."): tensor for part, tensor in source.read(parts).items()}
                self._states[weight] = self._bitsandbytes.QuantState.from_dict(tensors, device=torch.device("cpu"))
            elif name.rpartition(".")[2] == _SCALES:
                module = name.rpartition(".")[0]
                self._scales[f"{module}.weight"] = name
                helpers.update({name, f"{module}.{_FORMAT}"})
        for name, spec in stored.items():
            if name in self._states:
                state = self._states[name]
                self.specs[name] = Spec(tuple(state.shape), dtype if state.dtype == torch.float32 else state.dtype)
            elif name in self._scales:
                self.specs[name] = Spec(spec.shape, dtype)
            elif name not in helpers:
                self.specs[name] = spec

    @property
    def quantised(self) -> frozenset[str]:
        """Names of the weights that are quantised in the files."""
        return frozenset({*self._states, *self._scales})

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        scales = {name: self._scales[name] for name in names if name in self._scales}
        found = self._source.read([*names, *scales.values()])
        return {name: self._numbers(name, found[name], found.get(scales.get(name, ""))) for name in names}

    def _numbers(self, name: str, stored: Tensor, scales: Tensor | None) -> Tensor:
        if name in self._states:
            state = copy.copy(self._states[name])
            state.shape = torch.Size(shape_to_unpack(state.shape, state.blocksize))
            decoded: Tensor = self._bitsandbytes.dequantize_4bit(stored, state)
            return decoded.reshape(self.specs[name].shape)
        if scales is not None:
            rows: Tensor = self._bitsandbytes.int8_vectorwise_dequant(stored, scales)
            return rows
        return stored


def is_quantised(names: Iterable[str]) -> bool:
    """Return whether tensors of these names are weights that bitsandbytes has quantised."""
    return any(_STATE in name or name.rpartition(".")[2] == _SCALES for name in names)


def method(config: Mapping[str, Any]) -> str | None:
    """Return what has quantised the weights of a model with this ``config.json``; None: nothing."""
    found = config.get("quantization_config")
    if not found:
        return None
    return str(found.get("quant_method") or "bitsandbytes")
