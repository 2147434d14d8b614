"""Scripts of public bug reports about other ways to train in parts, each with others of its kind.

All give plain Lightning's numbers, in windows of 1 and 4 batches.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import ours, quiet, trainer_of
from lightning.pytorch.tuner import Tuner
from plain_oracle import PLAIN, assert_equal, assert_plain, assert_same, kept, on_devices, train
from test_cutting import Block
from test_module_state import Outputs, RunningMean, RunningMeanInBuffer, batches
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeWarning

DEVICES = on_devices(1, 3)
WINDOWS = pytest.mark.parametrize("window", [1, 4])
VOCABULARY, IMAGE, START, END = 24, 3, 4, 5
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


# -------------------------------------------------------------------------------- compiled, with negatives in the batch


class Encoder(nn.Module):
    """Its code depends on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return 2 * x if len(x) > 4 else x


def contrast(module: Any, x: Tensor) -> Tensor:
    similar = module.net(x) @ module.net(x.flip(1)).T
    return F.cross_entropy(similar, torch.arange(len(x)))


def compiled(way: str) -> Script:
    torch._dynamo.reset()
    encoder = Encoder()
    if way == "function":
        return Script(torch.compile(encoder, backend="eager"), contrast)  # type: ignore[arg-type]
    if way == "method":
        encoder.compile(backend="eager")
    else:
        for block in encoder.blocks:
            block.compile(backend="eager", dynamic=False)
    return Script(encoder, contrast)


for _way in ("function", "method", "blocks"):
    script(f"torch.compile as a {_way}", functools.partial(compiled, _way), parts)
script("not compiled", lambda: Script(Encoder(), contrast), parts)


# ----------------------------------------------------------------------------------------------------- kinds of batches


def rows() -> list[Any]:
    """Images of one size each, as detection has them, and their targets."""
    images = [values(3, 6)[i % 3 :] + i for i in range(12)]
    return [(image, {"boxes": image[:1] * 2, "name": f"image {i}"}) for i, image in enumerate(images)]


def detect(module: Any, samples: Any) -> Tensor:
    losses = [(module.net(image).mean(0) - target["boxes"]).abs().mean() for image, target in samples]
    return torch.stack(losses).mean()


def detect_columns(module: Any, batch: Any) -> Tensor:
    return detect(module, zip(*batch, strict=True))


def columns(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def detection(collate: Any) -> Callable[[], Any]:
    return lambda: DataLoader(rows(), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]


script("collate_fn=list", lambda: Script(blocks(), detect), detection(list))
script("collate_fn of torchvision", lambda: Script(blocks(), detect_columns), detection(columns))
script("collate_fn of one row", lambda: Script(blocks(), lambda m, row: detect(m, [row])), lambda: rows()[:6])


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
    "a namespace",
    lambda: Script(blocks(), lambda m, b: m(b.x).square().mean()),
    lambda: [types.SimpleNamespace(x=x, y=None) for x in parts()],
)


class TimeFirst(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 6)
        if kind == "Transformer":
            layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
            self.body: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        else:
            self.body = getattr(nn, kind)(6, 6, num_layers=2)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(self.first(x))
        return self.last(found if self.kind == "Transformer" else found[0])


def sequences() -> list[Tensor]:
    return [values(length, 3, 6) for length in (5, 4, 3, 5, 6)]


for _kind in ("LSTM", "Transformer", "RNN"):
    script(
        f"time-first {_kind}",
        lambda kind=_kind: Script(TimeFirst(kind), lambda m, x: m(x)[-1].square().mean()),  # type: ignore[misc]
        sequences,
    )
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


def joins_later(when: str, module: Any, batch: Any) -> Tensor:
    out = module.net(**batch, output_hidden_states=True)
    now = module.current_epoch if when == "epoch" else module.global_step
    return out.loss + 0.1 * out.hidden_states[1].square().mean() if now >= 1 else out.loss


