"""Who a thread works for: handed by torch to the threads that autograd runs backward on, and locks go by it."""

# Tensor.backward and the like have no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices.generators import GeneratorLock
from lightning_roundpipe.devices.thread_owner import behalf, thread, working

DEEP = 70
"""Backwards within each other: from the 61st on, torch has threads of its own for them on the CPU, too."""


class Nested(torch.autograd.Function):
    """Its backward runs another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, seen: list[Any]) -> Tensor:
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append((threading.get_ident(), thread(), behalf()))
        if ctx.depth:
            run(ctx.depth - 1, ctx.seen)
        return grad, None, None


def run(depth: int, seen: list[Any]) -> None:
    with torch.enable_grad():
        out: Tensor = Nested.apply(torch.ones(1, requires_grad=True), depth, seen)
    out.backward()


def test_autograds_own_threads_are_told() -> None:
    seen: list[Any] = []
    with working("a layer"):
        mine = behalf()
        run(DEEP, seen)
    assert behalf() is None
    own = threading.get_ident()
    assert {ident == own for ident, _, _ in seen} == {True, False}, "torch used no thread of its own"
    assert {(of, who) for _, of, who in seen} == {(own, mine)}


def test_work_within_work() -> None:
    with working("outer"):
        with working("inner"):
            found = behalf()
            assert found is not None and found.context == "inner"
        found = behalf()
        assert found is not None and found.context == "outer"
    with ThreadPoolExecutor(1) as other:
        assert other.submit(behalf).result() is None


def test_a_lock_is_entered_again_by_whom_its_owner_has_lent_work() -> None:
    lock, seen = GeneratorLock(), []

    class Enters(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(lock.acquire(timeout=0))
            lock.release()
            return grad

    class Around(Nested):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            if ctx.depth:
                with torch.enable_grad():
                    Around.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.seen).backward()
            else:
                ctx.seen.append(threading.get_ident())
                with torch.enable_grad():
                    Enters.apply(torch.ones(1, requires_grad=True)).backward()
            return grad, None, None

    where: list[int] = []
    with working("a layer"), lock:
        Around.apply(torch.ones(1, requires_grad=True), DEEP, where).backward()
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(lock.acquire, False).result()
    assert where != [threading.get_ident()]
    assert seen == [True]


def test_a_lock_is_free_when_it_was_released_as_often_as_taken() -> None:
    lock = GeneratorLock()
    with ThreadPoolExecutor(1) as other:
        with lock, lock, pytest.raises(RuntimeError, match="does not hold it"):
            other.submit(lock.release).result()
        assert other.submit(lock.acquire, False).result()
        assert not lock.acquire(blocking=False)
        assert not lock.acquire(timeout=0.01)
        other.submit(lock.release).result()
    assert lock.acquire(blocking=False)
    lock.release()


def test_no_reference_is_lost() -> None:
    """Some versions of torch give up a reference to what they keep that they have never taken."""
    context = object()
    before = sys.getrefcount(context)
    for _ in range(3):
        with working(context), working(context):
            assert sys.getrefcount(context) > before
    assert sys.getrefcount(context) == before
