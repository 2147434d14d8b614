"""The pieces of `bench_gpu.py`: the same optimizer steps by several systems, the longest sequence, a traced step.

Weights and tokens are random.

Shapes and adapters are those of ``conf/``, which is read without hydra. What a system needs is imported when its row
runs, because it may be missing.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import yaml
from common import trainer
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices.host_memory import peak_bytes
from lightning_roundpipe.tasks import CausalLM

CONF = Path(__file__).resolve().parents[1] / "conf"
GIB = 2**30
CAP = 24 * GIB
LEARNING_RATE = 1e-4
TILE = 1_000_003
"""Random numbers that are drawn. Weights repeat them, because drawing billions takes minutes."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Steps of ``microbatches``, each of ``rows`` sequences; ``steps`` are timed, after ``warmup``."""

    device: str
    sequence: int
    rows: int
    microbatches: int
    steps: int
    warmup: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    """Tokens of the sequences that `longest` tries."""

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.rows * self.microbatches

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence


ON_GPU = Sizes("cuda", 2048, 4, 8, 2, 2, torch.bfloat16, (32_768, 65_536, 131_072, 262_144))
TINY = Sizes("cpu", 32, 2, 4, 2, 2, torch.float32, (32, 64))


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        title: its first cell.
        run: trains, and returns the clock and what else the row records.
        model: name of a file in ``conf/model``.
        lora: train adapters in all linear layers; else all weights.
        quantization: format of the frozen weights.
        microbatches: of a step; None: as many as usual.
        cap: bytes of the GPU that torch may allocate; None: all.
        needs: module that has to be installed.
    """

    title: str
    run: Callable[[Row, Sizes], tuple[Clock, dict[str, Any]]]
    model: str = "qwen3_1_7b"
    lora: bool = False
    quantization: str | None = None
    microbatches: int | None = None
    cap: int | None = None
    needs: str | None = None


class Clock(pl.Callback):
    """Seconds of the timed steps, from the end of a batch to the end of a batch, and each step's loss.

    Both ends are at the same place of a step, so a system that begins the next step early is timed with as much work
    before the first end as after the last one. Reading the loss waits for the device.

    Args:
        sizes: of the steps.
        each: batches of a step.
    """

    roundpipe_passive_hooks = True

    def __init__(self, sizes: Sizes, each: int = 1) -> None:
        self._ends, self._each = (sizes.warmup * each, (sizes.warmup + sizes.steps) * each), each
        self._marks: list[float] = []
        self._losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch_ended(outputs["loss"])

    def batch_ended(self, loss: torch.Tensor) -> None:
        """Record the loss of a batch, which is divided by the number of batches of a step."""
        self._losses.append(loss.detach())
        if len(self._losses) in self._ends:
            float(self._losses[-1])
            self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return self._marks[1] - self._marks[0]

    @property
    def losses(self) -> list[float]:
        each = [float(loss) for loss in self._losses]
        return [sum(each[start : start + self._each]) for start in range(0, len(each), self._each)]


class HostMemory:
    """How far the machine's free memory falls inside the context: pinned memory need not count as the process's."""

    def __enter__(self) -> HostMemory:
        self._before = self._least = psutil.virtual_memory().available
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._least = min(self._least, psutil.virtual_memory().available)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.nbytes = max(0, self._before - self._least)


def shape(name: str, sizes: Sizes) -> dict[str, Any]:
    """The settings of a file of ``conf/model``, or of its tiny twin on the CPU."""
    path = CONF / "model" / f"{'tiny_' if sizes.device == 'cpu' else ''}{name}.yaml"
    settings: dict[str, Any] = yaml.safe_load(path.read_text())
    return {key: value for key, value in settings.items() if key != "_target_"}


def build(row: Row, sizes: Sizes, positions: int | None = None) -> PreTrainedModel:
    """The row's model in host memory. ``positions``: of so many tokens, if not as many as usual."""
    settings = shape(row.model, sizes) | ({"max_position_embeddings": positions} if positions else {})
    ours = ("weights", "dtype", "quantization", "double_quantization", "rope")
    config = AutoConfig.for_model(**{key: value for key, value in settings.items() if key not in ours})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to(sizes.dtype).to_empty(device="cpu")
    model.tie_weights()
    tile = torch.randn(TILE, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms
                parameter.fill_(1.0)
                continue
            for part in parameter.view(-1).split(TILE):
                part.copy_(tile[: part.numel()])
    for module in model.modules():
        if hasattr(module, "inv_freq"):  # a buffer, which had no values on the meta device
            module.__init__(config=model.config)  # type: ignore[misc]
    if row.quantization is None:
        return model
    from lightning_roundpipe.model.quantize import quantize

    return quantize(model, row.quantization)


def task(row: Row, sizes: Sizes, *, checkpointed: bool = False, positions: int | None = None) -> CausalLM:
    """The row's model as an ordinary LightningModule."""
    model = build(row, sizes, positions)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lora = yaml.safe_load((CONF / "lora" / "all_linear.yaml").read_text()) if row.lora else None
    return CausalLM(
        model,
        functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        lora=None if lora is None else LoraConfig(**{key: lora[key] for key in lora if key != "_target_"}),
    )


def batches(row: Row, sizes: Sizes, size: int, *, steps: int | None = None) -> Iterable[dict[str, torch.Tensor]]:
    """The tokens of all steps, ``size`` sequences at a time."""
    count = (sizes.warmup + sizes.steps if steps is None else steps) * sizes.batch
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape(row.model, sizes)["vocab_size"], (count, sizes.sequence), generator=draw)
    return DataLoader([{"input_ids": each, "labels": each} for each in tokens], batch_size=size)  # type: ignore[arg-type]


