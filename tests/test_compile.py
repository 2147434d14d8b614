"""Layers that the strategy compiles: the numbers of plain training, and few compilations."""

import gc
import shutil
import threading
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import Learner, assert_identical, assert_same, callback, halves, ours, per_call, run, seeded, single
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion
from torchao import float8

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.compiling import CompiledForwards


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Module(Learner, optimizer=torch.optim.AdamW, lr=0.01):
    def __init__(self, dropout=0.0):
        super().__init__()
        with seeded(5):
            self.blocks = nn.ModuleList(Block(dropout) for _ in range(5))

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return (x - batch["y"]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


class Counting(pl.Callback):
    """A backend that counts the graphs it is given, forward and backward, and how many there were after each step."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.forward = self.backward = 0
        self.after = []
        self.lazy = False
        self._compiling = threading.local()

    def __call__(self, graph, inputs):
        self._compiling.now = True
        try:
            return aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)(graph, inputs)
        finally:
            self._compiling.now = False

    def _forward(self, graph, inputs):
        self.forward += 1
        return graph.forward

    def _backward(self, graph, inputs):
        self.backward += 1
        self.lazy |= not getattr(self._compiling, "now", False)
        return graph.forward

    def on_train_batch_end(self, *args, **kwargs):
        self.after.append(self.forward)


LAYERS = ["Block"]


def batches(count, samples=4):
    generator = torch.Generator().manual_seed(3)
    return [{key: torch.randn(samples, 16, generator=generator) for key in "xy"} for _ in range(count)]


def compiled(backend, **options):
    return ours(compile_layers={"backend": backend}, layers=LAYERS, num_microbatches=2, **options)


def test_evaluation_runs_compiled_too():
    given, counting = batches(2), Counting()
    plain = run("auto", Module(), given, val_batches=given)
    strategy = compiled(counting)
    result = run(strategy, Module(), given, val_batches=given, devices=2, callbacks=[counting])
    torch.testing.assert_close(result.metrics["val_loss"], plain.metrics["val_loss"])
    assert counting.forward == 2 + 1  # without gradients it is another code


def test_compiled_code_holds_no_memory():
    """It was made with the weights of one moment."""
    arenas = []

    def note(trainer, *_):
        for worker in trainer.strategy._engine.context.pool.workers:
            arenas.append(StorageWeakRef(worker.planned.arena.buffer.untyped_storage()))

    noting = callback(passive=True, on_train_batch_end=note)
    run(compiled(Counting()), Module(), batches(3), devices=2, callbacks=[noting])
    gc.collect()
    assert arenas and all(memory.expired() for memory in arenas)


class CompilesItsLoss(Module):
    """In training and validation, with functions that call others."""

    def __init__(self, backend):
        super().__init__()
        self.backend = backend
        self.distance = torch.compile(self.as_written, backend=backend)

    def as_written(self, x, y):
        return F.smooth_l1_loss(F.layer_norm(x, (16,)).tanh() * 2, y) + (x - y).square().mean()

    def __deepcopy__(self, memo):
        made = CompilesItsLoss(self.backend)
        made.load_state_dict(self.state_dict())
        return made

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return self.distance(x, batch["y"])


def test_functions_that_user_code_has_compiled_run_as_written():
    """They were compiled with the modes that their operations pass through, once for each operation."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph

    given = batches(4)
    expected = run("auto", CompilesItsLoss(backend), given, val_batches=given[:1])
    graphs.clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trained = run(ours(num_microbatches=2), CompilesItsLoss(backend), given, devices=2, val_batches=given[:1])
    assert_same(expected, trained)
    assert not graphs


class InARow(Module):
    """Blocks in a module of their own, compiled by the user in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.net = nn.Sequential(*self.blocks)
        del self.blocks
        self.way = way

    def setup(self, stage):
        self.way(self)

    def training_step(self, batch, batch_idx):
        return (self.net(batch["x"]) - batch["y"]).square().mean()


def wraps_whole(module):
    module.net = torch.compile(module.net, backend="eager")


def wraps_layers(module):
    module.net = nn.Sequential(*(torch.compile(block, backend="eager") for block in module.net))


def compiles_whole(module):
    module.net.compile(backend="eager")


def compiles_layers(module):
    for block in module.net:
        block.compile(backend="eager")


@pytest.mark.parametrize("way", [wraps_whole, wraps_layers, compiles_whole, compiles_layers])
def test_what_users_compile(way):
    """Runs as written, with a warning; with `compile_layers`, each layer is compiled once for all workers."""
    given, counting = batches(8), Counting()
    module = InARow(way)
    plain = run("auto", module, given, accumulate_grad_batches=4)
    with pytest.warns(RoundPipeWarning, match=r"torch.compile was applied to 'net.*set compile_layers=True"):
        assert_same(plain, run(ours(layers=LAYERS), module, given, devices=3, accumulate_grad_batches=4))
    strategy = ours(layers=LAYERS, compile_layers={"backend": counting})
    assert_same(plain, run(strategy, module, given, devices=3, accumulate_grad_batches=4, callbacks=[counting]))
    assert counting.after == [2] * 8 and counting.backward == 2  # the batch itself wants no gradient
    assert not counting.lazy, "a backward was compiled when it first ran, when other threads may do the same"


class Broken(Exception):
    pass


def test_what_cannot_be_compiled_names_the_setting():
    def backend(graph, inputs):
        raise Broken("no compiler")

    with pytest.raises(RoundPipeError, match=r"layer 'blocks.0' could not be compiled .*compile_layers") as caught:
        run(compiled(backend), Module(), batches(2), devices=2)
    assert "no compiler" in str(caught.value.__cause__)


def test_more_variants_than_torch_keeps_are_named():
    """Torch would go on with the layer as it is written, whose bits are others, and say so in its log only."""
    settings = {"backend": "eager", "dynamic": False}
    strategy = ours(compile_layers=settings, layers=LAYERS, num_microbatches=1)
    message = r"layer 'blocks.\d' has more variants .*recompile_limit=2.*compile_layers={'dynamic': True}"
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(RoundPipeError, match=message):
        run(strategy, Module(), [batches(1, samples)[0] for samples in (2, 3, 4)])


class Rounding(Counting):
    """Code for sizes that are fixed rounds otherwise than code for any, as torch's own compiler would have it."""

    def _forward(self, graph, inputs):
        factor = 1 if any(isinstance(x, torch.SymInt) for x in inputs) else 1 + 2**-10

        def rounded(*args):
            return [x * factor if torch.is_tensor(x) and x.is_floating_point() else x for x in graph.forward(*args)]

        return rounded


@pytest.mark.slow
def test_sizes_that_came_before_do_not_matter():
    """A microbatch of 4 after those of 3 would be recomputed by another code than its forward; so would one of 16."""
    given = [batches(1, count)[0] for count in (64, 61, 64, 61)]
    results = []
    for plan, devices in ((single, 1), (per_call, 2)):
        torch._dynamo.reset()  # what it has learned about sizes, from one of these runs, another test or an earlier fit
        settings = {"compile_layers": {"backend": Rounding()}, "num_microbatches": 4, "plan": plan(5, 4)}
        results.append(run(ours(layers=LAYERS, **settings), Module(), given, devices=devices))
    assert_identical(*results)


@pytest.mark.slow
def test_a_language_model_equals_plain_training():
    module, given, counting = zoo.make_module("llama", True), zoo.make_batches("llama", 5), Counting()
    plain = run("auto", module, given)
    strategy = ours(compile_layers={"backend": counting, "dynamic": True}, num_microbatches=2)
    result = run(strategy, module, given, devices=2, callbacks=[counting])
    assert_same(plain, result, rtol=2e-4, atol=2e-5)  # Adam makes more of rounding with each step
    assert counting.after[1:] == [counting.after[1]] * 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for CPUs needs one for C++")
def test_with_torchs_own_compiler():
    """It has random numbers of its own making, which are the same whoever asks for them again."""
    options, given = {"compile_layers": True, "layers": LAYERS, "num_microbatches": 2}, batches(3)
    plain = run("auto", Module(), given)
    assert_same(plain, run(ours(**options, plan=halves(5, 2)), Module(), given, devices=2))
    one, other = (
        run(ours(**options, plan=plan(5, 2)), Module(0.3), given, devices=devices)
        for plan, devices in ((single, 1), (per_call, 2))
    )
    assert_identical(one, other)


class Float8(Module):
    """Blocks whose products are in fp8."""

    def __init__(self, recipe):
        super().__init__()
        config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        float8.convert_to_float8_training(self.blocks, config=config)


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("aot_eager", "tensorwise"),
        ("aot_eager", "rowwise"),
        pytest.param("inductor", "rowwise", marks=pytest.mark.slow),
    ],
)
def test_layers_in_fp8(backend, recipe):
    """Code that rounds as the layers do gives their numbers, and torch's own compiler the same for any plan."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch's compiler for CPUs needs one for C++")
    given = batches(3)
    found = run(compiled(backend, plan=halves(5, 2)), Float8(recipe), given, devices=2)
    if backend == "inductor":
        other = compiled(backend, plan=single(5, 2))
        assert_identical(run(other, Float8(recipe), given), found)
    else:
        written = run(ours(layers=LAYERS, num_microbatches=2), Float8(recipe), given, devices=2)
        assert_same(written, found)


def test_a_compiler_that_ends_the_process_is_refused(monkeypatch):
    """In torch 2.11, `FakeTensorMode` leaves a pointer to a guard of CUDA behind that dies with its thread."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="install torch's CPU build, or upgrade torch"):
        CompiledForwards({})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    CompiledForwards({})
