"""``roundpipe-export``: writes what was trained as a Hugging Face model or PEFT adapters.

This module imports neither torch nor transformers, so that it reports a mistyped option at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.commands.console import console_command, waiting
from lightning_roundpipe.commands.options import Reply, option, pasted, run
from lightning_roundpipe.config import parse_bytes
from lightning_roundpipe.messages import gib, plural, seconds

if TYPE_CHECKING:
    from lightning_roundpipe.export import Exported


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes what was trained as a model that loads without this package. Adapters
    are merged into the base model's weights. The memory that it takes is that of
    the weights in one file."""

    examples: ClassVar = (
        "run=runs/smollm2_lora-20260101-120000 to=smollm2-pydoc",
        "run=last.ckpt base=Qwen/Qwen3-0.6B to=tuned",
        "run=FOLDER to=adapters merge=false",
    )

    run: str = option("a run's folder, one with PEFT adapters, or a checkpoint", shown="FOLDER|FILE")
    to: Path = option("the new folder", shown="FOLDER")
    ckpt: Path | None = option("the checkpoint; by default the best, or the newest", default=None)
    base: str | None = option("the base model; by default what the run says", default=None, shown="FOLDER|NAME")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "float32, bfloat16, float16", default="auto", shown="TYPE"
    )
    merge: bool = option("merge adapters, or write them alone", default=True)
    max_shard_size: int | None = option(
        "most of a safetensors file (default: 5GB)", default=None, read=parse_bytes, shown="SIZE"
    )
    overwrite: bool = option("replace a folder that is there", default=False)


@console_command
def main() -> int:
    return run("roundpipe-export", ExportOptions, answer)


def answer(options: ExportOptions) -> Reply:
    """Export what a run has trained, and answer with a table of the files.

    Raises:
        ValueError: an option is wrong, or needs a package that is not installed.
        OSError: a file cannot be read or written.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # hides the progress bars of other libraries
    try:
        with waiting("Reading the run"):
            from lightning_roundpipe.export import MAX_SHARD_SIZE, export
        with _bar() as progress:
            made = export(
                options.run,
                options.to,
                ckpt=options.ckpt,
                base=options.base,
                dtype=options.dtype,
                merge=options.merge,
                max_shard_size=options.max_shard_size or MAX_SHARD_SIZE,
                overwrite=options.overwrite,
                progress=progress,
            )
    except ImportError as error:  # a package of an extra is missing
        raise ValueError(str(error)) from error
    return Reply(export_table(made))


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if standard error is a terminal. Yields its update, which takes bytes done and in total."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Preparing", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total, description="Writing")


def export_table(made: Exported) -> RenderableType:
    """Return a table of the exported files, with their contents and the code that loads them."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for name, size in _rows(made.files):
        table.add_row(Text(name), gib(size))
    contents = f"{made.contents}; {gib(sum(size for _, size in made.files))} in {seconds(made.seconds)}"
    return Group(table, *map(Text, (contents, *made.notes, "")), pasted(made.how))


def _rows(files: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each row. Shards of the weights share one row."""
    parts = [file for file in files if fnmatch(file[0], "model-*.safetensors")]
    if len(parts) > 1:
        yield f"model-*.safetensors ({plural(len(parts), 'file')})", sum(size for _, size in parts)
    yield from (file for file in files if len(parts) < 2 or file not in parts)
