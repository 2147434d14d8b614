"""Hooks that user code registers when training runs already: they run as in plain training, or are refused by name."""

import types

import pytest
import torch
import zoo
from harness import assert_plain, callback, ours, run

from lightning_roundpipe.config import RoundPipeError


class Recorded(zoo.PlainClassifier):
    """A module on which hooks leave what they have seen."""

    def __init__(self, model):
        super().__init__(model)
        self.seen = []


def doubled(module, optimizer):
    def hook(grad):
        module.seen.append(float(grad.norm()))
        return grad * 2

    return module.model.head.weight.register_hook(hook)


def after_accumulation(module, optimizer):
    def hook(parameter):
        module.seen.append(float(parameter.grad.norm()))
        parameter.grad.clamp_(-0.01, 0.01)

    return module.model.blocks[1].up.weight.register_post_accumulate_grad_hook(hook)


def before_the_step(module, optimizer):
    def hook(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        module.seen.append(float(sum(p.norm() for p in parameters)))

    return optimizer.register_step_pre_hook(hook)


def after_the_step(module, optimizer):
    def hook(optimizer, args, kwargs):
        with torch.no_grad():
            module.model.head.weight.mul_(0.9)
        module.seen.append(float(module.model.stem.weight.norm()))

    return optimizer.register_step_post_hook(hook)


def replaced_step(module, optimizer):
    own = optimizer.step

    def step(self, closure=None):
        found = own(closure)
        with torch.no_grad():
            module.model.stem.weight.add_(0.01)
        module.seen.append(float(module.model.stem.weight.norm()))
        return found

    optimizer.step = types.MethodType(step, optimizer)


def hook_of_the_module(module, optimizer):
    def on_before_optimizer_step(optimizer):
        module.seen.append(float(module.model.head.bias.grad.norm()))
        module.model.head.bias.grad.zero_()

    module.on_before_optimizer_step = on_before_optimizer_step


def another_callback(module, optimizer):
    norms = lambda *_: module.seen.append([float(p.grad.norm()) for p in module.parameters()])  # noqa: E731
    module.trainer.callbacks.append(callback(on_after_backward=norms))


LATE = [
    doubled, after_accumulation, before_the_step, after_the_step, replaced_step, hook_of_the_module, another_callback,
]  # fmt: skip


def made():
    module = zoo.make_module("mlp")
    torch.manual_seed(7)
    return Recorded(module.model)


@pytest.mark.parametrize("register", LATE)
def test_what_is_registered_between_batches_runs(register):
    def later(trainer, module, batch, batch_idx):
        if batch_idx == 3:
            register(module, module.optimizers().optimizer)

    batches, at = zoo.make_batches("mlp", count=5, samples=8), callback(passive=True, on_train_batch_start=later)
    plain, other = assert_plain(made(), batches, {"num_microbatches": 2}, watch=False, callbacks=[at])
    seen, found = plain.module.seen, other.module.seen
    assert seen and len(seen) == len(found), (seen, found)
    assert found == [pytest.approx(value, rel=1e-4) for value in seen]


class Within(Recorded):
    register = None

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            type(self).register(self, self.optimizers().optimizer)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("register", "error"),
    [
        (doubled, r"register_hook was called on a parameter.*on_train_batch_start"),
        (after_accumulation, r"register_post_accumulate_grad_hook was called on a parameter.*on_train_batch_start"),
        (after_the_step, r"SGD has a step hook .* It was registered or replaced within the batch.*Do it between"),
        (replaced_step, r"the step method of SGD was replaced. It was .*Do it between batches"),
        (hook_of_the_module, r"overrides on_before_optimizer_step.* It was |attribute 'on_before_optimizer_step' of"),
    ],
)
def test_within_training_step_it_is_refused(register, error):
    module = type("Net", (Within,), {"register": staticmethod(register)})(made().model)
    with pytest.raises(RoundPipeError, match=error):
        run(ours(num_microbatches=2), module, zoo.make_batches("mlp"), watch=False)
