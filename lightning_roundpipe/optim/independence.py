"""Decides which optimizers treat each parameter on its own and can thus be stepped a few parameters at a time.

Nothing in an optimizer's interface says so. An optimizer that uses all parameters together (a trust ratio over the
whole model, a step counter in the optimizer itself) would silently train something else when stepped in pieces. So
torch's own optimizers are listed by exact class, after reading the code of each, and all others must declare it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

KNOWN: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
        optim.RMSprop, optim.Rprop, optim.ASGD, optim.Adafactor, optim.Muon,
    }
)  # fmt: skip
"""Exact classes: a subclass may do anything."""

_BY_DEFAULT: frozenset[type[Optimizer]] = frozenset({optim.ASGD})
"""Known optimizers whose steps create tensors of torch's default dtype."""
_BY_DOUBLE: frozenset[type[Optimizer]] = frozenset({optim.ASGD, optim.NAdam})
"""Those that compute with tensors of float64 if that is the default dtype, and of float32 otherwise."""

DECLARATION = "independent_parameters"
EXPLICIT = "explicit_dtypes"
"""Class attribute that declares that steps create no tensors of torch's default dtype."""


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the user's optimizer, without Lightning's wrapper around it."""
    while any(_is_lightnings(base) for base in type(optimizer).__mro__):
        optimizer = vars(optimizer)["_optimizer"]
    return optimizer


def stepped_by_parameter(optimizer: Optimizer) -> str | None:
    """Return None if ``optimizer`` can be stepped a few parameters at a time with the same results; else the reason.

    Call it for each step, because hooks and groups come and go; it takes microseconds. The reason is a clause to follow
    "because".
    """
    optimizer = unwrapped(optimizer)
    cls = type(optimizer)
    if isinstance(optimizer, optim.LBFGS):
        return f"{cls.__name__} looks at all parameters together"
    if isinstance(optimizer, optim.SparseAdam):
        return f"{cls.__name__} takes sparse gradients only"
    if cls not in KNOWN and vars(cls).get(DECLARATION) is not True:
        return (
            f"{cls.__name__} is not known to treat each parameter on its own; if it does, say so with the class "
            f"attribute `{DECLARATION} = True`"
        )
    return _patched(optimizer) or _hooked(optimizer) or _entangled(optimizer)


def goes_by_default_format(optimizer: Optimizer, *, double: bool) -> str | None:
    """Return None if a step does not depend on torch's default dtype meanwhile; else why it may.

    Args:
        optimizer: the user's.
        double: whether that dtype may be float64.
    """
    cls = type(unwrapped(optimizer))
    if vars(cls).get(EXPLICIT) is True or (cls in KNOWN and cls not in (_BY_DOUBLE if double else _BY_DEFAULT)):
        return None
    return (
        f"{cls.__name__} may go by torch's default format, which is another one while layers compute; if it does not, "
        f"say so with the class attribute `{EXPLICIT} = True`"
    )


def _is_lightnings(base: type) -> bool:
    home = base.__module__.partition(".")[0]
    return base.__name__ == "LightningOptimizer" and home in ("lightning", "pytorch_lightning")


def _patched(optimizer: Optimizer) -> str | None:
    """Return a reason if a method is not the class's own. torch's schedulers may wrap ``step``, to count its calls."""
    cls = type(optimizer)
    for name in ("step", "zero_grad"):
        own: Any = getattr(cls, name)
        method: Any = vars(optimizer).get(name, own)
        while method is not own and _home(method) == "torch.optim.lr_scheduler":
            method = method.__wrapped__
        if method is not own or (name == "step" and cls in KNOWN and not is_torchs(method)):
            return f"the {name} method of {cls.__name__} was replaced"
    return None


def _home(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def is_torchs(function: Callable[..., Any] | None) -> bool:
    """Return whether ``function`` and all that it wraps are torch's own."""
    while function is not None:
        if not _home(function).startswith("torch."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _hooked(optimizer: Optimizer) -> str | None:
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{when}_hooks", None):
            return f"{type(optimizer).__name__} has a step hook (register_step_{when}_hook)"
        if getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", None):
            return f"there is a step hook for all optimizers (register_optimizer_step_{when}_hook)"
    return None


def _entangled(optimizer: Optimizer) -> str | None:
    """Return a reason if settings make a known optimizer treat parameters together, or need autograd."""
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "its group has differentiable=True"
        # The whole group uses one epsilon, that of the first parameter's dtype.
        if type(optimizer) is optim.Adafactor and group["eps"][0] is None:
            dtypes = {p.dtype for p in group["params"]}
            if len(dtypes) > 1:
                return f"eps[0]=None takes one epsilon for {len(dtypes)} dtypes in a group of Adafactor; set eps[0]"
    return None
