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

from lightning_roundpipe.data.records import Chat, Completion, Content, Text

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


class CannotEncode(Exception):
    """The tokenizer or its chat template refuses a record; the message says why."""


class NoTemplate(CannotEncode):
    """A record is a conversation, and the tokenizer has no chat template."""


class Encoder:
    """Encodes with ``tokenizer``. The model's end-of-text token follows texts and completions.

    Args:
        tokenizer: a fast one, because only those return character offsets.
        loss_on: ``"completions"`` (in a chat: the assistant's messages) or ``"everything"``.
        chat_template: formats conversations instead of the tokenizer's own template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str, chat_template: str | None = None) -> None:
        self._tokenizer: Any = tokenizer
        self.completions_only = loss_on == "completions"
        if chat_template is None and tokenizer.chat_template:
            chat_template = tokenizer.get_chat_template()
        self._template = chat_template

    @property
    def settings(self) -> list[Any]:
        """All settings that decide a record's tokens, and which of them are to be learnt."""
        made_by = json.loads(self._tokenizer.backend_tokenizer.to_str())
        made_by |= {"truncation": None, "padding": None}  # the last call's, which do not matter here
        named = [self._tokenizer.bos_token, self._tokenizer.eos_token]
        return [made_by, named, self._template, self.completions_only]

    def encode(self, content: Content) -> Tokens:
        """Return the record's tokens. Raises ``CannotEncode``."""
        if isinstance(content, Text):
            tokens = self._of(content.text, [(0, len(content.text))], specials=content.first)
            tokens = self._ended(tokens) if content.last else self._open(tokens)
            if not (content.first and content.last):
                return tokens
        elif isinstance(content, Completion):
            text = content.prompt + content.completion
            begin = len(content.prompt) if self.completions_only else 0
            tokens = self._ended(self._of(text, [(begin, len(text))], specials=True))
        else:
            tokens = self._chat(content)
        if not learnt(tokens):
            raise CannotEncode("it holds no token to be learnt")
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

    def _ended(self, tokens: Tokens) -> Tokens:
        """Return the tokens with exactly one end-of-text token, which is to be learnt."""
        end = self._tokenizer.eos_token_id
        return tokens if end is None else np.append(self._open(tokens), np.int32(end))

    def _open(self, tokens: Tokens) -> Tokens:
        """Return the tokens without the end-of-text token that some tokenizers append to every text."""
        end = self._tokenizer.eos_token_id
        return tokens[:-1] if end is not None and len(tokens) and tokens[-1] in (end, ~end) else tokens

    def _chat(self, chat: Chat) -> Tokens:
        if self._template is None:
            raise NoTemplate("it is a conversation, and the tokenizer has no chat template")
        if self.completions_only and not any(message["role"] == "assistant" for message in chat.messages):
            raise CannotEncode('no message is from "assistant", so there is nothing to be learnt')
        if self.completions_only and re.search(r"\{%-?\s*generation\b", self._template):
            return self._marked(chat)
        text = self._render(chat.messages)
        spans = self._answers(chat, text) if self.completions_only else [(0, len(text))]
        return self._of(text, spans, specials=False)

    def _marked(self, chat: Chat) -> Tokens:
        """Return the tokens by a template that marks the assistant's messages."""
        found = self._render(chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        tokens = np.array(found["input_ids"], dtype=np.int32)
        return np.where(np.array(found["assistant_masks"], dtype=bool), tokens, ~tokens)

    def _answers(self, chat: Chat, text: str) -> list[tuple[int, int]]:
        """Return the spans of the assistant's messages in ``text``, each with the characters that end it."""
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            if not number:
                raise CannotEncode('its first message is from "assistant", which answers nothing')
            before = self._render(chat.messages[:number], add_generation_prompt=True)
            after = self._render(chat.messages[: number + 1])
            if not text.startswith(before) or not text.startswith(after):
                raise CannotEncode(
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
            raise CannotEncode(f"the chat template refuses it: {lines[0]}") from error


def learnt(tokens: Tokens) -> int:
    """Return how many tokens are targets. The first token is not one, because nothing precedes it."""
    return int((tokens[1:] >= 0).sum())
