"""What every row of `bench_gpu.py` trains: a model of random weights in the shape of a real one, on random tokens.

Shapes and adapters are those of ``conf/``; the files are read without hydra, which the benchmark does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_roundpipe.model.lean_loss import lean_logits, make_lean

CONF = Path(__file__).resolve().parents[1] / "conf"
NOT_OF_THE_SHAPE = ("_target_", "model_type", "weights", "dtype")
LEARNING_RATE = 1e-4
TILE = 1_000_003
"""Random numbers that are made; weights repeat them, because billions would take minutes. No multiple of any row."""

MODELS: dict[str, bool] = {"qwen3_1_7b": False, "llama3_1_8b": True}
"""Names in ``conf/model``, and whether adapters are trained instead of all weights."""

_DTYPES = {"bf16-true": torch.bfloat16, "32-true": torch.float32}
PRECISIONS = tuple(_DTYPES)


@dataclass(frozen=True)
class Job:
    """One row of a table at one length of sequences: what a process of its own is told to measure.

    Attributes:
        row: one of `gpu_systems.SYSTEMS`.
        model: one of `MODELS`.
        cap: bytes of the device that may be used; None: all.
        sequence: tokens of each.
        microbatches: of an optimizer step.
        microbatch_size: sequences of each.
        steps: optimizer steps that are timed.
        warmup: steps before them.
        device: ``"cuda"`` or ``"cpu"``.
        tiny: the model's twin of a fifth of a million weights.
        workers: of ours, all on the same device.
        logs: whether ``training_step`` logs its loss, as a user's does.
    """

    row: str
    model: str
    cap: int | None
    sequence: int
    microbatches: int
    microbatch_size: int
    steps: int
    warmup: int
    precision: str = "bf16-true"
    device: str = "cuda"
    tiny: bool = False
    workers: int = 1
    logs: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of weights before training."""
        return _DTYPES[self.precision]

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.microbatches * self.microbatch_size * self.sequence


def read(folder: str, name: str) -> dict[str, Any]:
    """A file of ``conf/``."""
    found: dict[str, Any] = yaml.safe_load((CONF / folder / f"{name}.yaml").read_text())
    return found


def build(job: Job, *, lean: bool, checkpointed: bool) -> nn.Module:
    """The model in host memory, ready to be trained.

    Args:
        lean: the loss is computed without holding the logits.
        checkpointed: layers are recomputed in backward, by Hugging Face.
    """
    shape = read("model", f"tiny_{job.model}" if job.tiny else job.model)
    config = AutoConfig.for_model(
        shape["model_type"], **{key: value for key, value in shape.items() if key not in NOT_OF_THE_SHAPE}
    )
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if MODELS[job.model]:
            settings = {key: value for key, value in read("lora", "all_linear").items() if key != "_target_"}
            inject_adapter_in_model(LoraConfig(**settings), model)
    model.to(job.dtype).to_empty(device="cpu")
    model.tie_weights()
    _fill(model)
    for module in model.modules():
        if hasattr(module, "inv_freq"):  # a buffer, which had no values on the meta device
            module.__init__(config=model.config)
    if lean:
        make_lean(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    tile = torch.randn(TILE, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms
            parameter.fill_(1.0)
            continue
        for part in parameter.view(-1).split(TILE):
            part.copy_(tile[: part.numel()])


def batches(job: Job, size: int) -> DataLoader[Any]:
    """All tokens of the job, ``size`` sequences at a time."""
    vocabulary = read("model", f"tiny_{job.model}" if job.tiny else job.model)["vocab_size"]
    rows = (job.warmup + job.steps) * job.microbatches * job.microbatch_size
    tokens = torch.randint(0, vocabulary, (rows, job.sequence), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=size)


class Task(pl.LightningModule):
    """An ordinary language model in an ordinary module.

    Args:
        model: as `build` makes it.
        lean: whether it was built with a lean loss.
        optimizer: makes one of the parameters that are trained. Default: torch's fused AdamW.
        logs: whether ``training_step`` logs its loss.
    """

    roundpipe_looks_away = True

    def __init__(
        self,
        model: nn.Module,
        *,
        lean: bool,
        optimizer: Callable[[list[nn.Parameter]], Any] | None = None,
        logs: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.lean, self.logs = model, lean, logs
        self._optimizer = optimizer or (lambda trained: torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with lean_logits(self.model) if self.lean else nullcontext():
            loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self._optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
