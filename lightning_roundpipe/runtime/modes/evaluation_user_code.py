"""The torch function mode of user code in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.model.lean_loss import LOSS_ARGUMENTS
from lightning_roundpipe.runtime.batch.known_losses import KnownLosses
from lightning_roundpipe.runtime.batch.losses import WITH_REDUCTION
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.user_code.inference_writes import IN_PLACE
from lightning_roundpipe.runtime.user_code.mode import DATA, UserCodeMode

_ASKS = frozenset({"__bool__", "__float__", "__int__", "__index__", "item", "equal", "allclose", "is_nonzero"})
"""Functions that tell user code about the values of tensors. It may go on in another way for each part."""


class EvaluationUserCode(UserCodeMode):
    """Moves host tensors to the device of their operation's other operands, and watches for ``.data`` and branches.

    It also notes how the losses that user code computes weigh beside those of other parts of the batch.

    Args:
        engine: the context of the engine.
        touched: called before user code writes to a master, or reads its ``.data``, through which it may write to it.
            In a part also before it takes rows by a number that only the whole batch has.
        aside: see `UserCodeMode`.
        decided: called when user code asks for a tensor's truth value or number, with all of them so far.
        samples: how many samples a part has; 0 if user code runs on the whole batch.
    """

    def __init__(
        self,
        engine: EngineContext,
        touched: Callable[[], None],
        aside: Callable[[Callable[[], Any]], Any] = lambda wait: wait(),
        decided: Callable[[list[Any]], None] = lambda decisions: None,
        samples: int = 0,
    ) -> None:
        formats = engine.model.formats
        super().__init__(
            engine.model.bucket_of,
            lambda p: p.to(formats.of(p)),
            formats,
            train=False,
            accelerator=engine.worker_pool.accelerator,
            devices=engine.worker_pool.devices,
            aside=aside,
            buffers=engine.model.buffers,
        )
        self._all, self._touched, self._decided, self._samples = engine.model.bucket_of, touched, decided, samples
        self.decisions: list[Any] = []
        """The truth values and numbers of tensors that user code asked for."""
        self.losses = KnownLosses()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        target = args[0] if args else None
        writes = func == DATA or (IN_PLACE.fullmatch(name) and name != "requires_grad_")
        if writes and isinstance(target, nn.Parameter) and id(target) in self._all:
            self._touched()
        if self._samples and name == "__getitem__" and _is_beyond(target, args[1], self._samples):
            self._touched()
        result = super().__torch_function__(func, types, args, kwargs)
        if func in WITH_REDUCTION:
            bound = dict(zip(LOSS_ARGUMENTS, args, strict=False)) | kwargs
            self.losses.note(func, args, kwargs, result, lambda: self.targets_of(bound))
        elif IN_PLACE.fullmatch(name) or name.startswith("_foreach_"):
            self.losses.forget(args[0] if args else None)
        elif "out" in kwargs:
            self.losses.forget(kwargs["out"])
        else:
            self.losses.follow(name, args, result)
        if name in _ASKS:
            self.decisions.append(result)
            self._decided(self.decisions)
        return result


def _is_beyond(tensor: Any, index: Any, samples: int) -> bool:
    """Return whether ``index`` begins or ends at a row that a part of so many samples lacks, as in ``h[4:]``."""
    rows = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(rows, slice) or not isinstance(tensor, Tensor) or len(tensor) != samples:
        return False
    bounds = [bound for bound in (rows.start, rows.stop) if isinstance(bound, int)]
    return any(abs(bound) > samples for bound in bounds) or rows.start == samples or rows.stop == -samples
