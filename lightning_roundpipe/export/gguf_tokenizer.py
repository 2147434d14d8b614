"""Writes a tokenizer into a GGUF file.

llama.cpp has the rules by which text is cut before tokens are merged built in, each under a name. Which of them a
tokenizer uses shows in its ``pre_tokenizer``, and another one would give other tokens without any error. So a tokenizer
whose rule is not known here is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_RULES = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}
"""llama.cpp's names of rules that are a regular expression."""

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""GGUF's kinds of tokens."""

OTHERWISE = "Export safetensors, and convert those with llama.cpp's convert_hf_to_gguf.py"


def write_tokenizer(
    writer: Any, tokenizer: PreTrainedTokenizerBase | None, original: Path | None, config: PretrainedConfig
) -> None:
    """Add a tokenizer to a file: that of ``original`` if it is given, else ``tokenizer``; None: it has none.

    Raises:
        ValueError: llama.cpp has no such tokenizer.
    """
    if original is not None:
        _copy(writer, original)
        return
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    backend = _backend(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule_of(backend))
    tokens, kinds = zip(*_tokens(tokenizer, backend, config.vocab_size), strict=True)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    writer.add_token_merges(merges)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    encoded = list(tokenizer("a")["input_ids"])
    writer.add_add_bos_token(bool(encoded) and encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(encoded) and encoded[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def rule_of(backend: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the rule by which a ``tokenizer.json`` cuts text.

    Raises:
        ValueError: it is not known.
    """
    steps = backend.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    bytes_last = kinds[-1] == "ByteLevel" and not last.get("add_prefix_space", True)
    if bytes_last and kinds == ["ByteLevel"] and last.get("use_regex", True):
        return "gpt-2"
    if bytes_last and kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if bytes_last and kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        pattern = steps[0].get("pattern", {}).get("Regex")
        if pattern in _RULES and steps[0].get("behavior") == "Isolated" and not steps[0].get("invert"):
            return _RULES[pattern]
    raise ValueError(
        f"format=gguf: this tokenizer cuts text in a way that is not known here ({', '.join(map(str, kinds))}). "
        f"{OTHERWISE}."
    )


def _backend(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    backend: Mapping[str, Any] = {} if fast is None else json.loads(fast.to_str())
    kind = backend.get("model", {}).get("type")
    if kind != "BPE" or backend["model"].get("byte_fallback"):
        raise ValueError(
            f"format=gguf: tokenizers of the kind {kind or type(tokenizer).__name__} are not written, only BPE over "
            f"bytes. {OTHERWISE}."
        )
    return backend


def _tokens(tokenizer: PreTrainedTokenizerBase, backend: Mapping[str, Any], number: int) -> Iterator[tuple[str, int]]:
    """Yield each token with its kind. An embedding may have more rows than there are tokens."""
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {item["id"]: item for item in backend.get("added_tokens", ())}
    if names and max(names) >= number:
        raise ValueError(
            f"format=gguf: the tokenizer has the token {max(names)}, and the model's vocab_size is {number}. Export "
            "the model that this tokenizer belongs to."
        )
    for index in range(number):
        if index in added:
            yield added[index]["content"], _CONTROL if added[index]["special"] else _USER_DEFINED
        elif index in names:
            yield names[index], _NORMAL
        else:
            yield f"[PAD{index}]", _UNUSED


def _copy(writer: Any, original: Path) -> None:
    """Add the tokenizer of a GGUF file, field by field."""
    import gguf

    reader: Any = gguf.GGUFReader(original)
    for name, found in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind, *inner = found.types
        writer.add_key_value(name, found.contents(), kind, sub_type=inner[0] if inner else None)
