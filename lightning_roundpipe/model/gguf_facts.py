"""What a GGUF file says of its model and transformers does not read: sizes of heads and experts, and rotary scaling.

transformers takes a part of a file's figures and defaults for the rest. Where a default has another shape than the
weights, loading fails; a scaled rotary embedding has no weights, so the model loads and computes something else. The
figures here are put into the configuration before a model is made of it. What has no place there is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PretrainedConfig

from lightning_roundpipe.model.quantize_weight import UnfitModelError
from lightning_roundpipe.model.rope import llama3_factors, stretch

_SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Figures of files, and their names in configurations."""

_OWN_HEADS = ("gemma4_text",)
"""Architectures whose heads have two sizes, of which a file's figure is not ``head_dim``."""

_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that llama.cpp divides the frequencies of the rotary embedding by."""

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Scaling of Llama 3.1, 3.2 and 3.3. A file has its result only."""

_OTHERWISE = "Take the same model as safetensors (model=hub, or model=folder without model.gguf_file)"


def complete(config: PretrainedConfig, path: Path, setting: str) -> None:
    """Put what the GGUF file at ``path`` says into the ``config`` that transformers has made of it.

    Raises:
        UnfitModelError: the file has a rotary scaling that no configuration expresses, or that is not known here.
    """
    import gguf

    reader: Any = gguf.GGUFReader(path)
    prefix = f"{reader.fields['general.architecture'].contents()}."
    said = {key.removeprefix(prefix): field for key, field in reader.fields.items() if key.startswith(prefix)}
    for key, name in _SIZES.items():
        if key in said and hasattr(config, name) and config.model_type not in _OWN_HEADS:
            setattr(config, name, int(said[key].contents()))
    own = getattr(config, "rope_parameters", None)
    if isinstance(own, Mapping) and own.get("rope_type", "default") != "default":
        return  # a scaling that the architecture has by itself
    scaling = {k.removeprefix("rope.scaling."): said[k].contents() for k in said if k.startswith("rope.scaling.")}
    if "rope.scale_linear" in said:  # what old files have
        scaling |= {"type": "linear", "factor": said["rope.scale_linear"].contents()}
    factors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name in _FACTORS}
    wanted = _scaling(config, scaling, factors, setting)
    if wanted is None:
        return
    try:
        stretch(config, wanted | {"max_position_embeddings": config.max_position_embeddings})
    except ValueError as error:
        raise UnfitModelError(f"{setting} has the rotary scaling {wanted}: {error} {_OTHERWISE}.") from error


def check_biases(model: nn.Module, path: Path, setting: str) -> None:
    """Raise if the file has biases that ``model`` lacks: transformers leaves them out without a word.

    Raises:
        UnfitModelError: it has.
    """
    import gguf

    reader: Any = gguf.GGUFReader(path)
    stored = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors if tensor.name.endswith(".bias")}
    taken = sum(tensor.numel() for name, tensor in model.state_dict().items() if name.endswith("bias"))
    if sum(stored.values()) > taken:
        raise UnfitModelError(
            f"{setting} has biases, {min(stored)} among them, that transformers does not read from GGUF files of this "
            f"architecture. {_OTHERWISE}."
        )


def _scaling(
    config: PretrainedConfig, said: Mapping[str, Any], factors: Mapping[str, Any], setting: str
) -> dict[str, Any] | None:
    """Return the file's rotary scaling as transformers has it; None: there is none."""
    kind = said.get("type", "none")
    changed = {name for name, values in factors.items() if not np.allclose(values, 1)}
    if kind == "none" and not changed:
        return None
    if kind == "none" and changed == {"rope_freqs.weight"}:
        made = _llama3(config, factors["rope_freqs.weight"])
        if made is not None:
            return made
    elif kind == "linear" and not changed:
        return {"rope_type": "linear", "factor": float(said["factor"])} if said.get("factor", 1) != 1 else None
    elif kind == "yarn" and not changed and said.keys() <= {"type", "factor", "original_context_length", "finetuned"}:
        trained = int(said.get("original_context_length", config.max_position_embeddings))
        return {"rope_type": "yarn", "factor": float(said["factor"]), "original_max_position_embeddings": trained}
    what = ", ".join([*(f"rope.scaling.{key}={value}" for key, value in said.items()), *sorted(changed)])
    raise UnfitModelError(
        f"{setting} has a rotary scaling ({what}) that is not read from GGUF files, and without it the model would "
        f"compute something else. {_OTHERWISE}."
    )


def _llama3(config: PretrainedConfig, factors: Any) -> dict[str, Any] | None:
    """Return the scaling whose result ``factors`` are; None if it is not one of Llama 3.1's kind."""
    rope = config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    trained = 1
    while trained <= config.max_position_embeddings:
        made = _LLAMA3 | {"factor": float(factors.max()), "original_max_position_embeddings": trained}
        found = llama3_factors({"rope_theta": rope.get("rope_theta", 10_000.0)} | made, width)
        if found.shape == factors.shape and np.allclose(found, factors, rtol=1e-4):
            return made
        trained *= 2
    return None
