"""The mode that is active in user code: stand-ins for masters, host tensors that follow, counted targets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_roundpipe.batches.weights import TargetCounts
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.user_code import host_to_device
from lightning_roundpipe.user_code import mode as user_code_mode
from lightning_roundpipe.user_code.bypassed_gradients import functions_given_stand_ins
from lightning_roundpipe.user_code.host_to_device import _is_plain, _parse_move
from lightning_roundpipe.user_code.mode import UserCodeMode
from lightning_roundpipe.user_code.waits import waits


def mode(*masters: nn.Parameter, accelerator: str | None = None, devices: Any = ()) -> UserCodeMode:
    return UserCodeMode(
        {id(p) for p in masters}, lambda master: master, train=True, accelerator=accelerator, devices=devices
    )


def test_gradients_of_masters_go_to_stand_ins() -> None:
    """Microbatches that added into one ``.grad`` would add in the order in which threads happen to run."""
    weight, bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    user_code = mode(weight, bias)
    with user_code:
        (F.linear(torch.ones(2, 3), weight) + torch.stack([bias, bias])).sum().backward()
    assert weight.grad is None and bias.grad is None
    grads = {id(p): g for p, g in user_code.proxies.gradients()}
    assert grads[id(weight)].tolist() == [[2.0] * 3] * 3 and grads[id(bias)].tolist() == [2.0] * 3


def test_other_parameters_are_left_alone() -> None:
    stranger = nn.Parameter(torch.ones(2))
    with mode():
        (stranger * 2).sum().backward()
    assert stranger.grad is not None


def logits() -> Tensor:
    return torch.zeros(4, 5, requires_grad=True)


def counting() -> UserCodeMode:
    return UserCodeMode(set(), lambda master: master, train=True, accelerator=None, targets=TargetCounts())


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda x: F.cross_entropy(x, torch.tensor([1, 2, -100, 3])), [3.0]),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 0, 3]), ignore_index=0), [2.0]),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 1, 0]), weight=torch.tensor([1.0, 3, 0, 0, 0])), [8.0]),
        (lambda x: F.cross_entropy(x, torch.full((4, 5), 0.2)), [4.0]),
        (lambda x: nn.CrossEntropyLoss()(x, torch.tensor([1, 2, 3, 3])), [4.0]),
        (lambda x: F.nll_loss(x.log_softmax(1), torch.tensor([1, 2, -100, -100])), [2.0]),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 2, 3, 3]), reduction="none"), []),
        (lambda x: F.cross_entropy(x.detach(), torch.tensor([1, 2, 3, 3])), []),
    ],
)
def test_counted_targets(loss: Callable[[Tensor], Tensor], count: list[float]) -> None:
    """Behind the returned loss, of whatever else is computed with it."""
    user_code = counting()
    with user_code:
        found = loss(logits())
        F.cross_entropy(logits(), torch.tensor([1, -100, -100, -100]))  # is not in the loss
    if count:
        assert [user_code.targets.behind(found * 2)] == count
    else:
        with pytest.raises(RoundPipeError, match="made with none"):
            user_code.targets.behind(found.sum())


@pytest.mark.parametrize("other", [[1, 2, -100, 3], [1, -100, -100, 3]])
def test_several_means_need_one_count(other: list[int]) -> None:
    user_code, x = counting(), logits()
    with user_code:
        loss = F.cross_entropy(x, torch.tensor([1, -100, 2, 3])) + F.cross_entropy(x, torch.tensor(other))
    if other.count(-100) == 1:
        assert user_code.targets.behind(loss) == 3
    else:
        with pytest.raises(RoundPipeError, match=r"several over different numbers of targets \(2, 3\)"):
            user_code.targets.behind(loss)


class TestHostTensorsFollow:
    """The device type "meta" stands for an accelerator: torch refuses to mix it with the CPU as it does with a GPU."""

    def test_to_the_tensor_that_they_meet(self) -> None:
        there = torch.ones(2, 3, device="meta")
        with mode(accelerator="meta"):
            assert (there + torch.ones(3)).device.type == "meta"
            assert torch.cat([torch.ones(2, 3), there]).device.type == "meta"
            assert (there + torch.tensor(2.0)).device.type == "meta"

    def test_masters_through_one_differentiable_copy(self) -> None:
        weight = nn.Parameter(torch.ones(3))
        user_code = mode(weight, accelerator="meta")
        there = torch.ones(2, 3, device="meta")
        with user_code:
            out = there * weight + weight
        assert out.device.type == "meta" and out.requires_grad
        assert len(user_code.proxies._moved) == 1

    def test_masters_that_are_first_needed_without_grad(self) -> None:
        """As in the forward of a reentrant checkpoint; the same copy serves its backward."""
        weight = nn.Parameter(torch.ones(3))
        there = torch.ones(2, 3, device="meta")
        with mode(weight, accelerator="meta"):
            with torch.no_grad():
                assert not (there * weight).requires_grad
            assert (there * weight).requires_grad

    def test_what_an_autograd_function_is_applied_to(self) -> None:
        weight, there = nn.Parameter(torch.ones(3)), torch.ones(2, 3, device="meta")
        with functions_given_stand_ins(), mode(weight, accelerator="meta") as user_code:
            out = Product.apply(there, weight)
        assert out.device.type == "meta" and out.requires_grad and user_code.proxies._moved
        assert Product.given is not weight and Product.given.device.type == "meta"

    def test_and_tensors_of_other_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They go to the GPU that the microbatch is on, as they would have been there without the strategy."""
        skip, newest, scale = (torch.ones(2, 3, device="meta") for _ in range(3))
        homes = {id(skip): torch.device("meta", 0), id(newest): torch.device("meta", 1)}
        carried: list[tuple[bool, torch.device]] = []
        monkeypatch.setattr(user_code_mode, "_home", lambda t: homes.get(id(t), torch.device("meta", 2)))
        monkeypatch.setattr(host_to_device, "carry", lambda t, where: (carried.append((t is skip, where)), t)[1])
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
        with mode(accelerator="meta"):
            torch.add(skip, newest)
            torch.cat([newest, skip])
            newest.add_(skip)
            assert carried == [(True, torch.device("meta", 1))] * 3
            skip.mul_(newest)  # what is written to stays
            assert carried[3:] == [(False, torch.device("meta", 0))]
            torch.stack([skip, scale])  # neither is where the microbatch is
            assert carried[4:] == [(True, torch.device("meta", 2))]
            torch.add(newest, newest)
        assert len(carried) == 5

    def test_but_not_what_is_written_to(self) -> None:
        host = torch.zeros(3)
        with mode(accelerator="meta"), contextlib.suppress(RuntimeError):
            host.add_(torch.ones(3, device="meta"))
        assert host.device.type == "cpu"


