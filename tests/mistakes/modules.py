"""Mistakes in the LightningModule, its optimizer, its loss and its batches."""

import copy
import functools
import threading
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import loader, ours, trainer_of
from patience import PATIENCE_S
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from transformers import GPTQConfig

from lightning_roundpipe import Microbatches
from mistakes.user import Mistake


def mlp():
    return zoo.make_module("mlp").model


class Manual(zoo.PlainClassifier):
    def __init__(self, model, *, written_between=False, twice=False, **options):
        super().__init__(model)
        self.automatic_optimization = False
        self.written_between, self.twice, self.backward_options = written_between, twice, options

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss, _ = self.loss_and_logits(batch)
        if self.written_between:
            with torch.no_grad():
                self.model.head.weight.mul_(1.0)
        optimizer.zero_grad()
        self.manual_backward(loss, **self.backward_options)
        if self.twice:
            self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


def returning(change, **options):
    """The mistake of returning ``change(loss, batch)`` from ``training_step``."""

    class Returning(zoo.PlainClassifier):
        def training_step(self, batch, batch_idx):
            return change(self.loss_and_logits(batch)[0], batch)

    return lambda user: user.fit(Returning(mlp()), num_microbatches=4, **options)


def _frozen(user):
    module = zoo.make_module("mlp")
    module.make_optimizer = lambda parameters: zoo.sgd(list(parameters))
    user.fit(module.requires_grad_(False))


def _optimizing(parameters):
    """The mistake of an optimizer on ``parameters(module)``."""

    def way(user):
        module = zoo.make_module("mlp")
        module.make_optimizer = lambda _: zoo.sgd(parameters(module))
        user.fit(module)

    return way


class _AddsParameters(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def _in_inference_mode(*, builds):
    def way(user):
        with torch.inference_mode(builds):
            module = zoo.PlainClassifier(mlp() if not builds else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)))
        with torch.inference_mode(not builds):
            user.fit(module)

    return way


class _Waits(pl.Callback):
    def __init__(self):
        self.began, self.goes_on = threading.Event(), threading.Event()

    def on_train_start(self, *args):
        self.began.set()
        assert self.goes_on.wait(PATIENCE_S)


def _on_two_threads(user):
    waits = _Waits()
    other = trainer_of(ours(), devices=2, max_steps=1, callbacks=[waits])
    fit = functools.partial(other.fit, zoo.make_module("mlp"), loader(zoo.make_batches("mlp", 1)))
    thread = threading.Thread(target=fit)
    thread.start()
    assert waits.began.wait(PATIENCE_S)
    try:
        user.fit()
    finally:
        waits.goes_on.set()
        thread.join()
        assert other.global_step == 1


def _on_a_gpu(user):
    model = mlp()
    with FakeTensorMode():  # says that it is on a GPU, without one
        model.head.bias = nn.Parameter(torch.empty(5, device="cuda"))
    user.fit(zoo.PlainClassifier(model))


def _logging(bound):
    def fit(user):
        module = zoo.PlainClassifier(mlp())
        log = module.log
        module.model.blocks[0].up.register_forward_hook(lambda *_: (log if bound else module.log)("norm", 1.0))
        user.fit(module, num_microbatches=1)

    return fit


def _lazy(user):
    model = mlp()
    model.head = nn.LazyLinear(5)
    user.fit(zoo.PlainClassifier(model))


def _on_meta(change):
    """The mistake of leaving what ``change`` does to a model on the meta device."""

    def way(user):
        model = mlp()
        change(model)
        user.fit(zoo.PlainClassifier(model))

    return way


def _sharing(part):
    def way(user):
        model = mlp()
        model.blocks[1].up.weight = nn.Parameter(part(model.blocks[0].up.weight.data))
        user.fit(zoo.PlainClassifier(model))

    return way


