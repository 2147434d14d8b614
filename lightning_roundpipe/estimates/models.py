"""Models, adapters and packed weights of a command line, on the meta device and without a network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_roundpipe.estimates.conf_files import Settings, is_path, read_choice, read_model
from lightning_roundpipe.estimates.meter import ATTENTION, attention
from lightning_roundpipe.estimates.packing import Packed, PackedFormat, pack
from lightning_roundpipe.messages import did_you_mean, first_line
from lightning_roundpipe.model.quantize_experts import check_sizes, fused_experts, routers
from lightning_roundpipe.model.rope import stretch
from lightning_roundpipe.planning.profile import Precision

_ABOUT_FILES = ("quantization_config", "dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path")
"""Keys of a config.json that are about its weights' files."""

_QUANTIZED = ("quantization", "double_quantization")
"""Settings of a model about quantisation."""

_ABOUT_WEIGHTS = ("weights", "dtype", *_QUANTIZED)
"""Settings of ``from_config`` about weights. They are ignored, so that the command line of a training works here."""

_DTYPES: Mapping[Precision, torch.dtype] = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
    "fp8": torch.bfloat16,
}
"""Compute dtype of each precision."""


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
    found |= {name: own[name] for name in _QUANTIZED if name in own}
    if packed.get("quant_method") == "bitsandbytes":  # in a config.json of packed weights
        form = "int8" if packed.get("load_in_8bit") else packed.get("bnb_4bit_quant_type", "fp4")
        found = {"quantization": form, "double_quantization": packed.get("bnb_4bit_use_double_quant", False)}
    texts = [f"{name}={text}" for name, text in changed if name in _QUANTIZED]
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


def read_config(text: str, changed: Settings = ()) -> tuple[PretrainedConfig, Quantization | None]:
    """Return the configuration of a model, and the format of its weights if they are in few bits.

    ``changed``: settings that the command line changes, as ``model.num_hidden_layers=4``.

    Raises:
        ValueError: there is no such model, or transformers does not take its settings.
    """
    settings = read_model(text)
    quantization = read_quantization(text, settings, changed)
    left_out = (*_ABOUT_WEIGHTS, *(_ABOUT_FILES if is_path(text) else ()))
    settings = {key: value for key, value in settings.items() if key not in left_out}
    changed = tuple((name, value) for name, value in changed if name not in _ABOUT_WEIGHTS)
    of_rope = tuple((name, value) for name, value in changed if name.partition(".")[0] == "rope")
    rope = _changed({"rope": settings.pop("rope", None)}, "model", of_rope, ("rope",))["rope"]
    if rope is not None and not isinstance(rope, Mapping):
        raise ValueError(f"model.rope={rope!r} must be a mapping: model.rope='{{rope_type: yarn, factor: 4.0}}'.")
    kind = settings.pop("model_type")
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(kind, CONFIG_MAPPING.keys())
        raise ValueError(f"model={text}: transformers has no model_type {kind!r}.{hint}")
    others = tuple(pair for pair in changed if pair not in of_rope)
    known = {*settings, *AutoConfig.for_model(kind).to_dict()} if others else ()
    settings = _changed(settings, "model", others, known)
    try:
        config: PretrainedConfig = AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise ValueError(f"model={text}: transformers does not take these settings: {first_line(error)}.") from error
    stretch(config, rope)
    return config, quantization


def make_model(config: PretrainedConfig, name: str, precision: Precision) -> nn.Module:
    """Return the model on the meta device, in the compute dtype of Lightning's ``precision``. ``name``: for messages.

    Raises:
        ValueError: it is not a causal language model.
    """
    AttentionInterface.register(ATTENTION, attention)
    build: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            try:
                model: nn.Module = build(config, dtype=_DTYPES[precision], attn_implementation=ATTENTION)
            except (KeyError, ValueError):  # some architectures allow only their own attention
                model = build(config, dtype=_DTYPES[precision], attn_implementation="eager")
    except Exception as error:
        raise ValueError(f"model={name} makes no causal language model: {first_line(error)}.") from error
    return model.train()


def with_adapters(model: nn.Module, name: str, lora: str, changed: Settings, packed_as: str | None) -> nn.Module:
    """Return the model with the adapters of ``lora``, whose settings the command line changes, as ``lora.r=16``.

    Raises:
        ValueError: the adapters do not fit the model, or are those of experts that are ``packed_as`` a format.
    """
    with warnings.catch_warnings(action="ignore"):  # of libraries about each other
        if not (settings := read_adapters(lora, changed)):
            return model
        from peft import LoraConfig, get_peft_model  # takes some seconds, with the libraries that it imports
        from peft.tuners.lora.layer import ParamWrapper

        try:
            # As under autocast, adapters compute in the format of the weights beside them.
            model = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
        except Exception as error:
            raise ValueError(f"lora={lora} does not fit model={name}: {first_line(error)}.") from error
    adapted = (module.parameter_name for module in model.modules() if isinstance(module, ParamWrapper))
    if packed_as and (one := next(adapted, None)):
        raise ValueError(
            f"model.quantization={packed_as}: experts in few bits take no adapters of their own, and {one} has some "
            "(lora.target_parameters). Adapt attention alone: lora=attention."
        )
    return model.train()


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


def read_adapters(lora: str, changed: Settings = ()) -> dict[str, Any]:
    """Return settings of ``LoraConfig``, from a choice of ``conf/lora`` or a file; empty without adapters."""
    settings = read_choice("lora", lora)
    if not changed:
        return settings
    if not settings:
        raise ValueError(
            f"lora.{changed[0][0]}= is about adapters, and lora={lora} has none: choose some, as lora=all_linear."
        )
    from peft import LoraConfig  # takes some seconds, with the libraries that it imports

    return _changed(settings, "lora", changed, [item.name for item in fields(LoraConfig)])


def _changed(settings: dict[str, Any], group: str, changed: Settings, known: Iterable[str]) -> dict[str, Any]:
    """Return ``settings`` with those of ``changed``, whose values are YAML: ``[q_proj, v_proj]`` is a list."""
    for name, text in changed:
        if name.partition(".")[0] not in known:
            hint = did_you_mean(name, known) or f" There are {', '.join(sorted(known))}."
            raise ValueError(f"{group}.{name}= is no setting of {group}=.{hint}")
        try:
            merged = OmegaConf.merge(settings, OmegaConf.from_dotlist([f"{name}={text}"]))
            settings = {str(key): value for key, value in OmegaConf.to_container(merged).items()}  # type: ignore[union-attr]
        except Exception as error:  # errors of yaml and of OmegaConf have no common base class
            raise ValueError(f"{group}.{name}={text} cannot be read: {first_line(error)}.") from None
    return settings
