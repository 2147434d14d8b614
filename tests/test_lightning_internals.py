"""The private names of Lightning that the package uses mean what it relies on."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.apply_func import _TransferableDataType
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_roundpipe

PACKAGE = Path(lightning_roundpipe.__file__).parent
USED = {
    "_PrefetchDataFetcher": "trainer/lookahead",
    "_data_fetcher": "trainer/windows trainer/evaluation_window reports/step_monitor",
    "_on_before_batch_transfer": "trainer/lookahead",
    "_state_dicts": "trainer/lookahead",
    "_call_strategy_hook": "trainer/lookahead",
    "_skip_backward": "trainer/windows",
    "_results": "batches/logs",
    "_logger_connector": "batches/logs",
    "_current_fx": "batches/logs",
    "_active_loop": "trainer/evaluation_window",
    "_build_step_args_from_hook_kwargs": "trainer/evaluation_window",
    "_should_accumulate": "strategy",
    "_combined_loader": "trainer/resuming",
    "_Stateful": "trainer/resuming",
    "_batches_that_stepped": "reports/step_monitor",
    "_TransferableDataType": "strategy",
    "_EmptyInit": "strategy",
    "_WrappingCheckpointIO": "strategy",
    "_LRCallback": "trainer/hook_audit",
    "_signal_connector": "trainer/several_machines",
    "_sigterm_notifier_fn": "trainer/several_machines",
    "_val_check_time_interval": "trainer/several_machines trainer/shared_settings",
}
"""Each private name, and the modules that use it."""


@pytest.mark.parametrize("name", USED)
def test_the_modules_use_it(name: str) -> None:
    for module in USED[name].split():
        assert name in (PACKAGE / f"{module}.py").read_text(), f"{module} does not use {name}"


def test_all_imported_private_names_are_listed() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
                private = {alias.name for alias in node.names if alias.name.startswith("_")}
                assert private <= USED.keys(), path


# ------------------------------------------------------------------------------------------------------------- fetchers


class Streamed(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(("dataset", "ahead"), [([0, 1, 2], 0), (Streamed(), 1)], ids=["sized", "streamed"])
def test_fetcher(dataset: Any, ahead: int) -> None:
    """Only a fetcher of a stream fetches ahead. ``done`` is set with the last batch, before the iteration ends."""
    fetcher = _PrefetchDataFetcher()
    assert "done" in vars(fetcher)
    fetcher.setup(CombinedLoader(DataLoader(dataset, batch_size=None)))
    found = []
    for batch, index, loader in fetcher:
        found.append((batch, index, loader, fetcher.done, fetcher.fetched, len(fetcher.batches)))
    assert found == [(i, i, 0, i == 2, min(i + 1 + ahead, 3), min(ahead, 2 - i)) for i in range(3)]
    with pytest.raises(StopIteration):
        next(fetcher)
    fetcher.reset()
    assert (fetcher.fetched, fetcher.done, fetcher.batches) == (0, False, [])


def test_positions_of_loaders() -> None:
    class Stateful(list[int]):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    assert isinstance(Stateful(), _Stateful) and not isinstance([], _Stateful)
    combined = CombinedLoader([[0], Stateful([1])])
    assert combined._state_dicts() == [{"at": 1}]
    vars(combined)["_state_dicts"] = lambda: "replaced"
    assert combined._state_dicts() == "replaced"  # type: ignore[comparison-overlap]


# ---------------------------------------------------------------------------------------------------- a running trainer


class Net(pl.LightningModule):
    """Asks ``seen`` in each of its steps, for what the loops show there."""

    def __init__(self, look: Callable[[Net, str], Any]) -> None:
        super().__init__()
        self.layer, self.look, self.seen = nn.Linear(2, 1), look, list[Any]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(self.look(self, "training_step"))
        loss: Tensor = self.layer(batch).sum()
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.seen.append(self.look(self, "validation_step"))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(look: Callable[[Any, str], Any], validate: bool = False) -> list[Any]:
    """What ``look`` has returned in each step of three batches, in windows of two, or in one of validation."""
    module, trainer = Net(look), harness.trainer_of(accumulate_grad_batches=2)
    data = DataLoader(torch.ones(3, 2))
    if validate:
        trainer.validate(module, data, verbose=False)
    else:
        trainer.fit(module, data)
    return module.seen


LOOKS: dict[str, tuple[Callable[[Any, str], Any], list[Any]]] = {
    "_data_fetcher": (lambda m, _: type(m.trainer.fit_loop._data_fetcher) is _PrefetchDataFetcher, [True] * 3),
    "ready": (lambda m, _: m.trainer.fit_loop.epoch_loop.batch_progress.current.ready, [1, 2, 3]),
    "_skip_backward": (lambda m, _: m.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward, [False] * 3),
    "_results": (lambda m, _: type(m.trainer._results) is _ResultCollection, [True] * 3),
    "_current_fx": (lambda m, _: m.trainer._results is m.trainer._active_loop._results, [True] * 3),
    "_active_loop": (lambda m, _: m.trainer._active_loop is m.trainer.fit_loop, [True] * 3),
    "_should_accumulate": (lambda m, _: m.trainer.fit_loop._should_accumulate(), [True, False, False]),
    "_combined_loader": (lambda m, _: len(m.trainer.fit_loop._combined_loader.flattened), [1] * 3),
    "_batches_that_stepped": (lambda m, _: m.trainer.fit_loop.epoch_loop._batches_that_stepped, [0, 0, 1]),
    "handles_gradient_accumulation": (lambda m, _: m.trainer.strategy.handles_gradient_accumulation, [False] * 3),
}


@pytest.mark.parametrize("name", LOOKS)
def test_loop_of_training(name: str) -> None:
    look, expected = LOOKS[name]
    assert seen(look) == expected


def test_skipped_backward() -> None:
    """Set on the fit loop, as by weight averaging, it is read from the automatic optimization."""

    def skip(module: Any, _: str) -> bool:
        module.trainer.fit_loop._skip_backward = True
        return bool(module.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward)

    assert seen(skip) == [True] * 3


def test_loop_of_evaluation() -> None:
    """A step without ``batch_idx`` gets the batch alone."""

    def look(module: Any, name: str) -> Any:
        loop = module.trainer._active_loop
        args = loop._build_step_args_from_hook_kwargs(loop._build_kwargs("batch", 4, None), name)
        return args, type(loop._data_fetcher) is _PrefetchDataFetcher

    assert seen(look, validate=True) == [(("batch",), True)] * 3


def test_logging() -> None:
    """`LightningModule.log` hands what it is given to the results of the loop, after the hook's name, by keyword."""
    assert list(inspect.signature(_ResultCollection.log).parameters)[1:4] == ["fx", "name", "value"]

    def look(module: Any, name: str) -> Any:
        calls: list[Any] = []
        results = module.trainer._results
        results.log = lambda *args, **kwargs: calls.append((args, "batch_size" in kwargs))
        module.log("loss", 1.0)
        del results.log
        return [(*args[:2], float(args[2]), size) for args, size in calls], module.trainer._logger_connector._current_fx

    assert seen(look)[0] == ([("training_step", "loss", 1.0, True)], "training_step")


