"""``roundpipe-export``: writes what was trained as a Hugging Face model or PEFT adapters.

This module imports neither torch nor transformers, so that it reports a mistyped option at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning_roundpipe.commands.answer import Answer
from lightning_roundpipe.commands.command_line import Parser, add_option, one_of, run
from lightning_roundpipe.commands.console import console_command, waiting
from lightning_roundpipe.config import parse_bytes, refuse_taken
from lightning_roundpipe.messages import gib

_EXAMPLES = (
    "run=runs/smollm2_lora-20260101-120000 to=smollm2-pydoc",
    "run=last.ckpt base=Qwen/Qwen3-0.6B to=tuned",
    "run=adapters to=merged dtype=bfloat16",
)

_PURPOSE = """\
Writes what was trained as a model that loads without this package.
Adapters are merged into the base model's weights. The memory that it takes is
that of the weights in one file."""

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def parser() -> Parser:
    """Return the parser of the command's options."""
    made = Parser("roundpipe-export", _PURPOSE, _EXAMPLES)
    add_option(made, "run", "a run's folder, one with PEFT adapters, or a checkpoint", None, "FOLDER")
    add_option(made, "to", "the new folder", None, "FOLDER")
    add_option(made, "ckpt", "the checkpoint; by default the best, or the newest", None, "FILE")
    add_option(made, "base", "the base model; by default what the run says", None, "FOLDER|NAME")
    add_option(made, "dtype", ", ".join(_DTYPES), one_of(*_DTYPES))
    add_option(made, "max_shard_size", "most of a safetensors file; 5GB without", parse_bytes, "SIZE")
    return made


@console_command
def main() -> int:
    return run("roundpipe-export", answer)


def answer(arguments: Sequence[str]) -> Answer:
    """Export what a run has trained, and answer with what was written."""
    values, _ = parser().read(arguments)
    for name in ("run", "to"):
        if name not in values:
            raise ValueError(f"{name}= is missing: write run=FOLDER to=FOLDER, as in {_EXAMPLES[0]}.")
    if not Path(values["run"]).expanduser().exists():
        raise ValueError(
            f"run={values['run']} is not there: name a run's folder, one with PEFT adapters, or a checkpoint."
        )
    refuse_taken(values["to"], "to")
    os.environ.setdefault("TQDM_DISABLE", "1")  # hides the progress bars of other libraries
    try:
        with waiting("Reading the run"):
            from lightning_roundpipe.export import MAX_SHARD_SIZE, export

            ckpt = values.get("ckpt")
        with waiting("Writing"):
            made = export(
                values["run"],
                Path(values["to"]).expanduser(),
                ckpt=None if ckpt is None else Path(ckpt).expanduser(),
                base=values.get("base"),
                dtype=values.get("dtype", "auto"),
                max_shard_size=values.get("max_shard_size") or MAX_SHARD_SIZE,
            )
    except ImportError as error:  # a package of an extra is missing
        raise ValueError(str(error)) from error
    size = gib(sum(path.stat().st_size for path in made.folder.iterdir()))
    how = f'AutoModelForCausalLM.from_pretrained({str(made.folder)!r}, dtype="auto")'
    return Answer(verdict=f"{made.contents}; {size}", notes=made.notes, paste=[how])
