"""Adapters that PEFT adds to a model, with an error that names the layers to choose from."""

from __future__ import annotations

from typing import Any

from torch import nn


def add_adapters(model: Any, config: Any, **options: Any) -> Any:
    """Return the ``PeftModel`` of ``model``.

    Args:
        model: a Hugging Face model.
        config: PEFT's configuration of the adapters.
        options: of ``peft.get_peft_model``.

    Raises:
        ValueError: PEFT refuses the configuration, such as for names that no layer has.
    """
    from peft import get_peft_model  # takes some seconds, with the libraries that it imports

    try:
        return get_peft_model(model, config, **options)
    except ValueError as error:
        text = str(error).partition(". Please")[0]
        if "not found in the base model" not in text:
            raise
        names = dict.fromkeys(n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear))
        raise ValueError(f"{text}. Its linear layers are {', '.join(names)}") from error