class Product(torch.autograd.Function):
    given: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        Product.given = weight
        return x * weight


class Nowhere(SimpleNamespace):
    """A device from which nothing can be read: whoever asked for a number there would wait for it on a GPU."""

    torch_device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__(staged=[], kept=[])

    def host_like(self, t: torch.Tensor) -> torch.Tensor:
        self.staged.append(torch.empty_like(t))
        return self.staged[-1]

    def free_after_compute(self, tensors: Any) -> None:
        self.kept += tensors


THERE = torch.ones(4, device="meta")
HALF = torch.zeros(1, dtype=torch.float16, device="meta")

UPDATES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda host: host.add_(THERE),
    "augmented": lambda host: host.__iadd__(THERE),
    "a number": lambda host: host.sum().add_(THERE.sum()),
    "masked": lambda host: host.__setitem__(THERE > 0, 1.0),
    "by index": lambda host: host.index_add_(0, torch.arange(4), THERE),
    "averaged": lambda host: host.mul_(0.9).add_(THERE, alpha=0.1),
    "interpolated": lambda host: host.lerp_(THERE, 0.1),
    "out": lambda host: torch.add(torch.ones(4), THERE, out=host),
    "several": lambda host: torch._foreach_add_([host, torch.zeros(4)], [THERE, THERE]),
    "of a parameter": lambda host: nn.Parameter(host).data.sub_(THERE),
}


