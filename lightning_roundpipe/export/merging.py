"""Merges PEFT adapters into one layer at a time.

PEFT merges adapters into a model that is in memory. Here the model is on the meta device, and only what was trained is
in memory. The weights of one layer are put in, PEFT merges in fp32, and the result is taken out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from lightning_roundpipe.messages import plural

IN_PEFT = "base_model.model."
"""What PEFT puts before the names of a model's weights."""

_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base model as it is."""

_UNMERGEABLE = ("layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config")
"""Settings of ``LoraConfig`` whose adapters are no fixed change of the base model's weights."""

_OTHER_BASE = "Name the model that was trained with base=."


class Adapters:
    """Trained adapters in a model on the meta device.

    ``trained``: by the names of PEFT's ``adapter_model.safetensors``, or those of a state dict, with anything before
    ``base_model.model.``. ``where``: how an error names the file. ``changed``: the parameters that the adapters change.

    Raises:
        ValueError: the adapters are those of another model, cannot be merged, or are not finite.
    """

    def __init__(self, model: PreTrainedModel, config: PeftConfig, trained: Mapping[str, Tensor], where: str) -> None:
        self._where = where
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._homes = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
        self._model = _wrapped(model, config, where)
        self._load(trained)
        inner: Any = self._model.base_model.model
        self._wrappers = dict(_outermost(inner))
        self.modules = len(self._wrappers)
        inside = tuple(f"{name}." for name in self._wrappers)
        self.changed = {name for name in names if name.startswith(inside) or not self._value(name).is_meta}

    def merge(self, values: dict[str, Tensor]) -> None:
        """Merge the adapters into a layer's parameters, which are those of the base model in fp32, in place."""
        wrappers = {
            module: wrapper
            for module, wrapper in self._wrappers.items()
            if any(name.startswith(f"{module}.") for name in values)
        }
        filled = [(name, self._value(name)) for name in values if name in self._homes and self._value(name).is_meta]
        for name, _ in filled:
            self._put(name, Parameter(values[name], requires_grad=False))
        with torch.no_grad():
            merged = {module: _merged(wrapper) for module, wrapper in wrappers.items()}
        values |= {name: self._value(name).detach() for name in values if name in self.changed}
        for module, made in merged.items():
            found = {f"{module}.{name}": parameter.detach() for name, parameter in made.named_parameters()}
            values |= {name: found[name] for name in values.keys() & found.keys()}
        for name, empty in filled:
            self._put(name, empty)

    def _value(self, name: str) -> Parameter:
        owner, attribute = self._homes[name]
        value: Parameter = getattr(owner, attribute)
        return value

    def _put(self, name: str, value: Parameter) -> None:
        owner, attribute = self._homes[name]
        setattr(owner, attribute, value)

    def _load(self, trained: Mapping[str, Tensor]) -> None:
        wanted = {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        for name in wanted:
            path, _, attribute = name.rpartition(".")
            owner = self._model.get_submodule(path)
            setattr(owner, attribute, Parameter(torch.zeros(getattr(owner, attribute).shape, dtype=torch.float32)))
        tensors = {name[name.index(IN_PEFT) :]: tensor for name, tensor in trained.items() if IN_PEFT in name}
        if not tensors:
            raise ValueError(f"{self._where} holds no adapters of PEFT: no weight has {IN_PEFT!r} in its name.")
        try:
            if any(".default" in name for name in tensors):  # a state dict: files leave the adapter's name out
                tensors = get_peft_model_state_dict(self._model, tensors, save_embedding_layers=False)
            result: Any = set_peft_model_state_dict(self._model, tensors)
        except (RuntimeError, KeyError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            said = next((line for line in lines if "size mismatch" in line), lines[0]).rstrip(".")
            raise ValueError(f"{self._where} does not fit the base model: {said}. {_OTHER_BASE}") from error
        if result.unexpected_keys:
            more = min(result.unexpected_keys).removeprefix(IN_PEFT)
            raise ValueError(f"{self._where} does not fit the base model, which has no {more}. {_OTHER_BASE}")
        if lacking := sorted(wanted & set(result.missing_keys)):
            raise ValueError(
                f"{self._where} does not fit the base model: it lacks {len(lacking)} of "
                f"{plural(len(wanted), 'trained tensor')}, {lacking[0].removeprefix(IN_PEFT)} first. {_OTHER_BASE}"
            )
        values = dict(self._model.named_parameters())
        if broken := sorted(name for name in wanted if not values[name].isfinite().all()):
            raise ValueError(
                f"{self._where}: {broken[0].removeprefix(IN_PEFT)} has values that are not finite. Training has "
                "diverged: name an earlier checkpoint with ckpt=."
            )


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
    config.init_lora_weights, config.inference_mode = True, False
    with torch.device("meta"):
        try:
            return get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
        except ValueError as error:
            said = str(error).strip().splitlines()[0].rstrip(".")
            raise ValueError(f"{where} does not fit the base model: {said}. {_OTHER_BASE}") from error


def _merged(wrapper: Any) -> nn.Module:
    """Return the module that ``wrapper`` has adapters of, with these merged."""
    made: nn.Module
    if hasattr(wrapper, "unload_and_optionally_merge_module"):
        made = wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        wrapper.merge()
        made = wrapper.get_base_layer()
    return made


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what PEFT has wrapped, without the wrappers inside of wrappers."""
    inside: tuple[str, ...] = ()
    name: str
    module: nn.Module
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not name.startswith(inside or ("\0",)):
            inside = (*inside, f"{name}.")
            yield name, module
