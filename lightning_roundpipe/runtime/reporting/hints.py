"""Hints and warnings to the user, each issued once: what is switched off, and where microbatches change the result.

Much that couples the samples of a batch cannot be detected here (a contrastive loss is ordinary user code). Layers that
keep statistics in buffers can, and so can Hugging Face configurations that add a loss over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_roundpipe.messages import PREFIX, plural, warn
from lightning_roundpipe.model.refine import Refined
from lightning_roundpipe.runtime.memory.host_layer import HostLayer

_OVER_MICROBATCHES = (
    "over each microbatch and not over the whole batch, as under gradient accumulation. num_microbatches=1 keeps the "
    "batch whole."
)
_OVER_PARTS_OF_CALLS = (
    "over each microbatch of a call of the model and not over the whole call. num_microbatches=1 keeps calls whole."
)

_MOST_REASONS = 6
"""How many modules a warning says the reasons of."""

_WHOLE_LOGS = "microbatch_scope='model' or num_microbatches=1 computes it from the whole batch."
_CALLS_LOGGER = (
    "training_step calls a logger itself, which each microbatch does with its own values. self.log gives those of the "
    "batch, and microbatch_scope='model' runs training_step once."
)
PACKED_ROWS = "packed rows"
"""What is switched off with a cache on which the attention of a model depends."""
_PACKED = (
    "position_ids begin anew within rows. Each document attends to itself alone here, as use_cache is off. In plain "
    "training with use_cache=True, as in the model's configuration, transformers lets the documents of a row see each "
    "other: call the model with use_cache=False to keep them apart there too."
)


class Hints:
    """Issues each hint and warning once.

    Args:
        module: the user's LightningModule.
        inform: called with the text of each hint. Warnings go through `warn`.

    Attributes:
        cuts: which layers were cut because a worker's memory is too small for them; empty if none were.
        coupled_by: a difference of parts that vanishes with the buffers of layers held fixed; empty if there is none.
    """

    def __init__(self, module: nn.Module, inform: Callable[[str], None]) -> None:
        self._module = module
        self._inform = inform
        self._said: set[str] = set()
        self.cuts = ""
        self.coupled_by = ""
        self._calls_logger = False

    def logger_is_called(self) -> None:
        """Note that ``training_step`` calls a logger itself."""
        self._calls_logger = True

    def after_step(
        self, layers: Sequence[HostLayer], switched_off: Sequence[str], microbatches: int, *, cuts_calls: bool
    ) -> None:
        """Issue the hints that a finished step gives rise to.

        Args:
            layers: all layers.
            switched_off: settings that the strategy has switched off during the step.
            microbatches: number of microbatches of the step.
            cuts_calls: whether the calls of the model were cut, if there are several.
        """
        over = _OVER_PARTS_OF_CALLS if cuts_calls else _OVER_MICROBATCHES
        for name in switched_off:
            if name == PACKED_ROWS:
                self.warn(name, _PACKED)
            else:
                self.say(name, f"training runs with {name}=False, as the strategy recomputes layers itself.")
        if microbatches > 1 and "coupled" not in self._said:
            self._said.add("coupled")  # walk over all modules in the first such step only: it takes time
            for key, text in self._coupled(layers, over).items():
                self.warn(key, text)
        elif microbatches > 1 and "buffers" not in self._said and (text := _changing_buffer(layers, over)):
            self.warn("buffers", text)  # a later batch was the first to change it

    def of_a_called_logger(self) -> None:
        """Warning: each microbatch calls a logger, if ``training_step`` does so itself."""
        if self._calls_logger:
            self.warn("logger", _CALLS_LOGGER)

    def of_tiles(self, tile: int, ran: Mapping[str, Sequence[str]], why_not: Mapping[str, Mapping[str, str]]) -> None:
        """Hint: modules run in tiles; or warning: none does, though calls have more tokens than a tile.

        Args:
            tile: tokens in a tile.
            ran: names of the modules, by layer.
            why_not: why others do not, by layer and module.
        """
        if ran:
            layers: dict[tuple[str, ...], int] = {}
            for names in ran.values():
                key = tuple(name or "the layer itself" for name in names)
                layers[key] = layers.get(key, 0) + 1
            found = "; ".join(f"{', '.join(names)} of {plural(number, 'layer')}" for names, number in layers.items())
            return self.say("tiles", f"tiles of at most {plural(tile, 'token')}: {found}.")
        reasons = {f"{name or 'the layer'} {why}" for of_layer in why_not.values() for name, why in of_layer.items()}
        if not reasons:
            return None
        listed = "; ".join(sorted(reasons)[:_MOST_REASONS])
        return self.warn(
            "no tiles",
            f"nothing inside layers runs in tiles of tokens, though token_tiles asks for it: {listed}. Set "
            "token_tiles=None, which saves the comparisons.",
        )

    def of_cuts(self, refined: Refined) -> None:
        """Hint: layers that were too large for a worker were cut."""
        if refined.cuts:
            self.cuts = "; ".join(refined.summary())
            self.say("cuts", f"cut {self.cuts}: two of them with their gradients do not fit on a device.")

    def of_compiled(self, layers: Sequence[HostLayer]) -> None:
        """Warning: a compiled `nn.TransformerEncoder` pads otherwise in eval mode than one that is not compiled."""
        for layer in layers:
            encoders = [m for m in layer.module.modules() if isinstance(m, nn.TransformerEncoder)]
            if any(getattr(m, "use_nested_tensor", False) and getattr(m, "mask_check", True) for m in encoders):
                self.warn(
                    "compiled",
                    f"layer {layer.name!r} is or has an nn.TransformerEncoder, which is compiled. With a "
                    "src_key_padding_mask in eval mode, torch then leaves padded positions as they are; without "
                    "compile_layers they are zero. Make it with enable_nested_tensor=False, which leaves them in both "
                    "cases, or make its layers the strategy's (layers=['TransformerEncoderLayer', ...]).",
                )

    def of_logs_read(self) -> None:
        """Hint: `training_step` looks for what it has logged, which other microbatches have not logged yet."""
        self.say(
            "logs read",
            "training_step reads logged values (trainer.callback_metrics or its like) after self.log: those of this "
            "batch are there when training_step has ended for all microbatches. num_microbatches=1 has them at once.",
        )

    def of_refilled_batches(self) -> None:
        """Hint: steps do not overlap, as the data set reuses the memory of a batch for the next one."""
        self.say(
            "refilled",
            "a step's backward ends before the next batch is fetched, as the data set fills the same memory for each. "
            "Batches with memory of their own let steps overlap.",
        )

    def of_a_sum(self) -> None:
        """Warning: the loss is a plain ``sum()``, so it is not known how to combine those of the microbatches."""
        self.warn(
            "sum",
            "the loss is a sum() over the samples of each microbatch, and the losses of microbatches are averaged. If "
            "it is a plain sum, set RoundPipeStrategy(loss_weight='sum'). If it is a mean with weights of its own, set "
            "loss_weight to a function that returns the weight of a microbatch, such as loss_weight=len for its "
            "samples.",
        )

    def of_no_targets(self) -> None:
        """Warning: no part of a batch has a target, so none counts."""
        self.warn(
            "no targets",
            "a batch has no targets, so that no parameter gets a gradient from it and the optimizer leaves all as they "
            "are. Plain training has gradients of zeros there, with which weight decay and momentum go on. Leave such "
            "batches out of the data, or return None from training_step for them.",
        )

    def of_the_scope(self, what: str) -> None:
        """Hint: only the model's calls are cut, as ``what`` differs in parts of the batch."""
        self.say(
            "scope",
            f"in parts of the batch, {what}. So training_step runs once, on the whole batch, and the calls of the "
            "model in it are cut, which gives what the whole batch gives. microbatch_scope='model' says so beforehand.",
        )

    def of_a_coupling(self, what: str, *, of_a_log: bool = False) -> None:
        """Warning: batches are cut, and the loss, or a logged value, of others may differ for the reason ``what``."""
        if of_a_log:
            return self.warn(
                "logged coupling",
                f"in parts of the batch, {what}. Where it differs, what is logged comes from the parts. {_WHOLE_LOGS}",
            )
        return self.warn(
            "coupling",
            f"in parts of the batch, {what}. Where it differs, the loss of the parts is trained on. Set "
            "num_microbatches=1, or microbatch_scope='model' with the loss computed in training_step; for a mean by "
            "counts, a loss_weight that returns them is enough.",
        )

    def of_a_late_difference(self, occasion: str, what: str, *, switches: bool) -> None:
        """Warning: the parts of a batch, which were trained on already, do not give what the whole gives.

        Args:
            occasion: why the batch was compared, such as what it did for the first time.
            what: the difference.
            switches: whether only the model's calls are cut from the next batch on.
        """
        self.warn(
            f"late {what}",
            f"{occasion}, and in parts of the batch, {what}. This batch was trained on in parts. "
            + (
                "From the next one on, training_step runs once, on the whole batch, and the calls of the model in it "
                "are cut, which gives what the whole batch gives. microbatch_scope='model' does so from the first on."
                if switches
                else "So are later ones: microbatch_scope='model', num_microbatches=1 or a loss_weight may give what "
                "the whole batch gives."
            ),
        )

    def of_a_new_log(self, name: str, rule: str, *, is_known: bool, is_new: bool, is_open: bool) -> None:
        """Warning: a logged value was merged otherwise than it is from now on.

        Args:
            name: its name.
            rule: how it is merged now.
            is_known: whether it was logged before.
            is_new: whether it was computed in another way then.
            is_open: whether it was merged as a mean, as nothing was known of it.
        """
        since = "is another function of the batch than before" if is_known else "was logged for the first time"
        if is_known and is_open and not is_new:
            since = "was logged with a value from which no comparison has shown how that of a batch follows from them"
        how = "as a mean of the microbatches" if is_open else "as before"
        self.warn(
            f"log {name}",
            f"{name!r} {since}, and its value of this batch is merged {how}. From the next batch on it is computed as "
            f"the whole batch's ({rule}). {_WHOLE_LOGS}",
        )

    def of_what_is_collected(self, what: str) -> None:
        """Hint: batches are cut although ``what`` differs, which a global, a callback or the like keeps."""
        self.say("collected", f"in parts of the batch, {what}, as its code runs once for each microbatch.")

    def of_lost_rows(self, path: str) -> None:
        """Warning: hooks and callbacks find the last microbatch's rows at ``path``, outside of modules."""
        self.warn(
            "rows",
            f"{path!r} keeps a row for each sample, and each microbatch puts its own there: after the batch, hooks and "
            "callbacks find those of the last one. Kept in an attribute of a module (a dict in it, too) they are those "
            "of the whole batch; so they are with num_microbatches=1.",
        )

    def of_the_last_part(self, paths: Sequence[str], *, adds_up: bool) -> None:
        """Warning: attributes inside layers hold what the last microbatch has left, which others have not added to."""
        others = f" ({', '.join(map(repr, paths[1:4]))}{', ...' if paths[4:] else ''} likewise)" if paths[1:] else ""
        finds = "finds there what the batch has begun with" if adds_up else "sets it anew"
        self.warn(
            f"last part {adds_up}",
            f"{paths[0]!r}, inside a layer, is not what the whole batch leaves there but what its last microbatch "
            f"does{others}: each microbatch {finds}. Have the layer return the value and keep it in training_step, "
            "register what adds up as a buffer, or set num_microbatches=1.",
        )

    def of_a_loss_inside(self, layer: str) -> None:
        """Hint: a layer computes a cross entropy itself, whose targets are not counted."""
        self.say(
            "inside",
            f"layer {layer!r} computes a cross entropy itself, whose targets are not counted: microbatches weigh by "
            "their samples. If some batches are padded, set RoundPipeStrategy(loss_weight=...) to a function that "
            "returns the targets of a microbatch, or compute the loss in training_step.",
        )

    def of_evaluation(self, name: str) -> None:
        """Hint: evaluation cuts the calls of the model ``name``."""
        self.say(
            "evaluation",
            f"in evaluation, calls of {name!r} run in parts of the batch: two parts gave what their samples give as "
            "one, and some later ones are compared again. num_microbatches=1 keeps calls whole.",
        )

    def of_uneven_evaluation(self, name: str) -> None:
        """Warning: evaluation stops cutting the calls of ``name``, as a later comparison failed."""
        self.warn(
            f"evaluation {name}",
            f"in evaluation, parts of a batch gave something else than the whole batch for {name!r}, which the batches "
            "before did not show: from here on its calls run whole. num_microbatches=1 keeps them whole from the "
            "start.",
        )

    def of_uneven_metric(self, what: str) -> None:
        """Warning: a metric gives equal weight to parts of unequal sizes."""
        self.warn(
            "uneven",
            f"in parts of unequal sizes, {what}. A batch size that num_microbatches divides, or drop_last=True in the "
            "data loader, avoids them; microbatch_scope='model' updates metrics with whole batches.",
        )

    def of_a_counting_metric(self, name: str, state: str) -> None:
        """Warning: parts leave something else in a metric than the whole batch, though its value may be equal."""
        self.warn(
            f"metric {name}",
            f"parts of a batch leave something else in {state!r} of the metric {name!r} than the whole batch, even "
            "where its value is the same: it counts updates, one for each part. Give it what counts samples, such as "
            f"self.{name}(value, weight=len(batch)), update it in on_train_batch_end, whose outputs are the whole "
            "batch's, or set microbatch_scope='model', which updates metrics once for a batch.",
        )

    def of_a_late_counting_metric(self, name: str) -> None:
        """Warning: a metric counts updates, which only a later batch has shown."""
        self.warn(
            f"late metric {name}",
            f"the metric {name!r} counts updates, which the first batch did not show: until now each part of a batch "
            "has counted as one, from here on each batch does. "
            "microbatch_scope='model' updates metrics once for a batch.",
        )

    def of_metrics_reset(self, names: Sequence[str]) -> None:
        """Warning: a metric lacks what parts of a batch have added, as another part has reset it later."""
        for name in names:
            self.warn(
                f"reset {name}",
                f"training_step resets the metric {name!r} between updates, once in each part of a batch, so that it "
                "lacks what other parts have added. Reset it in on_train_batch_start or on_train_batch_end, or set "
                "microbatch_scope='model', which resets metrics once for a batch.",
            )

    def of_doubtful_metrics(self, names: Sequence[str]) -> None:
        """Warning: nothing shows how much the value of each part counts in that of the batch."""
        for name in names:
            self.warn(
                f"doubtful {name}",
                f"the metric {name!r} counts updates, and nothing has shown how much the value of each part of a batch "
                "counts: it may be a mean over samples or one over targets, or only some parts update the metric. "
                f"Give it what counts samples, such as self.{name}(value, weight=len(batch)), update it in "
                "on_train_batch_end, or set microbatch_scope='model', which updates metrics once for a batch.",
            )

    def of_batch_sizes(self, names: Sequence[str]) -> None:
        """Warning: the mean over an epoch weighs batches otherwise, as the sizes of parts do not add up."""
        for name in names:
            self.warn(
                f"batch size {name}",
                f"the batch_size of the logged {name!r} in parts of a batch may not add up to that of the whole "
                "batch, nor is it the same, so the mean over an epoch weighs batches otherwise. Let it count samples "
                "or targets, log a sum and a count apart with reduce_fx='sum', or set microbatch_scope='model'.",
            )

    def of_later_batches(self, what: str, *, uneven: bool) -> None:
        """Hint: batches that are cut unevenly (or evenly) stay whole; parts of the other kind give the right result."""
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

    def of_other_calls(self, what: str, *, again: bool) -> None:
        """Hint: microbatches called a layer that the plan does not have there, such as ``what``."""
        self.say(
            f"other calls {again}",
            f"microbatches called {what}, which the batches before have not shown. From there on they ran one after "
            "another in this batch. "
            + (
                "The next batches are learned again, for a new plan."
                if again
                else "Batches that call layers otherwise than the plan says go on doing so."
            ),
        )

    def of_unlike_samples(self, what: str, *, of_calls: bool = False) -> None:
        """Warning: batches stay whole from now on, as samples have begun to differ in a size, such as their length.

        Args:
            what: the difference.
            of_calls: whether the calls of the model were cut.
        """
        cut = "parts of calls of the model, in" if of_calls else "parts of"
        self.warn(
            "unlike samples",
            f"in {cut} a batch whose samples differ as those of no batch before, {what}. So batches stay whole from "
            "now on, which keeps one device busy at a time. "
            + (
                "A layer computes with something of all samples, such as the sum of a mask: where training_step "
                "computes that and hands it to the layer, calls may be cut."
                if of_calls
                else "microbatch_scope='model', with the loss computed in training_step, cuts the calls of the model "
                "instead."
            ),
        )

    def of_a_whole_batch(self, why: str) -> None:
        """Hint: batches stay whole, as they cannot be cut and the options do not ask for parts."""
        self.say(
            "whole",
            f"training runs each batch whole, which keeps one device busy at a time: it cannot be cut, as {why}",
        )

    def of_given_weights(self, what: str) -> None:
        """Warning: with the user's loss weights, parts differ from the whole batch."""
        self.warn(
            "scope",
            f"with the given loss_weight, training in parts of the batch is not that on the whole batch: {what}. Leave "
            "loss_weight out, or let it return what a part counts in the loss of the batch; microbatch_scope='step' "
            "makes this an error.",
        )

    def of_logs(self, undecided: Sequence[str], lost: Sequence[str]) -> None:
        """Warning: logged values may differ from those of the whole batch.

        Args:
            undecided: names of values whose merge rule is unknown, as comparisons have shown too little of them.
            lost: names of values that are NaN in some microbatches only.
        """
        for name in undecided:
            self.warn(
                f"log {name}",
                f"the logged {name!r} was zero or the same in all microbatches of the batches that were compared, or "
                "not in several, so that nothing shows how that of a batch follows from them. It is merged by its "
                f"reduce_fx, usually a mean of the microbatches. {_WHOLE_LOGS}",
            )
        for name in lost:
            self.warn(
                f"nan {name}",
                f"the logged {name!r} is NaN in some microbatches of a batch, which makes that of the batch NaN. Where "
                f"the whole batch has a value, a microbatch has nothing to average. {_WHOLE_LOGS}",
            )

    def of_stopping(self) -> None:
        """Warning: training ends because training_step, which ran on a part of the batch, has said so."""
        self.warn(
            "stopping",
            "training_step has set trainer.should_stop while it ran on a part of the batch. If that part's loss "
            "decided, the whole batch might not have stopped: decide in on_train_batch_end, whose outputs are the "
            "whole batch's, or set microbatch_scope='model'.",
        )

    def of_no_comparison(self, why: str, *, of_calls: bool = False) -> None:
        """Hint: parts, of the batch or with ``of_calls`` of the model's calls, could not be compared with the whole."""
        why = why.rstrip(".")
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
        """Whether a configuration couples samples in a way that `after_step` warns of: a router loss."""
        return any(getattr(config, "output_router_logits", False) is True for config in self._configs())

    def say(self, key: str, text: str) -> None:
        """Issue a hint, which the user need not act on; once for each ``key``."""
        if key not in self._said:
            self._said.add(key)
            self._inform(PREFIX + text)

    def warn(self, key: str, text: str) -> None:
        """Issue a warning, which names the setting that helps; once for each ``key``."""
        if key not in self._said:
            self._said.add(key)
            warn(PREFIX + text)

    def _coupled(self, layers: Sequence[HostLayer], over: str) -> dict[str, str]:
        found = {}
        if any(isinstance(m, _BatchNorm) and m.training for m in self._module.modules()):
            found["batch norm"] = f"batch norm computes its statistics {over}"
        if text := _changing_buffer(layers, over):
            found["buffers"] = text
        if self.couples:
            found["router"] = f"the router's loss (output_router_logits=True) is computed {over}"
        if self.coupled_by and not found:
            found["held"] = (
                f"in parts of the batch, {self.coupled_by}, as a hook changes buffers of layers in every forward pass "
                f"(spectral norm, most likely). They are computed {over}"
            )
        return found

    def _configs(self) -> Iterator[Any]:
        for module in self._module.modules():
            if (config := getattr(module, "config", None)) is not None:
                yield config


def _changing_buffer(layers: Sequence[HostLayer], over: str) -> str:
    """Return a warning of a buffer that layers change, other than the statistics of batch norm; empty if none."""
    for layer in layers:
        for module, name in layer.mutable_buffers.values():
            if not isinstance(module, _BatchNorm):
                what = f"buffer {name!r} of {type(module).__name__} in layer {layer.name!r}"
                return f"{what} changes in every forward pass, so it is computed {over}"
    return ""
