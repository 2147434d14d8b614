"""Which modules become layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import zoo
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_roundpipe.model.layers import find_layers


class Holder(nn.Module):
    """Stands for the LightningModule, which is itself never a layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def names(model: nn.Module, requested: list[str | type] | None = None) -> list[str]:
    return [n.removeprefix("model.") for n in find_layers(Holder(model), requested)]


def assert_nothing_twice(root: nn.Module) -> None:
    """No layer holds another, and none is listed twice: a weight that is inside two would travel twice."""
    inside: set[int] = set()
    for module in find_layers(root).values():
        mine = {id(m) for m in module.modules()}
        assert not inside & mine
        inside |= mine


# --------------------------------------------------------------------------------------------------------- Hugging Face


HUGGING_FACE = {
    "llama": ["model.embed_tokens", *(f"model.layers.{i}" for i in range(zoo.BLOCKS)), "model.norm", "lm_head"],
    "gpt2": [
        "transformer.wte",
        "transformer.wpe",
        *(f"transformer.h.{i}" for i in range(zoo.BLOCKS)),
        "transformer.ln_f",
        "lm_head",
    ],
    "bert": [
        "bert.embeddings",
        *(f"bert.encoder.layer.{i}" for i in range(zoo.BLOCKS)),
        "bert.pooler",
        "classifier",
    ],
    "t5": [
        "shared",
        "encoder.embed_tokens",  # modules of their own that hold the shared weight
        "encoder.block.0",
        "encoder.block.1",
        "encoder.final_layer_norm",
        "decoder.embed_tokens",
        "decoder.block.0",
        "decoder.block.1",
        "decoder.final_layer_norm",
        "lm_head",
    ],
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name: str) -> None:
    """Blocks stay whole, as the models themselves ask, whatever their size; what is around them is found too."""
    model = zoo.ENTRIES[name].build()
    assert names(model) == HUGGING_FACE[name]
    assert_nothing_twice(Holder(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_change_nothing(name: str) -> None:
    """PEFT's wrappers sit inside the blocks and travel with them, and so does one around the head."""
    inner = ["q_proj", "down_proj"] if name == "llama" else ["c_attn"]
    config = LoraConfig(r=2, target_modules=[*inner, "lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights and GPT-2's transposed ones, which make no difference here
        model = get_peft_model(zoo.ENTRIES[name].build(), config)
    assert [n.removeprefix("base_model.model.") for n in names(model)] == HUGGING_FACE[name]
    head = find_layers(Holder(model))["model.base_model.model.lm_head"]
    assert {n.split(".")[0] for n, _ in head.named_parameters()} == {"base_layer", "lora_A", "lora_B"}


# -------------------------------------------------------------------------------------------------------- plain PyTorch


def test_mlp_of_repeated_blocks() -> None:
    assert names(zoo.MLP()) == ["stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


def test_sequential() -> None:
    """A container is looked into and what has no parameters runs as user code."""
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]


def test_modules_without_parameters_are_user_code() -> None:
    """Nothing of them has to travel, and every call of a layer costs a hand-over. One that is not affine, too."""
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "drop": nn.Dropout(), "norm": nn.BatchNorm1d(2, affine=False)})
    assert names(model) == ["stem"]


def test_nothing_to_move() -> None:
    with pytest.raises(ValueError, match=r"Holder has no submodule with parameters.*self\.model = "):
        find_layers(Holder(nn.ReLU()))


@pytest.mark.parametrize(
    "kind", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm]
)
def test_parametrized_modules_are_layers(kind: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(kind(nn.Linear(6, 8)), nn.ReLU(), kind(nn.Linear(8, 4)), nn.Sequential(kind(nn.Linear(4, 4))))
    assert names(model) == ["0", "2", "3.0"]


def test_parameters_of_the_root_alone_are_no_layer() -> None:
    """They are read by user code; a root with nothing else has no call to intercept."""
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="no layer to offload"):
        find_layers(root)


class Residual(nn.Module):
    """Of a ResNet."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential(nn.Conv2d(width // stride, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.stages = nn.ModuleList(
            nn.Sequential(*(Residual(width, 2 if width > 4 and not i else 1) for i in range(blocks)))
            for width in (4, 8, 16, 32)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def test_an_ordinary_cnn_does_not_become_dozens_of_layers() -> None:
    """Small stages are one layer each; only those that are too large for one are cut, at their blocks."""
    model = ResNet(blocks=6)
    found = names(model)
    leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    assert len(found) <= 16 and len(leaves) == 147
    assert {"stem", "stages.0", "stages.1", "stages.3.5", "head"} <= set(found)
    assert {type(m) for m in find_layers(Holder(model)).values()} <= {nn.Sequential, Residual, nn.Linear}
    assert_nothing_twice(Holder(model))


def test_layers_hold_every_parameter() -> None:
    """What no layer holds runs as user code, on the first worker, and is never sent anywhere."""
    model = ResNet(blocks=2)
    held = {id(p) for m in find_layers(Holder(model)).values() for p in m.parameters()}
    assert held == {id(p) for p in model.parameters()}


def test_a_shared_module_is_one_layer() -> None:
    shared = nn.Linear(8, 8)
    assert names(nn.Sequential(shared, nn.Linear(8, 4), shared)) == ["0", "1"]


class Language(nn.Module):
    """A plain model whose embedding is larger than everything else together, which is the rule for small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 8)
        self.blocks = nn.ModuleList(zoo.ResidualBlock(8) for _ in range(4))
        self.head = nn.Linear(8, 5)


