"""Stepping in pieces is ``optimizer.step()``: same numbers, same state, and nothing of the user's is touched."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.optim.fused import fits
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer

STEPS = 10
SHAPES = [(7, 5), (33,), (4, 6), (), (6, 4), (130, 9), (3,)]
"""Matrices and vectors; some longer than a vector register, some with a rest."""

Make = Callable[[list[dict[str, Any]]], Optimizer]


def parameters(shapes: list[tuple[int, ...]] | None = None, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in (SHAPES if shapes is None else shapes)]


def groups_of(masters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, of which the second has a learning rate of its own, neither in the order of the masters."""
    return [{"params": masters[::-2]}, {"params": masters[-2::-2], "lr": 0.003}]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tensors this small gain nothing from several threads, which spin while they wait for each other."""
    torch.set_num_threads(1)


def gradients_of(step: int, masters: list[nn.Parameter], late: bool = True) -> list[Tensor | None]:
    """Different ones each step. The second master has none now and then; with ``late`` the third gets none at first."""
    generator = torch.Generator().manual_seed(100 + step)
    grads: list[Tensor | None] = [torch.randn(m.shape, generator=generator).to(m.dtype) for m in masters]
    if step % 3 == 1:
        grads[1] = None
    if late and step < 4:
        grads[2] = None
    return grads


class Pieces:
    """The masters cut into layers, each with a partial optimizer, stepped in a random order."""

    def __init__(
        self, optimizer: Optimizer, masters: list[nn.Parameter], sizes: tuple[int, ...] = (2, 1, 3, 1)
    ) -> None:
        self.optimizer, self.masters = optimizer, masters
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        layers = [masters[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self.partials = [PartialOptimizer(optimizer, layer) for layer in layers]
        self.order = random.Random(0)

    def step(self, grads: list[Tensor | None], meanwhile: Callable[[], None] = lambda: None) -> None:
        hyperparameters = Hyperparameters.of(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers want to see that it was called
        meanwhile()
        by_id = {id(m): g for m, g in zip(self.masters, grads, strict=True) if g is not None}
        for partial in self.order.sample(self.partials, len(self.partials)):
            partial.step(hyperparameters, by_id)


def plain_step(optimizer: Optimizer, masters: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    for master, grad in zip(masters, grads, strict=True):
        master.grad = None if grad is None else grad.clone()
    optimizer.step()


def clones(grads: list[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else grad.clone() for grad in grads]


def assert_same(ours: Any, plain: Any, close: bool) -> None:
    """Equal in keys and values; to the bit unless ``close``."""
    if isinstance(plain, Tensor):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape and ours.device == plain.device
        if close:
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours, plain)
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys()
        for key, value in plain.items():
            assert_same(ours[key], value, close)
    elif isinstance(plain, (list, tuple)):
        assert type(ours) is type(plain) and len(ours) == len(plain)
        for mine, other in zip(ours, plain, strict=True):
            assert_same(mine, other, close)
    else:
        assert ours == plain


def train(
    make: Make,
    reference: Make | None = None,
    schedule: Any = None,
    close: bool = False,
    late: bool = True,
    **given: Any,
) -> None:
    """Ten steps of ``make``'s optimizer in pieces, beside the step of ``reference``'s (the same, by default)."""
    masters, plain = parameters(**given), parameters(**given)
    optimizer, other = make(groups_of(masters)), (reference or make)(groups_of(plain))
    pieces = Pieces(optimizer, masters)
    schedulers = [schedule(optimizer), schedule(other)] if schedule else []
    for step in range(STEPS):
        grads = gradients_of(step, masters, late)
        for master in masters:
            master.grad = None
        groups, versions = copy.deepcopy(settings(optimizer)), [m._version for m in masters]
        pieces.step(clones(grads))
        assert_same(settings(optimizer), groups, close=False)
        assert [m._version for m in masters] == versions and all(m.grad is None for m in masters)
        plain_step(other, plain, grads)
        for master, expected in zip(masters, plain, strict=True):
            assert_same(master.detach(), expected.detach(), close)
        assert set(optimizer.state) <= set(masters)
        states, expected_states = optimizer.state_dict()["state"], other.state_dict()["state"]
        assert_same(states, expected_states, close)
        for scheduler in schedulers:
            scheduler.step()
        if step == STEPS // 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            other.load_state_dict(copy.deepcopy(other.state_dict()))


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups; parameters by their ids, because their values change."""
    return [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]


