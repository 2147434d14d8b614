"""What transformers' loader of quantised models lacks: experts, weights packed in pieces, and files that lack scales.

transformers reads a checkpoint weight by weight and gives each one that is to be quantised to its quantizer, which is
how no more than one weight is ever held in 16 bits. The quantizers here are transformers' own with three differences:

- they also pack the weights of experts, which transformers leaves in 16 bits;
- they pack a weight in pieces, where bitsandbytes takes 11 bytes for each element on a CPU. Pieces
  give the same bytes, as blocks and rows are independent of each other;
- linear layers beside experts, which choose among them, stay as they are.

Models get the same marks as from transformers, so that PEFT and ``save_pretrained`` know them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
from typing_extensions import override

from lightning_roundpipe.heap import give_back
from lightning_roundpipe.model.quantize_experts import (
    BLOCK,
    IMPLEMENTATION,
    ExpertWeights,
    UnfitModelError,
    check_sizes,
    fused_experts,
    routers,
)
from lightning_roundpipe.model.quantized import misfit

_PARTS = (
    "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4",
    "quant_state.bitsandbytes__fp4",
)  # fmt: skip

_NESTED_BLOCK = 256
"""Scales that share a scale of their own, where scales are quantised too."""

_PIECE = 1 << 19
"""Elements of a piece for each core: they stay in its cache."""

_TRIM_EVERY = 16 << 20
"""Bytes of packed weights in their first format, after which freed memory is returned to the system. A packed weight
takes a part of the memory that the weight before it was in, and the rest is too small for the next weight."""

_installing = threading.Lock()


class _Pack(ConversionOps):
    """Packs what the loader has read of one parameter."""

    def __init__(self, quantizer: Any) -> None:
        self._quantizer = quantizer

    @override
    def convert(self, input_dict: dict[str, Any], *patterns: Any, **options: Any) -> dict[str, Any]:
        given = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: self._quantizer.packed(options["model"], name, value) for name, value in given.items()}


class _Unite(ConversionOps):
    """Makes one parameter of the bytes and scales of experts, which files hold under names of their own."""

    def __init__(self, quantizer: Any, name: str) -> None:
        self.hf_quantizer, self._name = quantizer, name

    @override
    def convert(self, input_dict: dict[str, Any], *patterns: Any, **options: Any) -> dict[str, Any]:
        params: Any = import_module("bitsandbytes.nn")
        tensors = {re.sub(r"\\(.)", r"\1", key): value[0] for key, value in input_dict.items()}
        weight = tensors.pop(self._name)
        if not tensors:  # in 16 bits, as transformers leaves experts
            return {self._name: weight}
        stats = {key.removeprefix(f"{self._name}."): value for key, value in tensors.items()}
        return {self._name: params.Params4bit.from_prequantized(weight, stats, device="cpu")}


class _Quantizer:
    """What both kinds of quantizers here share, over one of transformers' own: all but `_find_experts` and `_pack`."""

    experts: tuple[str, ...] = ()
    _untrimmed = 0

    def _process_model_before_weight_loading(self: Any, model: PreTrainedModel, *args: Any, **options: Any) -> None:
        if not self.pre_quantized and (kept := routers(model)):
            skipped = sorted({*get_keys_to_not_convert(model), *kept})
            self.quantization_config.llm_int8_skip_modules = skipped
        super()._process_model_before_weight_loading(model, *args, **options)  # type: ignore[misc]
        self._find_experts(model)

    def _process_model_after_weight_loading(self: Any, model: PreTrainedModel, **options: Any) -> Any:
        for name in self.experts:
            prefix, _, own = name.rpartition(".")
            module = model.get_submodule(prefix)
            weight = module._parameters[own]
            if type(weight).__name__ == "Params4bit":
                check_sizes(name, cast(Any, weight).quant_state.shape, cast(Any, weight).quant_state.blocksize)
                del module._parameters[own]
                setattr(module, own, ExpertWeights(cast(nn.Parameter, weight)))
        _forget_conversions(model, self.experts)
        give_back()
        for name, module in model.named_modules():
            if wrong := misfit(module):
                raise ValueError(f"the quantised weight of {name!r} {wrong}")
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # Otherwise the first evaluation on a CPU that has these instructions rounds the scales and packs the
                # weight for a kernel without gradients, and training after it computes none.
                cast(Any, module).support_avx512bf16_for_cpu = False
        return super()._process_model_after_weight_loading(model, **options)  # type: ignore[misc]

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def packed(self: Any, model: PreTrainedModel, name: str, weight: Tensor) -> Any:
        """Return the parameter ``name`` of ``model``, packed from ``weight``."""
        module = model.get_submodule(name.rpartition(".")[0])
        if issubclass(getattr(module, "source_cls", object), Conv1D):
            weight = weight.t()
        made = self._pack(weight, module)
        module._is_hf_initialized = True  # type: ignore[assignment]
        self._untrimmed += weight.nbytes
        if self._untrimmed >= _TRIM_EVERY:
            self._untrimmed = 0
            give_back()
        return made


