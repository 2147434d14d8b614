"""Writes a model as a GGUF file, which llama.cpp and programs that are built on it read.

A GGUF file has names, an order of rows and figures of its own for each architecture. What is written here is right for
the architectures in `ARCHITECTURES`, with the settings that `check_architecture` lets pass. All others are refused,
because a file that is nearly right loads and generates nonsense.

The header has the size of every tensor, so it is written first, and the weights follow one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lightning_roundpipe.export.exported_weights import Weights
from lightning_roundpipe.export.gguf_tokenizer import OTHERWISE, write_tokenizer
from lightning_roundpipe.model.rope import llama3_factors

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""GGUF's names of them by ``model_type``."""

_TYPES = {"auto": "F16", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "q8_0": "Q8_0"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""llama.cpp's numbers for files that have most weights in a type."""

_USUAL_ROPE: dict[str, Any] = {
    "partial_rotary_factor": 1, "attention_factor": None, "beta_fast": 32, "beta_slow": 1, "mscale": None,
    "mscale_all_dim": None, "truncate": True,
}  # fmt: skip
"""Figures of rotary embeddings that a file is not given, and what llama.cpp takes for them."""


def check_architecture(config: PretrainedConfig) -> None:
    """Raise unless GGUF files of this model are written here.

    Raises:
        ValueError: another architecture, or a setting that llama.cpp computes otherwise.
        ImportError: the package gguf is not installed.
    """
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"format=gguf: models of the architecture {kind!r} are not written, only {', '.join(ARCHITECTURES)}. "
            f"{OTHERWISE}."
        )
    for name, fits in (
        ("hidden_act", config.hidden_act == "silu"),
        ("attention_bias", not getattr(config, "attention_bias", False)),
        ("mlp_bias", not getattr(config, "mlp_bias", False)),
        ("use_sliding_window", not getattr(config, "use_sliding_window", False)),
        ("norm_topk_prob", getattr(config, "norm_topk_prob", True)),
        ("decoder_sparse_step", getattr(config, "decoder_sparse_step", 1) == 1),
        ("mlp_only_layers", not getattr(config, "mlp_only_layers", None)),
    ):
        if not fits:
            raise ValueError(f"format=gguf: a model with {name}={getattr(config, name)!r} is not written. {OTHERWISE}.")
    rope = _rope(config)
    if (way := rope.get("rope_type", "default")) not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(f"format=gguf: a model with rope_type={way!r} is not written. {OTHERWISE}.")
    for name, usual in _USUAL_ROPE.items():
        if rope.get(name) not in (None, usual):
            raise ValueError(f"format=gguf: a model with {name}={rope[name]!r} is not written. {OTHERWISE}.")
    if find_spec("gguf") is None:
        raise ImportError("format=gguf needs the package gguf: pip install gguf")


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: Any


