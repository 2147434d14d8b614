"""What counts as resident on an emulated device, and what happens when it does not fit."""

# Tensor.backward and the like have no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.devices import Device, DeviceOutOfMemory
from lightning_roundpipe.devices.ledger import Ledger

MakeDevice = Callable[..., Device]


def test_allocate_counts_aligns_and_gives_back(make: MakeDevice) -> None:
    device = make(memory=10_000)
    assert device.capacity() == 10_000
    a, b = device.allocate(4_000, "weights"), device.allocate(5_000, "gradients")
    for arena, nbytes in ((a, 4_000), (b, 5_000)):
        assert arena.shape == (nbytes,)
        assert arena.dtype == torch.uint8
        assert arena.data_ptr() % 256 == 0
    assert device.resident_bytes() == 9_000
    device.free(a)
    assert device.resident_bytes() == 5_000
    assert device.peak_bytes() == 9_000
    device.reset_peak()
    assert device.peak_bytes() == 5_000
    device.free(b)
    assert device.resident_bytes() == 0
    assert device.allocate(0, "nothing").numel() == 0
    device.allocate(100, "left behind")
    device.close()
    assert device.resident_bytes() == 0


def test_free_takes_only_its_own_arenas_and_only_once(make_all: Callable[..., list[Device]]) -> None:
    device, other = make_all(2)
    arena = device.allocate(10, "weights")
    for wrong, buffer in ((other, arena), (device, arena[:5]), (device, torch.zeros(10))):
        with pytest.raises(ValueError, match="not an arena"):
            wrong.free(buffer)
    device.free(arena)
    with pytest.raises(ValueError, match="not an arena"):
        device.free(arena)


def test_out_of_memory_says_what_is_there_and_what_helps(make: MakeDevice) -> None:
    device = make(memory="8KiB")
    arena = device.allocate(4096, "weights of the slot")
    tracked = device.track([torch.zeros(256)], "boundary")
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.allocate(4096, "weights of the next slot")
    message = str(caught.value)
    for part in (
        "Emulated CUDA device 0 is out of memory: 4.0 KiB for weights of the next slot",
        "5.0 KiB of 8.0 KiB",
        "weights of the slot 4.0 KiB, boundary 1.0 KiB",
        "Use smaller microbatches (batches, or parts by num_microbatches), or a smaller memory_budget",
        "emulation.memory",
    ):
        assert part in message
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert device.resident_by_purpose() == {"weights of the slot": 4096, "boundary": 1024}
    tracked.release()
    device.allocate(4096, "weights of the next slot")
    device.free(arena)


def test_a_storage_counts_once_and_until_its_last_reason_is_gone(make: MakeDevice) -> None:
    device = make()
    x = torch.zeros(100)
    arena = device.allocate(400, "weights")
    parameter = arena.view(torch.float32)[:50].requires_grad_()
    first = device.track([x, x[:10], x.t(), parameter, parameter.data], "boundary")
    assert device.resident_bytes() == 800
    second = device.track([x.view(10, 10)], "input")
    assert device.resident_bytes() == 800
    first.release()
    first.release()
    assert device.resident_by_purpose() == {"weights": 400, "input": 400}
    second.release()
    assert device.resident_bytes() == 400


def test_a_hold_keeps_storages_alive_and_ends_with_itself(make: MakeDevice) -> None:
    device = make()
    with device.track([torch.zeros(100)], "input"):
        assert device.resident_bytes() == 400
        other = device.track([torch.zeros(100)], "input")  # would reuse the memory of the first, were that gone
        assert device.resident_bytes() == 800
    assert device.resident_bytes() == 400
    del other
    assert device.resident_bytes() == 0


def test_a_hold_that_does_not_fit_counts_nothing(make: MakeDevice) -> None:
    device = make(memory=1000)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.track([torch.zeros(100), torch.zeros(200)], "input")
    assert device.resident_bytes() == 0
    del caught  # until here it kept the half-made hold alive


