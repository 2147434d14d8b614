"""Runs of the zoo's models that several tests compare with, each made once in a session.

With a ``window``, the loader gives the parts of the zoo's batches, and a window of Lightning's is all parts of one.
"""

from __future__ import annotations

import functools
from typing import Any

import harness
import zoo
from harness import Result, ours, run


@functools.cache
def module(name: str, lora: bool) -> zoo.ZooModule:
    """``harness.run`` trains a copy, so one instance serves all tests."""
    return zoo.make_module(name, lora)


def batches(name: str, samples: int = 6, window: int = 1) -> list[zoo.Batch]:
    """The zoo's batches, or their parts one after another."""
    return [part for batch in zoo.make_batches(name, samples=samples) for part in harness.split(batch, window)]


@functools.cache
def plain(name: str, lora: bool, samples: int = 6, precision: str = "32-true", window: int = 1) -> Result:
    """Plain Lightning."""
    given = batches(name, samples, window)
    return run("auto", module(name, lora), given, precision=precision, accumulate_grad_batches=window)


@functools.cache
def one_after_another(name: str, lora: bool, microbatches: int, samples: int = 6) -> Result:
    """A plain loop over the parts of each batch, which weigh by their targets."""
    return harness.by_hand(module(name, lora), zoo.make_batches(name, samples=samples), microbatches)


def expected(name: str, lora: bool, microbatches: int, samples: int = 6) -> Result:
    """What cutting each batch must give: plain Lightning's result, unless samples of a batch depend on each other."""
    if microbatches > 1 and zoo.ENTRIES[name].coupled:
        return one_after_another(name, lora, microbatches, samples)
    return plain(name, lora, samples)


def train(
    name: str, lora: bool, devices: int, samples: int = 6, precision: str = "32-true", window: int = 1, **options: Any
) -> Result:
    """Train with the strategy, on windows of parts or, with ``num_microbatches``, on batches that it cuts."""
    given = module(name, lora)
    weigh = None if window > 1 else given.weighs
    strategy = ours(**{"layers": zoo.ENTRIES[name].layers, "loss_weight": weigh} | options)
    return run(
        strategy,
        given,
        batches(name, samples, window),
        devices=devices,
        precision=precision,
        accumulate_grad_batches=window,
    )


@functools.cache
def trained(name: str, lora: bool, devices: int, window: int) -> Result:
    """The same with default options."""
    return train(name, lora, devices, window=window)


@functools.cache
def calls(name: str, lora: bool) -> int:
    """How many calls the trace has."""
    report = trained(name, lora, 2, 3).report
    assert report is not None
    return harness.call_count(report["plan"])