@pytest.mark.parametrize("way", UPDATES)
def test_an_update_of_host_state_brings_what_it_is_updated_with(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metric states, running averages and counters stay on the host, where plain Lightning has them on the GPU."""
    carried: list[torch.device] = []

    def carry(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
        carried.append(where)
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(host_to_device, "carry", carry)
    host = torch.zeros(4)
    with mode(accelerator="meta", devices=[Nowhere()]):
        UPDATES[way](host)
    assert carried and set(carried) == {torch.device("cpu")}
    assert host.any() or way in ("a number",)


def test_an_update_on_the_device_brings_what_is_on_the_host() -> None:
    device = Nowhere()
    with mode(accelerator="meta", devices=[device]):
        THERE.clone().add_(torch.ones(4))
        torch.empty(4, device="meta").copy_(torch.ones(4))
    assert len(device.staged) == 1


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "torch.tensor": lambda: torch.tensor([1.0, 2.0], device="meta"),
    "torch.tensor of numbers": lambda: torch.tensor(3, device=THERE.device, dtype=torch.float16),
    "torch.as_tensor": lambda: torch.as_tensor([1, 2], device="meta"),
    "new_tensor": lambda: THERE.new_tensor([1.0, 2.0]),
    "cast on the way": lambda: torch.ones(3, dtype=torch.long).to("meta", torch.bfloat16),
    "cast by keyword": lambda: torch.ones(3).to(device="meta", dtype=torch.float16, non_blocking=True),
    "like another": lambda: torch.ones(3).to(HALF),
}


@pytest.mark.parametrize("way", MADE)
def test_nobody_waits_for_what_is_made_on_the_host(way: str) -> None:
    """torch's own copy of ordinary memory returns when the device has come that far, and the lock is held meanwhile."""
    device = Nowhere()
    expected = MADE[way]()
    with mode(accelerator="meta", devices=[device]):
        made = MADE[way]()
    assert len(device.staged) == 1
    assert (made.device, made.dtype, made.shape) == (expected.device, expected.dtype, expected.shape)


def test_lengths_stay_on_the_host() -> None:
    """``pack_padded_sequence`` takes them there, whatever it packs."""
    device = Nowhere()
    with mode(accelerator="meta", devices=[device]), contextlib.suppress(RuntimeError, NotImplementedError):
        nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 5, device="meta"), torch.tensor([3, 1]))
    assert device.staged == []


LABELS = torch.tensor([[1, -100], [2, 3]])

WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "labels that are left on the host": lambda x, labels: F.cross_entropy(x, labels.flatten()),
    "as Hugging Face does": lambda x, labels: F.cross_entropy(x, labels.view(-1).to(x.device)),
    "by keyword": lambda x, labels: F.cross_entropy(x, labels.view(-1).to(device="meta", non_blocking=True)),
    "before they are reshaped": lambda x, labels: F.cross_entropy(x, labels.to("meta").view(-1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_waits_for_labels(way: str) -> None:
    """They go through pinned memory."""
    device = Nowhere()
    with mode(accelerator="meta", devices=[device]):
        WAYS[way](torch.zeros(4, 5, device="meta", requires_grad=True), LABELS)
    assert [staged.tolist() for staged in device.staged] == [LABELS.flatten().tolist()] or way.startswith("before")
    assert len(device.kept) == 1 and device.kept[0] is device.staged[0]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "asked"),
    [
        ("cuda", (), {}, "cuda"),
        ("cuda", (1,), {"non_blocking": True}, "cuda:1"),
        ("cuda", ("cuda:2",), {}, "cuda:2"),
        ("cuda", (), {"device": torch.device("cuda", 3)}, "cuda:3"),
        ("cuda", (1, True), {}, None),
        ("cuda", (), {"memory_format": torch.channels_last}, None),
        ("to", ("cuda:1",), {"copy": True}, "cuda:1"),
        ("to", ("nowhere",), {}, None),
        ("to", (torch.float64,), {}, None),
    ],
)
def test_the_device_that_a_move_asks_for(name: str, args: Any, kwargs: Any, asked: str | None) -> None:
    """What is unusual, and what torch refuses, is left to torch."""
    found = _parse_move(name, args, kwargs)
    assert found == (None if asked is None else (torch.device(asked), None))


