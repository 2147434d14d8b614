"""The weights of a model that bitsandbytes has quantised, as numbers. The packed model is in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_roundpipe.model.quantize_experts import ExpertWeights
from lightning_roundpipe.model.quantize_weight import shape_to_unpack
from lightning_roundpipe.model.quantized import is_packed


class Unpacked:
    """The weights of ``model``, each packed one as one tensor of 16 bits.

    Args:
        dtype: dtype of weights that do not say in which 16 bits they were: those of eight bits, and those that were
            quantised from fp32. What is read of those is fp32.

    Attributes:
        quantised: names of the packed weights.
    """

    stored = False

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> None:
        self._bitsandbytes: Any = import_module("bitsandbytes.functional")
        experts = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ExpertWeights)}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        state, known = model.state_dict(), parameters.keys() | dict(model.named_buffers()).keys()
        self._tensors: dict[str, Any] = {name: tensor for name, tensor in state.items() if name in known}
        self._tensors |= {n.removesuffix(".weight") if n in experts else n: p for n, p in parameters.items()}
        self.quantised = {name for name, tensor in self._tensors.items() if is_packed(tensor)}
        self.specs = {name: self._spec(tensor, dtype) for name, tensor in self._tensors.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._numbers(self._tensors[name]) for name in names}

    @staticmethod
    def _spec(tensor: Any, dtype: torch.dtype) -> Tensor:
        shape, own = tensor.shape, tensor.dtype
        if is_packed(tensor):
            state = getattr(tensor, "quant_state", None)
            shape = shape if state is None else state.shape
            own = dtype if state is None or state.dtype is torch.float32 else state.dtype
        return torch.empty(shape, dtype=own, device="meta")

    def _numbers(self, tensor: Any) -> Tensor:
        if not is_packed(tensor):
            numbers: Tensor = tensor.detach()
        elif (packing := getattr(tensor, "quant_state", None)) is None:
            numbers = self._bitsandbytes.int8_vectorwise_dequant(tensor.detach(), tensor.SCB)
        else:
            state = copy.copy(packing)
            state.shape = torch.Size(shape_to_unpack(packing.shape, packing.blocksize))
            numbers = self._bitsandbytes.dequantize_4bit(tensor.detach(), state).reshape(packing.shape)
        return numbers
