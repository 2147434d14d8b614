"""The context of a thread: torch hands it to the threads that autograd runs backward on."""

import sys
import threading

import torch

from lightning_roundpipe.devices.thread_owner import context_of_thread, working

DEEP = 70
"""Backwards within each other: from the 61st on, torch has threads of its own for them on the CPU, too."""


class Nested(torch.autograd.Function):
    """Its backward runs another one."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append((threading.get_ident(), context_of_thread()))
        if ctx.depth:
            run(ctx.depth - 1, ctx.seen)
        return grad, None, None


def run(depth, seen):
    with torch.enable_grad():
        out = Nested.apply(torch.ones(1, requires_grad=True), depth, seen)
    out.backward()


def test_autograds_own_threads_are_told():
    seen = []
    with working("a layer"):
        run(DEEP, seen)
    assert context_of_thread() is None
    own = threading.get_ident()
    assert {ident == own for ident, _ in seen} == {True, False}, "torch used no thread of its own"
    assert {context for _, context in seen} == {"a layer"}


def test_no_reference_is_lost():
    """Some versions of torch give up a reference to what they keep that they have never taken."""
    context = object()
    before = sys.getrefcount(context)
    for _ in range(3):
        with working(context), working(context):
            assert sys.getrefcount(context) > before
    assert sys.getrefcount(context) == before