class _Bare(pl.LightningModule):
    """Computes with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def training_step(self, batch, batch_idx):
        return (batch["x"] @ self.weight).square().mean()

    def configure_optimizers(self):
        return zoo.sgd(self.parameters())


def computing(loss, **options):
    """The mistake of this loss, which is given the model and the batch."""
    kind = type("Computing", (zoo.PlainClassifier,), {"loss_and_logits": lambda self, b: (loss(self.model, b), None)})
    return lambda user: user.fit(kind(mlp()), **options)


@torch.jit.script
def _added(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


class _Steered(zoo.PlainClassifier):
    """A hook inside a frozen layer adds a trained vector; from the second batch on."""

    def __init__(self):
        super().__init__(mlp())
        self.requires_grad_(False)
        self.vector = nn.Parameter(torch.ones(zoo.WIDTH))
        self.model.head.requires_grad_(True)

    def setup(self, stage):
        inner = self.model.blocks[1].down
        inner.register_forward_hook(lambda m, inputs, out: out + self.vector if self.global_step else None)


class _Registers(zoo.PlainClassifier):
    def training_step(self, batch, batch_idx):
        self.model.head.weight.register_hook(lambda grad: grad)
        return super().training_step(batch, batch_idx)


class _Unfreezes(zoo.PlainClassifier):
    """Switches ``requires_grad`` of its blocks within ``training_step``: on in every other batch."""

    def training_step(self, batch, batch_idx):
        self.model.blocks.requires_grad_(batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)


def _unfreezing(*, frozen, batches, **options):
    def way(user):
        module = _Unfreezes(mlp())
        module.model.blocks.requires_grad_(not frozen)
        user.fit(module, zoo.make_batches("mlp", batches), **options)

    return way


class _RegistersLate(zoo.PlainClassifier):
    """Its training_step registers a parameter in a later batch, or replaces one that it has computed with."""

    def __init__(self, *, replaces=False):
        super().__init__(mlp())
        self.first = [nn.Parameter(torch.ones(()))] if replaces else []
        if replaces:
            self.scale = self.first[0]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        scale = getattr(self, "scale", None)
        if scale is not None:
            loss = loss * scale
        if batch_idx == 2 and (scale is None or any(scale is first for first in self.first)):
            self.scale = nn.Parameter(torch.tensor(2.0))
            loss = loss * self.scale
        return loss


class _UnfreezesItself(zoo.MLP):
    """Its blocks switch on ``requires_grad`` of their own parameters."""

    def __init__(self):
        super().__init__()
        for block in self.blocks.requires_grad_(False):
            block.forward = functools.partial(_unfrozen, block)


def _unfrozen(block, h):
    block.requires_grad_(True)
    return type(block).forward(block, h)


def _of_torchao(user):
    quantization = pytest.importorskip("torchao.quantization")
    module = zoo.make_module("mlp")
    quantization.quantize_(nn.Sequential(module.model.head), quantization.Int8WeightOnlyConfig())
    user.fit(module)


def _gathered_in_fp8(user):
    float8 = pytest.importorskip("torchao.float8")
    module = zoo.make_module("mlp")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    float8.convert_to_float8_training(module.model, config=config)
    user.fit(module)


def _by_gptq(user):
    module = zoo.make_module("mlp")
    module.model.hf_quantizer = SimpleNamespace(quantization_config=GPTQConfig(bits=4))  # as transformers marks it
    user.fit(module)


def _two_means(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + F.cross_entropy(logits[:2], batch["y"][:2])


def _nested():
    return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)


SECTION = "The module, its optimizer and its loss"
MODULES = [
    Mistake(SECTION, "several microbatches, or a plan, under manual optimization",
        "… with automatic_optimization=False: under manual optimization training_step runs once, on the whole batch",
        "Leave it out",
        (
            lambda user: user.fit(Manual(mlp()), num_microbatches=2),
            lambda user: user.fit(Manual(mlp()), microbatch_size=2),
            lambda user: user.fit(
                Manual(mlp()), num_microbatches=1, plan="forward 0-1; fused 2-5; backward 0-1; round 1"
            ),
        )),
    Mistake(SECTION, "weights that are written to between a call and its backward",
        "weights of layer '…' were written to (by an optimizer's step, most likely) between its call and the backward",
        "Run backward before the step, or call the model again after it",
        (lambda user: user.fit(Manual(mlp(), written_between=True)),)),
    Mistake(SECTION, "a hook on a parameter or on the optimizer's step that `training_step` registers",
        "register_hook was called on a parameter within training_step",
        "Do it between batches, for example in on_fit_start or on_train_batch_start",
        (lambda user: user.fit(_Registers(mlp())),)),
    Mistake(SECTION, "`requires_grad` that `training_step` switches on for a parameter of a layer",
        "training_step switches on requires_grad of parameter '…', in layer '…'",
        "Switch on between steps, for example in on_train_batch_start, all that the window's batches train",
        (_unfreezing(frozen=True, batches=1), _unfreezing(frozen=True, batches=1, num_microbatches=2))),
    Mistake(SECTION, "`requires_grad` that a layer switches on for its own parameters in its forward",
        "layer '…' switches on requires_grad of its own parameters while it runs",
        "Set requires_grad between steps, for example in on_train_batch_start",
        (
            lambda user: user.fit(zoo.PlainClassifier(_UnfreezesItself())),
            lambda user: user.fit(zoo.PlainClassifier(_UnfreezesItself()), num_microbatches=2),
        )),
    Mistake(SECTION, "a parameter that `training_step` registers or replaces outside the layers",
        "training_step registered parameter '…' and computes with it",
        "Register it between steps, for example in on_train_batch_start",
        (
            lambda user: user.fit(_RegistersLate(), num_microbatches=2),
            lambda user: user.fit(_RegistersLate(replaces=True)),
        ), finished=2),
    Mistake(SECTION, "two backward passes through the same calls", "a gradient entered layer '…' past its outputs",
        "Of several backwards under manual optimization, all but the last need retain_graph=True",
        (lambda user: user.fit(Manual(mlp(), twice=True)),)),
    Mistake(SECTION, "second derivatives, or a choice of inputs, under manual optimization",
        "backward(…) is not supported by the roundpipe strategy",
        "choose what gets gradients with requires_grad (toggle_optimizer)",
        (lambda user: user.fit(Manual(mlp(), create_graph=True)),)),
    Mistake(SECTION, "parameters on a GPU before training", "parameter '…' is on device cuda:0 already",
        "Build the model on the CPU (no .cuda(), no device_map)", (_on_a_gpu,)),
    Mistake(SECTION, "`fit` under `torch.inference_mode()`",
        "training under torch.inference_mode(), in which nothing has gradients",
        "Call Trainer.fit() outside of it", (_in_inference_mode(builds=False),)),
    Mistake(SECTION, "parameters that were made under `torch.inference_mode()`",
        "parameter '…' was made under torch.inference_mode(), so it takes part in no backward pass",
        "Build the model outside of it, or under torch.no_grad()", (_in_inference_mode(builds=True),)),
    Mistake(SECTION, "two runs at a time, on two threads of a process",
        "another thread of this process trains or evaluates with the roundpipe strategy already",
        "Run one after the other, or each in a process of its own", (_on_two_threads,)),
    Mistake(SECTION, "weights that another library than bitsandbytes has quantised, in a tensor of its own",
        "the weights of '…' are in a format (…) that the roundpipe strategy cannot send to devices",
        "Take the model with weights in 16 bits", (_of_torchao, _gathered_in_fp8)),
    Mistake(SECTION, "weights that another library than bitsandbytes has quantised (GPTQ, AWQ)",
        "the weights of '…' are quantised by …, which the roundpipe strategy cannot train",
        "Load the 16-bit checkpoint of the model", (_by_gptq,)),
    Mistake(SECTION, "`self.log` in a layer",
        "self.log was called in layer '…', which runs once for each microbatch and again for its backward",
        "Let the layer return what is to be logged, and call self.log in training_step itself",
        (_logging(bound=False), _logging(bound=True))),
    Mistake(SECTION, "a lazy module (`nn.LazyLinear` and others) that has not been called",
        "'…': of a lazy module that has not been called yet, so there is nothing to place",
        "Call the model once on a batch in configure_model(), under torch.no_grad(), or give the module its input size",
        (_lazy,)),
    Mistake(SECTION, "a nested tensor that goes from one layer to the next",
        "a nested tensor (torch.nested) goes into a layer or out of it",
        "hand on a padded tensor and a mask (torch.nested.to_padded_tensor), or name the module that makes the nested "
        "tensor and computes with it in RoundPipeStrategy(layers=[...])",
        (computing(lambda model, batch: torch.stack([x.mean() for x in model(batch["x"]).unbind()]).mean(),
                   batches=[{"x": _nested()}] * 3),)),
    Mistake(SECTION, "parameters or buffers without values", "on the meta device, without values: '…'",
        "Give them values in configure_model(): load_state_dict(weights, assign=True), or to_empty(device='cpu') and "
        "an initialisation; or set ckpt_path= to a checkpoint that holds them",
        (
            _on_meta(lambda model: setattr(model, "head", nn.Linear(zoo.WIDTH, 5, device="meta"))),
            _on_meta(lambda model: model.to("meta")),
            _on_meta(lambda model: model.stem.register_buffer("table", torch.ones(3, device="meta"), False)),
        )),
    Mistake(SECTION, "parameters that are views of one memory",
        "parameters '…' and '…' share memory without being one parameter",
        "Tie them by assigning the same nn.Parameter to both, or clone one of them",
        (_sharing(lambda weight: weight), _sharing(lambda weight: weight[1:]))),
    Mistake(SECTION, "no module with parameters in the LightningModule",
        "… has no submodule with parameters, so there is no layer to offload",
        "register the model as an attribute of the LightningModule", (lambda user: user.fit(_Bare()),)),
    Mistake(SECTION, "`training_step` computes with modules that are not registered",
        "training_step called none of the layers that were found", "name the modules it calls with layers=[...]",
        (computing(lambda model, batch: nn.Linear(8, 5)(batch["x"]).mean(), num_microbatches=2),)),
    Mistake(SECTION, "an optimizer on parameters that are not the module's",
        "… holds parameters that are not the LightningModule's",
        "build the optimizer from self.parameters() in configure_optimizers()",
        (
            _optimizing(lambda module: [nn.Parameter(torch.ones(3))]),
            _optimizing(lambda module: [*module.parameters(), nn.Parameter(torch.ones(3))]),
            _optimizing(lambda module: copy.deepcopy(module.model).parameters()),
            lambda user: user.fit(trainer={"callbacks": [_AddsParameters()]}),
        )),
    Mistake(SECTION,
        "an operation that is no torch function (TorchScript, a C++ extension, another thread) takes a parameter, with "
        "`staleness=1`, with a `*-true` precision of 16 bits, or in a later batch for the first time",
        "… uses parameter '…' itself, by another way than a torch function", "Give it parameter.clone() instead",
        (computing(lambda model, batch: _added(model(batch["x"]), model.head.bias).mean(), staleness=1),)),
    Mistake(SECTION,
        "a frozen layer computes with a trained parameter of another module (a steering vector), in a later batch for "
        "the first time",
        "layer '…' computes with parameter '…' of another module, which did not show in the first batch",
        "Pass the parameter to the layer", (lambda user: user.fit(_Steered(), overlap=False),), finished=1),
    Mistake(SECTION, "a loss that depends on nothing that is trained",
        "training_step returned a loss that does not require grad",
        "Return the loss as it was computed, or None to skip the batch",
        (_frozen, returning(lambda loss, batch: loss.detach()))),
    Mistake(SECTION, "a loss that is not one number", "training_step returned a loss of shape …",
        "it must be one real number (take its mean)", (returning(lambda loss, batch: loss.expand(2)),)),
    Mistake(SECTION, "a loss that is no tensor", "training_step returned 'loss' as a float",
        "return the tensor, without .item()", (returning(lambda loss, batch: {"loss": loss.item()}),)),
    Mistake(SECTION, "`loss_weight='targets'`, and a loss that is made without a mean cross entropy",
        "loss_weight='targets' counts the targets of the mean cross entropy … made with none",
        "Leave loss_weight out, or set it to a function of a microbatch that returns what it counts",
        (computing(lambda model, batch: model(batch["x"]).square().mean(), loss_weight="targets"),)),
    Mistake(SECTION,
        "`loss_weight='targets'`, and a loss that is made with several means over different numbers of targets",
        "loss_weight='targets' counts the targets of the mean cross entropy … made with several",
        "Leave loss_weight out, or set it to a function of a microbatch that returns what it counts",
        (computing(_two_means, loss_weight="targets"),)),
    Mistake(SECTION, "modules or parameters that are replaced within a window of accumulated batches",
        "roundpipe: modules or parameters of the model were replaced within a window of accumulate_grad_batches=…",
        "Replace them between windows, for example in on_train_epoch_start",
        (lambda user: user.fit(_Prunes(mlp()), trainer={"accumulate_grad_batches": 4}),), finished=1),
    Mistake(SECTION, "`on_train_batch_start` that returns -1 within a window",
        "on_train_batch_start returned -1 within a window of accumulate_grad_batches=…",
        "return -1 for the first batch of a window, or set accumulate_grad_batches=1",
        (
            lambda user: user.fit(_Skips(mlp()), trainer={"accumulate_grad_batches": 4}),  # found when training ends
            lambda user: user.fit(
                _Skips(mlp()), trainer={"accumulate_grad_batches": 4, "max_epochs": 2, "max_steps": -1}
            ),  # found when the next epoch begins
        ), finished=2),
    Mistake(SECTION, "`accumulate_grad_batches` is changed within a window",
        "accumulate_grad_batches was changed to … within a window of …",
        "change it behind the last batch of a window, or between epochs, as GradientAccumulationScheduler does",
        tuple(
            lambda user, length=length: user.fit(
                trainer={"accumulate_grad_batches": 4, "callbacks": [_ChangesTheWindow(length)]}
            )
            for length in (1, 2, 6)
        ), finished=1),
    Mistake(SECTION, "`accumulate_grad_batches` is changed at a batch that is no multiple of it",
        "accumulate_grad_batches was changed to … at batch … of an epoch, which is no multiple of it",
        "Change it at a multiple, or between epochs, as GradientAccumulationScheduler does",
        tuple(
            lambda user, length=length: user.fit(trainer={"callbacks": [_BeginsLongerWindows(length)]})
            for length in (2, 3)
        ), finished=1),
]  # fmt: skip


class _Prunes(zoo.PlainClassifier):
    def on_after_backward(self):
        """So that each batch is a step of its own."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            prune.l1_unstructured(self.model.head, "weight", amount=0.5)


