"""The paper's library, as our estimates and our simulation predict it: its plan, and its times where these differ.

Its loss takes no longer than the output layer's products. Its host waits for the router's choice, and issues the
operations of one expert after another. It keeps the inputs of each layer, and without staleness its optimizer begins
when backward is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_roundpipe.estimates.model_shape import ModelShape
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.pipeline import Rules, Staleness
from lightning_roundpipe.planning.profile import Hardware

EXPERT_OPERATIONS = {"GptOssExperts": 36, "Qwen3MoeExperts": 20}
"""Operations of one expert's forward, views included, where experts run in turn, by the class of a layer's experts.

Counted in transformers 4.57.6, in layers of 8 and of 16 experts.
"""


class PaperShape(ModelShape):
    """A model on the meta device with estimates for the paper's library."""

    def _costs_on(self, device: Hardware, microbatch_size: int, sequence_length: int) -> Costs:
        with _operations_of_experts(self._module) as together:
            found = super()._costs_on(device, microbatch_size, sequence_length)
        tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.long, device="meta")
        *_, head = self._estimate(device, input_ids=tokens)
        *calls, last = found.map(lambda call: self._in_turn(call, together, device)).calls
        last = replace(last, forward_s=head.forward_s, backward_s=head.backward_s)
        return Costs((*(replace(call, recomputable=()) for call in calls), last))

    def _in_turn(self, call: CallCost, together: dict[str, int], device: Hardware) -> CallCost:
        """Return the call with a layer's experts issued in turn. ``together``: operations of all of them at once."""
        more = 0
        for experts in _experts(self._layers[call.layer]):
            name, count = type(experts).__name__, max(len(weight) for weight in experts.parameters(recurse=False))
            more += count * EXPERT_OPERATIONS[name] - together[name]
        return replace(call, issue_s=call.issue_s + more * device.issue_s, is_synchronous=more > 0)

    def rules(self, staleness: Staleness, network: float | None = None) -> Rules:
        found = super().rules(staleness, network)
        assert found.updates is not None
        return replace(found, updates=replace(found.updates, at_once=False, blocking=not staleness))


def _experts(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield modules with parameters of three dimensions, of which the first is the number of experts."""
    for module in layer.modules():
        if any(weight.ndim == 3 for weight in module.parameters(recurse=False)):
            yield module


class _Operations(TorchDispatchMode):
    """Counts operations, views included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _operations_of_experts(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the operations of forwards of experts, by their class."""
    found, modes = dict[str, int](), dict[nn.Module, _Operations]()

    def begin(module: nn.Module, *_: object) -> None:
        modes[module] = _Operations()
        modes[module].__enter__()

    def end(module: nn.Module, *_: object) -> None:
        modes[module].__exit__(None, None, None)
        found[type(module).__name__] = modes.pop(module).count

    hooks = [
        hook
        for module in _experts(model)
        for hook in (module.register_forward_pre_hook(begin), module.register_forward_hook(end))
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
