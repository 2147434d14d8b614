"""Weights that bitsandbytes has quantised, read as numbers.

A weight of four bits is stored with the tensors that say how to decode it: ``NAME.absmax``, ``NAME.quant_map``,
``NAME.quant_state.bitsandbytes__nf4`` and, quantised twice, ``NAME.nested_absmax`` and ``NAME.nested_quant_map``. One
of eight bits has the scale of each row beside it, as ``SCB``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.export.weight_sources import Source, Spec
from lightning_roundpipe.extras import need
from lightning_roundpipe.messages import first_line
from lightning_roundpipe.model.quantize_weight import shape_to_unpack
from lightning_roundpipe.model.quantized import misfit_in_eight_bits, misfit_in_four_bits

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
        ValueError: a weight lacks some of what unpacks it, or has it in another size. Kernels would read beyond its
            end.
    """

    def __init__(self, source: Source, setting: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._source, self._setting = source, setting
        self._bitsandbytes: Any = need("bitsandbytes.functional", f"{setting} is quantised by bitsandbytes")
        self._states: dict[str, Any] = {}
        self._scales: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        stored = source.specs
        helpers = set()
        for weight, parts in _quantised(stored).items():
            helpers.update(parts)
            if parts[0].rpartition(".")[2] == _SCALES:
                self._scales[weight] = parts[0]
            else:
                self._states[weight] = self._state(weight, source.read(parts))
        for name, spec in stored.items():
            if name in self._states:
                state = self._states[name]
                self.specs[name] = Spec(tuple(state.shape), dtype if state.dtype == torch.float32 else state.dtype)
            elif name in self._scales:
                self.specs[name] = Spec(spec.shape, dtype)
            elif name not in helpers:
                self.specs[name] = spec
        self._check_sizes()

    @property
    def quantised(self) -> frozenset[str]:
        """Names of the weights that are quantised in the files."""
        return frozenset({*self._states, *self._scales})

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        scales = {name: self._scales[name] for name in names if name in self._scales}
        found = self._source.read([*names, *scales.values()])
        return {name: self._numbers(name, found[name], found.get(scales.get(name, ""))) for name in names}

    def _state(self, weight: str, parts: Mapping[str, Tensor]) -> Any:
        """Return the ``QuantState`` of a weight."""
        tensors = {name.removeprefix(f"{weight}."): tensor for name, tensor in parts.items()}
        try:
            return self._bitsandbytes.QuantState.from_dict(tensors, device=torch.device("cpu"))
        except Exception as error:  # of many types: bitsandbytes trusts what it reads
            what = f"lacks some of what unpacks it, or has it garbled ({first_line(error)})"
            raise self._broken(weight, what) from error

    def _check_sizes(self) -> None:
        stored = self._source.specs
        for name, state in self._states.items():
            if name in stored and (wrong := misfit_in_four_bits(state, stored[name].nbytes)):
                raise self._broken(name, wrong)
        for name, scales in self._scales.items():
            if name not in stored:
                continue
            [held] = self._source.read([scales]).values()
            if wrong := misfit_in_eight_bits(held, stored[name].shape[0]):
                raise self._broken(name, wrong)
        for name, spec in self.specs.items():
            if name not in self.quantised and name.endswith("weight") and spec.dtype in (torch.uint8, torch.int8):
                raise self._broken(name, "lacks its scales")

    def _broken(self, weight: str, what: str) -> ValueError:
        return ValueError(
            f"{self._setting}: the quantised weight {weight!r} {what}. The files are cut short or broken: copy or "
            "download them again, or name the original 16-bit model with base=."
        )

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
    return bool(_quantised(names))


def packed_parts(names: Iterable[str]) -> set[str]:
    """Return those of ``names`` that are quantised weights, and what is stored beside these."""
    names = list(names)
    return {name for weight, parts in _quantised(names).items() for name in (weight, *parts)}.intersection(names)


def _quantised(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the quantised weights among tensors of these names, each with what may be stored beside it."""
    names = list(names)
    found: dict[str, list[str]] = {name[: name.find(_STATE)]: [] for name in names if _STATE in name}
    for name in names:
        for head in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            if head in found:
                found[head].append(name)
    for name in names:
        module, _, own = name.rpartition(".")
        if own == _SCALES:
            found[f"{module}.weight"] = [name, f"{module}.{_FORMAT}"]
    return found


def method(config: Mapping[str, Any]) -> str | None:
    """Return what has quantised the weights of a model with this ``config.json``; None: nothing."""
    found = config.get("quantization_config")
    if not found:
        return None
    return str(found.get("quant_method") or "bitsandbytes")
