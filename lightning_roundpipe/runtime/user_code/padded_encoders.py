"""`nn.TransformerEncoder` with a ``src_key_padding_mask`` in eval mode, as without function modes around user code.

Plain evaluation makes a nested tensor there, which leaves zeros at padded positions. PyTorch does not where a function
mode is active, so code that pools over all positions would get other numbers. While a step runs, `as_plain` stands in
for the encoder's forward:

    under a mode of ours alone ── PyTorch's own forward, on stand-ins and without modes, shows what it would pad ── [1]
                               ── the layers get that mask, and what they return is set to zero there ── [2]
    anywhere else, in plain training too ── PyTorch's forward

PyTorch does so only if the padding of all samples is at the end. Parts of a batch that differ in it are refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.process_context import shared_context

_PLAIN = nn.TransformerEncoder.forward
_OURS = __name__.partition(".")[0] + "."


class PaddedCalls:
    """Compares the calls of encoders that the parts of a batch make. Shared by their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Hashable, int], bool] = {}

    def compare(self, key: Hashable, calls: Sequence[bool | None]) -> None:
        """Compare one part's calls with those of the others.

        Args:
            key: what the parts are parts of.
            calls: of each call, whether padding is set to zero; None if there is none, so that it does not matter.

        Raises:
            RoundPipeError: if another part's call was treated otherwise.
        """
        with self._lock:
            for place, zeroed in enumerate(calls):
                if zeroed is not None and self._known.setdefault((key, place), zeroed) is not zeroed:
                    raise RoundPipeError(
                        "an nn.TransformerEncoder in eval mode was given a src_key_padding_mask with padding at the "
                        "end of the samples in one part of the batch, and elsewhere in another. PyTorch sets padded "
                        "positions to zero only if they are at the end in all samples. Make the encoder with "
                        "enable_nested_tensor=False, or set num_microbatches=1."
                    )


@shared_context
def as_plain() -> Iterator[None]:
    """Let encoders give what they give in plain evaluation, until the last context of several has exited."""
    nn.TransformerEncoder.forward = _forward  # type: ignore[method-assign]
    yield
    nn.TransformerEncoder.forward = _PLAIN  # type: ignore[method-assign]


@functools.wraps(_PLAIN)
def _forward(
    self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:  # fmt: skip
    if (
        torch.compiler.is_compiling()
        or not torch._C._is_torch_function_mode_enabled()
        or src_key_padding_mask is None
        or mask is not None
        or self.layers[0].training
        or not getattr(self, "use_nested_tensor", False)
    ):
        return _PLAIN(self, src, mask, src_key_padding_mask, is_causal)
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    padding = None
    if all(type(mode).__module__.startswith(_OURS) for mode in modes):
        # PyTorch waits for the mask, too. Under the modes, other parts run meanwhile.
        on_host = src_key_padding_mask.cpu()
        with contextlib.ExitStack() as stack:
            for _ in modes:
                stack.enter_context(_pop_mode_temporarily())
            padding = _padding(self, src, on_host)
            padded = bool(padding.any()) if padding is not None else True
        for mode in modes:
            getattr(mode, "padded_calls", []).append(padding is not None if padded else None)
    if padding is None:
        return _PLAIN(self, src, mask, src_key_padding_mask, is_causal)
    without_norm: Any = _StandIn(self, norm=None)
    out = _PLAIN(without_norm, src, None, padding, False).masked_fill(padding[..., None], 0.0)  # [2]
    return out if self.norm is None else self.norm(out)


def _padding(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor) -> Tensor | None:
    """Return where the call pads a nested tensor; None if it makes none [1]. Without modes, as in plain evaluation.

    Args:
        encoder: the encoder.
        src: its input.
        mask: its ``src_key_padding_mask``, on the host.
    """
    if type(src) is not Tensor or src.is_nested:
        return None
    wanted = src.requires_grad and torch.is_grad_enabled()
    tokens = torch.ones(*src.shape[:-1], 1, requires_grad=wanted)  # one feature a token is enough
    first = _First(encoder.layers[0])
    alone: Any = _StandIn(encoder, layers=[first], norm=None)
    out = _PLAIN(alone, tokens, None, mask)
    return out[..., 0] == 0 if first.nested else None


class _StandIn:
    """A module with other attributes."""

    def __init__(self, module: nn.Module, **own: Any) -> None:
        self._module = module
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _First(_StandIn):
    """The first layer, which only notes whether it is given a nested tensor."""

    nested = False

    def __call__(self, src: Tensor, **_: Any) -> Tensor:
        self.nested = src.is_nested
        return src
