"""Runs of the zoo's models that several tests compare with, each made once in a session.

With a ``window``, the loader gives the parts of the zoo's batches, and a window of Lightning's is all parts of one.
"""

import functools

import harness
import zoo
from harness import ours, run


@functools.cache
def module(name, lora):
    """``harness.run`` trains a copy, so one instance serves all tests."""
    return zoo.make_module(name, lora)


def batches(name, samples=6, window=1):
    """The zoo's batches, or their parts one after another."""
    return [part for batch in zoo.make_batches(name, samples=samples) for part in harness.split(batch, window)]


@functools.cache
def plain(name, lora, samples=6, precision="32-true", window=1):
    """Plain Lightning."""
    given = batches(name, samples, window)
    return run("auto", module(name, lora), given, precision=precision, accumulate_grad_batches=window)


@functools.cache
def one_after_another(name, lora, microbatches, samples=6):
    """A plain loop over the parts of each batch, which weigh by their targets."""
    return harness.by_hand(module(name, lora), zoo.make_batches(name, samples=samples), microbatches)


def expected(name, lora, microbatches, samples=6):
    """What cutting each batch must give: plain Lightning's result, unless samples of a batch depend on each other."""
    if microbatches > 1 and zoo.ENTRIES[name].coupled:
        return one_after_another(name, lora, microbatches, samples)
    return plain(name, lora, samples)


def train(name, lora, devices, samples=6, precision="32-true", window=1, **options):
    """Train with the strategy, on windows of parts or, with ``num_microbatches``, on batches that it cuts."""
    given = module(name, lora)
    weigh = None if window > 1 else given.weighs
    strategy = ours(**{"loss_weight": weigh} | options)
    return run(
        strategy,
        given,
        batches(name, samples, window),
        devices=devices,
        precision=precision,
        accumulate_grad_batches=window,
    )


@functools.cache
def trained(name, lora, devices, window):
    """The same with default options."""
    return train(name, lora, devices, window=window)


@functools.cache
def calls(name, lora):
    """How many calls the trace has."""
    report = trained(name, lora, 2, 3).report
    assert report is not None
    return harness.call_count(report["plan"])
