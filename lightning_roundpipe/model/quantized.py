"""Weights in four or eight bits, as bitsandbytes keeps them: a packed parameter, and tensors that say how to unpack it.

``bitsandbytes`` keeps scales and tables in plain objects (``QuantState``, ``MatmulLtState``) that are attributes of
parameters or modules. These tensors are neither parameters nor buffers, so nothing would send them to a worker, and
``Params4bit.to()`` moves them in place, for all threads at once. `prepare` turns each of them into a *companion*: an
``nn.Parameter`` that is never trained. A layer's companions lie in its flat host buffer beside the packed bytes, and
travel with them. A replica has a packed parameter and state objects of its own, whose tensors are views into the arena.

The modules of ``bitsandbytes`` run unchanged: each use unpacks the weight on the worker.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.quantize_experts import ExpertWeights

_PACKAGE = "bitsandbytes"
_PACKED = ("Params4bit", "Int8Params")
_EMBEDDINGS = ("Embedding4bit", "Embedding8bit")
_LINEAR4 = "support_avx512bf16_for_cpu"
"""An attribute that bitsandbytes' linear layers in four bits have, of whatever class."""
_COMPANION = "_roundpipe_companion"
_TRANSIENT = ("CB", "idx")
"""Tensors of a state that say nothing of the weight: its bytes once more, and what the last call has found."""


def is_packed(parameter: Tensor) -> bool:
    """Return whether ``parameter`` is of a quantised class of bitsandbytes."""
    return type(parameter).__name__ in _PACKED and _is_of_bitsandbytes(type(parameter))


def weights_in(parameter: Tensor) -> int:
    """Return how many weights ``parameter`` stands for: packed, an element holds two or more."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None) if is_packed(parameter) else None
    return parameter.numel() if shape is None else math.prod(shape)


def is_stored_as_is(parameter: Tensor) -> bool:
    """Return whether ``parameter`` keeps its dtype in every precision: it is packed, or a companion."""
    return is_packed(parameter) or _COMPANION in parameter.__dict__


def companions(module: nn.Module) -> list[nn.Parameter]:
    """Return the companions in ``module``, each once, in an order that only depends on the module."""
    return list({id(companion): companion for _, _, companion in _held_companions(module)}.values())


Holding = tuple[dict[str, Any], str, Any]
"""The attributes of an object, the name of one of them, and what it was."""


def holdings(module: nn.Module) -> list[Holding]:
    """Return the attributes by which packed weights in ``module`` have their state, and states have companions."""
    packed = (vars(p) for p in module.parameters() if is_packed(p))
    own = [(held, "quant_state", held["quant_state"]) for held in packed if "quant_state" in held]
    return [*own, *_held_companions(module)]


def _held_companions(module: nn.Module) -> Iterator[Holding]:
    for state in _states(module):
        for name, value in vars(state).items():
            if isinstance(value, nn.Parameter) and _COMPANION in vars(value):
                yield vars(state), name, value


def empty_like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a packed parameter of the same class, without values and without state."""
    nothing = torch.empty(0, dtype=parameter.dtype, device=device)
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), nothing, parameter.requires_grad)
    return made


Alias = tuple[Any, nn.Parameter]
"""A state of bitsandbytes that refers to the bytes of an eight-bit weight, and that weight."""


def aliases(module: nn.Module) -> list[Alias]:
    """Return the states in ``module`` that `follow` keeps up to date."""
    linear: Iterable[Any] = (inner for inner in module.modules() if hasattr(inner, "init_8bit_state"))
    return [(inner.state, inner.weight) for inner in linear if inner.state.CB is not None]


def follow(states: Iterable[Alias]) -> None:
    """Make each state refer to the present memory of its weight."""
    for state, weight in states:
        state.CB = weight.data


def prepare(module: nn.Module) -> None:
    """Make the quantised weights of ``module`` ready for its layers to be copied to workers.

    Weights of modules that were built on the CPU and never moved are quantised, as ``module.to(device)`` does. Scales
    become companions. The layout that bitsandbytes chooses on some CPUs in evaluation, which rounds the scales, is
    undone and not chosen again.

    Raises:
        RoundPipeError: a weight is quantised in a way that cannot be trained here.
    """
    _refuse(module)
    if _PACKAGE not in sys.modules:
        return
    for name, inner in module.named_modules():
        packed = [p for p in inner._parameters.values() if p is not None and is_packed(p)]
        if not all(map(_is_quantized, packed)):
            inner.to("cpu")
        if packed:
            _settle(inner)
        if wrong := misfit(inner):
            raise RoundPipeError(
                f"the quantised weight of {name!r} {wrong}: its file is broken, or is one of another model. Copy or "
                "download it again, or quantise the 16-bit checkpoint anew."
            )
    for state in _states(module):
        for name, value in vars(state).items():
            # A copy of a prepared module has parameters without the mark here.
            if isinstance(value, Tensor) and _COMPANION not in value.__dict__ and name not in _TRANSIENT:
                companion = nn.Parameter(value.detach(), requires_grad=False)
                setattr(companion, _COMPANION, True)
                setattr(state, name, companion)


