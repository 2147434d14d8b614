"""The systems that `bench_gpu.py` compares, each as its own documentation says to use it.

What is called here runs in a process of its own, one for each `Job`. Everything that may be missing is imported late.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_memory import DeviceMemory, HostMemory, capped
from gpu_task import LEARNING_RATE, Job, Task, batches, build
from torch import nn

UNKNOWN = "unknown"
TOLD = ("torch", "lightning", "transformers", "peft")


@dataclasses.dataclass(frozen=True)
class System:
    """A row of the tables.

    Attributes:
        title: in them.
        run: measures a job: seconds of the timed steps, the loss of each step, and what else there is to keep.
        whole: it is fastest with the whole batch at once, where that fits: every microbatch costs it transfers.
        needs: what has to be installed: a module, and what pip calls it.
        cuda: it runs on nothing else.
    """

    title: str
    run: Callable[[Job], dict[str, Any]]
    whole: bool = False
    needs: tuple[str, str] | None = None
    cuda: bool = False

    def missing(self, device: str) -> str | None:
        """Why it cannot run here at all; None: it can."""
        if self.needs is not None:
            module, wanted = self.needs
            if find_spec(module) is None:
                return f"not installed: pip install {wanted}"
            if "==" in wanted and f"{module}=={(there := _version(module))}" != wanted and there != UNKNOWN:
                return f"{there} is installed: pip install {wanted}"
        if self.cuda and device != "cuda":
            return "needs a CUDA device"
        return None


class Clock(pl.Callback):
    """The time of the steps after a warm-up, from the end of a batch to the end of a batch, and every step's loss.

    The two ends are at the same place of a step, so systems that go on with a step while the next one begins are timed
    with as much before the first end as after the last one. Reading the loss waits for the device, where it has to.

    Args:
        warmup, steps: optimizer steps.
        each: batches of one of them.
    """

    roundpipe_looks_away = True

    def __init__(self, warmup: int, steps: int, each: int) -> None:
        self._ends, self._each, self._batches = (warmup, warmup + steps), each, 0
        self._marks: list[float] = []
        self._losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch_ended(outputs["loss"])

    def batch_ended(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())
        self._batches += 1
        if self._batches in [end * self._each for end in self._ends]:
            float(loss)
            self._marks.append(time.perf_counter())

    def found(self) -> dict[str, Any]:
        losses = [float(loss) for loss in self._losses]  # each divided by the number of batches, as Lightning does it
        steps = [losses[start : start + self._each] for start in range(0, len(losses), self._each)]
        first, last = self._marks
        return {"seconds": last - first, "losses": [sum(step) for step in steps]}


def measure(job: Job, system: System | None = None) -> dict[str, Any]:
    """What a row shows of a job, or ``system`` in place of the row's own. Whatever goes wrong is raised."""
    system = system or SYSTEMS[job.row]
    if job.device == "cpu" and job.cap is not None and not job.row.startswith("ours"):
        raise ValueError("without a GPU only emulated devices keep to a cap")
    if job.device == "cuda":
        with capped(job.cap), HostMemory() as host, DeviceMemory() as device:
            found = system.run(job)
            torch.cuda.synchronize()
        retries = torch.cuda.memory_stats(0).get("num_alloc_retries", 0)
        found |= {"device_name": torch.cuda.get_device_name(0), "alloc_retries": retries, **device.found()}
    else:
        with HostMemory() as host:
            found = system.run(job)
    names = [*TOLD, *([system.needs[0]] if system.needs else [])]
    versions = {name: _version(name) for name in names}
    return {"tokens_per_s": job.steps * job.tokens / found["seconds"], **found, **host.found(), "versions": versions}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # put somewhere by hand
        return UNKNOWN


