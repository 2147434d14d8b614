"""Stepping in pieces is ``optimizer.step()``: same numbers, same state, and nothing of the user's is touched."""

import copy
import functools
import random

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.optim.fused import fits
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer

assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
STEPS = 10
SHAPES = [(7, 5), (33,), (4, 6), (), (6, 4), (130, 9), (3,)]
"""Matrices and vectors; some longer than a vector register, some with a rest."""


def parameters(shapes=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in (SHAPES if shapes is None else shapes)]


def groups_of(masters):
    """Two groups, of which the second has a learning rate of its own, neither in the order of the masters."""
    return [{"params": masters[::-2]}, {"params": masters[-2::-2], "lr": 0.003}]


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small gain nothing from several threads, which spin while they wait for each other."""
    torch.set_num_threads(1)


def gradients_of(step, masters, late=True):
    """Different ones each step. The second master has none now and then; with ``late`` the third gets none at first."""
    generator = torch.Generator().manual_seed(100 + step)
    grads = [torch.randn(m.shape, generator=generator).to(m.dtype) for m in masters]
    if step % 3 == 1:
        grads[1] = None
    if late and step < 4:
        grads[2] = None
    return grads


class Pieces:
    """The masters cut into layers, each with a partial optimizer, stepped in a random order."""

    def __init__(self, optimizer, masters):
        self.optimizer, self.masters = optimizer, masters
        layers = masters[:2], masters[2:3], masters[3:6], masters[6:]
        self.partials = [PartialOptimizer(optimizer, layer) for layer in layers]
        self.order = random.Random(0)

    def step(self, grads):
        hyperparameters = Hyperparameters.of(self.optimizer)
        self.optimizer._opt_called = True  # schedulers want to see that it was called
        by_id = {id(m): g for m, g in zip(self.masters, grads, strict=True) if g is not None}
        for partial in self.order.sample(self.partials, len(self.partials)):
            partial.step(hyperparameters, by_id)


def plain_step(optimizer, masters, grads):
    for master, grad in zip(masters, grads, strict=True):
        master.grad = None if grad is None else grad.clone()
    optimizer.step()


def clones(grads):
    return [None if grad is None else grad.clone() for grad in grads]


def train(make, reference=None, schedule=None, late=True, **given):
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
        assert_same(settings(optimizer), groups)
        assert [m._version for m in masters] == versions and all(m.grad is None for m in masters)
        plain_step(other, plain, grads)
        for master, expected in zip(masters, plain, strict=True):
            assert_same(master.detach(), expected.detach())
        assert set(optimizer.state) <= set(masters)
        states, expected_states = optimizer.state_dict()["state"], other.state_dict()["state"]
        assert_same(states, expected_states)
        for scheduler in schedulers:
            scheduler.step()
        if step == STEPS // 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            other.load_state_dict(copy.deepcopy(other.state_dict()))


def settings(optimizer):
    """The groups; parameters by their ids, because their values change."""
    return [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]


def case(cls, **options):
    settings = ",".join(f"{k}={'tensor' if isinstance(v, Tensor) else v}" for k, v in options.items())
    return pytest.param(cls, options, id=f"{cls}({settings})")


FUSED = [
    case("SGD"),
    case("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    case("Adam", weight_decay=0.1, amsgrad=True),
    case("Adam", weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    case("AdamW", amsgrad=True, maximize=True),
    case("Adagrad", initial_accumulator_value=0.5, maximize=True),
]
OTHERS = [
    case("Adamax", maximize=True),
    case("NAdam", weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    case("RAdam", weight_decay=0.1),
    case("Adadelta", weight_decay=0.1, maximize=True),
    case("RMSprop", momentum=0.9, centered=True, weight_decay=0.1),
    case("Rprop", etas=(0.4, 1.3), maximize=True),
    case("ASGD", t0=3.0, weight_decay=0.1),
    case("Adafactor", eps=(1e-9, 1e-3), weight_decay=0.1, maximize=True),
    case("SGD", lr=torch.tensor(0.01), momentum=0.9),
    case("AdamW", betas=(torch.tensor(0.9), torch.tensor(0.99))),
]


def maker(cls, options):
    """Makes optimizers that share nothing with one another, tensors among the options included."""

    def make(groups):
        given = {"lr": 0.01, **copy.deepcopy(options)}
        others = [{**group, "lr": 0.3 * given["lr"]} if "lr" in group else group for group in groups]
        return getattr(optim, cls)(others, **given)

    return make


def fused_for(optimizer):
    """Whether fused kernels are used for some parameter where the user's own ``step()`` uses none."""
    fused = Hyperparameters.of(optimizer).fused
    return any(
        taken and any(fits(p, None, {}) for p in group["params"])
        for taken, group in zip(fused, optimizer.param_groups, strict=True)
    )


