"""The factor that multiplies the losses of a step in fp16.

Whether an update is skipped, which decides the factor of the next one, is known only when its last gradient has
arrived. A step waits for the factor as it waits for weights. Its loss comes after its weights, so the factor is usually
there by then.
"""

from __future__ import annotations

from lightning_roundpipe.memory.version_waits import Versioned
from lightning_roundpipe.optim.scaling import LossScale


class Scales(Versioned):
    """The loss scale by version: the number of the last update that it depends on.

    Args:
        scale: the dynamic loss scale. None: no scaling, all factors are 1.
        outer: whether a returned loss is multiplied by ``last`` when it is differentiated, as by Lightning.

    Attributes:
        last: factor of the last step that had a loss.
        manual: factor of a loss that ``manual_backward`` differentiates; 1 if the loss is multiplied already.
    """

    def __init__(self, scale: LossScale | None = None, *, outer: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.last = scale.now() if scale is not None else 1.0
        self.manual = 1.0
        self.outer = outer
        self._known: dict[int, float] = {}

    def fix(self, *versions: int) -> float:
        """Set the factor of ``versions`` to the current one, and return its ratio to that of the last loss.

        Accumulated gradients may have to be multiplied by it. No update may be pending.
        """
        if self.scale is None:
            return 1.0
        now, before = self.scale.now(), self.last
        self.last, self._known = now, dict.fromkeys(versions, now)
        self.publish(max(versions))
        return now / before

    def reload(self) -> None:
        """Adopt a factor that was loaded from a checkpoint. No update may be pending."""
        if self.scale is not None:
            self.last = self.scale.now()
            self._known = dict.fromkeys(self._known, self.last)

    def decided(self, version: int, *, finite: bool | None) -> None:
        """Record that update ``version`` was applied or skipped; ``finite`` is None if it had no gradients."""
        assert self.scale is not None
        if finite is not None:
            self.scale.update(finite=finite)
        # The running step, of an older version, may still need its factor.
        self._known = {v: known for v, known in self._known.items() if v >= version - 1} | {version: self.scale.now()}
        self.publish(version)

    def has(self, version: int) -> bool:
        """Return whether the factor of ``version`` is known; without scaling it always is."""
        return self.scale is None or super().has(version)

    def of(self, version: int) -> float:
        """Return the factor of a step of ``version``. It must be known."""
        if self.scale is None:
            return 1.0
        return self._known[version]

    def outside(self, version: int) -> float:
        """Return the factor of the merged loss, not of its gradients, outside of the step, and update ``last``."""
        if self.scale is None:
            return 1.0
        self.last = self._known[version]
        return self.last if self.outer else 1.0
