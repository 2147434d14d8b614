"""Only optimizers of which it is known are stepped by parameter; every other reason is named."""

import functools

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_roundpipe.optim.independence import KNOWN, stepped_by_parameter

KNOWN_BY_NAME = sorted(KNOWN, key=lambda cls: cls.__name__)


class Independent(optim.AdamW):
    independent_parameters = True


class Heir(Independent):
    """Its parent said so, which says nothing of what this class adds."""


class Undeclared(optim.AdamW):
    pass


class Denying(optim.AdamW):
    independent_parameters = False


def parameter(dtype=torch.float32):
    return nn.Parameter(torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize("cls", [*KNOWN_BY_NAME, Independent], ids=lambda cls: cls.__name__)
def test_known_and_declared_optimizers_are_stepped_by_parameter(cls):
    optimizer = cls([parameter()], lr=0.1)
    assert stepped_by_parameter(optimizer) is None
    CosineAnnealingLR(optimizer, 10)  # wraps step, to see whether it was called
    LinearLR(optimizer)
    assert "step" in vars(optimizer)
    assert stepped_by_parameter(optimizer) is None


@pytest.mark.parametrize("cls", [Heir, Undeclared, Denying], ids=lambda cls: cls.__name__)
def test_any_other_class_has_to_declare_it(cls):
    reason = stepped_by_parameter(cls([parameter()]))
    assert reason is not None
    assert cls.__name__ in reason and "`independent_parameters = True`" in reason


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(optim.LBFGS, "LBFGS looks at all parameters together"), (optim.SparseAdam, "SparseAdam takes sparse gradients")],
)
def test_optimizers_of_torch_that_cannot_be(cls, reason):
    assert reason in str(stepped_by_parameter(cls([parameter()])))


def wrapping(step):
    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        return step(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("scheduled", ["never", "before", "after"])
@pytest.mark.parametrize("cls", [optim.SGD, Independent])
def test_a_replaced_step_is_seen_also_under_a_schedulers_wrapper(cls, scheduled):
    optimizer = cls([parameter()], lr=0.1)
    if scheduled == "before":
        LinearLR(optimizer)
    wrapper = wrapping(optimizer.step)
    optimizer.step = wrapper.__get__(optimizer) if scheduled == "after" else wrapper
    if scheduled == "after":
        LinearLR(optimizer)
    assert stepped_by_parameter(optimizer) == f"the step method of {cls.__name__} was replaced"


@pytest.fixture
def handles():
    made = []
    yield made
    for handle in made:
        handle.remove()


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (lambda o: o.register_step_pre_hook(print), "register_step_pre_hook"),
        (lambda o: o.register_step_post_hook(print), "register_step_post_hook"),
        (lambda o: register_optimizer_step_pre_hook(print), "register_optimizer_step_pre_hook"),
        (lambda o: register_optimizer_step_post_hook(print), "register_optimizer_step_post_hook"),
    ],
)
def test_step_hooks_are_seen_and_forgotten_when_they_are_removed(register, name, handles):
    optimizer = optim.SGD([parameter()])
    handles.append(register(optimizer))
    assert f"({name})" in str(stepped_by_parameter(optimizer))
    handles.pop().remove()
    assert stepped_by_parameter(optimizer) is None


def test_adafactor_takes_one_epsilon_for_a_group():
    mixed = [parameter(), parameter(torch.bfloat16)]
    assert "eps[0]" in str(stepped_by_parameter(optim.Adafactor(mixed)))
    assert stepped_by_parameter(optim.Adafactor(mixed, eps=(1e-8, 1e-3))) is None
    assert stepped_by_parameter(optim.Adafactor([{"params": [p]} for p in mixed])) is None
