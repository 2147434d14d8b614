"""User code that gives the model other modules or parameters between batches: the strategy is set up again."""

import functools

import lightning.pytorch as pl
import pytest
import small_net
import torch
import zoo
from harness import assert_same, ours, run
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelPruning
from small_net import WIDTH, Block, made
from torch import nn
from torch.nn.utils import parametrize, prune

slow = pytest.mark.slow


class Net(small_net.Net):
    between = small_net.all_of


def joined(module, *parameters):
    module.trainer.optimizers[0].add_param_group({"params": list(parameters)})


def renewed(module):
    module.trainer.optimizers = [zoo.modules.sgd(module.parameters())]


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


def pruned(module):
    prune.l1_unstructured(module.blocks[1].inner, "weight", amount=0.5)


def parametrized(module):
    parametrize.register_parametrization(module.blocks[0].outer, "weight", Symmetric())


def new_head(module):
    module.head = made(lambda: nn.Linear(WIDTH, 5))
    renewed(module)


def head_beside_the_old_one(module):
    """Whose parameters stay in the optimizer, without gradients."""
    module.head = made(lambda: nn.Linear(WIDTH, 5))
    joined(module, *module.head.parameters())


def one_more(module):
    module.blocks.append(made(Block))
    joined(module, *module.blocks[3].parameters())


def other_function(module):
    """Nothing that has parameters."""
    module.blocks[2].act = nn.GELU()


def fewer_rows(module):
    """The parameters stay who they are."""
    inner, outer = module.blocks[0].inner, module.blocks[0].outer
    inner.weight.data, inner.bias.data = inner.weight.data[:3].clone(), inner.bias.data[:3].clone()
    outer.weight.data = outer.weight.data[:, :3].clone()
    renewed(module)


def adapters(module):
    class Low(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base.requires_grad_(False), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    for block in module.blocks:
        block.inner = made(functools.partial(Low, block.inner))
        joined(module, *block.inner.down.parameters(), *block.inner.up.parameters())


def mask(module):
    """A new buffer, which a hook uses."""
    module.blocks[1].register_buffer("keep", (torch.arange(WIDTH) % 2).float())
    module.blocks[1].register_forward_hook(lambda block, args, out: out * block.keep)


SOME = [parametrized, head_beside_the_old_one, other_function, adapters]
OTHERS = [pruned, new_head, one_more, fewer_rows, mask]


class At(pl.Callback):
    """Changes the model once, when ``hook`` is called for the second time."""

    def __init__(self, hook, change, *, looks=True):
        self.calls = 0
        self.roundpipe_passive_hooks = not looks
        setattr(self, hook, functools.partial(self.called, change))

    def called(self, change, trainer, module, *args):
        self.calls += 1
        if self.calls == 2:
            change(module)


def batches():
    return zoo.make_batches("mlp", count=4, samples=8)


EPOCH = "on_train_epoch_start"


def train(strategy, change, hook="on_train_epoch_start", devices=1, **options):
    torch.manual_seed(3)
    given = {"max_epochs": 2, "watch": False, "callbacks": [At(hook, change)]} | options
    return run(strategy, Net(), batches(), devices=devices, val_batches=batches()[:1], **given)


@functools.cache
def plain(change, hook, **options):
    return train("auto", change, hook, **options)


@pytest.mark.parametrize("change", [*SOME, *(pytest.param(change, marks=slow) for change in OTHERS)])
def test_between_epochs(change):
    assert_same(plain(change, EPOCH), train(ours(num_microbatches=2), change, EPOCH, 2))


@slow
@pytest.mark.parametrize("change", SOME)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_between_batches(change, hook):
    assert_same(plain(change, hook), train(ours(num_microbatches=2), change, hook, 2))


def test_within_a_window_it_is_refused():
    """In a validation between batches of a window; `mistakes` has a window whose batches are steps of their own."""
    options = {"accumulate_grad_batches": 4, "val_check_interval": 1}
    with pytest.raises(MisconfigurationException, match="replaced within a window of accumulate_grad_batches=4"):
        train(ours(), one_more, "on_validation_start", 2, **options)


def test_several_times(caplog):
    """It is said each time. Counters go on."""
    changes = [At("on_train_epoch_start", one_more), At("on_train_epoch_end", pruned)]
    strategy = ours(num_microbatches=2)
    found = run(strategy, made(Net), batches(), devices=2, watch=False, max_epochs=4, callbacks=changes)
    assert caplog.text.count("is set up again") == 2
    assert found.report["weights_bytes_uploaded_total"] > 16 * sum(p.nbytes for p in Block().parameters()) * 3


# ------------------------------------------------------------------------------------------------------ others' memory


CALLBACKS = {
    "pruned again and again": lambda: ModelPruning("l1_unstructured", amount=0.3),
    "pruned, and reset": lambda: ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False),
}


@pytest.mark.parametrize("kind", CALLBACKS)
def test_memory_that_callbacks_hold(kind):
    plain, other = (
        train(strategy, lambda m: None, devices=devices, callbacks=[CALLBACKS[kind]()], max_epochs=4)
        for strategy, devices in (("auto", 1), (ours(num_microbatches=2), 2))
    )
    assert_same(plain, other)
