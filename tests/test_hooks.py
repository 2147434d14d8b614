"""What a LightningModule may override, under automatic optimization: the same numbers at the same places as in plain
Lightning."""

import functools

import pytest
import torch
import zoo
from harness import assert_plain, run

MLP = zoo.make_module("mlp").model
STEP = torch.optim.lr_scheduler.ExponentialLR


CUT = {"num_microbatches": 3}


# ------------------------------------------------------------------------------------------------- configure_optimizers


def _by_frequency(optimizer):
    scheduler = {"scheduler": STEP(optimizer, 0.5), "interval": "step", "frequency": 2}
    return [{"optimizer": optimizer, "lr_scheduler": scheduler}]


def _by_metric(optimizer):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    scheduler = {"scheduler": plateau, "monitor": "train/loss", "interval": "step", "frequency": 2, "strict": True}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


CONFIGURED = {
    "a list and dicts": lambda optimizer: ([optimizer], [{"scheduler": STEP(optimizer, 0.5), "interval": "step"}]),
    "a list of dicts, every other step": _by_frequency,
    "a monitored value": _by_metric,
}


class Configured(zoo.PlainClassifier):
    def __init__(self, configure):
        super().__init__(MLP)
        self.configure = configure

    def configure_optimizers(self):
        return self.configure(torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9))


@pytest.mark.parametrize("kind", CONFIGURED)
def test_configured_optimizers(kind):
    plain, result = assert_plain(Configured(CONFIGURED[kind]), zoo.make_batches("mlp", 2), CUT, max_epochs=2)
    schedules = [[config.scheduler.state_dict() for config in r.trainer.lr_scheduler_configs] for r in (plain, result)]
    assert schedules[0] == schedules[1]


def test_no_optimizer():
    """Nothing is trained, but gradients are there."""
    module = Configured(lambda optimizer: None)
    plain, result = assert_plain(module, zoo.make_batches("mlp", 4), CUT, blocking=True)
    assert any(grad is not None for grad in plain.grads[0].values())
    assert all(torch.equal(result.state[f"model.{name}"], value) for name, value in MLP.state_dict().items())


# ------------------------------------------------------------------------------------------------- parts of the step


class WarmUp(zoo.PlainClassifier):
    """As in Lightning's documentation."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (self.trainer.global_step + 1)


class WarmUpAhead(WarmUp):
    """Sets the rate of the step before it; and says that it looks at nothing, so that the optimizer steps apart."""

    roundpipe_passive_hooks = ("optimizer_step",)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (self.trainer.global_step + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class EveryOtherStep(zoo.PlainClassifier):
    """Between its steps the closure is called by itself, so that losses and gradients are there."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class LateClosure(zoo.PlainClassifier):
    """Steps without a closure, once the module has called it itself and has changed the gradients."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()


class ClippingApart(zoo.PlainClassifier):
    """As in Lightning's documentation: only from some step on."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        assert gradient_clip_val is None
        if self.global_step:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class BackwardTwiceAsFar(zoo.PlainClassifier):
    def backward(self, loss):
        (loss * 2).backward()


class Transferred(zoo.PlainClassifier):
    """Each of the three changes the batch, and none commutes with another."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch | {"x": batch["x"] + 1}

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device.type == "cpu"
        return super().transfer_batch_to_device(batch | {"x": batch["x"] * 2}, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert batch["x"].device.type == "cpu"
        return batch | {"x": batch["x"].square()}


@functools.cache
def without():
    return run("auto", zoo.PlainClassifier(MLP), zoo.make_batches("mlp", 4))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WarmUp, {}),
        (WarmUpAhead, {}),
        (EveryOtherStep, {}),
        (LateClosure, {}),
        (ClippingApart, {}),
        (BackwardTwiceAsFar, {}),
        (Transferred, {"val_batches": zoo.make_batches("mlp", 1)}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_overridden(kind, options):
    plain, _ = assert_plain(kind(MLP), zoo.make_batches("mlp", 4), CUT, watch=kind is not LateClosure, **options)
    assert any(not torch.equal(without().state[n], value) for n, value in plain.state.items()), "it does nothing"
