"""Modules and tensors of special kinds: they train as plainly, or are refused by name."""

import functools
import operator

import pytest
import small_net
import torch
import torch.fx
import zoo
from harness import assert_plain, ours, run
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small_net import WIDTH, made
from torch import nn

from lightning_roundpipe.trainer.refusals import refuse_scripted


class Net(small_net.Net):
    """Its `middle` is the case."""

    def middle(self, h):
        return h

    def forward(self, x):
        h = self.middle(self.blocks[0](self.stem(x)))
        return self.head(small_net.all_of(self, self.blocks[2](self.blocks[1](h))))


def check(methods):
    batches = zoo.make_batches("mlp", samples=8)
    assert_plain(made(type("Net", (Net,), methods)), batches, {"num_microbatches": 2}, val_batches=batches[:1])


# ---------------------------------------------------------------------------------------------------- compiled modules


def scripts(path, way):
    """Puts a compiled module in the place of a module; late, as they cannot be copied with the LightningModule."""

    def configure_model(self):
        holder, _, name = path.rpartition(".")
        if not isinstance(self.get_submodule(path), torch.jit.ScriptModule):
            setattr(self.get_submodule(holder), name, way(self.get_submodule(path)))

    return configure_model


def with_graph_modules(self):
    for index, block in enumerate(self.blocks):
        self.blocks[index] = torch.fx.symbolic_trace(block)


def with_transformed_graphs(self):
    """Another function than the module's that was traced."""
    graph = torch.fx.symbolic_trace(self.blocks[1])
    for node in graph.graph.nodes:
        if node.target is operator.add:
            node.target = operator.sub
    graph.recompile()
    self.blocks[1] = graph


MODULES = {
    "a scripted block": {"configure_model": scripts("blocks.1", torch.jit.script)},
    "a scripted part of a block": {"configure_model": scripts("blocks.1.inner", torch.jit.script)},
    "graph modules": {"arrange": with_graph_modules},
    "graphs that were changed": {"arrange": with_transformed_graphs},
}


@pytest.mark.parametrize("kind", MODULES)
def test_compiled_modules(kind):
    check(MODULES[kind])


def test_scripted_modules_are_refused_on_gpus():
    module = made(Net)
    refuse_scripted(module, "cuda")
    module.blocks[1].inner = torch.jit.script(module.blocks[1].inner)
    refuse_scripted(module, "cpu")
    with pytest.raises(MisconfigurationException, match=r"'blocks.1.inner' is compiled by TorchScript: .* on the host"):
        refuse_scripted(module, "cuda")


# ---------------------------------------------------------------------------------------------- tensors that are sparse


class Propagate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, adjacency):
        return (adjacency @ self.linear(x).T).T


def adjacency():
    return (torch.arange(WIDTH**2).view(WIDTH, WIDTH) % 3 == 0) / WIDTH


def uncoalesced(dense):
    sparse = dense.to_sparse()
    return torch.sparse_coo_tensor(
        torch.cat([sparse.indices()] * 2, 1), torch.cat([sparse.values()] * 2) / 2, dense.shape, is_coalesced=False
    )


class Mixes(nn.Module):
    """Its buffers are sparse."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", adjacency().to_sparse_csr(), persistent=False)
        self.register_buffer("pairs", adjacency().to_sparse(), persistent=False)

    def forward(self, x):
        return torch.sparse.mm(self.pairs, torch.sparse.mm(self.rows, self.linear(x).T)).T


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).relu().to_sparse()


SPARSE = {
    "rows": lambda self, h: self.extra(h, adjacency().to_sparse_csr()),
    "uncoalesced": lambda self, h: self.extra(h, uncoalesced(adjacency())),
    "with gradients": lambda self, h: self.extra(h, (adjacency() * self.gain).to_sparse()),
    "returned": lambda self, h: self.extra(self.gate(h).to_dense(), adjacency()),
    "buffers": lambda self, h: self.extra(self.mixes(h), adjacency()),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors_pass_layers(kind):
    def arrange(self):
        self.extra = Propagate()
        if kind == "returned":
            self.gate = Gate()

    def configure_model(self):  # as sparse rows cannot be copied
        if kind == "buffers" and not hasattr(self, "mixes"):
            self.mixes = made(Mixes)

    check({"arrange": arrange, "middle": SPARSE[kind], "configure_model": configure_model})


class Bags(zoo.PlainClassifier):
    """The batch has its features in a sparse matrix, a row for each sample."""

    def loss_and_logits(self, batch):
        h = torch.sparse.mm(batch["words"], self.model.stem.weight.T) + self.model.stem.bias
        for block in self.model.blocks:
            h = block(h)
        logits = self.model.head(h)
        return nn.functional.cross_entropy(logits, batch["y"]), logits


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_in_the_batch():
    module = Bags(zoo.make_module("mlp").model)
    batches = [batch | {"words": batch["x"].relu().to_sparse_csr()} for batch in zoo.make_batches("mlp", 3)]
    assert_plain(module, batches)
    with pytest.raises(ValueError, match=r"batch\['words'\] is a sparse tensor"):
        run(ours(num_microbatches=2), module, batches, devices=2)


def test_sparse_gradients_of_an_embedding():
    """They are dense here; few optimizers take sparse ones."""
    module = zoo.PlainClassifier(nn.Sequential(nn.Embedding(24, 6, sparse=True), nn.Linear(6, 5)))
    module.make_optimizer = lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)
    batches = [{"x": torch.arange(4) + i, "y": torch.arange(4) % 5} for i in range(4)]
    assert_plain(module, batches, accumulate_grad_batches=2, watch=False)


# ------------------------------------------------------------------------------------------- transforms of torch.func


def ensemble(self, h):
    """Of the rows of two parameters, as heads of one module that has none of its own."""
    one = nn.Linear(WIDTH, WIDTH, device="meta", bias=False)
    call = functools.partial(torch.func.functional_call, one)
    return torch.func.vmap(lambda weight: call({"weight": weight}, (h,)))(torch.stack([self.mix, self.mix.T])).mean(0)


TRANSFORMS = {
    "vmap over samples": lambda self, h: torch.vmap(lambda x: self.mix @ (x * self.gain))(h),
    "jvp": lambda self, h: sum(torch.func.jvp(lambda g: torch.tanh(h * g), (self.gain,), (self.mix[0],))),
    "jacrev for each sample": lambda self, h: torch.vmap(torch.func.jacrev(lambda x: torch.tanh(x * self.gain)))(h).sum(
        1
    ),
    "functional_call": ensemble,
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_of_parameters_between_layers(kind):
    check({"middle": TRANSFORMS[kind]})