@pytest.mark.parametrize("choice", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_kernels_are_fused_unless_the_user_chooses(cls, options, choice):
    make, reference = maker(cls, options | choice), maker(cls, options | (choice or {"fused": True}))
    assert fused_for(make(groups_of(parameters()))) is not bool(choice)
    # torch's own fused step with momentum fails when a parameter gets its first gradient later than others.
    train(make, reference, late="foreach" in choice or not (cls == "SGD" and "momentum" in options))


@pytest.mark.parametrize(("cls", "options"), OTHERS)
def test_what_has_no_fused_kernel_is_the_users_step_to_the_bit(cls, options):
    assert not fused_for(maker(cls, options)(groups_of(parameters())))
    train(maker(cls, options))


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="came with torch 2.9")
def test_muon():
    matrices = [(7, 5), (4, 6), (6, 4), (13, 9), (3, 3), (2, 8), (8, 2)]
    train(lambda groups: optim.Muon(groups, lr=0.01), shapes=matrices)


def test_schedulers_change_what_comes_next_not_what_was_submitted():
    train(maker("AdamW", {"foreach": False}), schedule=lambda o: LambdaLR(o, lambda step: 0.7**step))
    train(maker("AdamW", {}), maker("AdamW", {"fused": True}), lambda o: LambdaLR(o, lambda step: 0.7**step))
    cycle = {"momentum": 0.9, "foreach": False}
    train(maker("SGD", cycle), schedule=lambda o: OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=STEPS + 1))
    tensor = {"lr": torch.tensor(0.01)}
    train(maker("Adam", tensor), schedule=lambda o: LambdaLR(o, lambda step: 0.7**step))


CHANGES = {
    "hyperparameters": lambda optimizer, masters: optimizer.param_groups[1].update(
        lr=0.05, betas=(0.7, 0.8), eps=1e-5, weight_decay=0.3, maximize=True
    ),
    "moved between groups": lambda optimizer, masters: optimizer.param_groups[1]["params"].append(
        optimizer.param_groups[0]["params"].pop()
    ),
    "state forgotten": lambda optimizer, masters: optimizer.state.pop(masters[0]),
    "state replaced": lambda optimizer, masters: optimizer.state.update(
        {masters[3]: {key: value * 2 for key, value in optimizer.state[masters[3]].items()}}
    ),
    "tensor replaced": lambda optimizer, masters: optimizer.state[masters[3]].update(
        exp_avg=optimizer.state[masters[3]]["exp_avg"] * 2
    ),
    "masters elsewhere": lambda optimizer, masters: setattr(masters[0], "data", masters[0].data * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_seen_to_the_bit(change):
    """Adam's kernel is given what it was given before, unless that has changed."""
    masters, plain = parameters(), parameters()
    ours, other = (
        maker("AdamW", {"amsgrad": True} | options)(groups_of(ps))
        for ps, options in ((masters, {}), (plain, {"fused": True}))
    )
    pieces = Pieces(ours, masters)
    for step in range(STEPS):
        if step == STEPS // 2:
            CHANGES[change](ours, masters)
            CHANGES[change](other, plain)
        grads = gradients_of(step, masters)
        pieces.step(clones(grads))
        plain_step(other, plain, grads)
        for master, expected in zip(masters, plain, strict=True):
            assert_same(master.detach(), expected.detach())
        assert_same(ours.state_dict()["state"], other.state_dict()["state"])


@pytest.fixture(params=["attribute", "group"])
def counting(request):
    class Counting(optim.SGD):
        independent_parameters = True
        calls = 0

        def step(self, closure=None):
            if request.param == "attribute":
                self.calls += 1
            else:
                self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1

    yield Counting


def test_what_is_counted_for_all_parameters_is_refused(counting):
    masters = parameters()
    optimizer = counting(masters)
    with pytest.raises(RoundPipeError, match=r"Counting declares .* but its step\(\) sets .*calls"):
        PartialOptimizer(optimizer, masters).step(
            Hyperparameters.of(optimizer), {id(masters[0]): torch.ones_like(masters[0])}
        )


@pytest.mark.parametrize("wrong", ["hyperparameters", "gradient"])
def test_an_error_leaves_no_gradient_behind_and_keeps_the_state(wrong):
    masters = parameters([(2,), (3,), (4,)])
    optimizer = optim.AdamW(masters)
    partial = PartialOptimizer(optimizer, masters)
    grads = {id(m): torch.ones_like(m) for m in masters}
    partial.step(Hyperparameters.of(optimizer), grads)
    states = [optimizer.state[m] for m in masters]
    broken = Hyperparameters.of(optimizer)
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