def test_transfer_of_a_batch() -> None:
    """Two calls: the hook before the transfer, and the strategy's, which calls the other two."""
    order: list[str] = []

    class Transferred(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            order.append("before")
            return batch

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            order.append("transfer")
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            order.append("after")
            return batch

    def look(module: Any, _: str) -> None:
        order.clear()
        batch = module._on_before_batch_transfer(1, dataloader_idx=0)
        call._call_strategy_hook(module.trainer, "batch_to_device", batch, dataloader_idx=0)
        found.append([*order])

    found: list[list[str]] = []
    harness.trainer_of().fit(Transferred(look), DataLoader(torch.ones(1, 2)))
    assert found == [["before", "transfer", "after"]]


def test_connectors() -> None:
    trainer = harness.trainer_of()
    assert trainer._signal_connector.received_sigterm is False
    assert callable(trainer._signal_connector._sigterm_notifier_fn)


# --------------------------------------------------------------------------------------------------------------- others


def test_what_moves() -> None:
    assert isinstance(torch.ones(1), _TransferableDataType) and not isinstance("text", _TransferableDataType)


def test_empty_init() -> None:
    weight = torch.ones(2)
    with _EmptyInit(enabled=True):
        assert nn.init.constant_(weight, 0.0).tolist() == [1, 1]
    with _EmptyInit(enabled=False):
        assert nn.init.constant_(weight, 0.0).tolist() == [0, 0]


def test_wrapped_checkpoint_io() -> None:
    inner = TorchCheckpointIO()
    wrapper = AsyncCheckpointIO(inner)
    assert isinstance(wrapper, _WrappingCheckpointIO) and wrapper.checkpoint_io is inner


def test_callback_of_the_learning_rate_finder() -> None:
    """It overrides these two hooks and no other one."""
    hooks = {name for name in vars(_LRCallback) if name.startswith("on_")}
    assert hooks == {"on_train_batch_start", "on_train_batch_end"}