def misfit(module: nn.Module) -> str | None:
    """Return what is wrong with the packed weight of ``module``, or None."""
    weight: Any = _weight(module)
    eight_bits = hasattr(module, "init_8bit_state")
    if weight is None or not (eight_bits or hasattr(module, _LINEAR4) or isinstance(module, ExpertWeights)):
        return None
    if not is_packed(weight) or not _is_quantized(weight):
        return f"has the dtype {weight.dtype} and is of no class of bitsandbytes"
    scales = (weight.SCB, cast(Any, module).state.SCB) if eight_bits else (weight.quant_state,)
    return "lacks its scales" if all(found is None for found in scales) else None


def load_states(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Load the scales and tables of quantised weights, which ``load_state_dict`` calls unexpected.

    Args:
        module: the module that the packed weights are loaded into afterwards.
        state: a state dict with weights as bitsandbytes saves them, or without.

    Returns:
        ``state`` without what has been loaded.
    """
    if _PACKAGE not in sys.modules:
        return state
    prepare(module)
    left = dict(state)
    for prefix, inner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}.".lstrip(".")
        weight: Any = _weight(inner)
        if weight is None or not is_packed(weight):
            continue
        if hasattr(inner, "init_8bit_state"):
            left.pop(f"{start}weight_format", None)
            found = {name: left.pop(start + name) for name in ["SCB"] if start + name in left}
            _load(f"{start}weight", left, found, {"SCB": cast(Any, inner).state.SCB})
            continue
        key = prefix if isinstance(inner, ExpertWeights) else f"{start}weight"  # as what the weight is saved
        _load_state(key, left, weight.quant_state)
        if key in left:
            left[f"{start}weight"] = left.pop(key)
    return left


def _load_state(key: str, left: dict[str, Any], state: Any) -> None:
    """Move the entries of ``left`` that bitsandbytes saves beside weight ``key`` into its ``QuantState``."""
    head = f"{key}."
    found = {name[len(head) :]: left.pop(name) for name in list(left) if name.startswith(head)}
    own = state.as_dict(packed=True)
    if found and found.keys() == own.keys():
        own, found = _tensors(state), _tensors(type(state).from_dict(found, "cpu"))
    _load(key, left, found, own)


def _load(key: str, left: Mapping[str, Any], found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Copy ``found`` into ``own``, the scales and tables of weight ``key``, if that was saved."""
    if not found and key not in left:
        return
    if {k: (v.shape, v.dtype) for k, v in found.items()} != {k: (v.shape, v.dtype) for k, v in own.items()}:
        raise RoundPipeError(
            f"ckpt_path: {key!r} of the checkpoint is quantised otherwise than the model's, or not at all: it has "
            f"{sorted(found) or 'no scales'}, the model has {sorted(own)}. Load the model with the "
            "quantization_config of the run that wrote the checkpoint."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(found[name])


def _tensors(state: Any, path: str = "") -> dict[str, Tensor]:
    held = {f"{path}{name}": value for name, value in vars(state).items() if isinstance(value, Tensor)}
    return held if getattr(state, "state2", None) is None else held | _tensors(state.state2, f"{path}state2.")


def _settle(module: nn.Module) -> None:
    """Bring the weight of a quantised linear layer into the form in which it is trained."""
    linear: Any = module
    weight: Any = _weight(module)
    if hasattr(module, _LINEAR4) and weight.quant_state is not None:
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse as undo

            weight.data, weight.quant_state = undo(weight.data, weight.quant_state)
        if weight.quant_state.absmax.dim() == 2:  # not turned back by bitsandbytes, unless it is quantised, too
            weight.quant_state.absmax = weight.quant_state.absmax.T.reshape(-1).float()
        linear.support_avx512bf16_for_cpu = False
        linear.quant_state = weight.quant_state
    if hasattr(module, "init_8bit_state") and weight.CB is not None:
        linear.init_8bit_state()  # as its first forward does


def _refuse(module: nn.Module) -> None:
    """Raise for packed weights that cannot be trained: those of other libraries, and some forms of bitsandbytes'."""
    for prefix, inner in module.named_modules():
        _refuse_other_library(prefix or type(inner).__name__, inner)
        kinds = {kind.__name__ for kind in type(inner).__mro__ if _is_of_bitsandbytes(kind)}
        if "Bnb4bitParametrization" in kinds:
            raise RoundPipeError(
                f"{prefix!r} unpacks a parameter for each use (bitsandbytes' replace_parameter_4bit), in a cache that "
                "all threads share. Pack the experts of transformers' models by "
                "lightning_roundpipe.model.quantize.from_pretrained, or leave the parameter in 16 bits."
            )
        if found := kinds.intersection(_EMBEDDINGS):
            raise RoundPipeError(
                f"{prefix!r} is an embedding in four or eight bits ({min(found)}), whose weights bitsandbytes cannot "
                "save. Leave embeddings as they are: llm_int8_skip_modules of BitsAndBytesConfig names modules that "
                "are not quantised."
            )
        weight = _weight(inner)
        if hasattr(inner, _LINEAR4) and type(weight) is nn.Parameter and weight.is_floating_point():
            raise RoundPipeError(
                f"{prefix!r} is a layer in four bits whose weight is not quantised, most likely because it is also "
                "that of an embedding (tied). Name the layer in llm_int8_skip_modules of BitsAndBytesConfig."
            )
        for key, parameter in inner._parameters.items():
            if parameter is None or not is_packed(parameter):
                continue
            name = f"{prefix}.{key}".lstrip(".")
            if getattr(parameter, "has_fp16_weights", False):
                raise RoundPipeError(
                    f"{name!r} is quantised anew from 16 bits in each forward (has_fp16_weights), which saves no "
                    "memory and keeps a copy that an update does not reach. Set llm_int8_has_fp16_weight=False "
                    "(has_fp16_weights=False)."
                )
            if parameter.requires_grad:
                raise RoundPipeError(
                    f"{name!r} is quantised ({type(parameter).__name__}) and has requires_grad=True: no optimizer can "
                    "update packed weights. Freeze it (requires_grad_(False)) and train adapters beside it: "
                    "peft.get_peft_model(model, LoraConfig(...)), or lora=all_linear. To train all weights, load the "
                    "model without quantization_config."
                )


def _refuse_other_library(name: str, module: nn.Module) -> None:
    """Raise for weights in the format of another library, loaded by transformers or packed in a tensor's subclass."""
    for parameter in module._parameters.values():
        if parameter is not None and bool(is_traceable_wrapper_subclass(parameter)):
            kind = f"{type(parameter).__module__.partition('.')[0]}'s {type(parameter).__name__}"
            raise RoundPipeError(
                f"the weights of {name!r} are in a format ({kind}) that the roundpipe strategy cannot send to devices. "
                "Take the model with weights in 16 bits, and quantise it with "
                "quantization_config=BitsAndBytesConfig(load_in_4bit=True), or not at all. torchao.float8 trains "
                "without enable_fsdp_float8_all_gather."
            )
    config = getattr(module.__dict__.get("hf_quantizer"), "quantization_config", None)
    if config is None or getattr(config, "dequantize", False):
        return
    method = str(getattr(config.quant_method, "value", config.quant_method))
    if not method.startswith(_PACKAGE):
        raise RoundPipeError(
            f"the weights of {name!r} are quantised by {method}, which the roundpipe strategy cannot train. Load the "
            "16-bit checkpoint of the model with quantization_config=BitsAndBytesConfig(load_in_4bit=True), or without "
            "quantization_config."
        )


def _weight(module: nn.Module) -> Any:
    """Return the parameter of ``module`` that is called "weight", or None."""
    return dict(module._parameters.items()).get("weight")  # TorchScript's mapping has no get()


def _is_quantized(parameter: Any) -> bool:
    if type(parameter).__name__ == "Int8Params":
        return bool(parameter.dtype is torch.int8)
    return bool(parameter.bnb_quantized)


def _states(module: nn.Module) -> Iterator[Any]:
    """Yield the states of the packed weights in ``module``, and those of their quantised scales, each once."""
    seen: set[int] = set()
    for inner in module.modules():
        for weight in inner._parameters.values():
            if weight is None or not is_packed(weight):
                continue
            state: Any = weight.quant_state if hasattr(weight, "quant_state") else getattr(inner, "state", None)
            while state is not None and id(state) not in seen:
                seen.add(id(state))
                yield state
                state = getattr(state, "state2", None)


def _is_of_bitsandbytes(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE
