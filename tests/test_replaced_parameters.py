"""User code that gives the model other modules or parameters between batches: the strategy is set up again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
import zoo
from harness import Result, assert_same, assert_tensors_same, ours, run
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

WIDTH = zoo.WIDTH
Change = Callable[[Any], None]
slow = pytest.mark.slow
on_the_grid = pytest.mark.parametrize(
    ("microbatches", "devices"),
    [(2, 2), *(pytest.param(*grid, marks=slow) for grid in ((1, 1), (1, 2), (2, 1), (4, 1), (4, 2)))],
)


class Block(nn.Module):
    def __init__(self, hidden: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.act(self.inner(x)))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h * self.gain)

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: zoo.Batch, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return zoo.modules.sgd(self.parameters())


def made(kind: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return kind()


def joined(module: Net, *parameters: nn.Parameter) -> None:
    module.trainer.optimizers[0].add_param_group({"params": list(parameters)})


def renewed(module: Net) -> None:
    module.trainer.optimizers = [zoo.modules.sgd(module.parameters())]


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def pruned(module: Net) -> None:
    prune.l1_unstructured(module.blocks[1].inner, "weight", amount=0.5)


def all_pruned(module: Net) -> None:
    """Every parameter of a layer: their order stays what it was."""
    for name in ("weight", "bias"):
        prune.l1_unstructured(module.head, name, amount=0.5)


def pruned_for_good(module: Net) -> None:
    pruned(module)
    prune.remove(module.blocks[1].inner, "weight")


def parametrized(module: Net) -> None:
    parametrize.register_parametrization(module.blocks[0].outer, "weight", Symmetric())


def normed(module: Net) -> None:
    parametrizations.weight_norm(module.blocks[0].outer)
    renewed(module)


def new_head(module: Net) -> None:
    module.head = made(lambda: nn.Linear(WIDTH, 5))
    renewed(module)


def head_beside_the_old_one(module: Net) -> None:
    """Whose parameters stay in the optimizer, without gradients."""
    module.head = made(lambda: nn.Linear(WIDTH, 5))
    joined(module, *module.head.parameters())


def new_head_that_is_not_trained(module: Net) -> None:
    module.head = made(lambda: nn.Linear(WIDTH, 5))


def one_more(module: Net) -> None:
    module.blocks.append(made(Block))
    joined(module, *module.blocks[3].parameters())


def one_less(module: Net) -> None:
    del module.blocks[1]


def exchanged(module: Net) -> None:
    module.blocks = nn.ModuleList(reversed(module.blocks))


def other_function(module: Net) -> None:
    """Nothing that has parameters."""
    module.blocks[2].act = nn.GELU()


def other_shapes(module: Net) -> None:
    module.blocks[0] = made(lambda: Block(2 * WIDTH))
    renewed(module)


def fewer_rows(module: Net) -> None:
    """The parameters stay who they are."""
    inner, outer = module.blocks[0].inner, module.blocks[0].outer
    inner.weight.data, inner.bias.data = inner.weight.data[:3].clone(), inner.bias.data[:3].clone()
    outer.weight.data = outer.weight.data[:, :3].clone()
    renewed(module)


def more_rows(module: Net) -> None:
    inner, outer = module.blocks[1].inner, module.blocks[1].outer
    inner.weight.data, inner.bias.data = torch.full((2 * WIDTH, WIDTH), 0.1), torch.zeros(2 * WIDTH)
    outer.weight.data = outer.weight.data.repeat(1, 2)
    renewed(module)


def longer_beside_layers(module: Net) -> None:
    module.gain.data = torch.full((1, WIDTH), 0.7)
    renewed(module)


def beside_layers(module: Net) -> None:
    module.gain = nn.Parameter(torch.full((WIDTH,), 0.7))
    joined(module, module.gain)


def adapters(module: Net) -> None:
    class Low(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base.requires_grad_(False), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    for block in module.blocks:
        block.inner = made(functools.partial(Low, block.inner))
        joined(module, *block.inner.down.parameters(), *block.inner.up.parameters())


def mask(module: Net) -> None:
    """A new buffer, which a hook uses."""
    module.blocks[1].register_buffer("keep", (torch.arange(WIDTH) % 2).float())
    module.blocks[1].register_forward_hook(lambda block, args, out: out * block.keep)


SOME: list[Change] = [all_pruned, parametrized, head_beside_the_old_one, other_function, adapters]
OTHERS: list[Change] = [
    pruned, pruned_for_good, normed, new_head, new_head_that_is_not_trained, one_more, one_less, exchanged,
    other_shapes, fewer_rows, beside_layers, mask,
]  # fmt: skip


class At(pl.Callback):
    """Changes the model once, when ``hook`` is called for the second time."""

    def __init__(self, hook: str, change: Change, *, looks: bool = True) -> None:
        self.calls = 0
        self.roundpipe_looks_away = not looks
        setattr(self, hook, functools.partial(self.called, change))

    def called(self, change: Change, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            change(module)


def batches() -> list[zoo.Batch]:
    return zoo.make_batches("mlp", count=4, samples=8)


EPOCH = "on_train_epoch_start"


def train(
    strategy: Any, change: Change, hook: str = "on_train_epoch_start", devices: int = 1, **options: Any
) -> Result:
    torch.manual_seed(3)
    given = {"max_epochs": 2, "watch": False, "callbacks": [At(hook, change)]} | options
    return run(strategy, Net(), batches(), devices=devices, val_batches=batches()[:1], **given)


@functools.cache
def plain(change: Change, hook: str, **options: Any) -> Result:
    return train("auto", change, hook, **options)


@pytest.mark.parametrize("change", [*SOME, *(pytest.param(change, marks=slow) for change in OTHERS)])
@on_the_grid
def test_between_epochs(change: Change, microbatches: int, devices: int) -> None:
    assert_same(plain(change, EPOCH), train(ours(num_microbatches=microbatches), change, EPOCH, devices))


@pytest.mark.parametrize("hook", [EPOCH, "on_train_epoch_end", "on_train_batch_start"])
@pytest.mark.parametrize("change", [fewer_rows, more_rows, longer_beside_layers])
@on_the_grid
def test_other_shapes_where_gradients_of_the_last_step_are_seen(
    change: Change, hook: str, microbatches: int, devices: int
) -> None:
    """No validation has taken them away: plain Lightning drops them before the next backward."""
    seen = []
    for strategy, workers in (("auto", 1), (ours(num_microbatches=microbatches), devices)):
        torch.manual_seed(3)
        epochs = {"max_epochs": 3, "watch": False, "callbacks": [At(hook, change)]}
        seen.append(run(strategy, Net(), batches(), devices=workers, **epochs))
    assert_same(*seen)


@slow
@pytest.mark.parametrize("change", [*SOME, *OTHERS])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_start"])
def test_between_batches(change: Change, hook: str) -> None:
    assert_same(plain(change, hook), train(ours(num_microbatches=2), change, hook, 2))


@slow
@pytest.mark.parametrize(
    ("change", "precision"), [(pruned, "bf16-mixed"), (adapters, "bf16-mixed"), (pruned, "64-true")]
)
def test_with_a_precision(change: Change, precision: str) -> None:
    expected, found = train("auto", change, precision=precision), train(ours(), change, precision=precision)
    assert_tensors_same(expected.state, found.state, **({"rtol": 0.02, "atol": 0.02} if "16" in precision else {}))


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=slow)])
def test_several_times(staleness: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is said each time. Counters go on."""
    changes = [At("on_train_epoch_start", one_more), At("on_train_epoch_end", pruned)]
    strategy = ours(num_microbatches=2, staleness=staleness)
    found = run(strategy, made(Net), batches(), devices=2, watch=False, max_epochs=4, callbacks=changes)
    assert caplog.text.count("is set up again") == 2
    assert found.report is not None
    assert found.report["weights_bytes_uploaded_total"] > 16 * sum(p.nbytes for p in Block().parameters()) * 3


