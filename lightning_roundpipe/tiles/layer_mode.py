"""`LayerMode`: the base of modes that see the operations of a layer's code."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class LayerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode around a layer's code. Compiled code inside stays compiled, and its operations unseen."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise torch.compile, possibly in another thread, would skip compilation in this mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
