"""`nn.TransformerEncoder` and padded samples: in eval mode, padded positions are what plain Lightning makes of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, assert_tensors_same, loader, ours, quiet, run, trainer_of
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError

WIDTH, LONGEST = 16, 6
Pooling = str
POOLINGS = ("mean", "max", "last")


@pytest.fixture(autouse=True)
def _no_warnings_of_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"enable_nested_tensor is True|The PyTorch API of nested tensors")
        yield


class Encoder(nn.TransformerEncoder):
    """Calls that of torch in a forward of its own."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(src * 1.0, *args, **kwargs) * 2.0


class Padded(pl.LightningModule):
    """An encoder whose outputs are pooled over all positions."""

    def __init__(
        self,
        pooling: Pooling = "mean",
        *,
        heads: int = 2,
        batch_first: bool = True,
        norm: bool = False,
        kind: type[nn.TransformerEncoder] = nn.TransformerEncoder,
        floats: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 32, dropout=0.0, activation="gelu", batch_first=batch_first)
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 5)
        self.encoder = kind(layer, 2, norm=nn.LayerNorm(WIDTH) if norm else None, **options)
        if norm:
            nn.init.normal_(self.encoder.norm.bias)
        self.pooling, self.batch_first, self.floats = pooling, batch_first, floats

    def encoded(self, ids: Tensor) -> Tensor:
        padding: Tensor = ids == 0
        if self.floats:
            padding = torch.zeros(ids.shape).masked_fill(padding, float("-inf"))
        h = self.embed(ids)
        h = self.encoder(h if self.batch_first else h.transpose(0, 1), src_key_padding_mask=padding)
        return h if self.batch_first else h.transpose(0, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.encoded(ids)
        return self.head(h.mean(1) if self.pooling == "mean" else h.amax(1) if self.pooling == "max" else h[:, -1])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["ids"]), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self(batch["ids"]), batch["labels"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["ids"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Frozen(Padded):
    """The encoder is frozen and in eval mode; a layer before the head is trained."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.encoder.requires_grad_(False)
        self.embed.requires_grad_(False)
        self.middle = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, activation="gelu", batch_first=True)

    def encoded(self, ids: Tensor) -> Tensor:
        self.encoder.eval()
        return self.middle(super().encoded(ids))


def made(module: type[Padded] = Padded, **options: Any) -> Padded:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return module(**options)


def batches(count: int = 4, lengths: tuple[int, ...] = (6, 3, 1, 5, 2, 6, 4, 1), seed: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k in range(count):
        ids = torch.randint(1, 11, (len(lengths), LONGEST), generator=generator)
        for row, length in enumerate(lengths[k:] + lengths[:k]):
            ids[row, length:] = 0
        found.append({"ids": ids, "labels": torch.randint(5, (len(lengths),), generator=generator)})
    return found


def predicted(module: Padded, strategy: Any, devices: int, data: Any) -> Any:
    with quiet():
        return trainer_of(strategy, devices=devices).predict(copy.deepcopy(module), loader(data))


def assert_predicted_as_plain(module: Padded, data: Any = None, **options: Any) -> None:
    data = batches() if data is None else data
    plain = predicted(module, "auto", 1, data)
    for devices, microbatches in ((1, 1), (2, 1), (2, 4)):
        found = predicted(module, ours(num_microbatches=microbatches, **options), devices, data)
        assert_tensors_same(plain, found, what=f"{devices} devices, {microbatches} microbatches")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("norm", [False, True])
def test_padded_positions_are_zero(pooling: Pooling, norm: bool) -> None:
    assert_predicted_as_plain(made(pooling=pooling, norm=norm))


def test_it_matters() -> None:
    """Without the fast path of torch, pooling gives something else."""
    module, data = made(), batches(1)
    plain = predicted(module, "auto", 1, data)
    module.encoder.use_nested_tensor = False
    assert (plain[0] - predicted(module, "auto", 1, data)[0]).abs().max() > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": False},
        {"enable_nested_tensor": False},
        {"mask_check": False},
        {"heads": 1},
        {"floats": True},
        {"kind": Encoder},
    ],
    ids=str,
)
def test_whatever_the_encoder_is(options: dict[str, Any]) -> None:
    assert_predicted_as_plain(made(**options))


@pytest.mark.parametrize("layers", [["TransformerEncoder", "Linear"], ["Embedding", "Linear"]], ids=str)
def test_whatever_the_layers_are(layers: list[str]) -> None:
    """The whole encoder, or nothing of it."""
    assert_predicted_as_plain(made(), layers=layers)


COMPILED = {"compile_layers": {"backend": "eager"}}


@pytest.mark.slow
def test_compiled_layers_of_an_encoder() -> None:
    assert_predicted_as_plain(made(), **COMPILED)


def test_a_compiled_encoder_is_said() -> None:
    """Torch's compiler leaves the fast path out. Nothing is said of an encoder that has none."""
    strategies = [ours(layers=["TransformerEncoder", "Linear"], **COMPILED) for _ in range(2)]
    with pytest.warns(RoundPipeWarning, match=r"layer 'encoder' .*enable_nested_tensor=False"):
        trainer_of(strategies[0]).predict(made(), loader(batches(1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        trainer_of(strategies[1]).predict(made(enable_nested_tensor=False), loader(batches(1)))


@pytest.mark.parametrize("mask_check", [False, True])
def test_padding_elsewhere(mask_check: bool) -> None:
    """Torch does nothing special if one sample of the batch is padded in front; it may be in a later part."""
    data = batches(5)
    for batch, row in zip(data[1:], (7, 4, 0, 2), strict=True):
        batch["ids"][row, :2], batch["ids"][row, 2:] = 0, 3
    assert_predicted_as_plain(made(mask_check=mask_check), data)


def test_a_sample_of_nothing_but_padding() -> None:
    data = batches(3)
    data[1]["ids"][3] = 0
    assert_predicted_as_plain(made(), data)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_frozen_encoder_in_training_step(pooling: Pooling, devices: int, microbatches: int) -> None:
    module, data = made(Frozen, pooling=pooling, norm=True), batches(3)
    plain = run("auto", module, data, val_batches=data)
    assert_same(plain, run(ours(num_microbatches=microbatches), module, data, devices=devices, val_batches=data))


def test_in_training_mode_nothing_is_set_to_zero() -> None:
    module, data = made(), batches(3)
    plain = run("auto", module, data, val_batches=data)
    assert_same(plain, run(ours(num_microbatches=4), module, data, devices=2, val_batches=data))


def test_parts_that_are_padded_at_other_ends_are_refused_in_training() -> None:
    """Plain training treats the whole batch alike; a part cannot know."""
    data = batches(3)
    data[2]["ids"][7, :2], data[2]["ids"][7, 2:] = 0, 3
    module = made(Frozen)
    assert_same(run("auto", module, data), run(ours(num_microbatches=1), module, data, devices=2))
    with pytest.raises(RoundPipeError, match="enable_nested_tensor=False"):
        run(ours(num_microbatches=4), module, data, devices=2)
    data = [dict(batch, ids=batch["ids"].flip(1)) for batch in batches(3)]  # parts without padding do not count
    assert_same(run("auto", module, data), run(ours(num_microbatches=4), module, data, devices=2))


def test_torch_is_left_as_it_was() -> None:
    before = nn.TransformerEncoder.forward
    with pytest.raises(KeyError, match="labels"):
        trainer_of(ours(), devices=2).validate(made(), loader([{"ids": batches(1)[0]["ids"]}]), verbose=False)
    assert nn.TransformerEncoder.forward is before