def test_unchanged_models_stay_attached(caplog: pytest.LogCaptureFixture) -> None:
    def harmless(module: Net) -> None:
        module.extra = nn.Identity()
        module.blocks[0].requires_grad_(False)
        module.head.weight.data = module.head.weight.data * 0.5
        module.blocks[1].flag = 3

    assert_same(plain(harmless, EPOCH), train(ours(), harmless))
    assert "is set up again" not in caplog.text


# ------------------------------------------------------------------------------------------------------ others' memory


class Swaps(pl.Callback):
    """Validates with an average, whose memory changes places with that of the weights; as references, not as copies."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.average: list[nn.Parameter] = []

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.average = [nn.Parameter(p.detach().clone()) for p in module.parameters()]

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        with torch.no_grad():
            for p, e in zip(module.parameters(), self.average, strict=True):
                e.lerp_(p, 0.3)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.kept = [p.data for p in module.parameters()]
        self.swap(module)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self.kind == "kept":
            for p, kept in zip(module.parameters(), self.kept, strict=True):
                p.data = kept
        elif self.kind == "there and back":
            self.swap(module)

    def swap(self, module: Any) -> None:
        for p, e in zip(module.parameters(), self.average, strict=True):
            if self.kind == "kept":
                p.data = e.data
            else:
                p.data, e.data = e.data, p.data


def reset_to_the_same_memory(module: Net) -> None:
    """Training goes on writing to what was assigned."""
    kept = module.__dict__.setdefault("kept", [p.detach().clone() for p in module.head.parameters()])
    for parameter, memory in zip(module.head.parameters(), kept, strict=True):
        parameter.data = memory


CALLBACKS: dict[str, Callable[[], pl.Callback]] = {
    "swapped for validation": lambda: Swaps("there and back"),
    "swapped, and not back": lambda: Swaps("there"),
    "kept while it validates": lambda: Swaps("kept"),
    "pruned again and again": lambda: ModelPruning("l1_unstructured", amount=0.3),
    "pruned, and reset": lambda: ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False),
    "pruned, and not reset": lambda: ModelPruning(
        "random_unstructured", amount=0.3, use_global_unstructured=False, use_lottery_ticket_hypothesis=False
    ),
    "reset": lambda: pl.callbacks.LambdaCallback(on_train_epoch_start=lambda t, m: reset_to_the_same_memory(m)),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if "again" in k or "swapped for" in k else slow) for k in CALLBACKS]
)
@pytest.mark.parametrize("options", [{}, pytest.param({"precision": "bf16-mixed"}, marks=slow)], ids=str)
@on_the_grid
def test_memory_that_callbacks_hold(kind: str, microbatches: int, devices: int, options: dict[str, Any]) -> None:
    found = []
    if options:  # which rounds so much that another order of sums counts
        microbatches = 1
    for strategy, count in (("auto", 1), (ours(num_microbatches=microbatches), devices)):
        callback = CALLBACKS[kind]()
        result = train(strategy, lambda m: None, devices=count, callbacks=[callback], max_epochs=4, **options)
        result.state |= {f"average.{i}": p.detach() for i, p in enumerate(getattr(callback, "average", ()))}
        found.append(result)
    if options:
        assert_tensors_same(found[0].state, found[1].state, rtol=0.02, atol=0.02)
    else:
        assert_same(*found)
