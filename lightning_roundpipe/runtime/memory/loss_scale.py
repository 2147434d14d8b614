"""What the losses of a step are multiplied by in fp16, which the updates before it decide.

Whether an update is skipped, and with it the factor of the next one, is known only when its last gradient has arrived.
A step waits for it as it waits for weights; as these come later, it is there by the time that there is a loss.
"""

from __future__ import annotations

from lightning_roundpipe.optim.scaling import LossScale
from lightning_roundpipe.runtime.memory.version_waits import Versioned


class Scales(Versioned):
    """The factor, by the number of the last update that has a say in it.

    Args:
        scale: None: there is no scaling, and all factors are 1.
        outer: whether the merged loss is multiplied once more by who differentiates it, as Lightning does.

    Attributes:
        last: the factor of the last step that had a loss.
        batches: how many batches the running step's loss is divided by. What overflows is to be what overflows in plain
            training, where that comes first.
        manual: what a loss is multiplied by that training_step differentiates by itself; 1 if that has been done.
    """

    def __init__(self, scale: LossScale | None = None, *, outer: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.last = scale.now() if scale is not None else 1.0
        self.batches = 1
        self.manual = 1.0
        self._outer = outer
        self._known: dict[int, float] = {}

    def fix(self, *versions: int) -> float:
        """Steps of ``versions`` take the factor that holds now. Nothing is on its way.

        Returns:
            By how much it has moved since the last loss, whose gradients may have to be added to others.
        """
        if self.scale is None:
            return 1.0
        now, before = self.scale.now(), self.last
        self.last, self._known = now, dict.fromkeys(versions, now)
        self.publish(max(versions))
        return now / before

    def reload(self) -> None:
        """Another factor was loaded; nothing is on its way."""
        if self.scale is not None:
            self.last = self.scale.now()
            self._known = dict.fromkeys(self._known, self.last)

    def decided(self, version: int, *, finite: bool | None) -> None:
        """Update ``version`` was applied, or skipped; None: there was nothing that could be."""
        assert self.scale is not None
        if finite is not None:
            self.scale.update(finite=finite)
        # The step that runs, of an older version, may not have come to its loss yet.
        self._known = {v: known for v, known in self._known.items() if v >= version - 1} | {version: self.scale.now()}
        self.publish(version)

    def has(self, version: int) -> bool:
        """Whether the factor of ``version`` is there; without scaling it always is."""
        return self.scale is None or super().has(version)

    def of(self, version: int) -> float:
        """The factor of a step of ``version``, which is there."""
        if self.scale is None:
            return 1.0
        return self._known[version] / self.batches

    def outside(self, version: int) -> float:
        """For a step that has its losses: what is applied once more to the merged loss, or not needed yet."""
        if self.scale is None:
            return 1.0
        self.last = self._known[version]
        return (self.last if self._outer else 1.0) / self.batches
