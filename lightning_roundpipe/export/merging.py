"""Merges PEFT adapters into one module at a time.

PEFT merges adapters into a model that is in memory. Here the model is a skeleton: all of its weights are on the meta
device, and only what was trained is in memory. The weights of one module are put in, PEFT merges, and the result is
taken out. So every kind of adapter that PEFT can merge is merged by PEFT's own code, in fp32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from lightning_roundpipe.export.quantised import packed_parts
from lightning_roundpipe.messages import plural

_IN_PEFT = "base_model.model."
"""What PEFT puts before the names of a model's weights."""

_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base model as it is."""

_UNMERGEABLE = (
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Settings of ``LoraConfig`` whose adapters are no fixed change of a weight, or are not tested."""


class Adapters:
    """Trained adapters, and the skeleton of the model that they belong to.

    Args:
        model: the skeleton, which gets the adapters.
        config: the adapters' configuration.
        trained: what was trained: names of PEFT's ``adapter_model.safetensors``, or those of a state dict, with
            anything before ``base_model.model.``.
        where: how an error names the file.

    Attributes:
        modules: names of the modules that are merged, each with its parameters' names.
        replaced: parameters outside of those that were trained, too, such as biases.

    Raises:
        ValueError: the adapters are those of another model, cannot be merged, or are not finite.
    """

    def __init__(self, model: PreTrainedModel, config: PeftConfig, trained: Mapping[str, Tensor], where: str) -> None:
        self._where = where
        self._model = _wrapped(model, config, where)
        self._load(trained)
        inner: Any = self._model.base_model.model
        self._wrappers: dict[str, nn.Module] = dict(_outermost(inner))
        self.modules = {name: tuple(_parameters(name, module)) for name, module in self._wrappers.items()}
        inside = tuple(f"{name}." for name in self._wrappers)
        self.replaced = {
            name: parameter.detach()
            for name, parameter in inner.named_parameters()
            if not parameter.is_meta and not name.startswith(inside)
        }

    @property
    def config(self) -> PeftConfig:
        """The configuration, with names of modules where it had a word for them."""
        return self._model.peft_config["default"]

    def merge(self, module: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of a module with its adapters merged into them.

        Args:
            module: one of ``modules``.
            weights: the base model's values, fp32. They are changed.
        """
        wrapper: Any = self._wrappers[module]
        base: Any = _base(wrapper)
        filled: list[tuple[Any, str, Parameter]] = []
        for name in () if base is None else self.modules[module]:
            owner, attribute = _owner(base, name.removeprefix(f"{module}."))
            empty = getattr(owner, attribute)
            if empty.is_meta:  # a bias may have been trained
                filled.append((owner, attribute, empty))
                setattr(owner, attribute, Parameter(weights[name], requires_grad=False))
        with torch.no_grad():
            if hasattr(wrapper, "unload_and_optionally_merge_module"):
                merged = wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                wrapper.merge()
                merged = wrapper.get_base_layer()
        found = {f"{module}.{name}": parameter.detach() for name, parameter in merged.named_parameters()}
        for owner, attribute, empty in filled:
            setattr(owner, attribute, empty)
        return {name: found[name] for name in self.modules[module]}

    def save(self, folder: str, base: str | None) -> None:
        """Write the adapters as PEFT does, for a base model of that name."""
        self.config.base_model_name_or_path = base
        self.config.inference_mode = True
        self._model.save_pretrained(folder, save_embedding_layers=False)

    def _load(self, trained: Mapping[str, Tensor]) -> None:
        wanted = {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        for name in wanted:
            owner, attribute = _owner(self._model, name)
            shape = getattr(owner, attribute).shape
            setattr(owner, attribute, Parameter(torch.zeros(shape, dtype=torch.float32)))
        at = {name: name.find(_IN_PEFT) for name in trained}
        tensors = {name[at[name] :]: tensor for name, tensor in trained.items() if at[name] >= 0}
        for name in packed_parts(tensors):  # of the base model, in a checkpoint that has all of it
            del tensors[name]
        if not tensors:
            raise ValueError(f"{self._where} holds no adapters of PEFT: no weight has {_IN_PEFT!r} in its name.")
        try:
            if any(".default" in name for name in tensors):
                # A state dict: files of adapters leave the adapter's name out.
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # the base model's
                    result = self._model.load_state_dict(tensors, strict=False)
            else:
                result = set_peft_model_state_dict(self._model, tensors)
        except (RuntimeError, KeyError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            said = next((line for line in lines if "size mismatch" in line), lines[0]).rstrip(".")
            raise ValueError(f"{self._where} does not fit the base model: {said}. {_OTHER_BASE}") from error
        if result.unexpected_keys:
            raise ValueError(
                f"{self._where} does not fit the base model, which has no {_plain(min(result.unexpected_keys))}. "
                f"{_OTHER_BASE}"
            )
        if lacking := sorted(wanted & set(result.missing_keys)):
            raise ValueError(
                f"{self._where} does not fit the base model: it lacks {len(lacking)} of "
                f"{plural(len(wanted), 'trained tensor')}, {_plain(lacking[0])} first. {_OTHER_BASE}"
            )
        values = dict(self._model.named_parameters())
        if broken := sorted(name for name in wanted if not values[name].isfinite().all()):
            raise ValueError(
                f"{self._where}: {_plain(broken[0])} has values that are not finite. Training has diverged: name an "
                "earlier checkpoint with ckpt=."
            )


_OTHER_BASE = "Name the model that was trained with base=."


def _plain(name: str) -> str:
    return name.removeprefix(_IN_PEFT)


def _wrapped(model: PreTrainedModel, config: PeftConfig, where: str) -> PeftModel:
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise ValueError(
            f"{where} has adapters of the kind {config.peft_type!s}, and only LoRA is exported. Merge them with PEFT's "
            "merge_and_unload()."
        )
    if config.init_lora_weights not in _PLAIN_STARTS:
        raise ValueError(
            f"{where} began with init_lora_weights={config.init_lora_weights!r}, which changes the base model in a way "
            "that no checkpoint holds. Convert the adapters with PEFT (save_pretrained with "
            "path_initial_model_for_weight_conversion=), and export those."
        )
    for name in _UNMERGEABLE:
        if getattr(config, name, None):
            raise ValueError(
                f"{where} has adapters with {name}=, which are not exported. Use them unmerged, with PEFT."
            )
    config = copy.deepcopy(config)
    config.init_lora_weights = True
    config.inference_mode = False
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # of tied weights, which are written apart where they differ
        try:
            return get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
        except ValueError as error:
            said = str(error).strip().splitlines()[0].rstrip(".")
            raise ValueError(f"{where} does not fit the base model: {said}. {_OTHER_BASE}") from error


def _outermost(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield what PEFT has wrapped, without the wrappers inside of wrappers."""
    inside: tuple[str, ...] = ()
    name: str
    module: nn.Module
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not name.startswith(inside or ("\0",)):
            inside = (*inside, f"{name}.")
            yield name, module


def _base(wrapper: Any) -> nn.Module | None:
    """Return the module that the base model's weights belong to; None if a trained one replaces it."""
    if isinstance(wrapper, ModulesToSaveWrapper):
        return None
    if isinstance(wrapper, TrainableTokensWrapper):
        wrapper = wrapper.token_adapter
    base: nn.Module = wrapper.get_base_layer()
    return base


def _parameters(name: str, wrapper: Any) -> Iterator[str]:
    base = _base(wrapper)
    module = wrapper.original_module if base is None else base
    for parameter, _ in module.named_parameters():
        yield f"{name}.{parameter}"


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
