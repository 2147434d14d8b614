"""Refuses GGUF files of which transformers would make another model without an error.

transformers reads a part of a file's figures and takes defaults for the rest. A default of another shape than the
weights is an error. A scaled rotary embedding and biases are left out silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PretrainedConfig

from lightning_roundpipe.model.quantize_weight import UnfitModelError

_OTHERWISE = "Take the same model as safetensors (model=hub, or model=folder without model.gguf_file)"


def check_rope(config: PretrainedConfig, path: Path, setting: str) -> None:
    """Raise if the file scales its rotary embedding and the ``config`` that transformers has made of it does not.

    Raises:
        UnfitModelError: it does.
    """
    import gguf

    own = getattr(config, "rope_parameters", None)
    if isinstance(own, Mapping) and own.get("rope_type", "default") != "default":
        return
    reader: Any = gguf.GGUFReader(path)
    scaling = [key for key in reader.fields if key.endswith(("rope.scaling.type", "rope.scale_linear"))]
    found = [key for key in scaling if reader.fields[key].contents() not in ("none", 1)]
    found += [t.name for t in reader.tensors if t.name.startswith("rope_") and not np.allclose(t.data, 1)]
    if found:
        raise UnfitModelError(
            f"{setting} has a rotary scaling ({', '.join(found)}) that transformers does not read from GGUF files, and "
            f"without it the model would compute something else. {_OTHERWISE}."
        )


def check_biases(model: nn.Module, path: Path, setting: str) -> None:
    """Raise if the file has biases that ``model`` lacks.

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
