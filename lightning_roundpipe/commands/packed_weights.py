"""Packed weights of a model on the meta device, for ``model.quantization=``: those that training packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from omegaconf import OmegaConf
from torch import nn

from lightning_roundpipe.commands.command_line import Settings
from lightning_roundpipe.messages import did_you_mean
from lightning_roundpipe.model.quantize_experts import check_sizes, fused_experts, routers
from lightning_roundpipe.planning.packing import Packed, PackedFormat, pack

NAMES = ("quantization", "double_quantization")
"""Settings of a model about quantisation."""


@dataclass(frozen=True)
class Quantization:
    """A format of packed weights. ``double``: whether scales of four-bit weights are in eight bits themselves."""

    form: PackedFormat
    double: bool = True

    @property
    def words(self) -> str:
        """The format as answers name it."""
        if self.form == "int8":
            return self.form
        return f"{self.form} with scales in {'8' if self.double else '32'} bits"


def read_quantization(model: str, own: Mapping[str, Any], changed: Settings = ()) -> Quantization | None:
    """Return the packed format of a model's weights; None if they are not packed. Settings of the model are its
    ``own``, and those that the command line has ``changed``.
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
    """Return the weights of ``model`` that training would pack. ``model`` has no adapters yet.

    Raises:
        ValueError: the model has experts that cannot be packed.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    kept = {id(getattr(head, "weight", None)), *(id(model.get_submodule(name).weight) for name in routers(model))}
    linear: list[Any] = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    experts = {name: module.get_parameter(own) for name, module, own in fused_experts(model)}
    for name, weight in experts.items():
        if quantization.form == "int8":
            raise ValueError(
                f"model.quantization=int8: {name} holds experts, which are quantised in four bits only: "
                "model.quantization=nf4."
            )
        check_sizes(name, weight.shape)
    return {
        weight: pack(weight.shape, quantization.form, quantization.double, weight.element_size())
        for weight in (*linear, *experts.values())
        if id(weight) not in kept
    }
