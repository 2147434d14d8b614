"""The torch function mode of user code in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.user_code.inference_writes import IN_PLACE
from lightning_roundpipe.runtime.user_code.mode import DATA, UserCodeMode


class EvaluationUserCode(UserCodeMode):
    """Moves host tensors to the device of their operation's other operands, and watches for writes to weights.

    Args:
        engine: the context of the engine.
        touched: called before user code writes to a master, or reads its ``.data``, through which it may write to it.
        aside: see `UserCodeMode`.
    """

    def __init__(
        self,
        engine: EngineContext,
        touched: Callable[[], None],
        aside: Callable[[Callable[[], Any]], Any] = lambda wait: wait(),
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
        self._all, self._touched = engine.model.bucket_of, touched

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target, name = args[0] if args else None, getattr(func, "__name__", "")
        writes = func == DATA or (IN_PLACE.fullmatch(name) and name != "requires_grad_")
        if writes and isinstance(target, nn.Parameter) and id(target) in self._all:
            self._touched()
        return super().__torch_function__(func, types, args, kwargs)
