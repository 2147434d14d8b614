"""Fine-tuning of a causal language model, as an ordinary LightningModule.

It does not depend on RoundPipe: the same class trains with ``strategy="auto"``. Its steps are those that a user would
write: call the model with labels, log, return the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_roundpipe.model.lean_loss import lean_logits, make_lean
from lightning_roundpipe.model.packed_rows import check_packed_rows, document_masks
from lightning_roundpipe.model.quantize import refuse_adapted_experts, refuse_full_training, stored_beside

Batch = dict[str, Tensor]


class MeanPerplexity(MeanMetric):
    """The exponential of the mean loss per token, from losses and token counts, without a softmax over logits."""

    @override
    def compute(self) -> Tensor:
        return torch.exp(super().compute())


class CausalLM(LightningModule):
    """Trains ``model``, or only adapters in it.

    Args:
        model: a Hugging Face causal language model. Batches are its keyword arguments, including ``labels``.
        optimizer: makes the optimizer from the names and trainable parameters, e.g. ``partial(AdamW, lr=1e-3)``.
        scheduler: makes a learning rate scheduler from the optimizer, stepped after every optimizer step.
        lora: a PEFT configuration: the model is frozen and gets these adapters. ``None``: all weights are trained.
        max_new_tokens: length of the completions of ``predict_step``.
        lean_loss: compute the loss without ever holding all logits. The loss is the same up to rounding; see
            `model.lean_loss` for the conditions on an output layer.
        attn_implementation: one of transformers', such as ``"flex_attention"``, which needs no masks of length x
            length. ``None``: the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Callable[[Iterable[tuple[str, Parameter]]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        lora: PeftConfig | None = None,
        max_new_tokens: int = 32,
        lean_loss: bool = True,
        attn_implementation: str | None = None,
    ) -> None:
        super().__init__()
        if lora is None:
            refuse_full_training(model)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        self.model: PreTrainedModel | PeftModel = model if lora is None else get_peft_model(model, lora)
        if lora is not None:
            refuse_adapted_experts(self.model, lora)
        self.model.train()  # Hugging Face loads models in eval mode, and Lightning keeps the mode
        if lean_loss:
            make_lean(self.model)
        self.lean_loss = lean_loss
        self.document_masks = False
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.max_new_tokens = max_new_tokens
        self.val_loss = MeanMetric()
        self.val_perplexity = MeanPerplexity()
        self.strict_loading = lora is None  # see on_save_checkpoint

    def keep_documents_apart(self) -> None:
        """Give the model masks that keep documents of packed rows apart.

        Raises:
            ValueError: documents of a packed row would see each other; see `check_packed_rows`.
        """
        check_packed_rows(self.model)
        self.document_masks = True

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the model's own loss."""
        if self.document_masks and "position_ids" in batch and "attention_mask" not in batch:
            batch = {**batch, "attention_mask": document_masks(self.model, batch["position_ids"])}
        with lean_logits(self.model) if self.lean_loss else contextlib.nullcontext():
            loss: Tensor = self.model(**batch, use_cache=False).loss
            return loss

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def on_validation_epoch_start(self) -> None:
        # Lightning resets metrics in the mode that it used them in: after trainer.validate() that is inference mode,
        # whose tensors the validation within fit cannot update. So they are reset here, in the mode of the update.
        self.val_loss.reset()
        self.val_perplexity.reset()

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss_of(batch)
        # The model's loss is a mean over its targets: all labels except each sequence's first. Weighting by their
        # number makes the validation loss the mean over all tokens, however they are cut into batches.
        targets = (batch["labels"][:, 1:] != -100).sum()
        self.val_loss.update(loss, targets)
        self.val_perplexity.update(loss, targets)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the prompts with their greedy completions: tokens of shape (prompts, length)."""
        prompts = batch["input_ids"]
        completed: Tensor = cast(Any, self.model).generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
        )
        return completed

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer([(name, p) for name, p in self.named_parameters() if p.requires_grad])
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save only trained parameters if there are adapters. The frozen weights are where they were loaded from."""
        if self.strict_loading:
            return
        named = self.named_parameters(remove_duplicate=False)  # tied weights are saved under all their names
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        frozen |= stored_beside(self, frozen)
        state = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {
            k: v for k, v in state if frozen.isdisjoint(accumulate(k.split("."), "{}.{}".format))
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise for missing parameters, because loading adapters is not strict."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        if missing := sorted(trained - checkpoint["state_dict"].keys()):
            raise ValueError(
                f"The checkpoint does not fit: it lacks {len(missing)} of {len(trained)} trained tensors, {missing[0]} "
                "first. Use the `lora` settings that it was written with."
            )
