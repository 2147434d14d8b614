"""Linear layers of a Hugging Face model in fp8, by ``torchao.float8``, which users call by themselves in a script.

torchao converts whatever is an ``nn.Linear``: packed layers, which are subclasses, and the output layer, whose loss is
computed in chunks. Both stay as they are here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from lightning_roundpipe.model.quantize import is_quantized

Recipe = Literal["tensorwise", "rowwise"]


def convert_to_float8(
    model: PreTrainedModel, recipe: Recipe = "tensorwise", emulate: bool = False, pad_inner_dim: bool = True
) -> None:
    """Let linear layers of ``model`` multiply in fp8, in place, except for the output layer.

    Args:
        model: the model, without adapters. Layers whose sizes are not multiples of 16 stay as they are.
        recipe: ``"tensorwise"``: a scale for each tensor; ``"rowwise"``: one for each row.
        emulate: multiply in the precision of the factors, after rounding these to fp8: for devices without fp8.
        pad_inner_dim: fill up factors to multiples of 16, which GPUs need.

    Raises:
        ValueError: the recipe is unknown, the model is quantised, or it has no such layer.
        ImportError: torchao is not installed.
    """
    if recipe not in get_args(Recipe):
        raise ValueError(f"float8.recipe={recipe!r} must be one of {', '.join(get_args(Recipe))}.")
    if is_quantized(model):
        raise ValueError(
            f"float8={recipe}: the model's weights are packed, and products with them are in 16 bits. Set float8=none, "
            "or model.quantization=null."
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ImportError(f"float8={recipe} needs torchao, which is not installed: pip install torchao") from error
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def fits(module: nn.Module, name: str) -> bool:
        sizes = (module.in_features, module.out_features) if type(module) is nn.Linear else (1,)
        return module is not head and all(size % 16 == 0 for size in sizes)

    if not any(fits(module, name) for name, module in model.named_modules()):
        raise ValueError(
            f"float8={recipe}: {type(model).__name__} has no linear layer whose sizes are multiples of 16, beside its "
            "output layer. Set float8=none."
        )
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=emulate, pad_inner_dim=pad_inner_dim)
    convert_to_float8_training(model, config=config, module_filter_fn=fits)
