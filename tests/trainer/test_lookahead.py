"""Data loaders that run the model find whole updates."""

import copy
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.trainer.lookahead import WholeUpdates


class Other(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def calls():
    return []


class Engine:
    """Has one weight, and notes when its updates are finished."""

    def __init__(self, weight, calls):
        self.model, self._calls = SimpleNamespace(bucket_of={id(weight): None}), calls

    def settle(self):
        self._calls.append(1)


@pytest.fixture
def engine(weight, calls):
    return Engine(weight, calls)


@pytest.fixture
def whole(engine):
    return WholeUpdates(engine)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.sum(), lambda w: torch.stack([w, w]), lambda w: w.data, lambda w: torch.add(1, other=w),
        lambda w: torch._foreach_add([w], 1.0), lambda w: nn.functional.linear(torch.ones(2), w[None]),
    ],
)  # fmt: skip
def test_a_function_that_takes_a_weight_waits(whole, weight, calls, use):
    with whole, torch.no_grad():
        use(weight)
    assert calls


def test_the_loader_does_not_keep_the_engine(weight, calls):
    """It outlives that if modules are replaced, and there must be one copy of the weights."""
    engine = Engine(weight, calls)
    whole, known = WholeUpdates(engine), weakref.ref(engine)
    del engine
    with whole:
        weight.sum()
    assert known() is None and not calls


def test_other_parameters_do_not_wait(whole, calls):
    with whole:
        nn.Embedding(4, 2)(torch.tensor([[1, 2], [3, 0]]))
    assert not calls


def test_a_worker_of_the_loader_has_no_updates(whole, weight, calls, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with whole:
        weight.sum()
    assert not calls


@pytest.mark.parametrize("other", [Other(), torch.device("meta")])
def test_modes_that_a_generator_leaves_open_stay(whole, weight, calls, other):
    def loader():
        with other:
            yield 1
            yield weight.sum()

    batches = loader()
    for _ in range(2):
        with whole:
            next(batches)
    assert calls and torch.overrides._len_torch_function_stack() == 1
    with whole:
        assert not list(batches)
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_default_device_may_be_set_meanwhile(whole):
    try:
        with whole:
            torch.set_default_device("meta")
        assert torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_default_device_may_be_taken_back_meanwhile(whole, weight, calls):
    torch.set_default_device("meta")
    try:
        with whole:
            assert torch.ones(1).is_meta
            torch.set_default_device(None)
            assert not torch.ones(1).is_meta
            weight.sum()
            torch.set_default_device("meta")
        assert calls and torch.overrides._len_torch_function_stack() == 1
    finally:
        torch.set_default_device(None)
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_copy_has_no_updates(whole, weight, calls):
    with copy.deepcopy(whole):
        weight.sum()
    assert not calls