def lightning(strategy: Any, sizes: Sizes, callback: pl.Callback, **options: Any) -> pl.Trainer:
    accelerator = "gpu" if sizes.device == "cuda" else "cpu"
    precision = "bf16-true" if sizes.dtype == torch.bfloat16 else "32-true"
    return trainer(strategy, accelerator=accelerator, precision=precision, callbacks=[callback], **options)


def plain(row: Row, sizes: Sizes, *, checkpointed: bool = False) -> tuple[Clock, dict[str, Any]]:
    """Everything on the device; a microbatch is a batch, and gradients accumulate. AdamW on weights of the dtype."""
    clock = Clock(sizes, sizes.microbatches)
    fitter = lightning("auto", sizes, clock, accumulate_grad_batches=sizes.microbatches)
    fitter.fit(task(row, sizes, checkpointed=checkpointed), batches(row, sizes, sizes.rows))
    return clock, {}


def ours(row: Row, sizes: Sizes, **settings: Any) -> tuple[Clock, dict[str, Any]]:
    """A batch a step, which the strategy cuts; ``settings`` are its own."""
    strategy = RoundPipeStrategy(num_microbatches=sizes.microbatches, **settings)
    clock = Clock(sizes)
    lightning(strategy, sizes, clock).fit(task(row, sizes), batches(row, sizes, sizes.batch))
    report = strategy.report()
    kept = {key: report[key] for key in ("plan", "stall_pct", "bubble_pct", "planned_device_bytes", "alloc_retries")}
    return clock, {**kept, "device_bytes": max(report["peak_device_bytes"])}


def roundpipe(row: Row, sizes: Sizes) -> tuple[Clock, dict[str, Any]]:
    """The loop of the paper's library by its documentation, one step late as it is, with its own AdamW."""
    from roundpipe import OptimizerCtx, RoundPipeRunConfig, wrap_model_to_roundpipe
    from roundpipe.optim import Adam

    model = wrap_model_to_roundpipe(
        build(row, sizes),
        use_sequential_preset=True,
        model_run_config=RoundPipeRunConfig(num_microbatch=sizes.microbatches),
        optim_dtype=torch.float32,
    )
    with OptimizerCtx():
        optimizer = Adam(list(model.parameters()), lr=LEARNING_RATE, weight_decay=0.01, decoupled_weight_decay=True)

    def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        loss = outputs.loss
        if loss is None:
            loss = model.loss_function(logits=outputs.logits, labels=labels, vocab_size=model.vocab_size)
        share: torch.Tensor = loss / sizes.microbatches
        return share

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    clock = Clock(sizes)
    model.train()
    for batch in batches(row, sizes, sizes.batch):
        loss = model.forward_backward(input_kwargs=batch, label=batch["labels"], loss_fn=loss_of)
        model.step(step, is_async=True)
        clock.batch_ended(loss)
    model.synchronize()
    return clock, {}


