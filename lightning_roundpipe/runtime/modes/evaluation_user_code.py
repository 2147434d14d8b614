"""The torch function mode of user code in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.user_code.mode import DATA, UserCodeMode


class EvaluationUserCode(UserCodeMode):
    """Moves host tensors to the device of their operation's other operands, and watches for ``.data`` and branches.

    Args:
        engine: the context of the engine.
        touched: called when user code reads the ``.data`` of a master, through which it may write to it.
        aside: see `UserCodeMode`.
        decided: called when user code asks for a tensor's truth value, with all truth values so far.
    """

    def __init__(
        self,
        engine: EngineContext,
        touched: Callable[[], None],
        aside: Callable[[Callable[[], Any]], Any] = lambda wait: wait(),
        decided: Callable[[list[bool]], None] = lambda decisions: None,
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
        self._all, self._touched, self._decided = engine.model.bucket_of, touched, decided
        self.decisions: list[bool] = []
        """The truth values of tensors that user code asked for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(args[0] if args else None, nn.Parameter) and func == DATA and id(args[0]) in self._all:
            self._touched()
        result = super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") == "__bool__":
            self.decisions.append(bool(result))
            self._decided(self.decisions)
        return result