def test_a_large_embedding_does_not_make_the_model_one_layer() -> None:
    """One layer would mean that the whole model has to fit a device."""
    assert names(Language()) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


# ------------------------------------------------------------------------------------------------------------ requested


def test_requested_by_class_name_or_qualified_name() -> None:
    """All three ways to say the same; what is left over is searched as usual."""
    model = zoo.ENTRIES["llama"].build()
    mlp = type(model.model.layers[0].mlp)
    by_class = names(model, [mlp])
    assert [n for n in by_class if n.endswith(".mlp")] == [f"model.layers.{i}.mlp" for i in range(zoo.BLOCKS)]
    assert "model.layers.0" not in by_class and {"model.embed_tokens", "lm_head"} <= set(by_class)
    held = {id(p) for m in find_layers(Holder(model), [mlp]).values() for p in m.parameters()}
    assert held == {id(p) for p in model.parameters()}, "the attention beside the requested layers was forgotten"
    assert names(model, ["LlamaMLP"]) == by_class

    one = find_layers(Holder(model), ["model.model.layers.1.mlp"])
    assert one["model.model.layers.1.mlp"] is model.model.layers[1].mlp
    assert "model.model.layers.0" in one and "model.model.layers.1" not in one


def test_requested_by_base_class() -> None:
    """A class stands for its subclasses, as ``isinstance`` does; a name for itself alone."""

    class Special(zoo.ResidualBlock):
        pass

    model = nn.Sequential(nn.Sequential(Special(4), nn.Linear(4, 4)), nn.Linear(4, 400))
    assert names(model, [zoo.ResidualBlock])[0] == "0.0"
    with pytest.raises(ValueError, match="ResidualBlock"):
        names(model, ["ResidualBlock"])


def test_the_outer_one_of_two_requested_wins() -> None:
    assert names(zoo.MLP(), [zoo.ResidualBlock, nn.Linear]) == names(zoo.MLP(), ["ResidualBlock"])


def test_a_whole_model_may_be_requested() -> None:
    """Even where it says itself that its blocks stay whole: it then is one layer."""
    assert list(find_layers(Holder(zoo.ENTRIES["llama"].build()), ["model"])) == ["model"]


def test_unknown_request_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"(?s)layers='Nonsense' matches no module of Holder.*Linear, MLP, .*Residual"):
        names(zoo.MLP(), [zoo.ResidualBlock, "Nonsense"])
    with pytest.raises(ValueError, match=r"layers=.*Conv2d.*matches no module"):
        names(zoo.MLP(), [nn.Conv2d])


@pytest.mark.parametrize("request_", [nn.ModuleList, "blocks"])
def test_a_list_cannot_be_a_layer(request_: str | type) -> None:
    """It is never called, so its blocks would silently compute on the host, one microbatch at a time."""
    with pytest.raises(ValueError, match="ModuleList"):
        find_layers(zoo.MLP(), [request_])
