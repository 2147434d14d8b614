"""Torch's per-thread modes travel with a call."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_roundpipe.user_code.thread_state import TorchThreadState


def modes() -> tuple[bool, bool, bool, torch.dtype]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def elsewhere(thread_state: TorchThreadState, **override: bool) -> tuple[bool, bool, bool, torch.dtype]:
    """The modes in a thread that enters ``thread_state``."""
    found = []

    def work() -> None:
        before = modes()
        with thread_state.entered(**override):
            found.append(modes())
        assert modes() == before

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_modes_are_re_entered_on_another_thread() -> None:
    for context in (
        torch.no_grad(),
        torch.enable_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.float16),
        torch.autocast("cpu", torch.bfloat16),
    ):
        with context:
            expected, thread_state = modes(), TorchThreadState.capture(("cpu",))
        assert elsewhere(thread_state)[:3] == expected[:3]
        if expected[2]:
            assert elsewhere(thread_state)[3] == expected[3]


@pytest.mark.parametrize("grad", [False, True])
def test_grad_mode_can_be_overridden(grad: bool) -> None:
    with torch.set_grad_enabled(not grad):
        thread_state = TorchThreadState.capture(("cpu",))
    assert elsewhere(thread_state, grad=grad)[0] is grad


def test_autocast_off_goes_along_too() -> None:
    """A layer that was called outside of autocast is computed outside, whatever the worker is in."""
    thread_state = TorchThreadState.capture(("cpu",))
    with torch.autocast("cpu", torch.bfloat16), thread_state.entered():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_casts_of_weights_are_not_kept() -> None:
    """The cache is shared by all threads, and the arena holds another stage's weights by the next call."""
    with torch.autocast("cpu", torch.bfloat16):
        thread_state = TorchThreadState.capture(("cpu",))
    weight = torch.ones(2, 2, requires_grad=True)
    with thread_state.entered():
        first = torch.ones(2, 2, dtype=torch.bfloat16) @ weight
        weight.data.fill_(3.0)
        second = torch.ones(2, 2, dtype=torch.bfloat16) @ weight
    assert (float(first.detach()[0, 0]), float(second.detach()[0, 0])) == (2.0, 6.0)