def mlp() -> nn.Sequential:
    """Three linear layers, 16 wide, without biases."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(16, 16, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def held_mlp(device: Device) -> tuple[nn.Sequential, int]:
    """The model with its weights counted, and their bytes."""
    model = mlp()
    arena = device.allocate(3 * 16 * 16 * 4, "weights")
    flat = arena.view(torch.float32)
    for i, linear in enumerate(m for m in model if isinstance(m, nn.Linear)):
        linear.weight = nn.Parameter(flat[i * 256 : (i + 1) * 256].view(16, 16).normal_())
    return model, arena.numel()


@pytest.mark.parametrize("drop", ["backward", "graph"])
def test_saved_tensors_of_an_mlp_match_a_sum_by_hand(make: MakeDevice, drop: str) -> None:
    device = make(memory=100_000)
    model, weights = held_mlp(device)
    x = torch.randn(8, 16)
    one = 8 * 16 * 4
    # Saved: the first layer's input and three tanh outputs (two are the next layers' inputs). The weights are there.
    with device.saved_for_backward():
        y = model(x)
    assert device.resident_by_purpose() == {"weights": weights, "saved for backward": 4 * one}
    gc.disable()  # nothing may depend on the garbage collector: the graph must hold no cycle
    try:
        if drop == "backward":
            y.sum().backward()
        else:
            del y
        assert device.resident_bytes() == weights
    finally:
        gc.enable()
    assert device.peak_bytes() == weights + 4 * one
    assert all(p.grad is not None for p in model.parameters()) == (drop == "backward")


def test_a_retained_graph_stays_counted(make: MakeDevice) -> None:
    device = make()
    model, weights = held_mlp(device)
    with device.saved_for_backward():
        y = model(torch.randn(8, 16)).sum()
    y.backward(retain_graph=True)
    assert device.resident_bytes() == weights + 4 * 512
    y.backward()
    assert device.resident_bytes() == weights


def test_saved_tensors_that_are_held_count_once(make: MakeDevice) -> None:
    device = make()
    model, weights = held_mlp(device)
    x = torch.randn(8, 16)
    with device.track([x], "boundary"):
        assert device.resident_bytes() == weights + 512
        with device.saved_for_backward():
            y = model(x)
        assert device.resident_bytes() == weights + 4 * 512
        assert device.resident_by_purpose()["boundary"] == 512
    assert device.resident_by_purpose() == {"weights": weights, "saved for backward": 4 * 512}
    del y


def test_what_autograd_saves_can_run_out_of_memory(make: MakeDevice) -> None:
    device = make(memory=3 * 16 * 16 * 4 + 3 * 512)
    model, weights = held_mlp(device)
    with pytest.raises(DeviceOutOfMemory, match="saved for backward"), device.saved_for_backward():
        model(torch.randn(8, 16))
    del model
    assert device.resident_bytes() == weights


def test_gradients_are_those_without_counting(make: MakeDevice) -> None:
    device = make()
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.LayerNorm(16), nn.Dropout(0.5), nn.GELU())
    x = torch.randn(8, 16, requires_grad=True)
    grads = []
    for counted in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        x.grad = None
        if counted:
            with device.saved_for_backward():
                y = model(x)
        else:
            y = model(x)
        y.sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, with_counting in zip(*grads, strict=True):
        assert plain is not None and with_counting is not None
        assert torch.equal(plain, with_counting)


def test_double_backward_works(make: MakeDevice) -> None:
    x = torch.randn(5, requires_grad=True)
    with make().saved_for_backward():
        y = (x.sin() * x).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        first.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * x.detach().cos() - x.detach() * x.detach().sin())


@pytest.mark.parametrize("change", ["itself", "view", "leaf", "custom"])
def test_a_saved_tensor_that_is_modified_still_raises(make: MakeDevice, change: str) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            result: torch.Tensor = 2 * x * grad
            return result

    leaf = torch.randn(4, 4, requires_grad=True)

    def run() -> torch.Tensor:
        hidden = (leaf @ leaf).tanh()
        out = Square.apply(hidden) if change == "custom" else hidden * leaf
        if change == "leaf":
            with torch.no_grad():
                leaf.add_(1)
        elif change == "view":
            hidden[0].detach().zero_()
        else:
            hidden.detach().add_(1)
        loss: torch.Tensor = out.sum()
        return loss

    usual = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=usual):  # torch's own check, to be kept
        run().backward()
    with make().saved_for_backward():
        loss = run()
    with pytest.raises(RuntimeError, match=usual):
        loss.backward()


def test_a_changed_arena_is_no_modification(make: MakeDevice) -> None:
    """Uploads go through ``.data``: a graph that saved a parameter must not trip over the next upload's version."""
    device = make()
    model, _ = held_mlp(device)
    first = next(model.parameters())
    with device.saved_for_backward():
        y = model(torch.randn(8, 16, requires_grad=True)).sum()
    device.weights_up.copy(first, torch.ones(16, 16))
    device.weights_up.synchronize()
    y.backward()


