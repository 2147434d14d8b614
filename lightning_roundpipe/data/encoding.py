"""Encodes records as tokens, and marks the tokens to learn.

The parts of a record to learn are found in its text and mapped to tokens by the tokens' character offsets. Tokenising
prompt and completion separately and joining them would give other tokens than the whole text, wherever a tokenizer
merges across the border or puts a space in front of every text.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from lightning_roundpipe.data.records import BadRecord, Chat, Text

PLAIN = (
    "{% if bos_token %}{{ bos_token }}{% endif %}{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% if eos_token %}{{ eos_token }}{% endif %}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
"""A chat template for tokenizers that have none: each message under a heading with its role."""

Tokens = npt.NDArray[np.int32]
"""Token ids. A token to learn is the id itself; a token that is only read is ``~id``, which is negative."""


class Encoder:
    """Encodes with a fast tokenizer: only those return character offsets. End-of-text follows texts and completions.

    ``loss_on``: ``"completions"`` (in a chat: the assistant's messages) or ``"everything"``. ``chat_template`` formats
    conversations instead of the tokenizer's own template. ``vocab_size`` is the model's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        loss_on: str,
        chat_template: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self.vocab_size = vocab_size
        self.completions_only = loss_on == "completions"
        if chat_template is None and tokenizer.chat_template:
            chat_template = tokenizer.get_chat_template()
        self._template = chat_template

    @property
    def settings(self) -> list[Any]:
        """All settings that decide a record's tokens, which of them are to be learnt, and whether they are refused."""
        made_by = json.loads(self._tokenizer.backend_tokenizer.to_str())
        made_by |= {"truncation": None, "padding": None}  # the last call's, which do not matter here
        named = [self._tokenizer.bos_token, self._tokenizer.eos_token]
        return [made_by, named, self._template, self.completions_only, self.vocab_size]

    def encode(self, content: Text | Chat) -> Tokens:
        """Return the record's tokens. Raises ``BadRecord``."""
        if isinstance(content, list):
            tokens = self._chat(content)
        else:
            whole, begin = content.prompt + content.text, len(content.prompt) if self.completions_only else 0
            tokens = self._of(whole, [(begin, len(whole))], specials=True)
            end = self._tokenizer.eos_token_id
            if end is not None:  # exactly one, where the text ends; some tokenizers append theirs to every text
                tokens = tokens[:-1] if len(tokens) and tokens[-1] in (end, ~end) else tokens
                tokens = np.append(tokens, np.int32(end))
        if not learnt(tokens):
            raise BadRecord("it holds no token to be learnt")
        return tokens

    def _of(self, text: str, spans: list[tuple[int, int]], specials: bool) -> Tokens:
        """Return the text's tokens. Those with a character in one of the spans are to be learnt."""
        found = self._tokenizer(text, add_special_tokens=specials, return_offsets_mapping=True, verbose=False)
        tokens = np.array(found["input_ids"], dtype=np.int32)
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        learn = np.zeros(len(tokens), dtype=bool)
        for begin, end in spans:
            learn |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
        return np.where(learn, tokens, ~tokens)

    def _chat(self, chat: Chat) -> Tokens:
        if self._template is None:
            raise BadRecord(
                "it is a conversation, and the tokenizer has no chat template. Set data.chat_template to plain or to a "
                "file with a template, or data.tokenizer to a tokenizer that has one"
            )
        if self.completions_only and not any(message["role"] == "assistant" for message in chat):
            raise BadRecord('no message is from "assistant", so there is nothing to be learnt')
        if self.completions_only and re.search(r"\{%-?\s*generation\b", self._template):
            return self._marked(chat)
        text = self._render(chat)
        spans = self._answers(chat, text) if self.completions_only else [(0, len(text))]
        return self._of(text, spans, specials=False)

    def _marked(self, chat: Chat) -> Tokens:
        """Return the tokens by a template that marks the assistant's messages."""
        found = self._render(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        tokens = np.array(found["input_ids"], dtype=np.int32)
        return np.where(np.array(found["assistant_masks"], dtype=bool), tokens, ~tokens)

    def _answers(self, chat: Chat, text: str) -> list[tuple[int, int]]:
        """Return the spans of the assistant's messages in ``text``, each with the characters that end it."""
        spans = []
        for number, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            if not number:
                raise BadRecord('its first message is from "assistant", which answers nothing')
            before = self._render(chat[:number], add_generation_prompt=True)
            after = self._render(chat[: number + 1])
            if not text.startswith(before) or not text.startswith(after):
                raise BadRecord(
                    f"the chat template writes messages up to {number + 1} differently when others follow, so their "
                    "place is not known: end the record there, or set data.loss_on=everything"
                )
            spans.append((len(before), len(after)))
        return spans

    def _render(self, messages: list[dict[str, Any]], tokenize: bool = False, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=tokenize, **options
            )
        except Exception as error:  # a template is a program and may raise anything
            lines = str(error).splitlines() or [type(error).__name__]
            raise BadRecord(f"the chat template refuses it: {lines[0]}") from error


def learnt(tokens: Tokens) -> int:
    """Return how many tokens are targets. The first token is not one, because nothing precedes it."""
    return int((tokens[1:] >= 0).sum())
