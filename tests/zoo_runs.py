"""Runs of the zoo's models that several tests compare with, each made once in a session."""

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


@functools.cache
def plain(name: str, lora: bool, samples: int = 6, precision: str = "32-true") -> Result:
    """Plain Lightning on whole batches."""
    batches = zoo.make_batches(name, samples=samples)
    return run("auto", module(name, lora), batches, precision=precision)


@functools.cache
def one_after_another(name: str, lora: bool, microbatches: int, samples: int = 6) -> Result:
    """A plain loop over the microbatches."""
    return harness.by_hand(module(name, lora), zoo.make_batches(name, samples=samples), microbatches)


def expected(name: str, lora: bool, microbatches: int, samples: int = 6) -> Result:
    """What the strategy must give: plain Lightning's result, unless several microbatches cannot be the whole batch."""
    if microbatches > 1 and zoo.ENTRIES[name].coupled:
        return one_after_another(name, lora, microbatches, samples)
    return plain(name, lora, samples)


def train(name: str, lora: bool, devices: int, samples: int = 6, precision: str = "32-true", **options: Any) -> Result:
    """Train with the strategy."""
    batches = zoo.make_batches(name, samples=samples)
    entry, given = zoo.ENTRIES[name], module(name, lora)
    options = {"layers": entry.layers, "loss_weight": given.targets if entry.weighed else None} | options
    return run(ours(**options), given, batches, devices=devices, precision=precision)


@functools.cache
def trained(name: str, lora: bool, devices: int, microbatches: int) -> Result:
    """The same with default options."""
    return train(name, lora, devices, num_microbatches=microbatches)


@functools.cache
def calls(name: str, lora: bool) -> int:
    """How many calls the trace has."""
    report = trained(name, lora, 2, 3).report
    assert report is not None
    return harness.call_count(report["plan"])
