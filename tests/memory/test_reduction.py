"""Gradients that travel in fewer bytes: narrowed on the worker, added up on the host."""

import threading
import time
from functools import partial

import pytest
import torch
from patience import PATIENCE_S, longer_each_try
from torch import nn
from without import take_out

from lightning_roundpipe.config import Emulation, RoundPipeError
from lightning_roundpipe.devices import make_devices
from lightning_roundpipe.devices.errors import StreamError
from lightning_roundpipe.memory import grad_buffers
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.grad_buffers import DeviceGradSums, GradientMemory, HostGradSums, Reduction
from lightning_roundpipe.memory.host_layer import host_layers, make_buckets
from lightning_roundpipe.optim.narrow_gradient import NarrowGradient, widened
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.threads.task_thread import TaskThread
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.updates.loss_handle import StepGradients


@pytest.fixture
def device():
    [made] = make_devices("cpu", [torch.device("cpu")], Emulation(poison=True, bandwidth="10MB"))
    yield made
    made.close()


@pytest.fixture
def reduction():
    thread = TaskThread("roundpipe-sums")
    yield Reduction(torch.bfloat16, lambda worker: thread)
    thread.stop()
    thread.join()


def _layer(device, *parameters):
    module = nn.ParameterList([nn.Parameter(p) for p in parameters])
    return host_layers({"layer": module}, device, Formats(), double_buffered=False, mapped=())[0]


def _begins(layer, device, reduction):
    """What begins the layer's sum in a batch."""
    memory = GradientMemory([layer], device, reduction, workers=1)
    memory.pool.keeps = True
    return partial(memory.begin, layer, ())


def _send(begin, device, rounds):
    """What is taken after ``rounds``, each with a gradient, or none, for each parameter."""
    return _send_from([device], begin, rounds)


def _send_from(devices, begin, rounds):
    """The same with rounds that come from the ``devices`` in turn."""
    host = begin()
    for number, gradients in enumerate(rounds):
        worker = number % len(devices)
        arena = torch.full((host.layout.nbytes,), 0xFF, dtype=torch.uint8)
        on_device = DeviceGradSums(host, arena)
        copies = [nn.Parameter(master.detach().clone()) for master in host.layer.masters]
        on_device.attach(copies)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        on_device.detach(copies)
        on_device.narrow()
        host.make_room(CancelScope())
        on_device.download(devices[worker].gradients_down, worker)
    taken = {key: widened(gradient).clone() for key, gradient in host.take(1.0).items()}
    host.release()
    return taken


@pytest.mark.parametrize("least", [7, grad_buffers.LEAST])
def test_each_round_is_rounded_and_the_sum_is_not(device, reduction, monkeypatch, least):
    """Weights of several sizes, formats and strides, of which none lies where it will travel but the first."""
    monkeypatch.setattr(grad_buffers, "LEAST", least)
    generator = torch.Generator().manual_seed(0)
    shapes = [torch.zeros(3), torch.zeros(1000, 7), torch.zeros(2, 3, 5, 5).to(memory_format=torch.channels_last)]
    shapes += [torch.zeros(300, dtype=torch.bfloat16), torch.zeros(65, dtype=torch.float64), torch.zeros(5000)]
    layer = _layer(device, *shapes)
    rounds = [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in shapes] for _ in range(3)]
    taken = _send(_begins(layer, device, reduction), device, [list(r) for r in rounds])
    for index, (master, shape) in enumerate(zip(layer.masters, shapes, strict=True)):
        expected = sum((r[index].bfloat16().to(shape.dtype) for r in rounds), torch.zeros(()).to(shape.dtype))
        assert torch.equal(taken[id(master)], expected) and taken[id(master)].dtype is shape.dtype, index


def test_a_parameter_gets_the_rounds_that_it_has_a_gradient_in(device, reduction):
    layer = _layer(device, torch.zeros(4), torch.zeros(4), torch.zeros(4))
    one = torch.ones(4)
    begin = _begins(layer, device, reduction)
    for factor in (1, 2):  # the second batch finds what the first one left
        taken = _send(begin, device, [[one * factor, None, None], [one * factor, one * factor, None]])
        assert [id(m) in taken for m in layer.masters] == [True, True, False]
        assert [taken[id(m)].unique().tolist() for m in layer.masters[:2]] == [[2.0 * factor], [1.0 * factor]]


WAITS = [
    ("memory.grad_buffers:_Added.after", "landed.wait()"),
    ("memory.grad_buffers:HostGradSums.wait", "arrived.wait()"),
    ("memory.grad_buffers:HostGradSums._land", "before.wait()"),
]


def _sum_of(rounds, reduction, times, adding_s):
    """The numbers of a sum of gradients whose additions take ``adding_s``. Every other download takes 4 ms."""
    slow, fast = (
        make_devices("cpu", [torch.device("cpu")], Emulation(poison=True, bandwidth=rate))[0]
        for rate in (1e7 / times, None)
    )
    real = HostGradSums._add

    def late(self, *args):
        time.sleep(adding_s * times)
        real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostGradSums, "_add", late)
        layer = _layer(slow, torch.zeros(20_000))
        given = [[torch.full((20_000,), value)] for value in rounds]
        try:
            [taken] = _send_from([slow, fast], _begins(layer, slow, reduction), given).values()
            slow.gradients_down.synchronize()
        finally:
            slow.close()
            fast.close()
    return taken.unique().tolist()


@pytest.mark.parametrize("adding_s", [0.0, 0.05])
def test_a_sum_has_all_rounds_however_late_they_are(reduction, adding_s):
    assert _sum_of((1.0, 2.0, 4.0), reduction, 1.0, adding_s) == [7.0]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: str(wait[1]))