for _when in ("epoch", "step"):
    make_later = functools.partial(lambda when: Script(llama(), functools.partial(joins_later, when)), _when)
    script(f"a term that joins in a later {_when}", make_later, tokens, rtol=1e-4, **EPOCHS)


def only_some(module: Any, x: Tensor) -> Tensor | None:
    return None if len(x) == 3 else module(x).square().mean()


def only_finite(module: Any, x: Tensor) -> Tensor | None:
    loss = module(x).square().mean() / (len(x) - 4)
    return loss if bool(torch.isfinite(loss)) else None


script("None for some batches", lambda: Script(blocks(), only_some), parts, **EPOCHS)
script("None for losses that are not finite", lambda: Script(blocks(), only_finite), parts)
script("None for all", lambda: Script(blocks(), lambda m, x: None), parts)


def several_means(module: Any, x: Tensor) -> Tensor:
    y = module(x)
    positive = y[y > 0]
    terms = {"square": y.square().mean(), "first": y[:, 0].abs().mean(), "positive": positive.mean()}
    module.log_dict(terms, batch_size=len(x))
    return terms["square"] + 0.5 * terms["first"] + terms["positive"] / terms["square"].detach()


def several_cross_entropies(module: Any, x: Tensor) -> Tensor:
    y, target = module(x), x.argmax(1)
    ignored = target.masked_fill(target > 3, -100)
    return F.cross_entropy(y, target) + F.cross_entropy(y, ignored) + F.nll_loss(y.log_softmax(1), target)


script("several means", lambda: Script(blocks(), several_means), parts)
script("several cross entropies", lambda: Script(blocks(), several_cross_entropies), parts)


script("self.outs.append(loss.detach())", Outputs, batches, **EPOCHS)
script("a running mean as attribute", RunningMean, batches, **EPOCHS)
script("a running mean as buffer", RunningMeanInBuffer, batches, **EPOCHS)


# ---------------------------------------------------------------------------------------------- hooks and other modules


def hooked() -> Script:
    module = Script(blocks(), lambda m, x: m(x).square().mean())
    for parameter in module.net[1].parameters():  # type: ignore[index]
        parameter.register_hook(lambda grad: 0.1 * grad)
    return module


def with_reference() -> Script:
    module = Script(blocks(), preferred)
    module.reference = blocks().double().requires_grad_(False)
    return module


def preferred(module: Any, x: Tensor) -> Tensor:
    y = module(x)
    policy, module.net = module.net, module.reference
    with torch.no_grad():
        reference = module(x)
    module.net = policy
    return (y - reference).square().mean()


def chosen(module: Any, x: Tensor) -> Tensor:
    module.chosen = module.net[len(x) % 4]
    return module.chosen(module(x)).square().mean()  # type: ignore[no-any-return]


script("hooks of parameters", hooked, parts)
script("another module in its place for a while", with_reference, parts, **EPOCHS)
script("another module in its place from now on", lambda: Script(blocks(), chosen), parts, **EPOCHS)


# ------------------------------------------------------------------------------------------------------ images and text


def pairs() -> list[dict[str, Any]]:
    images = {"pixel_values": lambda ids: values(2, 3, 8, 8), "return_loss": lambda ids: True}
    found = tokens(**images)
    return [{name: value for name, value in batch.items() if name != "labels"} for batch in found]


def clip(kind: str) -> nn.Module:
    text = small(vocab_size=VOCABULARY, max_position_embeddings=8, eos_token_id=2, bos_token_id=1)
    vision = small(image_size=8, patch_size=4)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    return getattr(transformers, f"{kind}Model")(config)


for _kind in ("CLIP", "Siglip"):
    make_pair = functools.partial(lambda kind: Script(clip(kind), lambda m, b: m.net(**b).loss), _kind)
    script(f"{_kind}Model(return_loss=True)", make_pair, pairs, rtol=1e-4)