def case(cls: str, **options: Any) -> Any:
    settings = ",".join(f"{k}={'tensor' if isinstance(v, Tensor) else v}" for k, v in options.items())
    return pytest.param(cls, options, id=f"{cls}({settings})")


FUSED = [
    case("SGD"),
    case("SGD", momentum=0.9),
    case("SGD", momentum=0.9, dampening=0.5, weight_decay=0.1),
    case("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    case("SGD", momentum=0.9, maximize=True),
    case("Adam"),
    case("Adam", weight_decay=0.1, amsgrad=True),
    case("Adam", weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    case("AdamW", betas=(0.8, 0.95), eps=1e-6),
    case("AdamW", amsgrad=True, maximize=True),
    case("Adagrad", lr_decay=0.1, weight_decay=0.1),
    case("Adagrad", initial_accumulator_value=0.5, maximize=True),
]
OTHERS = [
    case("Adamax", weight_decay=0.1),
    case("Adamax", maximize=True),
    case("NAdam"),
    case("NAdam", weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    case("RAdam", weight_decay=0.1),
    case("Adadelta", weight_decay=0.1, maximize=True),
    case("RMSprop"),
    case("RMSprop", momentum=0.9, centered=True, weight_decay=0.1),
    case("Rprop"),
    case("Rprop", etas=(0.4, 1.3), maximize=True),
    case("ASGD", t0=3.0, weight_decay=0.1),
    case("Adafactor"),
    case("Adafactor", eps=(1e-9, 1e-3), weight_decay=0.1, maximize=True),
    case("SGD", lr=torch.tensor(0.01), momentum=0.9),
    case("Adam", lr=torch.tensor(0.01)),
    case("AdamW", lr=torch.tensor([0.01]), weight_decay=0.1),
    case("AdamW", betas=(torch.tensor(0.9), torch.tensor(0.99))),
    case("RMSprop", lr=torch.tensor(0.01)),
]


def maker(cls: str, options: dict[str, Any]) -> Make:
    """Makes optimizers that share nothing with one another, tensors among the options included."""

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        given = {"lr": 0.01, **copy.deepcopy(options)}
        others = [{**group, "lr": 0.3 * given["lr"]} if "lr" in group else group for group in groups]
        made: Optimizer = getattr(optim, cls)(others, **given)
        return made

    return make


def fused_for(optimizer: optim.Optimizer) -> bool:
    """Whether fused kernels are used for some parameter where the user's own ``step()`` uses none."""
    fused = Hyperparameters.of(optimizer).fused
    return any(
        taken and any(fits(p, None, {}) for p in group["params"])
        for taken, group in zip(fused, optimizer.param_groups, strict=True)
    )


def can_be_late(cls: str, options: dict[str, Any]) -> bool:
    """torch's own fused step with momentum fails when a parameter gets its first gradient later than others."""
    return not (cls == "SGD" and "momentum" in options)


@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_our_fused_kernel_is_the_users_fused_kernel_to_the_bit(cls: str, options: dict[str, Any]) -> None:
    assert fused_for(maker(cls, options)(groups_of(parameters())))
    train(maker(cls, options), maker(cls, {**options, "fused": True}), late=can_be_late(cls, options))


@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_our_fused_kernel_is_close_to_the_users_step(cls: str, options: dict[str, Any]) -> None:
    train(maker(cls, options), close=True)


@pytest.mark.parametrize("choice", [{"fused": True}, {"fused": False}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_the_users_choice_of_kernel_is_kept_to_the_bit(
    cls: str, options: dict[str, Any], choice: dict[str, bool]
) -> None:
    make = maker(cls, {**options, **choice})
    assert not fused_for(make(groups_of(parameters())))
    train(make, late=can_be_late(cls, options) or not choice.get("fused"))


@pytest.mark.parametrize(("cls", "options"), OTHERS)
def test_what_has_no_fused_kernel_is_the_users_step_to_the_bit(cls: str, options: dict[str, Any]) -> None:
    assert not fused_for(maker(cls, options)(groups_of(parameters())))
    train(maker(cls, options))


@pytest.mark.parametrize("cls", ["Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor"])
def test_foreach_is_kept_to_the_bit(cls: str) -> None:
    train(maker(cls, {"foreach": True}))


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="came with torch 2.9")
def test_muon() -> None:
    matrices: list[tuple[int, ...]] = [(7, 5), (4, 6), (6, 4), (13, 9), (3, 3), (2, 8), (8, 2)]
    train(lambda groups: optim.Muon(groups, lr=0.01), shapes=matrices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", ["SGD", "AdamW"])
def test_other_dtypes(cls: str, dtype: torch.dtype) -> None:
    """In half precision a fused kernel differs by more than rounding, so the user's own is taken."""
    assert fused_for(maker(cls, {})(groups_of(parameters(dtype=dtype)))) == (dtype is torch.float64)
    train(maker(cls, {}), close=dtype is torch.float64, dtype=dtype)


def test_schedulers_change_what_comes_next_not_what_was_submitted() -> None:
    train(maker("AdamW", {"foreach": False}), schedule=lambda o: LambdaLR(o, lambda step: 0.7**step))
    train(maker("AdamW", {}), maker("AdamW", {"fused": True}), lambda o: LambdaLR(o, lambda step: 0.7**step))
    cycle = {"momentum": 0.9, "foreach": False}
    train(maker("SGD", cycle), schedule=lambda o: OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=STEPS + 1))
    tensor = {"lr": torch.tensor(0.01)}
    train(maker("Adam", tensor), schedule=lambda o: LambdaLR(o, lambda step: 0.7**step))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_snapshot_holds_though_groups_change_before_the_step(lr: Any) -> None:
    masters, plain = parameters(), parameters()
    optimizer, other = optim.AdamW(masters, lr=lr), optim.AdamW(plain, lr=0.1)
    pieces = Pieces(optimizer, masters)

    def change() -> None:
        group = optimizer.param_groups[0]
        group["weight_decay"], group["betas"] = 5.0, (0.1, 0.2)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(7.0)
        else:
            group["lr"] = 7.0
        optimizer.param_groups.clear()

    grads = gradients_of(9, masters)
    pieces.step(clones(grads), meanwhile=change)
    plain_step(other, plain, grads)
    for master, expected in zip(masters, plain, strict=True):
        assert_same(master.detach(), expected.detach(), close=True)


CHOICES = [{}, {"fused": True}, {"foreach": True}]
TOGETHER = [
    pytest.param(*given.values, choice, id=f"{given.id}-{next(iter(choice), 'ours')}")
    for given, choice in [(given, choice) for given in FUSED for choice in CHOICES] + [(g, {}) for g in OTHERS]
]


@pytest.mark.parametrize(("cls", "options", "choice"), TOGETHER)
def test_layers_stepped_in_one_call_are_those_stepped_apart_to_the_bit(
    cls: str, options: dict[str, Any], choice: dict[str, bool]
) -> None:
    """Any of them, in any order, parameters of different dtypes, ages and groups beside each other."""
    make, order = maker(cls, {**options, **choice}), random.Random(0)
    # torch's fused SGD leaves something else in the end of a bf16 momentum each time (torch 2.13).
    made = parameters if "fused" in choice else mixed_parameters
    together, apart = made(), made()
    optimizer, other = make(groups_of(together)), make(groups_of(apart))
    partial, partials = PartialOptimizer(optimizer, together), [PartialOptimizer(other, [master]) for master in apart]
    for step in range(STEPS):
        grads = gradients_of(step, together)
        for numbers in some_at_once([n for n, grad in enumerate(grads) if grad is not None], order):
            partial.step(Hyperparameters.of(optimizer), {id(together[n]): grads[n].clone() for n in numbers})  # type: ignore[union-attr]
        for one, master, grad in zip(partials, apart, grads, strict=True):
            one.step(Hyperparameters.of(other), {} if grad is None else {id(master): grad})
        for master, expected in zip(together, apart, strict=True):
            assert torch.equal(master, expected)
        assert_same(optimizer.state_dict()["state"], other.state_dict()["state"], close=False)


def mixed_parameters() -> list[nn.Parameter]:
    """Some in half precision, which no fused kernel of our choice takes; one in a layout that it cannot take."""
    masters = parameters()
    for number in (3, 5):
        masters[number] = nn.Parameter(masters[number].detach().bfloat16())
    masters[4] = nn.Parameter(masters[4].detach().t().contiguous().t())
    return masters


def some_at_once(numbers: list[int], order: random.Random) -> list[list[int]]:
    """All of them in a random order, cut at random."""
    mixed = order.sample(numbers, len(numbers))
    cuts = [0, *sorted(order.sample(range(1, len(mixed)), order.randrange(3))), len(mixed)]
    return [mixed[start:end] for start, end in itertools.pairwise(cuts)]


def test_one_call_steps_several_layers_and_no_others() -> None:
    masters = parameters()
    optimizer = optim.AdamW([{"params": [m], "lr": 0.1} for m in masters])
    partial, before = PartialOptimizer(optimizer, masters), [m.detach().clone() for m in masters]
    calls: list[list[nn.Parameter]] = []
    partial._run = lambda groups, state: calls.append([p for g in groups for p in g["params"]])  # type: ignore[method-assign]
    partial.step(Hyperparameters.of(optimizer), {id(masters[n]): torch.ones_like(masters[n]) for n in (6, 0, 2)})
    assert [[p.data_ptr() for p in call] for call in calls] == [[masters[n].data_ptr() for n in (0, 2, 6)]]
    del partial._run
    partial.step(Hyperparameters.of(optimizer), {id(masters[n]): torch.ones_like(masters[n]) for n in (6, 0, 2)})
    assert set(optimizer.state) == {masters[n] for n in (0, 2, 6)}
    stepped = [n for n, (m, b) in enumerate(zip(masters, before, strict=True)) if not torch.equal(m, b)]
    assert stepped == [0, 2, 6]


def test_a_step_runs_on_a_thread_of_its_own() -> None:
    masters, plain = parameters(), parameters()
    optimizer, other = optim.AdamW(groups_of(masters)), optim.AdamW(groups_of(plain), fused=True)
    pieces = Pieces(optimizer, masters)

    def run() -> None:
        for step in range(STEPS):
            pieces.step(gradients_of(step, masters))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for step in range(STEPS):
        plain_step(other, plain, gradients_of(step, plain))
    for master, expected in zip(masters, plain, strict=True):
        assert torch.equal(master, expected)


def test_fused_sgd_takes_parameters_that_come_later() -> None:
    """torch's own step cannot: it takes all for the first step of none or of all of them."""
    masters, plain = parameters(), parameters()
    optimizer = optim.SGD(masters, lr=0.1, momentum=0.9, fused=True)
    others = [optim.SGD([p], lr=0.1, momentum=0.9, fused=True) for p in plain]
    partial = PartialOptimizer(optimizer, masters)
    for step in range(STEPS):
        grads = gradients_of(step, masters)
        given = {id(m): g.clone() for m, g in zip(masters, grads, strict=True) if g is not None}
        partial.step(Hyperparameters.of(optimizer), given)
        for other, parameter, grad in zip(others, plain, grads, strict=True):
            plain_step(other, [parameter], [grad])
    for master, expected in zip(masters, plain, strict=True):
        assert torch.equal(master, expected)


def test_masters_without_a_gradient_or_a_group_stay_untouched() -> None:
    masters = parameters()
    before = [m.detach().clone() for m in masters]
    optimizer = optim.AdamW(masters[:3])
    partial = PartialOptimizer(optimizer, [*masters, masters[0]])
    grads = {id(m): torch.ones_like(m) for m in (masters[0], masters[5])} | {12345: torch.ones(3)}
    partial.step(Hyperparameters.of(optimizer), grads)
    assert list(optimizer.state) == [masters[0]]
    assert [torch.equal(m, b) for m, b in zip(masters, before, strict=True)] == [False, *[True] * 6]
    partial.step(Hyperparameters.of(optimizer), {id(masters[5]): torch.ones(1)})
    assert list(optimizer.state) == [masters[0]]


def test_a_master_that_moved_in_memory_is_stepped_where_it_is() -> None:
    (master,) = parameters([(4, 4)])
    optimizer = optim.SGD([master], lr=1.0)
    partial = PartialOptimizer(optimizer, [master])
    for value in (1.0, 2.0):
        master.data = torch.full((4, 4), value)
        partial.step(Hyperparameters.of(optimizer), {id(master): torch.ones(4, 4)})
        assert torch.equal(master, torch.full((4, 4), value - 1))
    master.data = master.data.view(2, 8)
    partial.step(Hyperparameters.of(optimizer), {id(master): torch.ones(2, 8)})
    assert torch.equal(master, torch.zeros(2, 8))


@pytest.mark.parametrize("cls", ["SGD", "AdamW", "Adagrad"])
def test_layouts_that_fused_kernels_get_wrong_take_the_users_kernel(cls: str) -> None:
    def make() -> tuple[Tensor, list[nn.Parameter]]:
        whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        return whole, [nn.Parameter(whole[:, :4]), nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4, 6).t())]

    (whole, masters), (other_whole, plain) = make(), make()
    optimizer, other = (getattr(optim, cls)(ps, lr=0.1) for ps in (masters, plain))
    transposed = torch.randn(4, 6).t()
    grads: list[Tensor | None] = [torch.randn(6, 4), transposed, torch.randn(6, 4)]
    for _ in range(3):
        Pieces(optimizer, masters).step(grads)
        plain_step(other, plain, grads)
    assert torch.equal(whole, other_whole)
    for master, expected in zip(masters, plain, strict=True):
        assert torch.equal(master, expected)


def test_with_float64_by_default_the_state_keeps_its_dtypes() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert not fused_for(optim.AdamW(parameters()))
        train(maker("AdamW", {}))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cls", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_run_goes_on_with_the_other_kernel(cls: str) -> None:
    """A checkpoint of ours in plain training, and one of plain training here."""
    options = {"momentum": 0.9} if cls == "SGD" else {}
    masters, plain = parameters(), parameters()
    ours, other = (maker(cls, options)(groups_of(ps)) for ps in (masters, plain))
    for step in range(4):
        Pieces(ours, masters).step(gradients_of(step, masters))
        plain_step(other, plain, gradients_of(step, plain))
    swapped = [maker(cls, options)(groups_of(ps)) for ps in (masters, plain)]
    swapped[0].load_state_dict(copy.deepcopy(other.state_dict()))
    swapped[1].load_state_dict(copy.deepcopy(ours.state_dict()))
    for step in range(4, STEPS):
        plain_step(swapped[0], masters, gradients_of(step, masters))
        Pieces(swapped[1], plain).step(gradients_of(step, plain))
    for master, expected in zip(masters, plain, strict=True):
        assert_same(master.detach(), expected.detach(), close=True)
    assert_same(swapped[0].state_dict(), swapped[1].state_dict(), close=True)


def test_named_parameters_keep_their_names() -> None:
    seen: list[tuple[str, Tensor]] = []

    class Naming(optim.SGD):
        independent_parameters = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                seen.extend(zip(group["param_names"], group["params"], strict=True))

    masters = parameters([(2,), (3,), (4,)])
    optimizer = Naming(zip("abc", masters, strict=True))
    PartialOptimizer(optimizer, masters).step(
        Hyperparameters.of(optimizer), {id(m): torch.ones_like(m) for m in masters[1:]}
    )
    assert [(name, p.shape) for name, p in seen] == [("b", (3,)), ("c", (4,))]


class Decaying(Optimizer):
    """A user's own: a constructor with more arguments, attributes, and marks on the parameters."""

    independent_parameters = True

    def __init__(self, params: Any, lr: float, power: int, tables: dict[str, float]) -> None:
        super().__init__(params, {"lr": lr})
        self.power = power
        self.tables = tables

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p] = {"count": self.state[p].get("count", 0) + 1}
                rate = group["lr"] * self.tables["rate"] * getattr(p, "mark", 1.0)
                p.sub_(p.grad**self.power, alpha=rate / self.state[p]["count"])


def test_a_users_own_optimizer() -> None:
    def make(groups: list[dict[str, Any]]) -> Optimizer:
        groups[0]["params"][0].mark = 3.0
        return Decaying(groups, 0.1, 3, {"rate": 0.5})

    train(make)


class Declared(optim.SGD):
    independent_parameters = True


@pytest.mark.parametrize("cls", [optim.SGD, Declared])
def test_the_instances_step_is_not_run_and_its_hooks_neither(cls: Any) -> None:
    masters = parameters()
    optimizer = cls(masters, lr=1.0)
    partial = PartialOptimizer(optimizer, masters)
    optimizer.step = None
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran"))
    before = masters[0].detach().clone()
    partial.step(Hyperparameters.of(optimizer), {id(masters[0]): torch.ones_like(masters[0])})
    assert torch.equal(masters[0], before - 1)


def test_a_users_own_optimizer_finds_its_groups_by_their_number() -> None:
    class Second(optim.SGD):
        independent_parameters = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.fill_(self.param_groups[1]["lr"])

    masters = parameters([(1,), (1,), (1,)])
    optimizer = Second([{"params": [master], "lr": lr} for master, lr in zip(masters, (1.0, 2.0, 3.0), strict=True)])
    PartialOptimizer(optimizer, masters).step(Hyperparameters.of(optimizer), {id(masters[2]): torch.ones(1)})
    assert masters[2].item() == 2.0


@pytest.fixture(params=["attribute", "group"])
def counting(request: Any) -> Iterator[type[Optimizer]]:
    class Counting(optim.SGD):
        independent_parameters = True
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if request.param == "attribute":
                self.calls += 1
            else:
                self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1

    yield Counting


def test_what_is_counted_for_all_parameters_is_refused(counting: type[Optimizer]) -> None:
    masters = parameters()
    optimizer = counting(masters)
    with pytest.raises(RoundPipeError, match=r"Counting declares .* but its step\(\) sets .*calls"):
        PartialOptimizer(optimizer, masters).step(
            Hyperparameters.of(optimizer), {id(masters[0]): torch.ones_like(masters[0])}
        )


def test_what_the_users_step_forgets_is_forgotten() -> None:
    class Forgetful(optim.SGD):
        independent_parameters = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.state.clear()

    masters = parameters([(2,), (3,)])
    optimizer = Forgetful(masters)
    for master in masters:
        optimizer.state[master]["known"] = 1
    PartialOptimizer(optimizer, masters).step(Hyperparameters.of(optimizer), {id(masters[0]): torch.ones(2)})
    assert list(optimizer.state) == [masters[1]]


def test_gradients_are_not_kept() -> None:
    (master,) = parameters([(2,)])
    optimizer = optim.SGD([master])
    partial, gradient = PartialOptimizer(optimizer, [master]), torch.ones(2)
    memory = weakref.ref(gradient.untyped_storage())
    seen = weakref.ref(gradient)
    partial.step(Hyperparameters.of(optimizer), {id(master): gradient})
    del gradient
    assert seen() is None and memory() is None


@pytest.mark.parametrize("wrong", ["hyperparameters", "gradient"])
def test_an_error_leaves_no_gradient_behind_and_keeps_the_state(wrong: str) -> None:
    masters = parameters([(2,), (3,), (4,)])
    optimizer = optim.AdamW(masters)
    partial = PartialOptimizer(optimizer, masters)
    grads = {id(m): torch.ones_like(m) for m in masters}
    partial.step(Hyperparameters.of(optimizer), grads)
    states = [optimizer.state[m] for m in masters]
    broken: Any = Hyperparameters.of(optimizer)
    if wrong == "hyperparameters":
        del broken.groups[0]["lr"]
    else:
        grads[id(masters[1])] = torch.ones(17)
    with pytest.raises((KeyError, RuntimeError), match=r"lr|size"):
        partial.step(broken, grads)
    assert all(optimizer.state[m] is state for m, state in zip(masters, states, strict=True))
    before = masters[1].detach().clone()
    partial.step(Hyperparameters.of(optimizer), {id(masters[0]): torch.ones(2)})
    assert torch.equal(masters[1], before)