def _trainer(job: Job, strategy: Any, clock: Clock, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        **{"accelerator": "gpu" if job.device == "cuda" else "cpu", "devices": 1, **options},
        precision=job.precision,  # type: ignore[arg-type]
        max_epochs=1,
        use_distributed_sampler=False,  # the order of tokens is everybody's
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def ours(job: Job, **settings: Any) -> dict[str, Any]:
    """One batch a step, which the strategy cuts; ``settings`` are its own."""
    from lightning_roundpipe import RoundPipeStrategy

    emulation = {"memory": job.cap} if job.device == "cpu" and job.cap is not None else None
    options: dict[str, Any] = {"devices": job.workers}
    gpus = None
    if job.device == "cuda" and job.workers > 1:  # Lightning's own devices=[0, 0] wants GPUs to be different ones
        gpus, options = [torch.device("cuda", 0)] * job.workers, {"accelerator": "auto", "devices": "auto"}
    strategy = RoundPipeStrategy(
        num_microbatches=job.microbatches, emulation=emulation, parallel_devices=gpus, **settings
    )
    clock = Clock(job.warmup, job.steps, 1)
    task = Task(build(job, lean=True, checkpointed=False), lean=True, logs=job.logs)
    _trainer(job, strategy, clock, **options).fit(task, batches(job, job.microbatches * job.microbatch_size))
    report = strategy.report()
    kept = {key: report[key] for key in ("plan", "stall_pct", "bubble_pct", "planned_device_bytes")}
    return {**clock.found(), **kept, "device_bytes": max(report["peak_device_bytes"])}


def plain(job: Job, *, checkpointed: bool) -> dict[str, Any]:
    """Everything on the device, a microbatch a batch, gradients accumulated."""
    clock = Clock(job.warmup, job.steps, job.microbatches)
    task = Task(build(job, lean=True, checkpointed=checkpointed), lean=True, logs=job.logs)
    trainer = _trainer(job, "auto", clock, accumulate_grad_batches=job.microbatches)
    trainer.fit(task, batches(job, job.microbatch_size))
    return clock.found()


def roundpipe(job: Job, *, stale: bool) -> dict[str, Any]:
    """The loop of its documentation, with AdamW of its own: https://itcarrot.github.io/RoundPipe."""
    from roundpipe import OptimizerCtx, RoundPipeRunConfig, wrap_model_to_roundpipe
    from roundpipe.optim import Adam

    # Its presets know models by their classes, and have a lean loss of their own.
    model = wrap_model_to_roundpipe(
        build(job, lean=False, checkpointed=False),
        use_sequential_preset=True,
        model_run_config=RoundPipeRunConfig(num_microbatch=job.microbatches),
        optim_dtype=torch.float32,
    )
    with OptimizerCtx():
        all_of_them = list(model.parameters())
        trained = [parameter for parameter in all_of_them if parameter.requires_grad]
        optimizer = Adam(trained or all_of_them, lr=LEARNING_RATE, weight_decay=0.01, decoupled_weight_decay=True)

    def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        loss = outputs.loss
        if loss is None:
            loss = model.loss_function(logits=outputs.logits, labels=labels, vocab_size=model.vocab_size)
        share: torch.Tensor = loss / job.microbatches
        return share

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    clock = Clock(job.warmup, job.steps, 1)
    model.train()
    for (tokens,) in batches(job, job.microbatches * job.microbatch_size):
        inputs = {"input_ids": tokens, "labels": tokens}
        loss = model.forward_backward(input_kwargs=inputs, label=tokens, loss_fn=loss_of)
        model.step(step, is_async=stale)
        clock.batch_ended(loss)
    model.synchronize()
    return clock.found()


def fsdp(job: Job) -> dict[str, Any]:
    """Lightning's, which on one device shards nothing: each layer's weights come from the host and go again."""
    from lightning.pytorch.strategies import FSDPStrategy

    model = build(job, lean=True, checkpointed=True)
    strategy = FSDPStrategy(cpu_offload=True, auto_wrap_policy=_units(model))
    clock = Clock(job.warmup, job.steps, job.microbatches)
    trainer = _trainer(job, strategy, clock, accumulate_grad_batches=job.microbatches)
    trainer.fit(Task(model, lean=True, logs=job.logs), batches(job, job.microbatch_size))
    return clock.found()


def _units(model: nn.Module) -> Callable[[nn.Module, bool, int], bool]:
    """What FSDP moves as one: layers that Hugging Face does not split, and adapters.

    A unit in which some weights are frozen would have gradients of all of them, which is why PEFT advises this.
    """
    names = model._no_split_modules or []
    some_frozen = not all(parameter.requires_grad for parameter in model.parameters())

    def is_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if recurse or type(module).__name__ in names:
            return True
        trained = any(parameter.requires_grad for parameter in module.parameters())
        return some_frozen and trained and not any(True for _ in module.children())

    return is_unit


def deepspeed(job: Job) -> dict[str, Any]:
    """Lightning's, stage 3, weights and optimizer on the host. It hooks into every module, so the loss is plain."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from lightning.pytorch.strategies import DeepSpeedStrategy

    strategy = DeepSpeedStrategy(
        stage=3,
        offload_optimizer=True,
        offload_parameters=True,
        pin_memory=True,
        logging_batch_size_per_gpu=job.microbatch_size,
    )
    task = Task(
        build(job, lean=False, checkpointed=True),
        lean=False,
        logs=job.logs,
        optimizer=functools.partial(DeepSpeedCPUAdam, lr=LEARNING_RATE, adamw_mode=True),
    )
    clock = Clock(job.warmup, job.steps, job.microbatches)
    trainer = _trainer(job, strategy, clock, accumulate_grad_batches=job.microbatches)
    trainer.fit(task, batches(job, job.microbatch_size))
    return clock.found()


_ROUNDPIPE = ("roundpipe", "roundpipe==0.1.1")

SYSTEMS: dict[str, System] = {
    "ours": System("ours, staleness 0", functools.partial(ours, staleness=0)),
    "ours_stale": System("ours, staleness 1", functools.partial(ours, staleness=1)),
    "ours_compiled": System(
        "ours, staleness 0, compile_layers", functools.partial(ours, staleness=0, compile_layers=True)
    ),
    "roundpipe": System(
        "roundpipe 0.1.1, as it is", functools.partial(roundpipe, stale=True), needs=_ROUNDPIPE, cuda=True
    ),
    "roundpipe_sync": System(
        "roundpipe 0.1.1, is_async=False", functools.partial(roundpipe, stale=False), needs=_ROUNDPIPE, cuda=True
    ),
    "plain": System("plain Lightning", functools.partial(plain, checkpointed=False)),
    "plain_checkpointed": System(
        "plain Lightning, activation checkpointing", functools.partial(plain, checkpointed=True)
    ),
    "fsdp": System("FSDP, CPU offload", fsdp, whole=True, cuda=True),
    "deepspeed": System(
        "DeepSpeed stage 3, offload", deepspeed, whole=True, needs=("deepspeed", "deepspeed"), cuda=True
    ),
}
