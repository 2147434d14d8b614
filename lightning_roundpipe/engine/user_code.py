"""The mode of user code in training: what it may do with gradients of layers' outputs."""

from __future__ import annotations

from lightning_roundpipe.engine.graph_cut import hook_gradient, keep_gradient, refuse_across
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode


class UserCode(UserCodeMode):
    """See `UserCodeMode`. Outputs of layers hang on `graph_cut.Boundary`."""

    refuse_across = staticmethod(refuse_across)  # type: ignore[assignment]
    hook_gradient = staticmethod(hook_gradient)
    keep_gradient = staticmethod(keep_gradient)
