"""What the user is told once: what was switched off, and where several microbatches are not the whole batch.

Much that couples the samples of a batch cannot be seen from here (a contrastive loss is ordinary user code). What can
be seen is said: layers that keep statistics in buffers, and what a Hugging Face configuration says of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_roundpipe.messages import PREFIX, warn
from lightning_roundpipe.model.refine import Refined
from lightning_roundpipe.runtime.memory.host_layer import HostLayer

_OVER_MICROBATCHES = (
    "over each microbatch and not over the whole batch, as under gradient accumulation. num_microbatches=1 keeps the "
    "batch whole."
)

_WHOLE_LOGS = "microbatch_scope='model' or num_microbatches=1 computes it from the whole batch."


class Hints:
    """Says each thing once.

    Args:
        module: the user's LightningModule.
        inform: is given the texts.
    """

    def __init__(self, module: nn.Module, inform: Callable[[str], None]) -> None:
        self._module = module
        self._inform = inform
        self._said: set[str] = set()

    def after_step(self, layers: Sequence[HostLayer], switched_off: Sequence[str], microbatches: int) -> None:
        """What a finished step has shown."""
        for name in switched_off:
            self.say(name, f"training runs with {name}=False, as the strategy recomputes layers itself.")
        if microbatches > 1 and "coupled" not in self._said:
            self._said.add("coupled")  # looked for in the first such step only: a walk over all modules takes time
            for key, text in self._coupled(layers).items():
                self.warn(key, text)

    def of_cuts(self, refined: Refined) -> None:
        """Layers that were too large for a worker."""
        if refined.cuts:
            cuts = "; ".join(refined.summary())
            self.say("cuts", f"cut {cuts}: two of them with their gradients do not fit on a device.")

    def of_moving_state(self, layer: str, said: str) -> None:
        """A layer reads what changes from step to step."""
        self.say(
            "moving",
            f"a step's backward ends before the next batch begins, as layer {layer!r} may read what changes between "
            f"them: {said}.",
        )

    def of_refilled_batches(self) -> None:
        """The data set gives each batch in the memory of the one before."""
        self.say(
            "refilled",
            "a step's backward ends before the next batch is fetched, as the data set fills the same memory for each. "
            "Batches with memory of their own let steps overlap.",
        )

    def of_a_sum(self) -> None:
        """The loss is the sum of a tensor's rows, of which nothing else is known."""
        self.warn(
            "sum",
            "the loss is a sum() over the samples of each microbatch, and the losses of microbatches are averaged. If "
            "it is a plain sum, set RoundPipeStrategy(loss_weight='sum'). If it is a mean with weights of its own, set "
            "loss_weight to a function that returns the weight of a microbatch, such as loss_weight=len for its "
            "samples.",
        )

    def of_the_scope(self, what: str) -> None:
        """Parts do not give what the whole batch gives, and ``what`` differs."""
        self.say(
            "scope",
            f"in parts of the batch, {what}. So training_step runs once, on the whole batch, and the calls of the "
            "model in it are cut, which gives what the whole batch gives. microbatch_scope='model' says so beforehand.",
        )

    def of_a_loss_inside(self, layer: str) -> None:
        """A layer computes a cross entropy."""
        self.say(
            "inside",
            f"layer {layer!r} computes a cross entropy itself, whose targets are not counted: microbatches weigh by "
            "their samples. If some batches are padded, set RoundPipeStrategy(loss_weight=...) to a function that "
            "returns the targets of a microbatch, or compute the loss in training_step.",
        )

    def of_evaluation(self, name: str) -> None:
        """Calls of a model are cut in evaluation."""
        self.say(
            "evaluation",
            f"in evaluation, calls of {name!r} run in parts of the batch, which gave what the whole batch gives; some "
            "later ones are compared again. num_microbatches=1 keeps them whole.",
        )

    def of_uneven_evaluation(self, name: str) -> None:
        """They differ on a later batch."""
        self.warn(
            f"evaluation {name}",
            f"in evaluation, parts of a batch gave something else than the whole batch for {name!r}, which the batches "
            "before did not show: from here on its calls run whole. num_microbatches=1 keeps them whole from the "
            "start.",
        )

    def of_uneven_metric(self, what: str) -> None:
        """A metric takes unequal parts for equal ones."""
        self.warn(
            "uneven",
            f"in parts of unequal sizes, {what}. A batch size that num_microbatches divides, or drop_last=True in the "
            "data loader, avoids them; microbatch_scope='model' updates metrics with whole batches.",
        )

    def of_later_batches(self, what: str, *, uneven: bool) -> None:
        """Parts of one kind, uneven or even, do not give what the whole batch gives, and those of the other one do."""
        if uneven:
            self.say(
                "uneven",
                f"in parts of unequal sizes, {what}. So batches that cannot be cut evenly stay whole. A batch size "
                "that num_microbatches divides, or drop_last=True in the data loader, avoids them; "
                "microbatch_scope='model' cuts the calls of the model instead.",
            )
        else:
            self.say(
                "even",
                f"in parts of equal sizes, which come for the first time, {what}. So batches that can be cut evenly "
                "stay whole; microbatch_scope='model' cuts the calls of the model instead.",
            )

    def of_a_whole_batch(self, why: str) -> None:
        """Batches cannot be cut, and parts were not asked for."""
        self.say(
            "whole",
            f"training runs each batch whole, which keeps one device busy at a time: it cannot be cut, as {why}",
        )

    def of_given_weights(self, what: str) -> None:
        """By the user's own weights, parts do not give what the whole batch gives."""
        self.warn(
            "scope",
            f"with the given loss_weight, training in parts of the batch is not that on the whole batch: {what}. Leave "
            "loss_weight out, or let it return what a part counts in the loss of the batch; microbatch_scope='step' "
            "makes this an error.",
        )

    def of_logs(self, undecided: Sequence[str], lost: Sequence[str]) -> None:
        """Logged values that may not be those of the whole batch."""
        for name in undecided:
            self.warn(
                f"log {name}",
                f"the logged {name!r} was zero in the first batches, so that it could not be compared with that of the "
                f"whole batch, and is merged as a mean of the microbatches. {_WHOLE_LOGS}",
            )
        for name in lost:
            self.warn(
                f"nan {name}",
                f"the logged {name!r} is NaN in some microbatches of a batch, which makes that of the batch NaN. Where "
                f"the whole batch has a value, a microbatch has nothing to average. {_WHOLE_LOGS}",
            )

    def of_no_comparison(self, why: str, *, of_calls: bool = False) -> None:
        """It is not known whether parts, of the batch or of the model's calls, give what the whole gives."""
        if of_calls:
            return self.say(
                "scope",
                "whether calls of the model give the same in parts as on the whole batch could not be compared: "
                f"{why}. If they do not, set num_microbatches=1.",
            )
        return self.say(
            "scope",
            f"whether training_step gives the same in parts of a batch as on the whole could not be compared: {why}. "
            "It runs on each part; where it needs all samples at once, set microbatch_scope='model' or "
            "num_microbatches=1.",
        )

    @property
    def couples(self) -> bool:
        """Whether the configuration couples samples in a way that `after_step` warns of."""
        return any(getattr(config, "output_router_logits", False) is True for config in self._configs())

    def say(self, key: str, text: str) -> None:
        """Inform of ``text``, which the user need not act on."""
        if key not in self._said:
            self._said.add(key)
            self._inform(PREFIX + text)

    def warn(self, key: str, text: str) -> None:
        """Warn of ``text``, which names the setting that helps."""
        if key not in self._said:
            self._said.add(key)
            warn(PREFIX + text)

    def _coupled(self, layers: Sequence[HostLayer]) -> dict[str, str]:
        found = {}
        if any(isinstance(m, _BatchNorm) and m.training for m in self._module.modules()):
            found["batch norm"] = f"batch norm computes its statistics {_OVER_MICROBATCHES}"
        for layer in layers:
            for module, name in layer.mutable_buffers.values():
                if not isinstance(module, _BatchNorm) and "buffers" not in found:
                    what = f"buffer {name!r} of {type(module).__name__} in layer {layer.name!r}"
                    found["buffers"] = f"{what} changes in every forward pass, so it is computed {_OVER_MICROBATCHES}"
        if self.couples:
            found["router"] = f"the router's loss (output_router_logits=True) is computed {_OVER_MICROBATCHES}"
        return found

    def _configs(self) -> Iterator[Any]:
        for module in self._module.modules():
            if (config := getattr(module, "config", None)) is not None:
                yield config