def qwen() -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = small(vocab_size=VOCABULARY, num_key_value_heads=2, rope_parameters=rope, bos_token_id=1, eos_token_id=2)
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1, "patch_size": 2}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}
    special = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 6}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    return transformers.Qwen2VLForConditionalGeneration(config)


def packed_images() -> list[dict[str, Tensor]]:
    """The patches of all images of a batch stand in one tensor, of another length than the batch."""
    found = []
    for count in (1, 2, 3, 2, 1):
        ids = torch.randint(7, VOCABULARY, (count, 6), generator=generator(count))
        ids[:, 1], ids[:, 2], ids[:, 3] = START, IMAGE, END
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        batch |= {"mm_token_type_ids": (ids == IMAGE).int(), "pixel_values": values(4 * count, 12)}
        found.append(batch | {"image_grid_thw": torch.tensor([[1, 2, 2]] * count)})
    return found


def pooled(module: Any, batch: Any) -> Tensor:
    patches = module(batch["patches"]).split(batch["lengths"].tolist())
    return torch.stack([(p.mean(0) - y).square().mean() for p, y in zip(patches, batch["y"], strict=True)]).mean()


script("Qwen2-VL", lambda: Script(qwen(), lambda m, b: m.net(**b).loss), packed_images, rtol=1e-4)
script(
    "patches of all images",
    lambda: Script(blocks(), pooled),
    lambda: [{"patches": x, "lengths": torch.tensor([2, len(x) - 2]), "y": x[:2]} for x in parts()],
)


# ----------------------------------------------------------------------------------------------------------- checkpoint


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, 6), blocks()
        self.lm_head = nn.Linear(6, VOCABULARY)


def head_and_loss(reentrant: bool, module: Any, ids: Tensor) -> Tensor:
    net = module.net
    hidden = net.blocks(net.embed(ids))
    loss = checkpoint(
        lambda h, y: F.cross_entropy(net.lm_head(h).flatten(0, 1), y.flatten()), hidden, ids, use_reentrant=reentrant
    )
    return loss  # type: ignore[no-any-return]


def around_blocks(reentrant: bool, module: Any, ids: Tensor) -> Tensor:
    net = module.net
    hidden = net.embed(ids)
    for block in net.blocks:
        hidden = checkpoint(block, hidden, use_reentrant=reentrant)
    return F.cross_entropy(net.lm_head(hidden).flatten(0, 1), ids.flatten())


def around_several_blocks(reentrant: bool, module: Any, ids: Tensor) -> Tensor:
    net = module.net
    hidden = checkpoint_sequential(net.blocks, 2, net.embed(ids), use_reentrant=reentrant)
    return F.cross_entropy(net.lm_head(hidden).flatten(0, 1), ids.flatten())


def ids() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (2, n), generator=generator(n)) for n in (5, 3, 4, 5, 6)]


for _loss in (head_and_loss, around_blocks, around_several_blocks):
    for _reentrant in (True, False):
        make_head = functools.partial(lambda *args: Script(Head(), functools.partial(*args)), _loss, _reentrant)
        script(f"checkpoint {_loss.__name__}, reentrant={_reentrant}", make_head, ids)


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


