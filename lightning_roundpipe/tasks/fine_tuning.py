"""A fine-tuning run from a composed configuration: builds it, trains, and shows what training changed.

All objects are built from a ``_target_`` in the configuration. A run is what any script around a Trainer does:
validate, complete a prompt, fit, and repeat the first two.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_roundpipe.callbacks import Measurements, RunFolder
from lightning_roundpipe.config import is_whole
from lightning_roundpipe.data import TextFiles
from lightning_roundpipe.tasks.causal_lm import CausalLM
from lightning_roundpipe.tasks.results import EvaluationResult, describe_parameters, show_outcome, show_run, summarise
from lightning_roundpipe.trainer.refusals import unreadable_checkpoint

_FILLED_IN = {"data.tokenizer", "data.vocab_size"}
"""Settings that may be left open, because the model determines them."""

_PROMPT_WITHOUT_TOKENIZER = (1, 2, 3)


@dataclass(frozen=True)
class Job:
    """The objects of a run, ready to start."""

    folder: Path
    started: float
    trainer: Trainer
    task: LightningModule
    data: LightningDataModule
    tokenizer: PreTrainedTokenizerBase | None
    measurements: Measurements
    prompt: str | None
    ckpt_path: str | None
    settings: dict[str, Any]
    """The whole configuration, resolved."""


def build(cfg: DictConfig, folder: Path) -> Job:
    """Return the job that ``cfg`` describes. Writes the resolved configuration to ``folder``.

    Raises:
        ValueError, OSError, ImportError, MisconfigurationException: a setting is invalid; the message says which.
    """
    started = time.monotonic()
    _refuse_unset(cfg)
    _refuse_missing_checkpoint(cfg.ckpt_path)
    _check_types(cfg)
    _check_step(cfg)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    measurements, settings = Measurements(), cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    trainer = _make_trainer(cfg, measurements, settings)  # before the model, which may take minutes
    seed_everything(cfg.seed, workers=True, verbose=False)
    pretrained = _make(cfg.model)
    facts = {"tokenizer": pretrained.tokenizer, "vocab_size": pretrained.config.get_text_config().vocab_size}
    _check_vocabulary(cfg, facts["vocab_size"])
    data = _make(cfg.data, **{key: fact for key, fact in facts.items() if OmegaConf.is_missing(cfg.data, key)})
    if isinstance(data, TextFiles):
        data.setup("fit")  # checks every record before the weights are loaded, which may take minutes
    seed_everything(cfg.seed, workers=True, verbose=False)  # random weights are the same whatever the data have drawn
    show_run(run=cfg.name, model=pretrained.source, folder=folder)
    model = pretrained.model  # may take minutes
    if cfg.float8:
        _make(cfg.float8)(model)
    task = _make(
        cfg.task,
        model=model,
        lora=_make(cfg.lora) if cfg.lora else None,
        optimizer=_make(cfg.optimizer),
        scheduler=_make(cfg.scheduler) if cfg.scheduler else None,
    )
    if isinstance(data, TextFiles) and data.rows == "packed" and isinstance(task, CausalLM):
        task.keep_documents_apart()
    return Job(
        folder=folder,
        started=started,
        trainer=trainer,
        task=task,
        data=data,
        tokenizer=pretrained.tokenizer,
        measurements=measurements,
        prompt=cfg.prompt,
        ckpt_path=cfg.ckpt_path,
        settings=settings,
    )


def _check_vocabulary(cfg: DictConfig, of_model: int) -> None:
    """Refuse more tokens than the model has, which would end as an index that is out of range."""
    given = None if OmegaConf.is_missing(cfg.data, "vocab_size") else cfg.data.get("vocab_size")
    if isinstance(given, int) and given > of_model:
        raise ValueError(
            f"data.vocab_size={given} is more than the model's vocabulary, which has {of_model}. Leave data.vocab_size "
            "out: it is filled in."
        )


def run(job: Job) -> dict[str, Any]:
    """Train, print what that changed, and return the summary, which is also written to ``summary.json``."""
    trainer, task, data = job.trainer, job.task, job.data
    show_run(parameters=describe_parameters(task, job.settings))
    trainer.validate(task, datamodule=data, verbose=False)
    before = _outcome(job)
    trainer.fit(task, datamodule=data, ckpt_path=job.ckpt_path)
    if trainer.global_step not in job.measurements.val_losses:
        trainer.validate(task, datamodule=data, verbose=False)
    after = _outcome(job)
    summary = summarise(trainer, job.measurements, before, after, wall_s=time.monotonic() - job.started)
    (job.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show_outcome(summary, job.prompt)
    gc.collect()  # a sweep runs its next job in this process
    return summary


def _refuse_unset(cfg: DictConfig) -> None:
    if unset := set(_unset(OmegaConf.to_container(cfg))) - _FILLED_IN:
        raise ValueError(f"{min(unset)} must be set, for example on the command line: {min(unset)}=VALUE")


def _refuse_missing_checkpoint(path: str | None) -> None:
    """Raise before the model is read. Lightning's own words, such as ``last``, and addresses are no paths."""
    if path and path not in ("best", "hpc", "last", "registry") and ":" not in path and not Path(path).exists():
        raise unreadable_checkpoint(path, FileNotFoundError())


def _unset(node: Any, path: str = "") -> Iterator[str]:
    """Yield where ``node`` is "???". (OmegaConf's own search fails where other settings refer to such a setting.)"""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _unset(value, f"{path}.{key}" if path else str(key))
    if node == "???":
        yield path


