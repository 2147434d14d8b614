"""Causal language modelling on the user's files: texts, prompts with completions, instructions, conversations.

All problems with the data show before training begins: invalid records, records that do not fit, a tokenizer of another
model. Nothing is dropped silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import Subset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_roundpipe.data.encoding import PLAIN, Encoder, learnt
from lightning_roundpipe.data.rows import Rows
from lightning_roundpipe.data.sequences import TokenRows
from lightning_roundpipe.data.tokens import column, read_tokens
from lightning_roundpipe.messages import PREFIX, plural
from lightning_roundpipe.model.loading import reading

if TYPE_CHECKING:
    import datasets

_CHOICES = {
    "rows": ("joined", "packed", "padded"),
    "loss_on": ("completions", "everything"),
    "too_long": ("error", "truncate", "drop"),
}
_LISTED = 5
"""Most names of a list in a message."""


class TextFiles(TokenRows):
    """Data from files of records.

    A ``.txt`` file is one text. ``.jsonl``, ``.json``, ``.parquet`` and folders that ``datasets`` saved hold records of

    - ``{"text": "..."}``,
    - ``{"prompt": "...", "completion": "..."}``,
    - ``{"instruction": "...", "input": "...", "output": "..."}`` (Alpaca's; ``input`` is optional),
    - ``{"messages": [{"role": "user", "content": "..."}, ...]}``,
    - ``{"conversations": [{"from": "human", "value": "..."}, ...]}`` (ShareGPT's).

    The last three are conversations, which the chat template formats. Other fields are not read.

    Args:
        path: such a file or folder, or a folder that is searched for them recursively.
        tokenizer: the model's tokenizer, or its folder.
        vocab_size: size of the model's vocabulary.
        sequence_length: tokens of a row.
        batch_size: rows of a microbatch.
        rows: "joined": records one after another, cut without padding. "packed": whole records, as many per row as fit,
            which do not attend to each other. "padded": one record per row.
        loss_on: "completions": learn completions of prompts, and the assistant's messages of conversations.
            "everything": learn all tokens.
        too_long: what to do with records of more than ``sequence_length`` tokens unless they are joined: raise an
            "error"; "truncate" or "drop" them, and report how many.
        validation_path: file or folder of held-out records. ``None``: hold out some of the records.
        validation_fraction: the held-out fraction. Records with the same text are on the same side.
        max_validation_sequences: validate on at most this many rows, evenly spread. ``None``: on all.
        seed: seed of the split and of the order of rows.
        num_workers: processes that load data.
        chat_template: a file with a Jinja template for conversations, or "plain": each message under a heading with its
            role. ``None``: the tokenizer's template.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | str | Path | None,
        vocab_size: int,
        sequence_length: int,
        batch_size: int,
        rows: str = "packed",
        loss_on: str = "completions",
        too_long: str = "error",
        validation_path: str | Path | None = None,
        validation_fraction: float = 0.1,
        max_validation_sequences: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        chat_template: str | Path | None = None,
    ) -> None:
        for name, value in (("rows", rows), ("loss_on", loss_on), ("too_long", too_long)):
            if value not in _CHOICES[name]:
                raise ValueError(f"data.{name}={value!r} must be {' or '.join(map(repr, _CHOICES[name]))}.")
        most = max_validation_sequences
        super().__init__(sequence_length, batch_size, seed, num_workers, max_validation_sequences=most)
        if validation_path is None and not 0 < validation_fraction < 1:
            raise ValueError(f"data.validation_fraction={validation_fraction!r} must lie between 0 and 1.")
        made = _loaded(tokenizer)
        pads = (made.pad_token_id, made.eos_token_id, 0)  # nothing reads it; other programs look for it
        self._pad: int = next(token for token in pads if token is not None)
        self._encoder = Encoder(made, loss_on, _template(chat_template), vocab_size)
        paths = {"data.path": path, "data.validation_path": validation_path}
        self._paths = {setting: Path(given).expanduser() for setting, given in paths.items() if given is not None}
        self.rows: Any = rows
        self._too_long, self._fraction, self._most = too_long, validation_fraction, most
        self._tables: list[datasets.Dataset] = []

    @override
    def prepare_data(self) -> None:
        """Tokenise the files unless an earlier run has."""
        if not self._tables:
            self._tables = [self._open(path, setting) for setting, path in self._paths.items()]

    @override
    def setup(self, stage: str) -> None:
        """Lay the records out in rows, and report their numbers."""
        self.prepare_data()
        if not hasattr(self, "training"):
            training, validation = self._tables if len(self._tables) > 1 else self._divided(*self._tables)
            self.training, rows = self._laid_out("training", training), self._laid_out("validation", validation)
            spread = np.linspace(0, len(rows) - 1, min(self._most or len(rows), len(rows)))
            self.validation = Subset(rows, spread.round().astype(int).tolist())

    def _open(self, path: Path, setting: str) -> datasets.Dataset:
        table, files, others = read_tokens(path, setting, self._encoder)
        if self.rows == "joined" and self._encoder.completions_only and column(table, "prompt").any():
            raise ValueError(
                f"data.rows='joined' cuts records anywhere, and those of {setting} have prompts: a row could have "
                "nothing to be learnt. Set data.rows=packed, or data.loss_on=everything."
            )
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        _tell(
            f"{setting}: {plural(len(table), 'record')} of {plural(int(column(table, 'length').sum()), 'token')} from "
            f"{plural(files, 'file')}",
            f"files that are not read: {', '.join(others[:_LISTED])}{more}" if others else "",
        )
        return table

    def _divided(self, table: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
        """Return the records for training and for validation. Records with the same text are on the same side."""
        seeds = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)
        # Digests are random already, so multiplying by an odd number mixes well enough: upper bits decide the order.
        mixed = (column(table, "digest").view(np.uint64) ^ seeds) * np.uint64(0x9E3779B97F4A7C15)
        last = max(1, round(len(mixed) * self._fraction)) - 1
        held_out = mixed <= np.partition(mixed, last)[last]
        if held_out.all():
            raise ValueError(
                f"data.path has too few different records ({len(table):,} or fewer) to be divided into training and "
                "validation. Set data.validation_path to held-out records."
            )
        return table.select(np.flatnonzero(~held_out)), table.select(np.flatnonzero(held_out))

    def _laid_out(self, purpose: str, table: datasets.Dataset) -> Rows:
        table, changed = (table, "") if self.rows == "joined" else self._fitting(table)
        rows = Rows(table, self.sequence_length, self.rows, self._pad)
        if not len(rows):
            raise ValueError(f"data.sequence_length={self.sequence_length} is longer than all text for {purpose}.")
        of = f"{plural(len(table), 'record')} in {plural(len(rows), 'row')}"
        _tell(f"{purpose}: {of}, {100 * rows.filled:.0f} % full", changed)
        return rows

    def _fitting(self, table: datasets.Dataset) -> tuple[datasets.Dataset, str]:
        """Return the records that fit into rows, perhaps after truncation, and a description of what that changed."""
        fits = column(table, "length") <= self.sequence_length
        if fits.all():
            return table, ""
        long = table.select(np.flatnonzero(~fits))
        limit = plural(self.sequence_length, "token")
        which = f"{plural(len(long), 'record')} of more than {limit}, {long[0]['place']} first"
        if self._too_long == "error":
            raise ValueError(
                f"data.sequence_length={self.sequence_length} is too short for {which}. Raise it, or set "
                "data.too_long to truncate or drop, or data.rows=joined for texts."
            )
        if self._too_long == "drop":
            return table.select(np.flatnonzero(fits)), f"without {which}"
        for record in long:
            if not learnt(np.asarray(record["tokens"][: self.sequence_length])):
                raise ValueError(
                    f"data.too_long='truncate' leaves nothing to be learnt of {record['place']}: its prompt alone "
                    f"takes data.sequence_length={self.sequence_length}. Raise that, or set data.too_long=drop."
                )
        return table, f"truncated: {which}"


def _loaded(tokenizer: PreTrainedTokenizerBase | str | Path | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ValueError(
            "data.path needs the model's tokenizer, and this model has none. Set data.tokenizer to a folder with one, "
            "or choose a pretrained model (model=smollm2) or data=random_tokens."
        )
    if isinstance(tokenizer, (str, Path)):
        setting, folder = f"data.tokenizer={str(tokenizer)!r}", Path(tokenizer).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"{setting} is not a folder. Name one that a tokenizer's save_pretrained() wrote.")
        with reading(folder, setting):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.is_fast:
        raise ValueError(
            f"data.tokenizer: {type(tokenizer).__name__} does not say which characters a token stands for, so what is "
            "to be learnt cannot be found. Take the fast kind of it (tokenizer.json)."
        )
    return tokenizer


def _template(chosen: str | Path | None) -> str | None:
    """Return the text of the chat template; ``None`` selects the tokenizer's own."""
    if chosen is None or str(chosen) == "plain":
        return None if chosen is None else PLAIN
    file = Path(chosen).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"data.chat_template={str(chosen)!r} is not a file. Name one with a Jinja template, or set it to plain, or "
            "to null for the tokenizer's own."
        )
    return file.read_text(encoding="utf-8")


def _tell(*facts: str) -> None:
    rank_zero_info(PREFIX + "; ".join(fact for fact in facts if fact))