class Chunked(torch.autograd.Function):
    """The gradients of a loss, chunk by chunk, computed in its forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, head: Any) -> Tensor:
        total, grads, grad_weight = hidden.new_zeros(()), [], torch.zeros_like(weight)
        for chunk, target in zip(hidden.detach().chunk(2), ids.chunk(2), strict=True):
            with torch.enable_grad():
                used = weight.detach().requires_grad_() if head is F.linear else weight
                logits = F.linear(chunk.requires_grad_(), used) if head is F.linear else head(chunk.requires_grad_())
                loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()) / 2
            grad_chunk, grad_used = torch.autograd.grad(loss, (chunk, used))
            grads.append(grad_chunk)
            grad_weight += grad_used
            total += loss.detach()
        ctx.save_for_backward(torch.cat(grads), grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None, None


def chunked(passes_weight: bool, module: Any, ids: Tensor) -> Tensor:
    hidden = module.net.blocks(module.net.embed(ids))
    head = module.net.lm_head
    return Chunked.apply(hidden, head.weight, ids, F.linear if passes_weight else head)  # type: ignore[no-any-return]


def no_bias(passes_weight: bool) -> Script:
    module = Script(Head(), functools.partial(chunked, passes_weight))
    module.net.lm_head = nn.Linear(6, VOCABULARY, bias=False).double()
    return module


@DEVICES
@WINDOWS
def test_chunks_of_the_loss(devices: int, window: int) -> None:
    """A loss that computes its gradients in chunks, from the weight that it is given."""
    assert_plain(devices, lambda: no_bias(True), lambda: _loader(ids()), accumulate_grad_batches=window)


@DEVICES
@WINDOWS
def test_backward_through_the_head_in_training_step(devices: int, window: int) -> None:
    """A backward through a layer inside ``training_step`` works, or the error says what to pass instead."""
    plain = train(PLAIN, lambda: no_bias(False), lambda: _loader(ids()), accumulate_grad_batches=window)
    try:
        other = train(devices, lambda: no_bias(False), lambda: _loader(ids()), accumulate_grad_batches=window)
    except RuntimeError as error:
        assert "weight" in str(error)
    else:
        assert_same(plain, other)


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


class Lora(Script):
    def __init__(self) -> None:
        config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj"], init_lora_weights=False)
        super().__init__(peft.get_peft_model(llama(), config), lambda m, b: m.net(**b).loss)


@DEVICES
@pytest.mark.parametrize("make", [AdaLora, Lora])
def test_adapters_without_a_false_warning(devices: int, make: Any) -> None:
    """AdaLoRA, whose ranks depend on gradients and weights after each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        loader = lambda: _loader(tokens())  # noqa: E731
        assert_plain(devices, make, loader, accumulate_grad_batches=2, rtol=1e-4, **EPOCHS)


class Sized(Script):
    """Has what the Tuner looks for."""

    def __init__(self) -> None:
        super().__init__(blocks(), lambda m, x: m(x).square().mean())
        self.lr, self.batch_size = 0.1, 2

    def train_dataloader(self) -> Any:
        return DataLoader(parts()[0].repeat(8, 1), batch_size=self.batch_size)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@DEVICES
@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("kind", ["lr_find", "scale_batch_size"])
def test_tuner_and_fit_without_a_false_warning(devices: int, kind: str, window: int, tmp_path: Path) -> None:
    """The Tuner restores what it has tried, and ``fit`` begins anew."""

    def tuned(number: int) -> tuple[Any, Any]:
        torch.manual_seed(1)
        module = Sized()
        options = {"accumulate_grad_batches": window, "default_root_dir": tmp_path}
        trainer = trainer_of("auto" if number == PLAIN else ours(), devices=max(number, 1), **options)
        with quiet():
            if kind == "lr_find":
                found = Tuner(trainer).lr_find(module, num_training=8).results  # type: ignore[union-attr]
            else:
                found = Tuner(trainer).scale_batch_size(module, steps_per_trial=2, max_trials=2)
            trainer.fit(module)
        return kept(found), kept(module.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        assert_equal(tuned(PLAIN), tuned(devices), kind)


@DEVICES
@WINDOWS
def test_float8(devices: int, window: int) -> None:
    """Layers of ``torchao.float8``, whose scales depend on the microbatch."""
    from torchao import float8

    config = float8.Float8LinearConfig(emulate=True)

    def make() -> Script:
        net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        module = Script(float8.convert_to_float8_training(net, config=config), lambda m, x: m(x).square().mean())
        return module.float()  # type: ignore[return-value]

    made = lambda: _loader([x.float() for x in parts((16, 16, 16, 16, 16), width=16)])  # noqa: E731
    assert_plain(devices, make, made, accumulate_grad_batches=window, rtol=1e-5)
