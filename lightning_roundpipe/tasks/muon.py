"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

Lightning's automatic optimization takes one optimizer, and ``torch.optim.Muon`` takes matrices only. Both treat each
parameter on its own, so the strategy steps this one layer by layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer
from typing_extensions import override


class MuonAdamW(Optimizer):
    """Steps matrices as ``torch.optim.Muon`` and other parameters as ``torch.optim.AdamW(fused=True)``.

    It does not depend on RoundPipe. A checkpoint has the state that these two keep.

    Args:
        params: names and parameters, as ``module.named_parameters()`` gives them.
        lr: Muon's learning rate.
        adamw_lr: AdamW's. Default: ``lr``, which fits ``adjust_lr_fn="match_rms_adamw"``.
        adamw_for: matrices whose name has one of these parts are stepped by AdamW: embeddings and the output layer.
        momentum, weight_decay, adjust_lr_fn: Muon's; ``weight_decay`` is AdamW's, too.
        betas, eps: AdamW's.

    Raises:
        ValueError: ``params`` has no names.
    """

    independent_parameters = True
    explicit_dtypes = True

    def __init__(
        self,
        params: Iterable[tuple[str, Parameter]],
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        adamw_for: Sequence[str] = ("embed", "lm_head"),
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        given = list(params)
        if not all(isinstance(entry, tuple) for entry in given):
            raise ValueError("MuonAdamW knows embeddings by their names: give it module.named_parameters().")
        hidden = [p.ndim == 2 and not any(part in name for part in adamw_for) for name, p in given]
        parts: list[Optimizer] = []
        if matrices := [entry for entry, taken in zip(given, hidden, strict=True) if taken]:
            parts.append(Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn=adjust_lr_fn))
        if others := [entry for entry, taken in zip(given, hidden, strict=True) if not taken]:
            rate = lr if adamw_lr is None else adamw_lr
            parts.append(AdamW(others, rate, betas, eps, weight_decay, fused=True))
        super().__init__([group for part in parts for group in part.param_groups], {})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step, as `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            cls = Muon if "ns_steps" in group else AdamW
            part: Optimizer = object.__new__(cls)
            vars(part).update(vars(self), param_groups=[group])
            inspect.unwrap(cls.step)(part)  # without this optimizer's hooks
        return loss