class _Skips(zoo.PlainClassifier):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class _ChangesTheWindow(pl.Callback):
    def __init__(self, length):
        self.length = length

    def on_train_batch_end(self, trainer, *args):
        trainer.accumulate_grad_batches = self.length


class _BeginsLongerWindows(pl.Callback):
    roundpipe_passive_hooks = True

    def __init__(self, length):
        self.length = length

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.accumulate_grad_batches = self.length if batch_idx else 1


def _batches(batch):
    loss = lambda model, batch: model(torch.ones(4, 8)).square().mean()  # noqa: E731
    return computing(loss, batches=[batch] * 3, num_microbatches=2)


SECTION = "The batch"
BATCHES = [
    Mistake(SECTION, "a batch without tensors is to be cut",
        "num_microbatches=… cuts a batch, and this one (…) has no tensors",
        "Leave num_microbatches and microbatch_size out", (_batches({}), _batches([]))),
    Mistake(SECTION, "a batch that holds other things than tensors is to be cut",
        "num_microbatches=… cuts the tensors of a batch, and … is a …",
        "Leave num_microbatches and microbatch_size out",
        (_batches({"x": torch.ones(4, 2), "names": ["a", "b", "c", "d"]}), _batches("text"), _batches(3))),
    Mistake(SECTION, "a batch that holds a tensor of one number is to be cut",
        "num_microbatches=… cuts the tensors of a batch, and … has no dimension",
        "Leave num_microbatches and microbatch_size out",
        (_batches({"x": torch.ones(4, 2), "scale": torch.tensor(0.5)}),)),
    Mistake(SECTION, "a batch whose tensors have different numbers of rows is to be cut",
        "num_microbatches=… cuts a batch along the first dimension of its tensors, and they disagree: … has … rows",
        "Leave num_microbatches and microbatch_size out",
        (_batches(zoo.make_batches("mlp", 1)[0] | {"scale": torch.ones(3)}), _batches([torch.ones(4), torch.ones(5)]))),
    Mistake(SECTION, "a loader that returns `Microbatches` of nothing", "the data loader returned Microbatches([])",
        "a batch needs at least one microbatch", (_batches(Microbatches([])),)),
]  # fmt: skip
