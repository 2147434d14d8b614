"""Makes models with weights in four or eight bits, for QLoRA: as they are read, or of a model in memory.

The result is what ``AutoModelForCausalLM.from_pretrained(..., quantization_config=BitsAndBytesConfig(...))`` gives,
with the modules of bitsandbytes in place of linear layers, and it is trained and saved in the same way. In addition,
experts are packed, and of a model that is read, about one weight at a time is held in 16 bits::

    model = from_pretrained("Qwen/Qwen3-30B-A3B", "nf4")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))

Nothing here depends on the strategy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from lightning_roundpipe.extras import need
from lightning_roundpipe.model.quantized import is_packed

if TYPE_CHECKING:
    from peft import PeftConfig

QUANTIZATIONS = ("nf4", "fp4", "int8")
"""Formats of packed weights: two of four bits, one of eight."""

_HUB = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip
"""Options of ``from_pretrained`` that say where files are, for the configuration as for the weights."""


def check_quantization(quantization: str | None) -> None:
    """Raise unless weights can be packed so; None: they stay as they are."""
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(f"model.quantization={quantization!r} must be null or one of {', '.join(QUANTIZATIONS)}.")
    if quantization is not None:
        _need_packages(f"model.quantization={quantization!r}")


def stored_quantization(config: PretrainedConfig, setting: str, quantization: str | None) -> str | None:
    """Return the format that a checkpoint's weights are stored in, by its configuration; None for plain weights.

    Raises:
        ValueError: it is none of `QUANTIZATIONS`, or another one than ``quantization`` asks for.
        ImportError: a package is missing.
    """
    stored: Any = getattr(config, "quantization_config", None)
    if not stored:
        return None
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    packed = stored.get("load_in_4bit") or stored.get("load_in_8bit")
    method = "bitsandbytes" if packed else stored.get("quant_method") or "what config.json does not name"
    if method != "bitsandbytes":
        raise ValueError(
            f"{setting} is quantised with {method}, and only bitsandbytes' formats can be trained: "
            f"{', '.join(QUANTIZATIONS)}. Take the same model with weights in 16 bits, and set model.quantization=nf4."
        )
    kind = "int8" if stored.get("load_in_8bit") else str(stored.get("bnb_4bit_quant_type", "fp4"))
    if quantization not in (None, kind):
        raise ValueError(
            f"model.quantization={quantization!r}: {setting} is already quantised, as {kind}. Set "
            f"model.quantization={kind}, or take weights in 16 bits."
        )
    _need_packages(f"{setting}, which is quantised as {kind},")
    return kind


def from_pretrained(
    path: str | Path,
    quantization: str | None = None,
    *,
    double_quantization: bool = True,
    dtype: str | torch.dtype = "auto",
    **options: Any,
) -> Any:
    """Return a causal language model that is packed weight by weight while it is read.

    Args:
        path: a folder, or the name of a model on the hub. It may be quantised already, then that format is kept.
        quantization: one of `QUANTIZATIONS`; None: that of the files.
        double_quantization: quantise the scales of ``nf4`` and ``fp4`` too, as QLoRA does.
        dtype: of all other weights and of the computation; ``"auto"``: that of the files.
        options: others of transformers' ``from_pretrained``, such as ``revision`` or ``attn_implementation``.

    Raises:
        ValueError: the format does not exist, or the files are quantised in another one or lack parts.
        ImportError: a package is missing.
    """
    from lightning_roundpipe.model import quantize_loader

    check_quantization(quantization)
    config = options.pop("config", None)
    if config is None:
        where = {name: options[name] for name in _HUB if name in options}
        config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **options)
        options = rest | where
    stored = stored_quantization(config, str(path), quantization)
    named = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    computed: torch.dtype = getattr(torch, named) if isinstance(named, str) else named
    packing: Any = None
    if stored is None and quantization is not None:
        packing = quantize_loader.configuration(quantization, double_quantization, computed)
    elif stored is not None and isinstance(config.quantization_config, dict):
        config.quantization_config["bnb_4bit_compute_dtype"] = str(computed).removeprefix("torch.")
    with quantize_loader.installed():
        return AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, device_map="cpu", quantization_config=packing, **options
        )


def quantize(model: PreTrainedModel, quantization: str, *, double_quantization: bool = True) -> PreTrainedModel:
    """Return ``model`` with packed weights. The other weights are shared with it.

    Raises:
        ValueError: the format does not exist, or ``model`` is none that can be packed: it has adapters, is quantised
            already, or is not transformers'.
        ImportError: a package is missing.
    """
    from lightning_roundpipe.model import quantize_loader

    check_quantization(quantization)
    _refuse_unfit(model)
    packing = quantize_loader.configuration(quantization, double_quantization, model.dtype)
    with quantize_loader.installed(), without_progress_bars():
        made: PreTrainedModel = type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), dtype=model.dtype, device_map="cpu",
            quantization_config=packing,
        )  # fmt: skip
    return made


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide Hugging Face's progress bars."""
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_unfit(model: nn.Module) -> None:
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"PeftModel", "BaseTunerLayer"}:
        raise ValueError("quantize() takes a model without adapters: quantise it first, then call get_peft_model.")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"quantize() takes a model of transformers, not a {type(model).__name__}. Put bitsandbytes.nn.Linear4bit "
            "into modules of your own: they are trained, too."
        )
    if is_quantized(model):
        raise ValueError("quantize(): the model is quantised already. Take it with weights in 16 bits.")


def is_quantized(model: nn.Module) -> bool:
    """Return whether any weight is packed."""
    return any(is_packed(parameter) for parameter in model.parameters())


def refuse_full_training(model: nn.Module) -> None:
    """Raise if not all weights of ``model`` can be trained because some are packed."""
    if is_quantized(model):
        raise ValueError(
            "The model is quantised, and packed weights cannot be trained: train adapters (lora=all_linear), or all "
            "weights of a model with model.quantization=null."
        )


def refuse_adapted_experts(model: nn.Module, lora: PeftConfig) -> None:
    """Raise if ``lora``, as PEFT has completed it, asks for adapters in packed experts, which PEFT leaves out."""
    from lightning_roundpipe.model.quantize_experts import ExpertWeights

    experts = [name for name, module in model.named_modules() if isinstance(module, ExpertWeights)]
    for target in sorted(getattr(lora, "target_parameters", None) or ()):
        if found := next((name for name in experts if name == target or name.endswith(f".{target}")), None):
            raise ValueError(
                f"lora asks for adapters in experts that are quantised ({found}), and PEFT adapts experts in 16 or 32 "
                "bits only. Use lora=attention, or model.quantization=null."
            )


def stored_beside(model: nn.Module, weights: Collection[str]) -> set[str]:
    """Return the names in a state dictionary, other than their own, under which packed ``weights`` are stored.

    The parts of a packed weight are stored under names that begin with these or with the weight's own.
    """
    from lightning_roundpipe.model.quantize_experts import ExpertWeights

    experts = {name for name, module in model.named_modules() if isinstance(module, ExpertWeights)}
    scales = {f"{name.removesuffix('weight')}{part}" for name in weights for part in ("SCB", "weight_format")}
    return {name for name in experts if f"{name}.weight" in weights} | scales


def _need_packages(why: str) -> None:
    for package in ("bitsandbytes", "accelerate"):
        need(package, f"{why} needs {package}")
