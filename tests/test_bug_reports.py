"""Scripts of public bug reports about other ways to train in parts, each with others of its kind.

All give plain Lightning's numbers, in windows of 1 and 4 batches.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import transformers
from plain_oracle import assert_plain, on_devices
from test_cutting import Block
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeWarning

DEVICES = on_devices(3)
WINDOWS = pytest.mark.parametrize("window", [4])
VOCABULARY = 24
EPOCHS = {"max_epochs": 2}

Loss = Callable[[Any, Any], Any]


class Script(pl.LightningModule):
    """A network, and the loss of a batch as a function of the module and the batch."""

    calls: list[Any]

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net.double(), loss

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self, batch)
        if loss is not None:
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=generator())


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(4)])


def parts(sizes: tuple[int, ...] = (5, 3, 5, 4, 5, 5), width: int = 6) -> list[Tensor]:
    return list(values(sum(sizes), width).split(sizes))


SCRIPTS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Any], dict[str, Any]]] = {}
"""How to make the module and the batches (a list, or a loader), and options of ``assert_plain``."""


def script(name: str, make: Callable[[], Any], made: Callable[[], Any], **options: Any) -> None:
    SCRIPTS[name] = make, made, options


# ----------------------------------------------------------------------------------------------------- kinds of batches


def rows() -> list[Any]:
    """Images of one size each, as detection has them, and their targets."""
    images = [values(3, 6)[i % 3 :] + i for i in range(12)]
    return [(image, {"boxes": image[:1] * 2, "name": f"image {i}"}) for i, image in enumerate(images)]


def detect(module: Any, samples: Any) -> Tensor:
    losses = [(module.net(image).mean(0) - target["boxes"]).abs().mean() for image, target in samples]
    return torch.stack(losses).mean()


def detection(collate: Any) -> Callable[[], Any]:
    return lambda: DataLoader(rows(), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]


script("collate_fn=list", lambda: Script(blocks(), detect), detection(list))


@dataclasses.dataclass
class Graph:
    """A batch of the user's own class: nodes of several graphs, and edges between them."""

    nodes: Tensor
    edges: Tensor

    def to(self, device: Any) -> Graph:
        return Graph(self.nodes.to(device), self.edges.to(device))


class Opaque:
    """A class without anything that Lightning knows."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.name = x, "opaque"


def spread(module: Any, graph: Graph) -> Tensor:
    x = graph.nodes
    for block in module.net:
        x = block(x).index_add(0, graph.edges[0], x[graph.edges[1]])
    return x.square().mean()


def graphs() -> list[Graph]:
    return [Graph(x, torch.randint(0, len(x), (2, 7), generator=generator())) for x in parts()]


script("a dataclass with to()", lambda: Script(blocks(), spread), graphs)
script("a class", lambda: Script(blocks(), lambda m, b: m(b.x).square().mean()), lambda: [Opaque(x) for x in parts()])


script(
    "packed GRU",
    lambda: Script(nn.GRU(6, 6), lambda m, x: m(x)[0].data.square().mean()),
    lambda: [pack_sequence([x, x[:2]]) for x in parts()],
)


# --------------------------------------------------------------------------------------------------- losses that change


def tokens(**more: Callable[[Tensor], Any]) -> list[dict[str, Tensor]]:
    """Rows that are padded to the longest of all."""
    found = []
    for length in (5, 3, 6, 4, 5):
        ids = torch.randint(6, VOCABULARY, (2, 6), generator=generator(length))
        mask = torch.arange(6) < torch.tensor([[length], [3]])
        batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
        found.append(batch | {name: make(ids) for name, make in more.items()})
    return found


def small(**options: Any) -> dict[str, Any]:
    return {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, **options}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, num_key_value_heads=2, **small())
    return transformers.LlamaForCausalLM(config)


# ------------------------------------------------------------------------------------------------------ images and text


def pairs() -> list[dict[str, Any]]:
    images = {"pixel_values": lambda ids: values(2, 3, 8, 8), "return_loss": lambda ids: True}
    found = tokens(**images)
    return [{name: value for name, value in batch.items() if name != "labels"} for batch in found]


def clip() -> nn.Module:
    text = small(vocab_size=VOCABULARY, max_position_embeddings=8, eos_token_id=2, bos_token_id=1)
    vision = small(image_size=8, patch_size=4)
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))


script("CLIPModel(return_loss=True)", lambda: Script(clip(), lambda m, b: m.net(**b).loss), pairs, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------------- checkpoint


def ids() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (2, n), generator=generator(n)) for n in (5, 3, 4, 5, 6)]


# ----------------------------------------------------------------------------------------------------- sparse gradients


class Sparse(Script):
    """An embedding with sparse gradients, which few optimizers take."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


script(
    "sparse=True",
    lambda: Sparse(nn.Sequential(nn.Embedding(24, 6, sparse=True), *blocks()), lambda m, x: m(x).square().mean()),
    ids,
)


# ------------------------------------------------------------------------------------------------------------ the tests


@DEVICES
@WINDOWS
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(devices: int, window: int, name: str) -> None:
    """The same hooks, logs and weights as under plain Lightning."""
    make, made, options = SCRIPTS[name]
    assert_plain(devices, make, lambda: _loader(made()), accumulate_grad_batches=window, **options)


def _loader(batches: Any) -> Any:
    return DataLoader(batches, batch_size=None) if isinstance(batches, list) else batches  # type: ignore[arg-type]


class AdaLora(Script):
    """Calls what AdaLoRA asks for after each step, when gradients are still there."""

    def __init__(self) -> None:
        config = peft.AdaLoraConfig(
            init_r=4, target_r=2, tinit=1, tfinal=1, total_step=6, deltaT=1, target_modules=["q_proj", "v_proj"]
        )
        super().__init__(peft.get_peft_model(llama(), config), lambda m, b: m.net(**b).loss)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.net.base_model.update_and_allocate(self.trainer.global_step)


@DEVICES
def test_adapters_without_a_false_warning(devices: int) -> None:
    """AdaLoRA, whose ranks depend on gradients and weights after each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        loader = lambda: _loader(tokens())  # noqa: E731
        assert_plain(devices, AdaLora, loader, accumulate_grad_batches=2, rtol=1e-4, **EPOCHS)


@on_devices(1, 3)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8(devices: int, window: int, recipe: str) -> None:
    """Layers of ``torchao.float8``, whose scales depend on the microbatch."""
    from torchao import float8

    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)

    def make() -> Script:
        net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        module = Script(float8.convert_to_float8_training(net, config=config), lambda m, x: m(x).square().mean())
        return module.float()  # type: ignore[return-value]

    made = lambda: _loader([x.float() for x in parts((16, 16, 16, 16, 16), width=16)])  # noqa: E731
    assert_plain(devices, make, made, accumulate_grad_batches=window, rtol=1e-5)
