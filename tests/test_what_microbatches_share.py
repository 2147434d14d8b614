"""State that the engine cannot keep apart for each microbatch, and hooks inside layers, which run once."""

from __future__ import annotations

import collections
import dataclasses
import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from harness import assert_same, loader, ours, run, trainer_of
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.profile.outside_writes import OutsideWrites
from lightning_roundpipe.runtime.reporting.hints import Hints

KEPT: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any = None


class Shelf:
    """What a class keeps."""

    value: ClassVar[Any] = None
    single: ClassVar[Any] = None

    @classmethod
    def get(cls) -> Any:
        if cls.single is None:
            cls.single = cls()
        return cls.single


def remembers() -> None:
    """Keeps something in an attribute of its own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Module(pl.LightningModule):
    """Keeps what its second layer gives in ``place``, and reads it behind the last one."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(4)).double()
        self.place = place
        self.helper, self.slotted, self.queue = Shelf(), Slotted(), collections.deque([None], maxlen=1)
        self.nested, self.holder = {"a": {"b": None}}, nn.Module()
        self.tensor, self.array = torch.zeros(6, dtype=torch.float64), np.zeros(6)
        held = [None]
        self.put, self.take = (lambda value: held.__setitem__(0, value)), (lambda: held[0])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = batch
        for i, block in enumerate(self.blocks):
            h = block(h)
            if i == 1:
                WAYS[self.place][0](self, h)
        return h.square().mean() + (h * WAYS[self.place][1](self)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _global(module: Module, value: Tensor) -> None:
    global KEPT
    KEPT = value.detach()


Way = tuple[Callable[[Module, Tensor], Any], Callable[[Module], Any]]
WAYS: dict[str, Way] = {
    "object": (lambda m, h: setattr(m.helper, "value", h), lambda m: m.helper.value),
    "object, detached": (lambda m, h: setattr(m.helper, "value", h.detach()), lambda m: m.helper.value),
    "slots": (lambda m, h: setattr(m.slotted, "value", h), lambda m: m.slotted.value),
    "closure": (lambda m, h: m.put(h.detach()), lambda m: m.take()),
    "global": (_global, lambda m: KEPT),
    "class": (lambda m, h: setattr(Shelf, "value", h.detach()), lambda m: Shelf.value),
    "own class": (lambda m, h: setattr(Module, "kept", h.detach()), lambda m: Module.kept),  # type: ignore[attr-defined]
    "singleton": (lambda m, h: setattr(Shelf.get(), "x", h.detach()), lambda m: Shelf.get().x),
    "function": (lambda m, h: setattr(remembers, "x", h.detach()), lambda m: remembers.x),  # type: ignore[attr-defined]
}
APART: dict[str, Way] = {
    "attribute": (lambda m, h: setattr(m, "kept", h), lambda m: m.kept),
    "queue": (lambda m, h: m.queue.append(h.detach()), lambda m: m.queue[-1]),
    "nested": (lambda m, h: m.nested["a"].update(b=h), lambda m: m.nested["a"]["b"]),
    "another module": (lambda m, h: setattr(m.holder, "kept", h), lambda m: m.holder.kept),
}
LIKE_THE_WHOLE: dict[str, Way] = {
    "tensor": (lambda m, h: m.tensor.copy_(h[0].detach().sign()), lambda m: m.tensor),
    "array": (lambda m, h: m.array.__setitem__(slice(None), h[0].detach().sign()), lambda m: torch.as_tensor(m.array)),
}
"""Of which the whole batch keeps what its first sample gives."""
WAYS |= APART | LIKE_THE_WHOLE


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why microbatches run one after another."""
    said: list[str] = []
    real = Hints.say

    def say(self: Hints, key: str, text: str) -> None:
        if key == "order":
            said.append(text)
        real(self, key, text)

    monkeypatch.setattr(Hints, "say", say)
    return said


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("place", [place for place in WAYS if place not in LIKE_THE_WHOLE])
def test_each_finds_what_it_has_kept(place: str, microbatches: int, devices: int, told: list[str]) -> None:
    expected = run("auto", Module(place), batches())
    assert_same(expected, run(ours(num_microbatches=microbatches), Module(place), batches(), devices=devices))
    assert len(told) == (microbatches > 1 and place not in APART)


@pytest.mark.parametrize("place", LIKE_THE_WHOLE)
def test_memory_that_is_written_to(place: str, told: list[str]) -> None:
    """One microbatch after another, as plain training that accumulates gradients would."""
    parts = [part for batch in batches() for part in batch.chunk(4)]
    expected = run("auto", Module(place), parts, accumulate_grad_batches=4)
    strategy = ours(num_microbatches=4, loss_weight=lambda part: 1.0)
    trained = run(strategy, Module(place), batches(), devices=2)
    assert told, "it is not the whole batch's"
    for name, value in expected.state.items():
        torch.testing.assert_close(trained.state[name], value)


def test_without_the_look_it_is_another_microbatchs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("auto", Module("object, detached"), batches())
    monkeypatch.setattr(OutsideWrites, "_see", lambda *_: None)
    plan = "forward 0 1 2; fused 3; backward 2 1 0; round 4"
    strategy = ours(num_microbatches=4, plan=plan)
    with pytest.raises(AssertionError):
        assert_same(expected, run(strategy, Module("object, detached"), batches(), devices=2))


def test_a_plan_that_was_asked_for_is_refused() -> None:
    strategy = ours(num_microbatches=4, plan="forward 0-2; fused 3; backward 0-2; round 4")
    with pytest.raises(ValueError, match=r"code between layers changes 'helper\.value'.*: leave plan out"):
        run(strategy, Module("object"), batches(), devices=2)


class Behind(Module):
    """What changes behind the last layer alone is read by nobody on the way."""

    def __init__(self) -> None:
        super().__init__("attribute")
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.helper.last = float(loss)  # type: ignore[attr-defined]
        return loss


def test_what_changes_at_the_end_keeps_the_plan(told: list[str]) -> None:
    run(ours(num_microbatches=4), Behind(), batches(), devices=2)
    assert not told


class Records(Module):
    """Writes down what passes, on the way, and never computes with it."""

    def __init__(self) -> None:
        super().__init__("attribute")
        self.helper.seen = []  # type: ignore[attr-defined]
        for block in self.blocks:
            block.register_forward_hook(lambda *_: self.helper.seen.append(1))  # type: ignore[attr-defined]


def test_what_is_only_written_down_keeps_the_plan(told: list[str]) -> None:
    trained = run(ours(num_microbatches=4), Records(), batches(), devices=2)
    assert not told
    assert_same(run("auto", Records(), batches()), trained)


class Times(Records):
    """Logs a time as well, which differs from run to run."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        start = time.perf_counter()
        loss = super().training_step(batch, batch_idx)
        self.log("seconds", time.perf_counter() - start)
        return loss


def test_times_are_not_taken_for_what_another_microbatch_has_left(told: list[str]) -> None:
    run(ours(num_microbatches=4), Times(), batches(), devices=2)
    assert not told


# -- hooks inside layers -----------------------------------------------------------------------------------------------


class Hooked(Module):
    """``kind`` of hooks on modules inside its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__("attribute")
        self.kind = kind

    def on_fit_start(self) -> None:
        self.seen: list[Any] = []
        self.kept_by_hooks: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            HOOKS[self.kind](self, i, block)


def _changing(module: Hooked, i: int, block: Any) -> None:
    block.up.register_forward_hook(lambda m, args, out: 0.5 * out)


def _in_place(module: Hooked, i: int, block: Any) -> None:
    def hook(m: Any, args: Any, out: Tensor) -> None:
        out.mul_(0.5)

    block.up.register_forward_hook(hook)


def _setting(module: Hooked, i: int, block: Any) -> None:
    """As weight normalisation does."""
    block.up.register_forward_pre_hook(lambda m, args: setattr(m, "factor", 0.5 * args[0].mean(-1, keepdim=True)))
    block.up.register_forward_hook(lambda m, args, out: out * m.factor)


def _hooking(module: Hooked, i: int, block: Any) -> None:
    """Its hook hooks the tensor."""

    def hook(m: Any, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: 2 * grad)

    block.up.register_forward_hook(hook)


HOOKS: dict[str, Callable[[Any, int, Any], Any]] = {
    "list": lambda m, i, block: block.up.register_forward_hook(lambda _, args, out: m.seen.append((i, len(out)))),
    "before": lambda m, i, block: block.down.register_forward_pre_hook(lambda _, args: m.seen.append(args[0].shape)),
    "keywords": lambda m, i, block: block.up.register_forward_hook(
        lambda _, args, kwargs, out: m.seen.append((i, len(kwargs))), with_kwargs=True
    ),
    "dict": lambda m, i, block: block.up.register_forward_hook(
        lambda _, args, out: m.kept_by_hooks.__setitem__(i, out.detach().clone())
    ),
    "changing": _changing,
    "in place": _in_place,
    "setting": _setting,
    "hooking": _hooking,
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_inside_layers(kind: str, devices: int) -> None:
    """They run as often as in plain training, in its order, with its values; those that act act each time."""
    expected = run("auto", Hooked(kind), batches())
    trained = run(ours(num_microbatches=1), Hooked(kind), batches(), devices=devices)
    assert_same(expected, trained)
    assert trained.module.seen == expected.module.seen
    assert trained.module.kept_by_hooks.keys() == expected.module.kept_by_hooks.keys()
    for key, value in expected.module.kept_by_hooks.items():
        torch.testing.assert_close(trained.module.kept_by_hooks[key], value)


@pytest.mark.parametrize("kind", ["dict", "changing", "in place", "setting", "hooking"])
def test_hooks_inside_layers_of_microbatches(kind: str) -> None:
    expected = run("auto", Hooked(kind), batches())
    trained = run(ours(num_microbatches=4), Hooked(kind), batches(), devices=2)
    assert_same(expected, trained)
    for key, value in expected.module.kept_by_hooks.items():
        torch.testing.assert_close(trained.module.kept_by_hooks[key], value[-2:])


class Reading(Hooked):
    """Computes with what a hook inside a layer has kept."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(kept.square().mean() for kept in self.kept_by_hooks.values()) * loss  # type: ignore[no-any-return]


def test_what_hooks_kept_is_the_microbatchs(told: list[str]) -> None:
    """`expected` accumulates: the product of two means is not that of the whole batch."""
    parts = [part for batch in batches() for part in batch.chunk(4)]
    expected = run("auto", Reading("dict"), parts, accumulate_grad_batches=4)
    strategy = ours(num_microbatches=4, loss_weight=lambda part: 1.0)
    trained = run(strategy, Reading("dict"), batches(), devices=2)
    assert len(told) == 1 and "inside layer 'blocks.0'" in told[0]
    for name, value in expected.state.items():
        torch.testing.assert_close(trained.state[name], value)


# ------------------------------------------------------------------------------------- rows that hooks find afterwards


def _sets(module: Any, h: Tensor, batch: Tensor) -> None:
    module.kept = h


def _sets_a_tuple(module: Any, h: Tensor, batch: Tensor) -> None:
    module.kept = (h, len(module.blocks), {"batch": batch})


def _fills_a_dict(module: Any, h: Tensor, batch: Tensor) -> None:
    module.shelf["h"] = h.detach()


def _sets_on_another_module(module: Any, h: Tensor, batch: Tensor) -> None:
    module.holder.kept = [h.detach(), batch]


class KeepsRows(Module):
    """Its hooks compute with the rows that training_step has kept, whichever microbatch had them."""

    def __init__(self, keep: Callable[[Any, Tensor, Tensor], None], reads: Callable[[Any], Tensor]) -> None:
        super().__init__("attribute")
        self.keep, self.reads, self.shelf = keep, reads, dict[str, Tensor]()
        self.register_buffer("center", torch.zeros(6, dtype=torch.float64))
        self.rows: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = batch
        for block in self.blocks:
            h = block(h)
        self.keep(self, h, batch)
        return (h - self.center).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        kept = self.reads(self)
        self.rows.append(len(kept))
        self.center.lerp_(kept.detach().mean(0), 0.1)


KEEPS_ROWS: dict[str, tuple[Callable[[Any, Tensor, Tensor], None], Callable[[Any], Tensor]]] = {
    "attribute": (_sets, lambda m: m.kept),
    "tuple": (_sets_a_tuple, lambda m: m.kept[0] + m.kept[2]["batch"] * m.kept[1]),
    "dict": (_fills_a_dict, lambda m: m.shelf["h"]),
    "another module": (_sets_on_another_module, lambda m: m.holder.kept[0] + m.holder.kept[1]),
}


class KeepingBlock(Block):
    """Keeps what it has computed, as code that draws attention maps does."""

    kind = "attribute"

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.kind == "attribute":
            self.kept = hidden
        elif self.kind == "within":
            self.up.kept = hidden.detach()  # of a module within the layer
        else:
            self.maps = {"hidden": [hidden.detach()]}
        return x + self.down(hidden)


KEPT_BY_LAYERS: dict[str, Callable[[Any], Tensor]] = {
    "attribute": lambda block: block.kept,
    "within": lambda block: block.up.kept,
    "dict": lambda block: block.maps["hidden"][0],
}


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("kind", KEPT_BY_LAYERS)
def test_hooks_find_the_rows_that_layers_keep(kind: str, microbatches: int) -> None:
    """They found the last microbatch's."""

    def module() -> KeepsRows:
        made = KeepsRows(lambda *_: None, lambda m: KEPT_BY_LAYERS[kind](m.blocks[1])[:, :6])
        torch.manual_seed(4)
        made.blocks[1] = KeepingBlock().to(torch.float64)
        made.blocks[1].kind = kind
        return made

    expected = run("auto", module(), batches(4))
    trained = run(ours(num_microbatches=microbatches), module(), batches(4), devices=2)
    assert_same(expected, trained)
    assert trained.module.rows == expected.module.rows == [8] * 4


FEATURES: dict[str, Tensor] = {}


class Extracts(KeepsRows):
    """Keeps what a layer gives in ``self.features`` or in a global, as hooks that extract features do."""

    def __init__(self, place: str) -> None:
        super().__init__(lambda *_: None, lambda m: (m.features if place == "attribute" else FEATURES)["h"])
        self.features: dict[str, Tensor] = {}
        self.place = place

    def setup(self, stage: str) -> None:
        features = self.features if self.place == "attribute" else FEATURES
        self.blocks[1].register_forward_hook(lambda module, args, output: features.update(h=output.detach()))


@pytest.mark.parametrize("place", ["attribute", "global"])
def test_features_that_hooks_on_layers_extract(place: str, recwarn: pytest.WarningsRecorder) -> None:
    """In attributes they are those of the batch; elsewhere those of the last microbatch, which a warning says."""
    expected = run("auto", Extracts(place), batches(4))
    trained = run(ours(num_microbatches=4), Extracts(place), batches(4), devices=2)
    said = [str(one.message) for one in recwarn if issubclass(one.category, RoundPipeWarning)]
    if place == "attribute":
        assert_same(expected, trained)
        assert trained.module.rows == [8] * 4 and not said
    else:
        assert trained.module.rows == [2] * 4
        assert len(said) == 1 and "['h']\" keeps a row for each sample" in said[0]


@pytest.mark.parametrize("samples", [8, 7])
@pytest.mark.parametrize("kind", KEEPS_ROWS)
def test_hooks_find_the_rows_of_all_microbatches(kind: str, samples: int) -> None:
    """They found the last one's, and computed with these alone."""
    data = [batch[:samples] for batch in batches(4)]
    expected = run("auto", KeepsRows(*KEEPS_ROWS[kind]), data)
    trained = run(ours(num_microbatches=4), KeepsRows(*KEEPS_ROWS[kind]), data, devices=2)
    assert_same(expected, trained)
    assert trained.module.rows == expected.module.rows == [samples] * 4


def test_rows_are_no_sums() -> None:
    """A sum with as many numbers as a microbatch has samples is left as the last microbatch has left it."""

    def keep(module: Any, h: Tensor, batch: Tensor) -> None:
        module.kept = h.detach()[:1].sign().flatten()[:2]

    expected = run("auto", KeepsRows(keep, lambda m: m.kept[:, None]), batches())
    trained = run(ours(num_microbatches=4), KeepsRows(keep, lambda m: m.kept[:, None]), batches(), devices=2)
    assert trained.module.rows == expected.module.rows == [2] * 3


def test_rows_that_nobody_reads_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be large, as logits are."""

    class Unread(KeepsRows):
        on_train_batch_end = pl.LightningModule.on_train_batch_end

    module = Unread(*KEEPS_ROWS["attribute"])
    trainer_of(ours(num_microbatches=4), devices=2).fit(module, loader(batches()))
    assert len(module.kept) == 2


# ------------------------------------------------------------------------------------------- what layers leave in them


class Adding(torchmetrics.Metric):
    """Replaces its state, where others add to it in place."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.sum()

    def compute(self) -> Tensor:
        return self.total


class LeavingBlock(Block):
    def __init__(self, leave: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.leave, self.total, self.seen, self.metric = leave, torch.zeros(()), 0, Adding()
        self.loads: dict[str, Tensor] = {}
        self.grown: list[Any] = []
        self.last: collections.deque[Any] = collections.deque(maxlen=2)
        self.lists: dict[str, list[Any]] = collections.defaultdict(list)
        self.set, self.all = set[float](), torch.zeros(0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.training:
            self.leave(self, x.detach())
        return x


def _adds(block: Any, x: Tensor) -> None:
    block.total = block.total + x.sum()


def _counts(block: Any, x: Tensor) -> None:
    block.seen += len(x)


def _updates(block: Any, x: Tensor) -> None:
    block.metric.update(x)


def _appends(block: Any, x: Tensor) -> None:
    block.grown.append(x.mean())


def _appends_numbers(block: Any, x: Tensor) -> None:
    block.last.append(float(x.mean()))


def _appends_within(block: Any, x: Tensor) -> None:
    block.loads.setdefault("means", []).append(x.mean())


def _adds_to_a_set(block: Any, x: Tensor) -> None:
    block.set.add(float(x.mean()))


def _concatenates(block: Any, x: Tensor) -> None:
    block.all = torch.cat([block.all, x[:, 0]])


def _appends_the_width(block: Any, x: Tensor) -> None:
    block.grown.append(x.shape[1])


def _sets_a_mean(block: Any, x: Tensor) -> None:
    block.loads = {"mean": x.mean(0)}


def _sets_rows(block: Any, x: Tensor) -> None:
    block.loads = {"rows": x}


def _sets_the_last(block: Any, x: Tensor) -> None:
    block.total = x[-1]


def _sets_the_width(block: Any, x: Tensor) -> None:
    block.seen = x.shape[1]


class ReadsAll(KeepsRows):
    """Computes the names of the attributes that a hook reads."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None, lambda m: torch.zeros(1, 6).double())

    def on_train_epoch_end(self) -> None:
        self.found = [vars(block)[name] for block in self.blocks for name in ("lo" + "ads",) if name in vars(block)]


def leaving(leave: Callable[[Any, Tensor], None], *, reads: bool) -> Module:
    made = ReadsAll() if reads else Module("attribute")
    torch.manual_seed(4)
    made.blocks[1] = LeavingBlock(leave).to(torch.float64)
    return made


@pytest.mark.parametrize(
    ("leave", "reads", "name"),
    [
        (_adds, False, "blocks.1.total"),
        (_counts, False, "blocks.1.seen"),
        (_updates, False, "blocks.1.metric"),
        (_appends, False, "blocks.1.grown"),
        (_appends_numbers, False, "blocks.1.last"),
        (_appends_within, False, "blocks.1.loads"),
        (_adds_to_a_set, False, "blocks.1.set"),
        (_concatenates, True, "blocks.1.all"),
        (_sets_a_mean, True, "blocks.1.loads"),
    ],
)
@pytest.mark.parametrize("scope", ["auto", "model"])
def test_it_is_said_that_a_layer_leaves_what_is_the_last_parts(
    leave: Callable[[Any, Tensor], None], reads: bool, name: str, scope: str
) -> None:
    strategy = ours(num_microbatches=2, microbatch_scope=scope)
    with pytest.warns(RoundPipeWarning, match=f"^roundpipe: [\"']{name}.*, inside a layer, is not what the whole"):
        run(strategy, leaving(leave, reads=reads), batches(2), devices=2, watch=False)


def test_rows_are_the_last_parts_where_calls_of_the_model_are_cut() -> None:
    strategy = ours(num_microbatches=2, microbatch_scope="model")
    with pytest.warns(RoundPipeWarning, match=r"^roundpipe: 'blocks.1.loads', inside a layer, is not what the whole"):
        run(strategy, leaving(_sets_rows, reads=True), batches(2), devices=2, watch=False)


class GoesOn(Block):
    """Computes with what it has kept of the batch before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept = kind, [torch.zeros(1, 6, dtype=torch.float64)]
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.before if self.kind != "list" else self.kept[-1]
        out = super().forward(x)
        if self.kind == "mean":
            self.before = x.detach().mean(0, keepdim=True)
        elif self.kind == "list":
            self.kept.append(x.detach())
        else:
            self.before = x.detach()
        return out if before is None else out + 0.3 * before.mean(0)


@pytest.mark.parametrize("kind", ["mean", "rows", "list"])
def test_it_is_said_that_a_layer_computes_with_what_the_batch_before_has_left(kind: str) -> None:
    """It finds the last microbatch's, and trained on other numbers without a word."""
    module = Module("attribute")
    module.blocks[1] = GoesOn(kind).to(torch.float64)
    name = "kept" if kind == "list" else "before"
    with pytest.warns(RoundPipeWarning, match=f"^roundpipe: 'blocks.1.{name}', inside a layer, .* has begun with"):
        run(ours(num_microbatches=2), module, batches(2), devices=2, watch=False)


@pytest.mark.parametrize(
    ("leave", "reads", "microbatches"),
    [
        (_adds, True, 1),
        (_sets_a_mean, False, 2),  # nobody looks
        (_sets_rows, True, 2),
        (_sets_the_last, True, 2),
        (_sets_the_width, True, 2),
        (_appends_the_width, True, 2),
    ],
)
def test_what_layers_leave_as_plainly_is_not_spoken_of(
    leave: Callable[[Any, Tensor], None], reads: bool, microbatches: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        strategy = ours(num_microbatches=microbatches)
        run(strategy, leaving(leave, reads=reads), batches(2), devices=2, watch=False)


GROWN_ROWS: dict[str, tuple[Callable[[Any, Tensor], None], Callable[[Any], list[Tensor]]]] = {
    "list": (lambda block, x: block.grown.append(x), lambda block: block.grown),
    "tuples": (lambda block, x: block.grown.append((x, 1)), lambda block: [x for x, _ in block.grown]),
    "deque": (lambda block, x: block.last.append(x), lambda block: list(block.last)),
    "dict of lists": (lambda block, x: block.lists["x"].append(x), lambda block: block.lists["x"]),
    "dict": (lambda block, x: block.loads.update({f"{len(block.loads)}": x}), lambda block: [*block.loads.values()]),
}


@pytest.mark.parametrize("hook", [None, "on_train_epoch_end", "on_train_batch_end"])
@pytest.mark.parametrize("kind", GROWN_ROWS)
def test_lists_that_grow_in_layers_have_the_rows_of_all_batches(kind: str, hook: str | None) -> None:
    """They had the last microbatches' of all batches but the last, without a word."""
    leave, rows_of = GROWN_ROWS[kind]
    ragged = [batch[: 8 - number % 3] for number, batch in enumerate(batches(4))]
    read: list[list[Tensor]] = []

    class Reads(pl.Callback):
        pass

    if hook is not None:
        setattr(Reads, hook, lambda self, trainer, module, *_: read.append([*rows_of(module.blocks[1])]))

    def rows(strategy: Any, devices: int) -> list[Tensor]:
        read.clear()
        module = leaving(leave, reads=False)
        trainer_of(strategy, devices=devices, max_epochs=2, callbacks=[Reads()]).fit(module, loader(ragged))
        return [x for found in [*read, rows_of(module.blocks[1])] for x in found]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        torch.testing.assert_close(rows(ours(num_microbatches=2), 2), rows("auto", 1))


class Router(Block):
    """Sets its loss as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.detach().square().mean()
        return super().forward(x)

    def penalty(self) -> Tensor:
        return self.aux


class Routed(Module):
    """Reads what routers have set right after their calls."""

    def __init__(self) -> None:
        super().__init__("attribute")
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Router() for _ in range(4)).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("aux", sum((block(batch).mean() * 0 + block.penalty() for block in self.blocks), torch.zeros(())))
        return super().training_step(batch, batch_idx)


def collected(module: Any) -> list[Tensor]:
    return [block.aux for block in module.blocks]


READS: dict[str, tuple[Callable[..., Any], bool]] = {
    "nothing": (lambda self, trainer, module, outputs, *_: float(outputs["loss"]), False),
    "weights": (lambda self, trainer, module, *_: [b.up.weight.norm() for b in module.blocks], False),
    "resets": (lambda self, trainer, module, *_: [b.__setattr__("other", None) for b in module.blocks], False),
    "itself": (lambda self, trainer, module, *_: [b.aux for b in module.blocks], True),
    "by a method": (lambda self, trainer, module, *_: [b.penalty() for b in module.blocks], True),
    "by a function": (lambda self, trainer, module, *_: collected(module), True),
    "by its text": (lambda self, trainer, module, *_: [getattr(b, "a" + "ux") for b in module.blocks], True),
}


@pytest.mark.parametrize("kind", READS)
def test_what_no_hook_reads_is_not_spoken_of(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """What only training_step reads is each microbatch's own; it was warned of wherever a callback had a hook."""
    reads, expected = READS[kind]
    callback = type("Reads", (pl.Callback,), {"on_train_batch_end": reads, "__module__": __name__})()
    run(ours(num_microbatches=2), Routed(), batches(2), devices=2, watch=False, callbacks=[callback])
    said = [str(one.message) for one in recwarn if issubclass(one.category, RoundPipeWarning)]
    assert [text.startswith("roundpipe: 'blocks.0.aux', inside a layer") for text in said] == [True] * expected


def _calls(block: Any, x: Tensor) -> None:
    block.metric(x)


def test_a_metric_that_a_layer_calls_is_refused_by_name() -> None:
    """Its value of a step would be a part's."""
    with pytest.raises(RoundPipeError, match=r"metric 'blocks.1.metric' of the step is"):
        run(ours(num_microbatches=2), leaving(_calls, reads=False), batches(2), devices=2)