def _make(node: DictConfig, **objects: Any) -> Any:
    """Return what a node's ``_target_`` makes of its settings and of ``objects``, which bypass OmegaConf."""
    if node.get("_target_") is None:
        raise ValueError(
            f"these settings lack _target_, the class that takes them, as each file of conf has it: {_shown(node)}"
        )
    try:
        if node.get("_partial_"):
            return instantiate(node, _convert_="all", **objects)
        return instantiate(node, _partial_=True, _convert_="all")(**objects)
    except TypeError as error:
        made = node.get("_target_")
        raise ValueError(
            f"{made} does not take these settings: {error}. Leave it out, or choose another class."
        ) from error
    except InstantiationException as error:
        cause = error.__cause__
        raise (cause if isinstance(cause, (ValueError, OSError)) else ValueError(str(error))) from None


_NUMBERS = {int: "a whole number", float: "a number", bool: "true or false"}


def _check_types(node: Any) -> None:
    """Raise for settings of the wrong type. Otherwise they would fail late, where they are used.

    Raises:
        ValueError: a ``_target_`` annotates an argument as a number or boolean, and its setting is of another type.
    """
    if not isinstance(node, DictConfig):
        return
    wanted = _annotations(node["_target_"]) if "_target_" in node else {}
    for key in map(str, node):
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        value = node[key]
        _check_types(value)
        kinds = set(get_args(wanted.get(key))) or {wanted.get(key)}
        known = kinds & _NUMBERS.keys()
        if not known or not isinstance(value, (str, int, float)) or {get_origin(kind) for kind in kinds} & {Literal}:
            continue
        fits = known | (kinds & {str}) | ({int} if float in known else set())
        if type(value) not in fits:
            named = known - {int} if float in known else known
            meant = " or ".join(name for kind, name in _NUMBERS.items() if kind in named)
            null = ", or null" if type(None) in kinds else ""
            raise ValueError(f"{node._get_full_key(key)}={value!r} must be {meant}{null}.")


def _check_step(cfg: DictConfig) -> None:
    """Raise ``ValueError`` if ``step_samples`` decides the window and is not a whole number of batches."""
    samples, size = cfg.step_samples, cfg.data.get("batch_size")
    if not is_whole(samples) or samples < 1:
        raise ValueError(f"step_samples={samples!r} must be a whole number of at least 1.")
    if (
        is_whole(size)
        and size > 0
        and samples % size
        and OmegaConf.is_interpolation(cfg.trainer, "accumulate_grad_batches")
    ):
        raise ValueError(
            f"step_samples={samples} is not a multiple of data.batch_size={size}, so no number of batches makes a "
            "step. Change one of them, or set trainer.accumulate_grad_batches instead of step_samples."
        )


def _annotations(target: str) -> dict[str, Any]:
    """Return the annotations of ``target``'s arguments; empty if they cannot be resolved."""
    made: Any = get_object(target)
    try:
        return get_type_hints(made if is_dataclass(made) or not isinstance(made, type) else vars(made)["__init__"])
    except (NameError, TypeError, KeyError):
        return {}


def _shown(node: DictConfig) -> str:
    known = [key for key in map(str, node) if not key.startswith("_") and not OmegaConf.is_missing(node, key)]
    return ", ".join(f"{key}={node[key]!r}" for key in known)


def _make_trainer(cfg: DictConfig, measurements: Measurements, settings: Mapping[str, Any] | None = None) -> Trainer:
    if cfg.trainer.get("accelerator") in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.accelerator={cfg.trainer.accelerator!r} needs a CUDA device, and torch finds none: set "
            "trainer=cpu for emulated devices."
        )
    named = "_target_" not in cfg.strategy
    strategy = cfg.strategy.name if named else _make(cfg.strategy)
    devices = cfg.strategy.get("devices") if named else None
    callbacks = [measurements, *(_make(node) for node in cfg.callbacks.values() if node)]
    for callback in callbacks:
        if isinstance(callback, RunFolder):
            callback.settings = settings
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)  # otherwise Lightning adds its own
    trainer: Trainer = _make(
        cfg.trainer,
        strategy=strategy,
        callbacks=callbacks,
        logger=[_make(node) for node in cfg.logger.values() if node],
        **({} if devices is None else {"devices": devices}),
        **({} if saves or "enable_checkpointing" in cfg.trainer else {"enable_checkpointing": False}),
    )
    return trainer


def _outcome(job: Job) -> EvaluationResult:
    loss = job.measurements.val_losses.get(job.trainer.global_step)
    return EvaluationResult(loss, _complete(job) if job.prompt is not None else None)


def _complete(job: Job) -> str:
    """Return the model's greedy completion of the prompt. Without a tokenizer, the prompt is a few token ids."""
    prompt = list(_PROMPT_WITHOUT_TOKENIZER)
    if job.tokenizer is not None:
        prompt = job.tokenizer(job.prompt, add_special_tokens=False)["input_ids"]
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader([{"input_ids": torch.tensor(prompt)}])  # type: ignore[arg-type]
    bar = job.trainer.progress_bar_callback
    if isinstance(bar, ProgressBar):
        bar.disable()  # a single prompt needs no bar
    try:
        predictions = job.trainer.predict(job.task, dataloaders=loader)
    finally:
        if isinstance(bar, ProgressBar):
            bar.enable()
    assert predictions is not None
    tokens = torch.as_tensor(predictions[0])[0][len(prompt) :].tolist()
    if job.tokenizer is None:
        return " ".join(map(str, tokens))
    return str(job.tokenizer.decode(tokens, skip_special_tokens=True))
