"""Positions beyond those that a model was made for: its rotary embedding, stretched as transformers computes it.

A longer sequence than a model has seen runs with any rotary embedding, and what comes out means little. So nothing here
is assumed: a setting says how positions are stretched, and the configuration carries it into the model, its checkpoints
and its exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_KINDS = ("default", *ROPE_INIT_FUNCTIONS)
_REMEMBERED = ("rope_theta", "partial_rotary_factor")
"""What stays as it is unless the setting changes it."""
_ORIGINAL = "original_max_position_embeddings"
_FROM_ORIGINAL = ("yarn", "llama3", "longrope")
"""Kinds that are told how many positions a model had."""
_STRETCHED = ("linear", *_FROM_ORIGINAL)
"""Kinds with ``factor`` times as many positions. ``dynamic`` compares a sequence with the model's own number."""
_POSITIONS = "max_position_embeddings"


def stretch(config: PretrainedConfig, rope: Mapping[str, Any] | None) -> None:
    """Gives ``config``, that a model is made from, another rotary embedding.

    Args:
        rope: what transformers calls ``rope_parameters``, such as ``{"rope_type": "yarn", "factor": 4.0}``;
            ``rope_theta`` stays as it is unless named. ``max_position_embeddings`` sets the number of positions, which
            is ``factor`` times the model's own by default. None: nothing changes.

    Raises:
        ValueError: the model has no rotary embedding or one for each kind of layer, or a parameter makes no sense.
    """
    if rope is None:
        return
    setting = f"model.rope={dict(rope)!r}"
    text = config.get_text_config()
    own = getattr(text, "rope_parameters", None)
    if not isinstance(own, Mapping) or not own:
        raise ValueError(f"{setting}: a {config.model_type} has no rotary embedding. Leave model.rope out.")
    if any(isinstance(value, Mapping) for value in own.values()):
        kinds = ", ".join(own)
        raise ValueError(
            f"{setting}: a {config.model_type} has a rotary embedding for each kind of layer ({kinds}). Change "
            "rope_parameters in its config.json, and leave model.rope out."
        )
    given, before = dict(rope), text.max_position_embeddings
    kind = given.get("rope_type")
    if kind not in _KINDS:
        raise ValueError(f"{setting} needs a rope_type, one of {', '.join(_KINDS)}.")
    positions = given.pop(_POSITIONS, None)
    if kind in _FROM_ORIGINAL:
        given.setdefault(_ORIGINAL, own.get(_ORIGINAL, before))
    if positions is None and kind in _STRETCHED and "factor" in given:
        positions = round(given["factor"] * given.get(_ORIGINAL, before))
    text.rope_parameters = {**{key: own[key] for key in _REMEMBERED if key in own}, **given}
    text.max_position_embeddings = positions or before
    try:
        text.standardize_rope_params()
        text.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        why = str(error.args[0] if error.args else error).rstrip(".")
        raise ValueError(f"{setting}: transformers does not take these parameters: {why}.") from error
