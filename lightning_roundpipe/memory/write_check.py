"""Notices that user code writes to a layer's weights while they are on their way to workers."""

from __future__ import annotations

import operator

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import ModuleState


class WriteCheck:
    """Whether a layer has the parameters and inner modules, unwritten, that it had at the last `snapshot`."""

    def __init__(self, name: str, state: ModuleState) -> None:
        self._name, self._state = name, state

    def snapshot(self) -> None:
        """Save what is compared with. Call after all layers have reattached their masters."""
        self._own = [
            (inner._parameters, key, p, p._version, p.data_ptr())
            for inner in self._state.modules
            for key, p in inner._parameters.items()
            if p is not None
        ]
        self._inner = [(m._modules, tuple(m._modules.values())) for m in self._state.modules if m._modules]

    def assert_unmodified(self) -> None:
        """Raise if user code has changed or replaced a weight or an inner module since `snapshot`."""
        for held, key, parameter, version, pointer in self._own:
            now = held.get(key)
            if now is not parameter:
                raise RoundPipeError(
                    f"layer {self._name!r} is called with other weights than its own: {key!r} was replaced within the "
                    "step, as torch.func.functional_call does. Only a module's own parameters are sent to a worker: "
                    "compute with the other weights in a layer's forward, or between layers with torch functions."
                )
            if parameter._version != version or parameter.data_ptr() != pointer:
                raise RoundPipeError(
                    f"parameter {key!r} of layer {self._name!r} was written to within the step, when its value was on "
                    "its way to a worker. Write to parameters between steps, for example in on_train_batch_start."
                )
        if any(len(held) != len(now) or any(map(operator.is_not, held.values(), now)) for held, now in self._inner):
            raise RoundPipeError(
                f"a module inside layer {self._name!r} was replaced within the step; workers have the old one. Change "
                "the model between steps, and choose between modules in the layer's forward."
                + self._configuration_remedy()
            )

    def _configuration_remedy(self) -> str:
        """Return which settings make the model as it is now from the beginning, as a sentence; empty if none do.

        A model that replaces its modules in a forward (BigBird, for short sequences) sets attributes that it has from
        its configuration.
        """
        now = self._state.current()
        settings = [
            f"config.{name}={value!r}"
            for index, (changed, _) in (now.changed.items() if now is not None else ())
            for name, value in changed.items()
            if isinstance(value, (str, bool, int, float))
            and getattr(getattr(self._state.modules[index], "config", None), name, value) != value
        ]
        listed = ", ".join(dict.fromkeys(settings))
        return f" Or set {listed} before training: the model has set itself so in its forward." if listed else ""

    def is_written(self) -> bool:
        """Return whether user code has written to parameters, without replacing them, since `snapshot`."""
        return any(
            held.get(key) is parameter and (parameter._version != version or parameter.data_ptr() != pointer)
            for held, key, parameter, version, pointer in self._own
        )