def test_checkpointing_inside_works_and_hides_what_it_does_not_save(make: MakeDevice) -> None:
    device = make()
    model, weights = held_mlp(device)
    x = torch.randn(8, 16, requires_grad=True)
    with device.saved_for_backward():
        y = checkpoint(model, x, use_reentrant=False)
    assert device.resident_bytes() < weights + 4 * 512
    y.sum().backward()
    assert x.grad is not None


def test_sparse_tensors_are_saved_uncounted(make: MakeDevice) -> None:
    device = make()
    sparse = torch.eye(4).to_sparse()
    dense = torch.randn(4, 4, requires_grad=True)
    with device.saved_for_backward(), device.track([sparse], "input"):
        loss = torch.sparse.mm(sparse, dense).sum()
    loss.backward()
    assert dense.grad is not None
    assert device.resident_bytes() == 0


def test_a_storage_that_is_tracked_until_it_is_freed_runs_no_python_then(make: MakeDevice) -> None:
    """What is raised there, such as a KeyboardInterrupt, Python would print and drop."""
    device, called = make(), list[str]()
    tensor = torch.ones(256)
    device.track_until_freed([tensor, tensor[:3]], "outputs")
    device.track_until_freed([tensor], "outputs")
    assert device.resident_bytes() == 1024
    sys.setprofile(lambda frame, event, arg: called.append(f"{event} {frame.f_code.co_name}"))
    del tensor
    sys.setprofile(None)
    assert not [line for line in called if line.startswith("call ")]
    assert device.resident_bytes() == 0


def test_an_address_is_tracked_again_for_its_next_storage(make: MakeDevice) -> None:
    """Before the books are brought up to date, and by many threads at once."""
    device = make()
    for nbytes in (1024, 2048) * 50:
        tensor = torch.ones(nbytes // 4)
        threads = [
            threading.Thread(target=device.track_until_freed, args=([tensor], purpose))
            for purpose in ("outputs", "outputs", "gradients")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert device.resident_bytes() == nbytes
        del tensor, threads, thread


class _StorageAt:
    """A storage with an address of the test's choice: which one the allocator takes next is chance."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._cdata = address
        self._nbytes = nbytes

    def nbytes(self) -> int:
        return self._nbytes


@pytest.mark.parametrize("limit", [None, 2048])
def test_a_storage_at_the_address_of_a_freed_one_counts_by_itself(limit: int | None) -> None:
    ledger = Ledger("dev0", limit)

    def track(storage: _StorageAt, purpose: str) -> None:
        ledger.track_until_freed(cast(torch.UntypedStorage, storage), purpose)

    track(_StorageAt(64, 1024), "outputs")  # freed at once, which only the journal says
    storage = _StorageAt(64, 2048)
    track(storage, "outputs")
    track(storage, "inputs")
    track(storage, "outputs")
    assert ledger.by_purpose() == {"outputs": 2048}
    del storage
    assert ledger.by_purpose() == {}


@pytest.mark.parametrize("poison", [False, True])
def test_poison_of_allocated_and_freed_arenas(make: MakeDevice, poison: bool) -> None:
    device = make(poison=poison)
    arena = device.allocate(64, "weights")
    weights = arena.view(torch.float32)
    if poison:
        assert weights.isnan().all(), "a read before the first write must show"
    weights.fill_(1)
    device.free(arena)
    assert weights.isnan().all().item() is poison


def test_memory_made_in_inference_mode_can_be_trained_on(make: MakeDevice) -> None:
    device = make()
    with torch.inference_mode():
        made = [device.allocate(64, "weights"), device.host_buffer(64), device.host_like(torch.zeros(4))]
        made.append(device.device_like(torch.zeros(4), device.activations_up))
    assert not any(t.is_inference() for t in made)


def test_host_and_device_tensors_look_like_the_original(make: MakeDevice) -> None:
    device = make()
    t = torch.zeros(2, 3, dtype=torch.bfloat16).t()
    for like in (device.host_like(t), device.device_like(t, device.activations_up)):
        assert (like.shape, like.stride(), like.dtype) == (t.shape, t.stride(), t.dtype)
    assert device.host_buffer(1000).shape == (1000,)
    assert device.host_buffer(1000).untyped_storage().nbytes() == 1000
