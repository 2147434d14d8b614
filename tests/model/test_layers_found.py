"""Which modules become layers."""

import warnings

import pytest
import zoo
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_roundpipe.model.layers import find_layers


class Holder(nn.Module):
    """Stands for the LightningModule, which is itself never a layer."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def names(model, requested=None):
    return [n.removeprefix("model.") for n in find_layers(Holder(model), requested)]


def assert_nothing_twice(root):
    """No layer holds another, and none is listed twice: a weight that is inside two would travel twice."""
    inside = set()
    for module in find_layers(root).values():
        mine = {id(m) for m in module.modules()}
        assert not inside & mine
        inside |= mine


# --------------------------------------------------------------------------------------------------------- Hugging Face


HUGGING_FACE = {
    "llama": ["model.embed_tokens", *(f"model.layers.{i}" for i in range(zoo.BLOCKS)), "model.norm", "lm_head"],
    "gpt2": [*(f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "h.2", "ln_f")), "lm_head"],
    "bert": ["bert.embeddings", *(f"bert.encoder.layer.{i}" for i in range(zoo.BLOCKS)), "bert.pooler", "classifier"],
    "t5": [
        "shared",  # which both embeddings, modules of their own, hold
        *(f"encoder.{name}" for name in ("embed_tokens", "block.0", "block.1", "final_layer_norm")),
        *(f"decoder.{name}" for name in ("embed_tokens", "block.0", "block.1", "final_layer_norm")),
        "lm_head",
    ],
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name):
    """Blocks stay whole, as the models themselves ask, whatever their size; what is around them is found too."""
    model = zoo.ENTRIES[name].build()
    assert names(model) == HUGGING_FACE[name]
    assert_nothing_twice(Holder(model))


def test_adapters_change_nothing():
    """PEFT's wrappers sit inside the blocks and travel with them, and so does one around the head."""
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights and GPT-2's transposed ones, which make no difference here
        model = get_peft_model(zoo.ENTRIES["llama"].build(), config)
    assert [n.removeprefix("base_model.model.") for n in names(model)] == HUGGING_FACE["llama"]
    head = find_layers(Holder(model))["model.base_model.model.lm_head"]
    assert {n.split(".")[0] for n, _ in head.named_parameters()} == {"base_layer", "lora_A", "lora_B"}


# -------------------------------------------------------------------------------------------------------- plain PyTorch


class Residual(nn.Module):
    """Of a ResNet."""

    def __init__(self, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential(nn.Conv2d(width // stride, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.stages = nn.ModuleList(
            nn.Sequential(*(Residual(width, 2 if width > 4 and not i else 1) for i in range(blocks)))
            for width in (4, 8, 16, 32)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def test_an_ordinary_cnn_does_not_become_dozens_of_layers():
    """Small stages are one layer each; only those that are too large for one are cut, at their blocks."""
    model = ResNet(blocks=6)
    found = names(model)
    leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    assert len(found) <= 16 and len(leaves) == 147
    assert {"stem", "stages.0", "stages.1", "stages.3.5", "head"} <= set(found)
    assert {type(m) for m in find_layers(Holder(model)).values()} <= {nn.Sequential, Residual, nn.Linear}
    assert_nothing_twice(Holder(model))


class Language(nn.Module):
    """A plain model whose embedding is larger than everything else together, which is the rule for small ones."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2000, 8)
        self.blocks = nn.ModuleList(zoo.ResidualBlock(8) for _ in range(4))
        self.head = nn.Linear(8, 5)


def test_a_large_embedding_does_not_make_the_model_one_layer():
    """One layer would mean that the whole model has to fit a device."""
    assert names(Language()) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


# ------------------------------------------------------------------------------------------------------------ requested


def test_requested_by_class_name_or_qualified_name():
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