def fsdp2(row: Row, sizes: Sizes, *, microbatches: int | None = None) -> tuple[Clock, dict[str, Any]]:
    """``fully_shard`` on one device, which shards nothing: each layer's weights come from the host and go again.

    Args:
        microbatches: of a step. Each of them uploads all weights, so fewer are faster.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    gloo_and_nccl = "cpu:gloo,cuda:nccl" if sizes.device == "cuda" else "gloo"
    torch.distributed.init_process_group(gloo_and_nccl, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh(sizes.device, (1,))
        module = task(row, sizes, checkpointed=True)
        module.log = lambda *_, **__: None  # type: ignore[method-assign]  # no Trainer takes what it logs
        offload = CPUOffloadPolicy(pin_memory=sizes.device == "cuda")
        for layer in module.modules():
            if type(layer).__name__ in (module.model._no_split_modules or ()):
                fully_shard(layer, mesh=mesh, offload_policy=offload)  # type: ignore[call-overload]
        fully_shard(module.model, mesh=mesh, offload_policy=offload)
        optimizer: Any = module.configure_optimizers()
        count = microbatches or sizes.microbatches
        clock = Clock(sizes, count)
        for number, batch in enumerate(batches(row, sizes, sizes.batch // count), start=1):
            there = {name: value.to(sizes.device) for name, value in batch.items()}
            loss = module.training_step(there, number) / count
            loss.backward()
            if number % count == 0:
                optimizer.step()
                optimizer.zero_grad()
            clock.batch_ended(loss)
    finally:
        torch.distributed.destroy_process_group()
    return clock, {}


_RECOMPUTING = functools.partial(plain, checkpointed=True)
_ROW_8B = functools.partial(Row, model="llama3_1_8b", lora=True, microbatches=2, cap=CAP)
_NF4: dict[str, Any] = {"quantization": "nf4", "needs": "bitsandbytes"}
ROWS: dict[str, Row] = {
    "plain": Row("plain Lightning", plain),
    "ours": Row("ours, staleness 0", ours),
    "ours_stale": Row("ours, staleness 1", functools.partial(ours, staleness=1)),
    "roundpipe": Row("the paper's library, one step late", roundpipe, needs="roundpipe"),
    "fsdp2": Row("FSDP2, CPU offload, the batch whole", functools.partial(fsdp2, microbatches=1)),
    "plain_24gib": Row("plain Lightning, recomputing, 24 GiB", _RECOMPUTING, cap=CAP),
    "ours_24gib": Row("ours, staleness 0, 24 GiB", ours, cap=CAP),
    "ours_stale_24gib": Row("ours, staleness 1, 24 GiB", functools.partial(ours, staleness=1), cap=CAP),
    "fsdp2_24gib": Row("FSDP2, CPU offload, 24 GiB", fsdp2, cap=CAP),
    "roundpipe_24gib": Row("the paper's library, 24 GiB", roundpipe, cap=CAP, needs="roundpipe"),
    "lora_plain_24gib": _ROW_8B("8B, LoRA, plain Lightning, recomputing, 24 GiB", _RECOMPUTING),
    "lora_ours_24gib": _ROW_8B("8B, LoRA, ours, 24 GiB", ours),
    "nf4_plain_24gib": _ROW_8B("8B, LoRA on nf4, plain Lightning, recomputing, 24 GiB", _RECOMPUTING, **_NF4),
    "nf4_ours_24gib": _ROW_8B("8B, LoRA on nf4, ours, 24 GiB", ours, **_NF4),
}
OF_ITS_OWN = Row("the longest sequence, 24 GiB", ours, cap=CAP)
"""The model of `longest`."""


def begin(row: Row, sizes: Sizes) -> None:
    """What each process does first."""
    torch.manual_seed(0)
    if sizes.device == "cpu":
        torch.set_num_threads(1)  # the models are too small for more
    elif row.cap is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, row.cap / torch.cuda.get_device_properties(0).total_memory))


def measure(row: Row, sizes: Sizes) -> dict[str, Any]:
    """What a row records; errors pass."""
    cuda, sizes = (
        sizes.device == "cuda",
        dataclasses.replace(sizes, microbatches=row.microbatches or sizes.microbatches),
    )
    begin(row, sizes)
    with HostMemory() as host:
        clock, found = row.run(row, sizes)
    if cuda:  # the engine begins a new peak with each step, and reports its own
        found = {"device_bytes": torch.cuda.max_memory_allocated(), **found}
    speed = {"tokens_per_s": sizes.steps * sizes.tokens / clock.seconds, "step_s": clock.seconds / sizes.steps}
    return {**speed, "losses": clock.losses, "host_bytes": max(peak_bytes(), host.nbytes), **found}


class TracedStep(pl.Callback):
    """Profiles a batch: everything that the host's threads and the GPU do."""

    roundpipe_passive_hooks = True

    def __init__(self, batch: int, path: Path, cuda: bool) -> None:
        self._batch, self._path = batch, path
        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(activities=kinds, experimental_config=every_thread)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            self._profiler.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._path))


