"""``roundpipe-train``: runs the training that a configuration describes, from the command line.

The configuration is in ``conf/``, which is installed as ``lightning_roundpipe.conf``::

    roundpipe-train experiment=smollm2_lora                 the main job
    roundpipe-train experiment=smollm2_lora strategy=auto   the same job, plain Lightning on one device
    roundpipe-train -m experiment=tiny data.batch_size=2,4,8      a sweep of microbatches, and a table of its runs
    roundpipe-train --help                                  all groups and choices

The last line on standard output is only the absolute path of the folder that the run wrote, for scripts:
``folder="$(roundpipe-train ... | tail -n 1)"``. If Ctrl-C, SIGTERM or an error ends a run, standard error shows the
command that continues it.

This module imports little beyond Hydra, so that it reports a mistyped setting at once.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_roundpipe.commands.console import console_command
from lightning_roundpipe.config import RoundPipeError, is_whole
from lightning_roundpipe.messages import PREFIX, RoundPipeWarning, plural, raised_here
from lightning_roundpipe.overrides import USAGE, command, explained, help_text, options_first, wrong_option
from lightning_roundpipe.reports.sweep import finished_sweep, forget_sweep, make_plans_static

if TYPE_CHECKING:
    from lightning_roundpipe.tasks.fine_tuning import Job

_FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's environment variable: 1 shows every traceback in full."""

_CONFIG_PATH = "pkg://lightning_roundpipe.conf"

_IRRELEVANT_WARNINGS = (
    r".*does not have many workers which may be a bottleneck.*",  # the data are in memory
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",  # Lightning's use of torch
    r".*`is_gradient_checkpointing` is deprecated.*",  # PEFT's use of transformers
    r".*GPU available but not used.*",  # accelerator=cpu was asked for
    r"The dirpath has changed from .*",  # a resumed run has a folder of its own
)

_finished: list[Path] = []

_left: list[str] = []
"""Lines to print at the very end about runs that did not finish."""


@console_command
def main() -> None:
    """Run the console command. Exit with 2 and one line that says what to change, if settings are invalid."""
    arguments = sys.argv[1:]
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        raise SystemExit(2)
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return
    sys.argv[1:] = options_first(arguments)
    _finished.clear()
    _left.clear()
    forget_sweep()
    folder: Path | None = None
    try:
        _run_application()
        folder = _finished[-1] if _finished else None
    finally:
        folder = finished_sweep() or folder
        for line in _left:
            print(line, file=sys.stderr)
        sys.stderr.flush()
        if folder is not None:
            print(folder, flush=True)


class _Mistake(SystemExit):
    """A failure of the job whose message says what to change. Not an ``Exception``, which Hydra would report too."""


def _run_application() -> None:
    """Run the application without Hydra's own error reports, which are several lines of its internals."""
    if (wrong := wrong_option(sys.argv[1:])) is not None:
        _exit(wrong)
    full = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"  # makes Hydra raise
    try:
        _application()
    except _Mistake as mistake:
        if full == "1" and mistake.__cause__ is not None:
            raise mistake.__cause__ from None
        _exit(str(mistake))
    except BrokenPipeError:
        raise  # the reader of our output has gone: `console_command` ends the process
    except Exception as error:
        if full == "1":
            raise
        trace = _of_the_job(error.__traceback__)
        if trace is None:
            _exit(explained(error, sys.argv[1:]))
        traceback.print_exception(error.with_traceback(trace))
        raise SystemExit(1) from None
    finally:
        del os.environ[_FULL_ERROR]
        os.environ.update({} if full is None else {_FULL_ERROR: full})


