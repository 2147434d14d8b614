"""Packed weights of a model on the meta device, for ``model.quantization=``.

As in training, these are the frozen weights of linear layers and of fused experts. Embeddings, the output layer, norms
and routers stay in the format that layers compute in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from omegaconf import OmegaConf
from torch import nn

from lightning_roundpipe.commands.command_line import Settings
from lightning_roundpipe.messages import did_you_mean
from lightning_roundpipe.planning.packing import BLOCK, Packed, PackedFormat, pack

NAMES = ("quantization", "double_quantization")
"""Settings of a model about quantisation."""


@dataclass(frozen=True)
class Quantization:
    """A format of packed weights.

    Args:
        form: the format of the weights.
        double: whether the scales of four-bit weights are in eight bits themselves.
    """

    form: PackedFormat
    double: bool = True

    @property
    def words(self) -> str:
        """The format as answers name it."""
        if self.form == "int8":
            return self.form
        return f"{self.form} with scales in {'8' if self.double else '32'} bits"


def read_quantization(model: str, own: Mapping[str, Any], changed: Settings = ()) -> Quantization | None:
    """Return the packed format of a model's weights; None if they are not packed.

    Args:
        model: name of the model, for messages.
        own: settings of the model itself, with ``quantization_config`` if its files have packed weights.
        changed: settings that the command line changes.

    Raises:
        ValueError: there is no such format, or ``double_quantization`` is neither true nor false.
    """
    packed = own.get("quantization_config") or {}
    found: dict[str, Any] = {"quantization": None, "double_quantization": True}
    found |= {name: own[name] for name in NAMES if name in own}
    if packed.get("quant_method") == "bitsandbytes":  # in a config.json of packed weights
        form = "int8" if packed.get("load_in_8bit") else packed.get("bnb_4bit_quant_type", "fp4")
        found = {"quantization": form, "double_quantization": packed.get("bnb_4bit_use_double_quant", False)}
    texts = [f"{name}={text}" for name, text in changed if name in NAMES]
    found |= {str(name): value for name, value in OmegaConf.from_dotlist(texts).items()}
    form, double = found["quantization"], found["double_quantization"]
    if not isinstance(double, bool):
        raise ValueError(f"model.double_quantization={double} of model={model} must be true or false.")
    if form in (None, "none"):
        return None
    if form not in (known := get_args(PackedFormat)):
        hint = did_you_mean(str(form), known)
        raise ValueError(f"model.quantization={form} must be one of null, {', '.join(known)}.{hint}")
    return Quantization(form, double)


def packed_weights(model: nn.Module, quantization: Quantization) -> dict[nn.Parameter, Packed]:
    """Return the weights of ``model`` that are in few bits. Adapters are not among them.

    Raises:
        ValueError: the model has experts that cannot be quantised, or adapters of quantised experts' weights.
    """
    from peft.tuners.lora.layer import ParamWrapper  # takes some seconds, with the libraries that it imports

    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    kept = {id(getattr(head, "weight", None))}
    found = {}
    for name, module in model.named_modules():
        if count := _experts_inside(module):
            kept |= {id(child.weight) for child in module.children() if _is_router(child, count)}
        for own, weight in module.named_parameters(recurse=False):
            if weight.requires_grad or id(weight) in kept:
                continue
            if weight.ndim == 3:
                _check_experts(f"{name}.{own}", module, weight, quantization)
            elif not (isinstance(module, nn.Linear) and own == "weight"):
                continue
            found[weight] = pack(weight.shape, quantization.form, quantization.double, weight.element_size())
        if isinstance(module, ParamWrapper):
            raise ValueError(
                f"model.quantization={quantization.form}: experts in few bits take no adapters of their own, and "
                f"{module.parameter_name} has some (lora.target_parameters). Adapt attention alone: lora=attention."
            )
    return found


def _experts_inside(module: nn.Module) -> int:
    """Return the most experts of a child of ``module``; 0 if none has experts."""
    weights = (weight for child in module.children() for weight in child.parameters(recurse=False))
    return max((len(weight) for weight in weights if weight.ndim == 3), default=0)


def _is_router(module: nn.Module, experts: int) -> bool:
    return isinstance(module, nn.Linear) and module.out_features in (1, experts)


def _check_experts(name: str, module: nn.Module, weight: nn.Parameter, quantization: Quantization) -> None:
    """Refuse experts that training cannot quantise."""
    setting = f"model.quantization={quantization.form}: {name}"
    if not hasattr(module, "is_transposed"):  # set by transformers on experts whose computation training can replace
        raise ValueError(
            f"{setting} of {type(module).__name__} holds experts in a way that cannot be quantised. Plan for "
            "model.quantization=null."
        )
    if quantization.form == "int8":
        raise ValueError(f"{setting} holds experts, which are quantised in four bits only: model.quantization=nf4.")
    if math.prod(weight.shape[1:]) % BLOCK:
        raise ValueError(
            f"{setting} has experts of {weight.shape[1]} x {weight.shape[2]} weights, which are no whole blocks of "
            f"{BLOCK}. Plan for model.quantization=null."
        )
