"""Gradients between optimizer steps: what windows have accumulated, and what ``.grad`` shows.

    a window that no step follows ── its gradients are added, bucket by bucket ── [1]
    a step ── the sum with its last window's gradients, which goes to the optimizer ── [2]
    a hook, an evaluation, a checkpoint ── ``.grad`` shows what plain training leaves there ── [3]
    the next window ── takes it back, with what user code has changed ── [4]

[1] and [2] run on the optimizer's thread. [3] and [4] run on the main thread, while nothing is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from lightning_roundpipe.memory.flat_params import ALONE, holders
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.optim.narrow_gradient import AnyGradient, all_widened


class Accumulated:
    """The gradients of one bucket that windows have accumulated for the next optimizer step. Steps reuse its memory.

    Those of masters outside of the optimizer are accumulated over all steps, as in plain training.

    Attributes:
        shown: whether user code has seen the tensors in ``.grad``, and may keep them.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._present: set[int] = set()
        self.shown = False

    def add(self, gradients: Mapping[int, Tensor]) -> None:
        """Add the gradients of a window [1]."""
        for key, gradient in gradients.items():
            if key in self._present:
                self._memory[key].add_(gradient)
            elif key in self._memory:
                self._memory[key].copy_(gradient)
            else:
                self._memory[key] = gradient.clone()
        self._present |= gradients.keys()

    def with_last(self, gradients: dict[int, AnyGradient], outside: AbstractSet[int]) -> dict[int, AnyGradient]:
        """Return the sum with the last window's ``gradients`` [2]; these themselves where nothing was accumulated."""
        kept = self._present | outside
        self.add(all_widened({key: gradient for key, gradient in gradients.items() if key in kept}))
        return gradients | self.present()

    def present(self) -> dict[int, Tensor]:
        """Return the sums, by id of the master."""
        return {key: self._memory[key] for key in self._present}

    def forget(self, outside: AbstractSet[int]) -> None:
        """Forget the sums, except for masters ``outside`` of the optimizer."""
        self._present &= outside
        if self.shown:  # do not reuse memory that user code still holds
            self._memory = {
                key: memory for key, memory in self._memory.items() if key in self._present or holders(memory) == ALONE
            }
            self.shown = bool(self._present)

    def drop(self, key: int) -> None:
        """Forget one gradient with its memory: user code has replaced it in ``.grad``, and may keep it."""
        self._present.discard(key)
        self._memory.pop(key, None)


class WindowGradients:
    """See above.

    Args:
        outside: returns the ids of the masters that the optimizer does not hold. A step does not use their gradients.

    Attributes:
        accumulated: what windows have accumulated, by bucket.
        is_open: whether a window has been accumulated that no step has used.
        keeps: whether gradients that a step has used stay until the next window, for `show`. Otherwise the gradients
            of other layers take their memory.
    """

    def __init__(self, buckets: Sequence[ParamBucket], outside: Callable[[], AbstractSet[int]]) -> None:
        self._buckets, self._outside = buckets, outside
        self.accumulated = {bucket: Accumulated() for bucket in buckets}
        self.is_open, self.keeps = False, True
        self._used: dict[ParamBucket, dict[int, Tensor]] = {}
        """The gradients that the last step has used, by bucket and id of the master."""
        self._used_in: Sequence[HostGradSums] = ()
        """The sums whose memory these lie in."""
        self._shown: dict[int, Tensor] | None = {}
        """What `show` has put into ``.grad`` since the last window, by id of the master; None if it was not called.
        Before the first window, all that is in ``.grad`` is user code's."""

    # -- the main thread ----------------------------------------------------------------------------------------------

    def current(self) -> dict[int, Tensor]:
        """Return what was accumulated for the next step, by id of the master, with user code's changes in ``.grad``."""
        if self._shown is not None:
            self.show(after_step=True)
        return self._present()

    def _present(self) -> dict[int, Tensor]:
        return _together(self.accumulated[bucket].present() for bucket in self._buckets)

    def show(self, *, after_step: bool) -> None:
        """Put into ``.grad`` what plain training leaves there [3].

        User code may write to these gradients, replace or drop them: that counts, as in plain training.

        ``after_step``: whether plain training still has the gradients that a step has used.
        """
        if not (after_step or self.is_open) and self._shown is None:
            self.forget(frozenset())  # validation begins with the module's zero_grad, which reaches all parameters
        self.hide()
        self._shown = {}
        gradients = self._present() if self.is_open else _together(self._used.values()) | self._present()
        if not self.is_open:
            for total in self._used_in:
                total.handed_out = True  # the next window must not reuse memory that user code has kept
        for bucket in self._buckets:
            self.accumulated[bucket].shown = True
            for master in bucket.masters:
                gradient = gradients.get(id(master))
                if gradient is not None and gradient.shape == master.shape:  # torch takes no other, from a former .data
                    self._shown[id(master)] = master.grad = gradient.detach()

    def hide(self) -> None:
        """Take back from ``.grad`` what `show` has put there, with the changes by user code [4]."""
        shown, self._shown = self._shown, None
        if shown is None:
            return
        outside = self._outside()
        for bucket in self._buckets:
            for master in bucket.masters:
                key, now = id(master), master.grad
                master.grad = None
                if now is shown.get(key):
                    continue
                self.accumulated[bucket].drop(key)
                used = self._used.setdefault(bucket, {})
                used.pop(key, None)
                if now is not None and (self.is_open or key in outside):
                    self.accumulated[bucket].add({key: now.detach()})
                elif now is not None:
                    used[key] = now.detach()

    def multiply(self, factor: float) -> None:
        """Multiply what was accumulated by a quotient of loss scales: a power of two, which rounds nothing."""
        for gradient in self._present().values() if factor != 1.0 else ():
            gradient.mul_(factor)

    # -- the optimizer's thread ---------------------------------------------------------------------------------------

    def begin_step(self, sums: Sequence[HostGradSums]) -> None:
        """Drop what the step before has used; ``sums`` hold what this one uses, as far as `show` may need it."""
        for total in self._used_in:
            total.release()
        self._used, self._used_in = {}, sums

    def use(self, bucket: ParamBucket, gradients: dict[int, Tensor]) -> None:
        """Keep the gradients that the step uses for `show`."""
        self._used[bucket] = gradients

    def forget(self, outside: AbstractSet[int]) -> None:
        """Forget everything, except for masters ``outside`` of the optimizer, as ``Optimizer.zero_grad`` does."""
        self.begin_step(())
        for accumulated in self.accumulated.values():
            accumulated.forget(outside)


def _together(found: Iterable[dict[int, Tensor]]) -> dict[int, Tensor]:
    return {key: gradient for gradients in found for key, gradient in gradients.items()}
