"""Cutting a call out of the graph and joining it again, without threads: gradients are those of the uncut graph."""

from __future__ import annotations

import contextlib
import contextvars
import gc

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.user_code.graph_cuts import InputGradSink, boundary, driven_backward, source_of
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


class Named:
    name = "the layer"


def recorded() -> RecordedCall:
    thread_state = TorchThreadState.capture(("cpu",))
    return RecordedCall(0, Named(), 0, None, [], [], thread_state, None, 0, contextvars.copy_context())  # type: ignore[arg-type]


def cut(layer: nn.Module, tape: list[RecordedCall], x: Tensor) -> Tensor:
    """What user code sees of ``layer(x)``; its graph is kept on the recorded call."""
    made = recorded()
    made.targets = [source_of(x)]
    made.sink = InputGradSink([x]) if x.requires_grad and made.targets[0] is None else None
    detached_inputs = DetachedInputs("a layer")
    with torch.enable_grad():
        [inner] = detached_inputs.open([x], [x.requires_grad])
        output = layer(inner)
    made.graph = (detached_inputs, [output])
    tape.append(made)
    [alias] = boundary(made, [output], [True])
    return alias


def walk(tape: list[RecordedCall]) -> None:
    while tape:
        taken = tape.pop()
        assert taken.graph is not None
        detached_inputs, outputs = taken.graph
        with detached_inputs:
            torch.autograd.backward(outputs, [taken.grads[0][0][0]])
        [grad] = detached_inputs.grads
        if taken.targets[0] is not None:
            taken.targets[0][0].add_grad(taken.targets[0][1], grad, None)
        elif taken.sink is not None:
            taken.sink.push([grad], contextlib.nullcontext())


def run(x: Tensor, first: nn.Module, second: nn.Module, call) -> Tensor:  # type: ignore[no-untyped-def]
    h = call(first, x * 2)
    h = torch.tanh(h) + x
    more = call(second, h)
    more += h
    h = more
    return call(first, h).square().sum()


def test_gradients_equal_those_of_the_whole_graph() -> None:
    """User code in front, between and behind; a residual written in place; a layer used twice."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    plain_x = torch.randn(3, 4, requires_grad=True)
    run(plain_x, first, second, lambda layer, x: layer(x)).backward()
    expected = [p.grad.clone() for p in (*first.parameters(), *second.parameters())]
    first.zero_grad(), second.zero_grad()

    x = plain_x.detach().clone().requires_grad_()
    tape: list[RecordedCall] = []
    loss = run(x, first, second, lambda layer, y: cut(layer, tape, y))
    with driven_backward.of(loss):
        loss.backward(retain_graph=True)
    walk(tape)
    torch.testing.assert_close(x.grad, plain_x.grad)
    for got, wanted in zip((*first.parameters(), *second.parameters()), expected, strict=True):
        torch.testing.assert_close(got.grad, wanted)


def test_an_output_that_goes_straight_on_walks_no_user_code() -> None:
    tape: list[RecordedCall] = []
    h = cut(nn.Linear(4, 4), tape, torch.randn(2, 4))
    assert source_of(h) == (tape[0], 0)
    assert source_of(h * 1) is None
    h.register_hook(lambda g: g)
    assert source_of(h) is None, "a hook on the tensor would be passed by"


def test_user_code_cannot_differentiate_across_a_layer() -> None:
    tape: list[RecordedCall] = []
    h = cut(nn.Linear(4, 4), tape, torch.randn(2, 4))
    with pytest.raises(RoundPipeError, match="'the layer'"):
        h.sum().backward()


def test_a_layer_may_write_to_its_input() -> None:
    x = torch.randn(3, requires_grad=True)
    detached_inputs = DetachedInputs("a layer")
    [inner] = detached_inputs.open([x.detach().clone()], [True])
    inner.mul_(3).add_(1)
    loss = inner.sum()
    with pytest.raises(RoundPipeError, match="past its outputs"):
        loss.backward(retain_graph=True)  # user code got hold of what the layer computed inside
    with detached_inputs:
        loss.backward()
    assert detached_inputs.grads[0] is not None and detached_inputs.grads[0].tolist() == [3, 3, 3]


def test_outputs_that_need_no_gradient() -> None:
    made = recorded()
    first, second = boundary(made, [torch.ones(2), torch.ones(2, dtype=torch.long)], [True, False])
    assert first.requires_grad and not second.requires_grad
    assert boundary(made, [torch.ones(2)], [False])[0].grad_fn is None


def test_a_sink_is_gone_when_its_call_is() -> None:
    """With all that lies in front of it. In a circle with its node it would live on until garbage is collected."""
    x = torch.ones(3, requires_grad=True)
    h = x * torch.ones(3)
    storage = h.untyped_storage()._weak_ref()
    sink = InputGradSink([h * h])
    del h
    gc.disable()
    try:
        sink.push([torch.ones(3)], contextlib.nullcontext())
        del sink
        expired = torch.UntypedStorage._expired(storage)
        torch.UntypedStorage._free_weak_ref(storage)
    finally:
        gc.enable()
    assert expired and x.grad is not None