@longer_each_try
def test_each_wait_is_needed(reduction, wait, times):
    """What is waited for is slow here, or the numbers may be right without a wait."""
    with pytest.MonkeyPatch.context() as patch:
        take_out(patch, *wait)
        assert _sum_of((1.0, 2.0, 4.0), reduction, times, 0.05 if wait == WAITS[1] else 0.0) != [7.0]


@pytest.mark.parametrize(("dtype", "narrowed"), [(torch.bfloat16, False), (torch.float32, True)])
def test_what_is_as_narrow_already_travels_as_it_is(device, reduction, dtype, narrowed):
    begin = _begins(_layer(device, torch.zeros(512, dtype=dtype)), device, reduction)
    layout = begin().layout
    assert layout.narrowed is narrowed and layout.travel_nbytes == 1024


def test_products_are_rounded_before_they_are_added_whatever_the_order_of_elements():
    """Every plan must give the same bits; a gradient may be transposed."""
    total, grad = torch.randn(5, 7), torch.randn(5, 7)
    expected = total + grad * 0.3
    for mine, its in ((total.clone(), grad), (total.t().contiguous().t(), grad), (total.clone(), grad.t().clone().t())):
        grad_buffers._add_product(mine, its, 0.3)
        assert torch.equal(mine, expected)


def test_an_error_of_the_summing_thread_reaches_who_waits_for_the_sum():
    """And so does its death, as nobody would wake them."""

    class Fails:
        def wait(self):
            raise ValueError("lost on the way")

    thread = TaskThread("roundpipe-sums")
    added, never = grad_buffers._Added(thread), grad_buffers._Added(thread)
    failing = Fails()
    thread.submit(lambda: added.after(failing, lambda: None))
    with pytest.raises(StreamError, match="lost on the way"):
        added.wait()
    assert added.done() and not never.done()
    thread.stop()
    thread.join()
    with pytest.raises(RoundPipeError, match="thread 'roundpipe-sums' has died"):
        never.wait()


def test_an_addition_that_fails_gives_back_where_it_has_landed(device, reduction, monkeypatch):
    """In the first window one download lands at a time, and the next one comes before any looks at the sum."""

    def fails(*args):
        raise MemoryError("no room for the sum")

    monkeypatch.setattr(HostGradSums, "_add", fails)
    layer = _layer(device, torch.zeros(4))
    memory = GradientMemory([layer], device, reduction, workers=1)
    with pytest.raises(StreamError, match="no room for the sum"):
        _send(partial(memory.begin, layer, ()), device, [[torch.ones(4)], [torch.ones(4)]])
    assert not memory.pool.keeps and not memory.pool.is_landing(8)


@pytest.mark.parametrize("keeps", [False, True], ids=["first window", "later"])
def test_what_lands_waits_until_what_has_landed_is_added(device, reduction, monkeypatch, keeps):
    may_add, waits, real = threading.Event(), list[bool](), HostGradSums._add

    class Watched(CancelScope):
        def wait(self, waiter):
            waits.append(memory.pool.is_landing(8))
            may_add.set()
            super().wait(waiter)

    def late(*args):
        assert may_add.wait(PATIENCE_S)
        real(*args)

    monkeypatch.setattr(HostGradSums, "_add", late)
    layer = _layer(device, torch.zeros(4))
    memory = GradientMemory([layer], device, reduction, workers=1)
    memory.pool.keeps = keeps
    host = memory.begin(layer, ())
    for number in range(3):
        on_device = DeviceGradSums(host, torch.zeros(host.layout.nbytes, dtype=torch.uint8))
        on_device.present = [True]
        host.make_room(Watched())
        assert len(waits) == (number == 2), "the first is the sum, the second lands, the third has to wait"
        on_device.download(device.gradients_down, 0)
    host.wait()
    host.release()


def test_a_download_that_cannot_begin_ends_the_wait_for_the_sum(device, reduction):
    """The optimizer's thread may wait for it by then, and would do so for ever."""

    class Fails:
        name = "gradients_down"

        def copy(self, target, source):
            raise RuntimeError("no such memory")

    layer, failed = _layer(device, torch.zeros(4)), list[BaseException]()
    host = GradientMemory([layer], device, reduction, workers=1).begin(layer, ())
    on_device = DeviceGradSums(host, torch.zeros(host.layout.nbytes, dtype=torch.uint8))
    on_device.present = [True]
    host.make_room(CancelScope())
    on_device.download(device.gradients_down, 0)
    host.make_room(CancelScope())
    with pytest.raises(RuntimeError, match="no such memory"):
        on_device.download(Fails(), 0, failed=failed.append)
    assert [str(error) for error in failed] == ["no such memory"]
    with pytest.raises(StreamError, match="no such memory"):
        host.wait()


@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_batch_that_counts_for_nothing_gives_zeros(device, reduction, narrow, widen):
    """Also where its gradients are NaN, as those of a machine whose batches have no samples."""
    layer = _layer(device, torch.zeros(3))
    host = _begins(layer, device, reduction if narrow else Reduction(None, reduction.thread))()
    host.make_room(CancelScope())
    source = torch.full((host.layout.travel_nbytes,), 255, dtype=torch.uint8)  # NaN
    host.download(device.gradients_down, source, 0, [True])
    _, bucket = make_buckets([layer], layer.masters, Formats())
    batch = StepGradients([host], [], 0.0, GradReadiness([bucket]))
    batch.losses([(torch.ones(()), True)])
    batch.differentiated(1.0)
    [gradient] = batch.take(bucket, widen=widen).values()
    assert isinstance(gradient, NarrowGradient) == (narrow and not widen)
    assert torch.equal(widened(gradient), torch.zeros(3))