class Quantizer4bit(_Quantizer, Bnb4BitHfQuantizer):
    """Linear layers and experts in ``nf4`` or ``fp4``."""

    def _find_experts(self, model: PreTrainedModel) -> None:
        found = [(name, module._parameters[own]) for name, module, own in fused_experts(model)]
        for name, parameter in found:
            assert parameter is not None
            check_sizes(name, parameter.shape)
        self.experts = tuple(name for name, _ in found)
        if found:
            model.set_experts_implementation(IMPLEMENTATION)

    @override
    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **options: Any) -> bool:
        return param_name in self.experts or super().param_needs_quantization(model, param_name, **options)

    @override
    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        found: list[Any] = super().update_weight_conversions(weight_conversions, model)  # type: ignore[no-untyped-call]
        if not self.pre_quantized:
            return found
        of_experts = []
        for name in self.experts:
            sources = [re.escape(key) for key in (*(f"{name}.{part}" for part in _PARTS), name)]
            of_experts.append(WeightConverter(sources, [name], [_Unite(self, name)]))
        return of_experts + found

    def _pack(self, weight: Tensor, module: nn.Module) -> Tensor:
        config = self.quantization_config
        own = module if hasattr(module, "quant_state") else None
        return pack_4bit(weight, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, own)


class Quantizer8bit(_Quantizer, Bnb8BitHfQuantizer):
    """Linear layers in ``int8``."""

    def _find_experts(self, model: PreTrainedModel) -> None:
        found = next((name for name, *_ in fused_experts(model)), None)
        if found is not None and not self.pre_quantized:
            raise UnfitModelError(
                f"model.quantization='int8' is not supported for experts such as {found}: use model.quantization=nf4."
            )

    def _pack(self, weight: Tensor, module: nn.Module) -> Tensor:
        return pack_8bit(weight)


def configuration(quantization: str, double: bool, compute: torch.dtype) -> BitsAndBytesConfig:
    """Return transformers' configuration of ``nf4``, ``fp4`` or ``int8``."""
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute,
    )


@contextmanager
def installed() -> Iterator[None]:
    """Make ``from_pretrained`` use the quantizers of this file."""
    ours = {"bitsandbytes_4bit": Quantizer4bit, "bitsandbytes_8bit": Quantizer8bit}
    mapping: Any = auto.AUTO_QUANTIZER_MAPPING
    with _installing:
        theirs = {key: mapping[key] for key in ours}
        mapping.update(ours)
        try:
            yield
        finally:
            mapping.update(theirs)


def _forget_conversions(model: PreTrainedModel, experts: tuple[str, ...]) -> None:
    """Keep of what ``save_pretrained`` reverts the names: it cannot cut packed weights into those of single experts."""
    kept: list[WeightTransform] = []
    for conversion in cast(Any, model)._weight_conversions or ():
        operations = getattr(conversion, "operations", ())
        of_experts = any(re.search(rf"{re.escape(t)}$", name) for t in conversion.target_patterns for name in experts)
        if not any(hasattr(operation, "hf_quantizer") for operation in operations) and not (operations and of_experts):
            kept.append(conversion)
    cast(Any, model)._weight_conversions = kept


def pack_4bit(weight: Tensor, kind: str, double: bool, module: nn.Module | None = None) -> nn.Parameter:
    """Return ``weight``, of any shape, as bitsandbytes' ``Params4bit``, of ``kind`` ``"nf4"`` or ``"fp4"``.

    ``double``: quantise the scales too. ``module``: the ``Linear4bit`` that the weight is for.
    """
    functional: Any = import_module("bitsandbytes.functional")
    params: Any = import_module("bitsandbytes.nn").Params4bit
    pieces = torch.split(weight.detach().contiguous().view(-1), _PIECE * torch.get_num_threads())
    packed = [functional.quantize_4bit(piece, blocksize=BLOCK, quant_type=kind) for piece in pieces]
    state = packed[-1][1]
    state.shape, state.absmax = weight.shape, torch.cat([of_piece.absmax for _, of_piece in packed])
    if double:  # over all scales at once: their mean is one number
        state.nested, state.offset = True, state.absmax.mean()
        state.absmax, state.state2 = functional.quantize_blockwise(state.absmax - state.offset, blocksize=_NESTED_BLOCK)
    stored = torch.cat([data for data, _ in packed])
    made: nn.Parameter = params(
        stored, quant_state=state, compress_statistics=double, quant_type=kind, module=module, bnb_quantized=True
    )
    if module is not None:
        module.quant_state = state
    return made


def pack_8bit(weight: Tensor) -> nn.Parameter:
    """Return a matrix as bitsandbytes' ``Int8Params``: each row has a scale."""
    functional: Any = import_module("bitsandbytes.functional")
    rows = max(1, _PIECE * torch.get_num_threads() // weight.shape[1])
    pieces = [functional.int8_vectorwise_quant(part.contiguous().half()) for part in torch.split(weight.detach(), rows)]
    packed, scales = (torch.cat([piece[i] for piece in pieces]) for i in range(2))
    made: nn.Parameter = import_module("bitsandbytes.nn").Int8Params(packed, requires_grad=False, CB=packed, SCB=scales)
    return made
