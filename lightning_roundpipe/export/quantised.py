"""Weights that bitsandbytes has quantised, read as numbers.

A weight of four bits is stored with the tensors that say how to decode it: ``NAME.absmax``, ``NAME.quant_map``,
``NAME.quant_state.bitsandbytes__nf4`` and, quantised twice, ``NAME.nested_absmax`` and ``NAME.nested_quant_map``. One
of eight bits has the scale of each row beside it, as ``SCB``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.export.weight_sources import Source
from lightning_roundpipe.extras import need
from lightning_roundpipe.messages import first_line
from lightning_roundpipe.model.quantize_weight import shape_to_unpack
from lightning_roundpipe.model.quantized import misfit_in_eight_bits, misfit_in_four_bits

_STATE = ".quant_state.bitsandbytes__"
_SCALES = ".SCB"


class Dequantised:
    """``source`` with each quantised weight as one tensor of 16 bits.

    Args:
        setting: how an error names the weights.
        dtype: dtype of weights that do not say in which 16 bits they were: those of eight bits, and those that were
            quantised from fp32. What is read of those is fp32.

    Attributes:
        quantised: names of the quantised weights.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: a weight lacks some of what unpacks it, or has it in another size. Kernels would read beyond its
            end.
    """

    def __init__(self, source: Source, setting: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._source, self._setting = source, setting
        self._bitsandbytes: Any = need("bitsandbytes.functional", f"{setting} is quantised by bitsandbytes")
        self._states: dict[str, Any] = {}
        self._scales: dict[str, Tensor] = {}
        self.stored = source.stored
        self.specs = dict(source.specs)
        four = [name[: name.find(_STATE)] for name in source.specs if _STATE in name]
        for weight in four:
            self._add_four_bits(weight, dtype)
        for name in [name for name in source.specs if name.endswith(_SCALES)]:
            self._add_eight_bits(name.removesuffix(_SCALES), dtype)
        self.quantised = self._states.keys() | self._scales.keys()
        for name, spec in self.specs.items():
            if name not in self.quantised and name.endswith("weight") and spec.dtype in (torch.uint8, torch.int8):
                raise self._broken(name, "lacks its scales")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._numbers(name, tensor) for name, tensor in self._source.read(names).items()}

    def _add_four_bits(self, weight: str, dtype: torch.dtype) -> None:
        parts = [name for name in self._source.specs if name.startswith(f"{weight}.")]
        tensors = {name.removeprefix(f"{weight}."): tensor for name, tensor in self._source.read(parts).items()}
        try:
            state = self._bitsandbytes.QuantState.from_dict(tensors, device=torch.device("cpu"))
        except Exception as error:  # of many types: bitsandbytes trusts what it reads
            what = f"lacks some of what unpacks it, or has it garbled ({first_line(error)})"
            raise self._broken(weight, what) from error
        if wrong := misfit_in_four_bits(state, self._source.specs[weight].nbytes):
            raise self._broken(weight, wrong)
        own = dtype if state.dtype == torch.float32 else state.dtype
        self._states[weight] = state
        self.specs[weight] = torch.empty(tuple(state.shape), dtype=own, device="meta")
        for name in parts:
            del self.specs[name]

    def _add_eight_bits(self, module: str, dtype: torch.dtype) -> None:
        weight = f"{module}.weight"
        [scales] = self._source.read([module + _SCALES]).values()
        if wrong := misfit_in_eight_bits(scales, self._source.specs[weight].shape[0]):
            raise self._broken(weight, wrong)
        self._scales[weight] = scales
        self.specs[weight] = self.specs[weight].to(dtype)
        for name in (module + _SCALES, f"{module}.weight_format"):
            self.specs.pop(name, None)

    def _broken(self, weight: str, what: str) -> ValueError:
        return ValueError(
            f"{self._setting}: the quantised weight {weight!r} {what}. The files are cut short or broken: copy or "
            "download them again, or name the original 16-bit model with base=."
        )

    def _numbers(self, name: str, stored: Tensor) -> Tensor:
        if name in self._states:
            state = copy.copy(self._states[name])
            state.shape = torch.Size(shape_to_unpack(state.shape, state.blocksize))
            decoded: Tensor = self._bitsandbytes.dequantize_4bit(stored, state)
            return decoded.reshape(self.specs[name].shape)
        if name in self._scales:
            rows: Tensor = self._bitsandbytes.int8_vectorwise_dequant(stored, self._scales[name])
            return rows
        return stored


def is_quantised(names: Iterable[str]) -> bool:
    """Return whether tensors of these names are weights that bitsandbytes has quantised."""
    return any(_STATE in name or name.endswith(_SCALES) for name in names)