@pytest.mark.parametrize("asked", [torch.float64, "cpu", torch.zeros(1)])
def test_what_stays_on_the_host_is_not_staged(asked: Any) -> None:
    device = Nowhere()
    with mode(accelerator="meta", devices=[device]):
        LABELS.to(asked)
    assert device.staged == []


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "like another": lambda x: x.to(HALF),
    "like another, by keyword": lambda x: x.to(tensor=HALF),
    "like another, without waiting": lambda x: x.to(HALF, non_blocking=True),
    "like another, by place": lambda x: x.to(HALF, True),
    "like another, a copy": lambda x: x.to(HALF, copy=True),
    "like another, in another order": lambda x: x.to(HALF, memory_format=torch.channels_last),
    "to a device, and cast": lambda x: x.to("meta", torch.float16),
    "to a device, and cast, by keyword": lambda x: x.to(device="meta", dtype=torch.float16, non_blocking=True),
    "to a device, in another order": lambda x: x.to("meta", memory_format=torch.channels_last),
    "like another of the same format": lambda x: x.to(HALF.float()),
    "cast": lambda x: x.to(torch.float16),
}


@pytest.mark.parametrize("way", MOVES)
def test_what_is_brought_is_as_torch_makes_it(way: str) -> None:
    images = torch.ones(2, 3, 4, 4)
    expected = MOVES[way](images)
    with mode(accelerator="meta", devices=[Nowhere()]):
        result = MOVES[way](images)
    assert (result.device, result.dtype, result.stride()) == (expected.device, expected.dtype, expected.stride())


class Annotated(torch.Tensor):
    """A tensor that says more than its numbers."""


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "a subclass": lambda: torch.ones(3).as_subclass(Annotated),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.ones(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:.*(nested|quantize_per_tensor):UserWarning")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_more_than_its_numbers_is_carried_by_torch(
    kind: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[torch.Tensor] = []
    there = torch.ones(3, device="meta")
    monkeypatch.setattr(host_to_device, "carry", lambda t, where: (carried.append(t), there)[1])
    device, odd = Nowhere(), ODD[kind]()
    with mode(accelerator="meta", devices=[device]):
        if asked:
            odd.to("meta")
        else:
            torch.add(there, odd)
    assert len(carried) == 1 and carried[0] is odd
    assert device.staged == []


def test_tensors_within_a_transform_are_not_staged() -> None:
    """They have no memory of their own that could be copied into page-locked memory."""
    plain: list[bool] = []

    def within(x: Tensor) -> Tensor:
        plain.append(_is_plain(x))
        return x

    torch.vmap(within)(torch.ones(2, 3))
    torch.func.jvp(within, (torch.ones(3),), (torch.ones(3),))
    assert plain == [False, False] and _is_plain(torch.ones(3))


@pytest.mark.parametrize("asked", ["cpu", torch.device("cpu"), torch.zeros(1)])
def test_moves_to_the_host_wait_for_the_device(asked: Any) -> None:
    there = torch.zeros(2, device="meta")
    assert waits("to", (there, asked), {}, "meta")
    assert waits("to", (there,), {"device": asked}, "meta")
    assert not waits("to", (there, "meta"), {"dtype": torch.float64}, "meta")
    assert not waits("to", (torch.zeros(2), asked), {}, "meta")
