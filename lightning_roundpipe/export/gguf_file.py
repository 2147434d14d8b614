"""Writes a model as a GGUF file, which llama.cpp and programs that are built on it read.

A GGUF file has names, an order of rows and figures of its own for each architecture. What is written here is right for
the architectures in `ARCHITECTURES`, with the settings that `check_architecture` lets pass. All others are refused,
because a file that is nearly right loads and generates nonsense.

The header has the size of every tensor, so it is written first, and the weights follow one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lightning_roundpipe.export.gguf_tokenizer import write_tokenizer
from lightning_roundpipe.export.sources import Spec
from lightning_roundpipe.export.weights import Weights

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of ``model_type``, which are GGUF's names of them as well."""

_TYPES = {"auto": "F16", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "q8_0": "Q8_0"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""llama.cpp's numbers for files that have most weights in a type."""

_OTHERWISE = "Export safetensors, and convert those with llama.cpp's convert_hf_to_gguf.py"


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
            f"{_OTHERWISE}."
        )
    for name, fits in (
        ("hidden_act", config.hidden_act == "silu"),
        ("attention_bias", not getattr(config, "attention_bias", False)),
        ("mlp_bias", not getattr(config, "mlp_bias", False)),
        ("use_sliding_window", not getattr(config, "use_sliding_window", False)),
    ):
        if not fits:
            raise ValueError(
                f"format=gguf: a model with {name}={getattr(config, name)!r} is not written. {_OTHERWISE}."
            )
    rope = _rope(config)
    if (way := rope.get("rope_type", "default")) not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(f"format=gguf: a model with rope_type={way!r} is not written. {_OTHERWISE}.")
    if find_spec("gguf") is None:
        raise ImportError("format=gguf needs the package gguf: pip install gguf")


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
        arch = getattr(gguf.MODEL_ARCH, config.model_type.upper())
        known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        self._names: dict[str, str] = {}
        for parameter in weights.parameters:
            found = known.get_name(parameter, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ValueError(
                    f"format=gguf: GGUF has no name for the weight {parameter} of a {config.model_type}. {_OTHERWISE}."
                )
            self._names[parameter] = found
        self._types = {parameter: self._type_of(spec) for parameter, spec in weights.parameters.items()}

    @property
    def nbytes(self) -> int:
        """The size of the weights."""
        return sum(self._nbytes(parameter) for parameter in self._names)

    def write(self, path: Path, progress: Callable[[int], None]) -> None:
        """Write the file; ``progress`` is called with the bytes of each weight that has come.

        Raises:
            ValueError: a weight is too large for float16.
        """
        writer = self._gguf.GGUFWriter(path, self._config.model_type)
        try:
            self._add_facts(writer)
            write_tokenizer(writer, self._tokenizer, self._original, self._config)
            factors = _rope_factors(self._config)
            if factors is not None:
                writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
            for parameter, spec in self._weights.parameters.items():
                kind = self._types[parameter]
                writer.add_tensor_info(
                    self._names[parameter], spec.shape, np.dtype(np.float32), self._nbytes(parameter), raw_dtype=kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors)
            expected = iter(self._weights.parameters)
            for parameter, tensor in self._weights.by_parameter():
                assert parameter == next(expected)
                writer.write_tensor_data(self._stored(parameter, tensor))
                progress(self._nbytes(parameter))
        finally:
            writer.close()

    def _type_of(self, spec: Spec) -> Any:
        types = self._gguf.GGMLQuantizationType
        if len(spec.shape) < 2:
            return types.F32
        block, _ = self._gguf.GGML_QUANT_SIZES[types[self.type]]
        return types[self.type] if spec.shape[-1] % block == 0 else types.F16

    def _nbytes(self, parameter: str) -> int:
        block, size = self._gguf.GGML_QUANT_SIZES[self._types[parameter]]
        return self._weights.parameters[parameter].numel // int(block) * int(size)

    def _stored(self, parameter: str, tensor: Tensor) -> Any:
        values = tensor.float()
        config = self._config
        if config.model_type == "llama" and parameter.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in parameter else config.num_key_value_heads
            values = _paired(values, heads)
        kind = self._types[parameter]
        if kind == self._gguf.GGMLQuantizationType.F16 and values.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(
                f"format=gguf: {parameter} has values that float16 cannot hold. Set dtype=bfloat16 or dtype=q8_0."
            )
        return self._gguf.quants.quantize(np.ascontiguousarray(values.numpy()), kind)

    def _add_facts(self, writer: Any) -> None:
        config = self._config
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
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
    """Return what each frequency of the rotary embedding is divided by, for Llama 3.1's scaling; None for others.

    llama.cpp reads them as a tensor. The formula is that of Hugging Face's ``_compute_llama3_parameters``.
    """
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained = float(rope["original_max_position_embeddings"])
    turns = trained / (2 * math.pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