class GgufFile:
    """A GGUF file that is to be written.

    Args:
        weights: the model's weights.
        config: the model's configuration.
        dtype: a setting of the export, whose ``"auto"`` is float16. Vectors are always float32.
        name: what the file calls the model.
        tokenizer: the model's tokenizer; None: the file has none.
        original: the GGUF file that the model came from, whose tokenizer is taken as it stands.

    Raises:
        ValueError: the model is not one that is written here.
    """

    def __init__(
        self,
        weights: Weights,
        config: PretrainedConfig,
        dtype: str,
        name: str,
        tokenizer: PreTrainedTokenizerBase | None,
        original: Path | None,
    ) -> None:
        import gguf

        self._gguf: Any = gguf
        self._weights, self._config, self._name = weights, config, name
        self._tokenizer, self._original = tokenizer, original
        self.type = _TYPES[dtype]
        self._arch = ARCHITECTURES[config.model_type]
        known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, self._arch.upper()), config.num_hidden_layers)
        self._tensors: dict[str, list[_Tensor]] = {}
        for parameter, spec in weights.parameters.items():
            parts = self._tensors[parameter] = []
            for own, shape in _parts(parameter, spec.shape):
                found = known.get_name(own, try_suffixes=(".weight", ".bias"))
                if found is None:
                    raise ValueError(
                        f"format=gguf: GGUF has no name for the weight {parameter} of a {config.model_type}. "
                        f"{OTHERWISE}."
                    )
                name = found if found.endswith((".weight", ".bias")) else f"{found}.weight"
                parts.append(_Tensor(name, shape, self._type_of(name, shape)))

    @property
    def nbytes(self) -> int:
        """The size of the weights."""
        return sum(self._nbytes(tensor) for parts in self._tensors.values() for tensor in parts)

    def write(self, path: Path, progress: Callable[[int], None]) -> None:
        """Write the file; ``progress`` is called with the bytes of each weight that has come.

        Raises:
            ValueError: a weight is too large for float16.
        """
        writer = self._gguf.GGUFWriter(path, self._arch)
        try:
            self._add_facts(writer)
            write_tokenizer(writer, self._tokenizer, self._original, self._config)
            factors = _rope_factors(self._config)
            if factors is not None:
                writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
            for parts in self._tensors.values():
                for part in parts:
                    writer.add_tensor_info(
                        part.name, part.shape, np.dtype(np.float32), self._nbytes(part), raw_dtype=part.type
                    )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors)
            expected = iter(self._weights.parameters)
            for parameter, tensor in self._weights.by_parameter():
                assert parameter == next(expected)
                parts = self._tensors[parameter]
                for part, values in zip(parts, tensor.chunk(len(parts), dim=1 if len(parts) > 1 else 0), strict=True):
                    writer.write_tensor_data(self._stored(parameter, values, part.type))
                    progress(self._nbytes(part))
        finally:
            writer.close()

    def _type_of(self, name: str, shape: Sequence[int]) -> Any:
        types = self._gguf.GGMLQuantizationType
        if len(shape) < 2 or name.endswith("ffn_gate_inp.weight"):  # vectors, and routers as llama.cpp has them
            return types.F32
        block, _ = self._gguf.GGML_QUANT_SIZES[types[self.type]]
        return types[self.type] if shape[-1] % block == 0 else types.F16

    def _nbytes(self, tensor: _Tensor) -> int:
        block, size = self._gguf.GGML_QUANT_SIZES[tensor.type]
        return math.prod(tensor.shape) // int(block) * int(size)

    def _stored(self, parameter: str, tensor: Tensor, kind: Any) -> Any:
        values = tensor.float()
        config = self._config
        if config.model_type == "llama" and parameter.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in parameter else config.num_key_value_heads
            values = _paired(values, heads)
        if kind == self._gguf.GGMLQuantizationType.F16 and values.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(
                f"format=gguf: {parameter} has values that float16 cannot hold. Set dtype=bfloat16 or dtype=q8_0."
            )
        return self._gguf.quants.quantize(np.ascontiguousarray(values.numpy()), kind)

    def _add_facts(self, writer: Any) -> None:
        config = self._config
        heads, width = config.num_attention_heads, _head_dim(config)
        rope = _rope(config)
        writer.add_type("model")
        writer.add_name(self._name)
        writer.add_file_type(_FILE_TYPES[self.type])
        writer.add_quantization_version(self._gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        if config.model_type == "qwen3_moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_head_count(heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(width)
        writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
        if rope.get("rope_type") in ("linear", "yarn"):
            scaling = self._gguf.RopeScalingType
            writer.add_rope_scaling_type(scaling.LINEAR if rope["rope_type"] == "linear" else scaling.YARN)
            writer.add_rope_scaling_factor(float(rope["factor"]))
            if rope["rope_type"] == "yarn":
                trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
                writer.add_rope_scaling_orig_ctx_len(int(trained))


def _parts(parameter: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors that a parameter becomes: its own name, or those of two halves, and their shapes.

    Hugging Face keeps two weights of each expert in one parameter, one above the other.
    """
    if not parameter.endswith(".experts.gate_up_proj"):
        return [(parameter, shape)]
    experts, rows, columns = shape
    return [(parameter.replace("gate_up_proj", own), (experts, rows // 2, columns)) for own in ("gate_proj", "up_proj")]


def _rope(config: PretrainedConfig) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return found


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Return a projection with its rows in llama.cpp's order.

    A rotary embedding turns pairs of rows. Hugging Face's Llama pairs a row with that half a head further on, llama.cpp
    with the next one.
    """
    rows, *rest = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def _rope_factors(config: PretrainedConfig) -> Any:
    """Return what each frequency of the rotary embedding is divided by, for Llama 3.1's scaling; None for others."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    return llama3_factors(rope, _head_dim(config))


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