def longest(sizes: Sizes, save: Callable[[dict[str, Any]], None], *, ours: bool) -> dict[str, Any]:
    """The longest of some sequences, one a step, that trains under the cap: all weights, ours or plain Lightning.

    Ours tries tiles of tokens where a sequence does not fit without.

    Args:
        save: gets what is known so far, for the case that the time ends.
    """
    begin(OF_ITS_OWN, sizes)
    found: dict[str, Any] = {"longest": 0, "steps": []}
    module = task(OF_ITS_OWN, sizes, checkpointed=not ours, positions=sizes.lengths[-1])
    for length, tiles in itertools.product(sizes.lengths, (None, 4096) if ours else (None,)):
        if length <= found["longest"]:
            continue
        strategy: Any = RoundPipeStrategy(token_tiles=tiles) if ours else "auto"
        row = torch.randint(0, module.model.config.vocab_size, (length,))
        if sizes.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step: dict[str, Any] = {"tokens": length, "token_tiles": tiles}
        try:
            lightning(strategy, sizes, pl.Callback()).fit(module, DataLoader([{"input_ids": row, "labels": row}]))  # type: ignore[arg-type]
            step["step_s"], found["longest"] = time.perf_counter() - start, length
        except Exception as error:  # that of a full device, with the engine's notes
            step["reason"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if sizes.device == "cuda":  # the engine begins a new peak with each step, and reports its own
            report = strategy.report() if ours and "reason" not in step else {}
            step["device_bytes"] = max(report.get("peak_device_bytes", [torch.cuda.max_memory_allocated()]))
        found["steps"].append(step)
        save(found)
        if "reason" in step and (tiles or not ours):
            break
    return found


LAUNCH_GAP_S = 50e-6
"""A GPU that idles for less waits for the next launch."""
MENDS = {
    "recomputation": "a larger fused stage (more memory), carry_products=True where links are fast",
    "gaps between kernels": "compile_layers=True, or larger microbatches: fewer and longer kernels",
    "waits for the optimizer": "more cores for the process, LoRA, or staleness=1 where it is 0",
    "waits for copies": "more microbatches a step, reduce_dtype='bfloat16', or prefetch=1",
    "waits for the host": "larger microbatches: the interpreter issues fewer operations a token",
}
"""What a step loses time to, and what would mend it."""


def losses_of(events: Iterable[dict[str, Any]], recomputed_s: float, cuda: bool) -> list[dict[str, Any]]:
    """Seconds of a traced step that are lost, by `MENDS`, the most first.

    Args:
        events: of the Chrome trace; on the CPU, operations count as kernels.
        recomputed_s: seconds of recomputation in the step.
    """
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "copy": [], "optimizer": []}
    for event in events:
        kind = str(event.get("cat"))
        span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if re.search(r"Optimizer\.step|adam", event["name"], re.IGNORECASE):
            spans["optimizer"].append(span)
        elif kind == ("kernel" if cuda else "cpu_op"):
            spans["kernel"].append(span)
        elif kind == "gpu_memcpy":
            spans["copy"].append(span)
    lost = dict.fromkeys(MENDS, 0.0) | {"recomputation": recomputed_s}
    end = None
    for begin_s, end_s in sorted(spans["kernel"]):
        if end is not None and begin_s > end:
            idle = begin_s - end
            within = {what: max((min(b, begin_s) - max(a, end) for a, b in spans[what]), default=0.0) for what in spans}
            if idle < LAUNCH_GAP_S:
                lost["gaps between kernels"] += idle
            elif within["optimizer"] > idle / 2:
                lost["waits for the optimizer"] += idle
            elif within["copy"] > idle / 2:
                lost["waits for copies"] += idle
            else:
                lost["waits for the host"] += idle
        end = end_s if end is None else max(end, end_s)
    most = sorted(lost, key=lambda what: -lost[what])
    return [{"loss": what, "seconds": lost[what], "mend": MENDS[what]} for what in most]


def trace(sizes: Sizes, path: Path) -> dict[str, Any]:
    """Seconds of a traced step of ``ours_stale``, those in which the GPU computed and copied, the three largest losses.

    Args:
        path: of the trace (``.json.gz``), which chrome://tracing and Perfetto show.
    """
    row = ROWS["ours_stale"]
    traced = TracedStep(sizes.warmup, path, sizes.device == "cuda")
    strategy = RoundPipeStrategy(num_microbatches=sizes.microbatches, staleness=1)
    rows = batches(row, sizes, sizes.batch, steps=sizes.warmup + 2)
    lightning(strategy, sizes, traced).fit(task(row, sizes), rows)
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    seconds = {kind: sum(e["dur"] for e in events if e.get("cat") == kind) / 1e6 for kind in ("kernel", "gpu_memcpy")}
    recomputed = sum(e["end_s"] - e["start_s"] for e in strategy.report()["events"] if e["kind"] == "recompute")
    largest = losses_of(events, recomputed, sizes.device == "cuda")[:3]
    figures = {f"{kind}_s": value for kind, value in seconds.items()}
    return {"traced_events": len(events), **figures, "largest_losses": largest, "trace": str(path)}
