"""Hints and warnings to the user, each issued once: what is switched off, cut or run otherwise than asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_roundpipe.messages import PREFIX, plural, warn
from lightning_roundpipe.model.refine import Refined


class Hints:
    """Issues each hint and warning once.

    Args:
        inform: called with the text of each hint. Warnings go through `warn`.

    Attributes:
        cuts: which layers were cut because a worker's memory is too small for them; empty if none were.
    """

    def __init__(self, inform: Callable[[str], None]) -> None:
        self._inform, self._said, self.cuts = inform, set[str](), ""

    def of_settings(self, switched_off: Sequence[str]) -> None:
        """Hint: settings of the model that are off while it is trained."""
        for name in switched_off:
            wanted = " Pass use_cache=True in a call whose past_key_values are used." if name == "use_cache" else ""
            self.say(name, f"training runs with {name}=False, as the strategy recomputes layers itself.{wanted}")

    def of_one_microbatch(self, devices: int) -> None:
        """Hint: a step of one microbatch keeps one device busy at a time."""
        self.say(
            "one",
            f"a step has one microbatch, which keeps one of {plural(devices, 'device')} busy at a time. Set "
            "Trainer(accumulate_grad_batches=...) with smaller batches, or RoundPipeStrategy(num_microbatches=...) to "
            "cut each batch.",
        )

    def of_few_samples(self, asked: int, samples: int) -> None:
        """Warning: batches have fewer samples than parts are asked for."""
        self.warn(
            "samples",
            f"num_microbatches={asked} cuts a batch of {plural(samples, 'sample')} into {plural(samples, 'part')}. "
            f"Let the data loader give batches of at least {asked} samples, or take num_microbatches out and set "
            f"Trainer(accumulate_grad_batches={asked}).",
        )

    def of_cuts(self, refined: Refined, *, fitting: bool) -> None:
        """Hint, unless only an evaluation follows: layers that were too large for a worker were cut."""
        self.cuts = "; ".join(refined.summary()) if refined.cuts else ""
        if self.cuts and fitting:
            self.say("cuts", f"cut {self.cuts}: two of them with their gradients do not fit on a device.")

    def say(self, key: str, text: str) -> None:
        """Issue a hint, which the user need not act on; once for each ``key``."""
        if key not in self._said:
            self._said.add(key)
            self._inform(PREFIX + text)

    def warn(self, key: str, text: str) -> None:
        """Issue a warning, which names the setting that helps; once for each ``key``."""
        if key not in self._said:
            self._said.add(key)
            warn(PREFIX + text)