def _of_the_job(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` from where the job begins; None if the failure was earlier."""
    while trace is not None and trace.tb_frame.f_code is not _application.__wrapped__.__code__:
        trace = trace.tb_next
    return trace


def _exit(text: str) -> NoReturn:
    print(f"roundpipe-train: {' '.join(text.split())}", file=sys.stderr)
    raise SystemExit(2)


def run_folder(name: str) -> str:
    """Return the absolute path of a new folder for a run of that name, in ``runs/`` of the current folder."""
    here = Path.cwd() / "runs"
    stem = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = here / stem
    number = 2
    while folder.exists():
        folder = here / f"{stem}-{number}"
        number += 1
    return str(folder)


def by_adapters(with_adapters: float, without: float, *, _root_: DictConfig) -> float:
    """Return the value for a run with adapters (the group ``lora``), or the one for a run that trains all weights."""
    return with_adapters if _root_.lora else without


def emulated(*, _root_: DictConfig) -> bool:
    """Return whether devices are emulated ones, of the group ``trainer``."""
    return bool(_root_.trainer.get("accelerator") == "cpu")


def tenth_of(steps: Any) -> int:
    """Return a tenth of ``steps``, rounded down; 0 if it is not a whole number, which another check refuses."""
    return max(0, steps // 10) if isinstance(steps, int) else 0


def by_rows(even: Any, uneven: Any, *, _root_: DictConfig) -> Any:
    """Return the value for data whose rows have equally many targets, or the one for packed and padded rows."""
    return uneven if _root_.data.get("rows") in ("packed", "padded") else even


def batches_of_step(*, _root_: DictConfig) -> int:
    """Return the batches in ``step_samples`` samples; 1 for what is no number, which another check refuses."""
    samples, size = _root_.step_samples, _root_.data.get("batch_size")
    whole = is_whole(samples) and is_whole(size) and size > 0
    return max(1, samples // size) if whole else 1


def product(one: Any, other: Any) -> int:
    """Return the product of two whole numbers; 1 if they are none, which another check refuses."""
    return one * other if is_whole(one) and is_whole(other) else 1


for _function in (run_folder, by_adapters, emulated, tenth_of, by_rows, batches_of_step, product):
    _cached = _function is run_folder  # with a time stamp
    OmegaConf.register_new_resolver(_function.__name__, _function, use_cache=_cached, replace=True)


@hydra.main(version_base="1.3", config_path=_CONFIG_PATH, config_name="train")
def _application(cfg: DictConfig) -> None:
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    started = False
    try:
        if settings.mode == RunMode.MULTIRUN:
            make_plans_static(cfg)
        _quiet()
        from lightning_roundpipe.tasks.fine_tuning import build, run

        job = build(cfg, folder)
        started = True
        try:
            run(job)
        except BaseException as ended:
            _say_how_to_go_on(job, ended)
            raise
    except SystemExit as ended:  # an interrupt
        _leave_error(folder, ended)
        raise
    except Exception as error:
        _leave_error(folder, error)
        if settings.mode != RunMode.MULTIRUN and _is_mistake(error, started):
            raise _Mistake(str(error)) from error
        raise
    _finished.append(folder)


def _is_mistake(error: Exception, started: bool) -> bool:
    """Return whether the error's message alone says what to change: ordinary errors while objects are built from the
    configuration, and later those that this package raises.
    """
    if type(error).__name__ == "MisconfigurationException":
        return True
    if not started:
        return isinstance(error, (ValueError, TypeError, OSError, ImportError))
    from lightning_roundpipe.devices.errors import DeviceOutOfMemory

    return raised_here(error) and isinstance(error, (ValueError, OSError, RoundPipeError, DeviceOutOfMemory))


def _say_how_to_go_on(job: Job, error: BaseException) -> None:
    """Prepare the last lines of the output of a run that did not finish, and raise an interrupt's ``SystemExit``."""
    from lightning_roundpipe.callbacks import Checkpoints

    found = [callback for callback in job.trainer.checkpoint_callbacks if isinstance(callback, Checkpoints)]
    newest = next((callback.newest for callback in found if callback.newest is not None), None)
    number = next((callback.interrupted_by for callback in found if callback.interrupted_by is not None), None)
    interrupted = isinstance(error, (SystemExit, KeyboardInterrupt))
    if not interrupted and newest is None and not job.trainer.global_step:
        return  # nothing was trained: the error is enough
    if interrupted:
        _left.append(
            f"roundpipe-train: interrupted after {job.trainer.global_step} of {plural(job.trainer.max_steps, 'step')}."
        )
    checkpoint = newest or job.ckpt_path
    if checkpoint is None:
        _left.append("No checkpoint was written.")
    else:
        overrides = HydraConfig.get().overrides.task
        _left.append(f"The newest checkpoint is {checkpoint}. To go on from it:")
        _left.append(command(overrides, sys.argv[1:], Path(checkpoint).absolute()))
    if interrupted:
        raise SystemExit(128 + (number or signal.SIGINT)) from None


def _leave_error(folder: Path, error: BaseException) -> None:
    """Write the failure to the run's summary, for the table of a sweep."""
    lines = str(error).splitlines() or [""]
    text = "interrupted" if isinstance(error, SystemExit) else f"{type(error).__name__}: {lines[0]}"
    (folder / "summary.json").write_text(json.dumps({"error": text}, indent=2))


class _OwnLines(logging.Filter):
    """Of lines of information, those of this package: Lightning's are the same in every run."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or record.getMessage().startswith(PREFIX)


class _CurrentStderr(io.TextIOBase):
    """The present standard error: a progress bar replaces it while it draws, to print above itself."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


_format = warnings.formatwarning


def _as_text(message: Warning | str, category: type[Warning], *args: Any, **options: Any) -> str:
    """Return a warning as it is shown: a `RoundPipeWarning` without a line of code, which would be one of Hydra."""
    if issubclass(category, RoundPipeWarning):
        return f"{message}\n"
    return _format(message, category, *args, **options)


def _quiet() -> None:
    """Silence messages of every run that concern no user. All others stay."""
    for message in _IRRELEVANT_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = _as_text
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # hides loading bars; Lightning's own bars ignore it
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _OwnLines) for known in logger.filters):
            logger.addFilter(_OwnLines())
    import_module("lightning.pytorch")  # the import gives its loggers their handlers
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:  # others write to files or collectors
                handler.setStream(_CurrentStderr())


if __name__ == "__main__":
    main()
