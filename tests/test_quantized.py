"""Models quantised by bitsandbytes train as under plain Lightning: packed weights travel, adapters are trained."""

import copy
import functools
from pathlib import Path

import bitsandbytes as bnb
import harness
import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from harness import Learner, arenas_of, assert_identical, assert_same, loader, ours, run, trainer_of
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.uploads import SlotMemory
from lightning_roundpipe.model import quantize
from lightning_roundpipe.model.attributes import bits
from lightning_roundpipe.model.quantized import companions, prepare

VOCAB, WIDTH = 97, 64

FORMATS = {
    "nf4": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 once": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
    "fp4": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4 in fp32": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.float32},
    "int8": {"load_in_8bit": True},
}
PLAN = "forward 0-1 2; fused 3-6; backward 2 0-1; round 2"


@functools.cache
def folder():
    """A tiny Llama in 32 bits."""
    import tempfile

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    path = Path(tempfile.mkdtemp())
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def quantised(name, source=None, *, compute=torch.float32):
    options = FORMATS[name]
    if "load_in_8bit" not in options:
        options = options | {"load_in_4bit": True, "bnb_4bit_compute_dtype": compute}
    config = {"quantization_config": BitsAndBytesConfig(**options)} if source is None else {}
    return AutoModelForCausalLM.from_pretrained(source or folder(), dtype=torch.float32, device_map="cpu", **config)


class Task(Learner, optimizer=torch.optim.AdamW, lr=1e-2):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, batch):
        return self.model(**batch).loss


def task(name="nf4", source=None, *, compute=torch.float32, **lora):
    model = prepare_model_for_kbit_training(quantised(name, source, compute=compute), use_gradient_checkpointing=False)
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"} | lora
    return Task(get_peft_model(model, LoraConfig(**options))).train()


@functools.cache
def batches(count=2, size=4):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, VOCAB, (size, 10), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in drawn]


def trained(module, devices=2, data=None, precision=None, **options):
    chosen = ours(**({"num_microbatches": 2} | options))
    return run(chosen, module, data or batches(), devices=devices, precision=precision)


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nf4", "int8", pytest.param("fp4", marks=pytest.mark.slow)])
def test_equals_plain_training_and_has_the_same_bits_for_all_devices_and_plans(name):
    module = task(name)
    first = trained(module, 1)
    assert_same(run("auto", module, batches()), first)
    assert_identical(first, trained(module, 2, plan=PLAN))
    with arenas_of(0.0):
        assert_identical(first, trained(module, 3, plan=PLAN))


def with_experts():
    """Beside adapters in attention."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        initializer_range=0.1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = quantize.quantize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), "nf4")
    targets = [f"{kind}_proj" for kind in "qkvo"]
    torch.manual_seed(1)
    return Task(get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))).train()


@pytest.mark.slow
def test_adapters_that_read_the_base_weights():
    """DoRA unpacks the base's weight by itself, and on the CPU puts another parameter in its place."""
    module = task(use_dora=True)
    assert_same(run("auto", module, batches()), trained(module, plan=PLAN))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("nf4 in fp32", "bf16-true"), ("int8", "bf16-mixed")])
def test_low_precision_leaves_packed_weights_and_scales_alone(name, precision):
    module = task(name, compute=torch.bfloat16)
    before = {key: value.clone() for key, value in module.state_dict().items() if "base_layer" in key}
    result = trained(module, precision=precision)
    scales = [value for key, value in result.state.items() if key.endswith(("absmax", "SCB", "quant_map"))]
    assert scales
    assert torch.bfloat16 not in {value.dtype for value in scales}
    for key, value in before.items():
        if not key.endswith(("nf4", "weight_format")):
            assert torch.equal(bits(result.state[key]), bits(value)), key
    if not (name == "nf4 in fp32" and precision == "bf16-true"):  # plain Lightning casts the packed bytes and fails
        plain = run("auto", module, batches(), precision=precision)
        for one, other in zip(plain.losses, result.losses, strict=True):
            assert abs(one - other) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [("dense", "16-mixed"), ("experts", "bf16-mixed")])
def test_mixed_precision_computes_as_in_plain_microbatches(kind, precision):
    """bitsandbytes' operator, given fp32, computed in fp32 where the engine watched operations, elsewhere in 16 bits.

    Which steps are watched depends on the plan, so the bits of a model with experts did, too.
    """
    module = task() if kind == "dense" else with_experts()
    first = trained(module, 1, precision=precision)
    assert_identical(first, trained(module, 4, precision=precision, plan=PLAN))
    if precision == "bf16-mixed":
        by_hand = harness.by_hand(module, batches(), 2, lambda part: (part["labels"] != -100).sum(), bf16=True)
        for one, other in zip(first.losses, by_hand.losses, strict=True):
            assert one.item() == pytest.approx(other.item(), rel=1e-6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        frozen = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        self.frozen = frozen.requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.trained(torch.relu(self.frozen(x)))


class Own(Learner):
    """A module without transformers.

    Args:
        blocks: its layers.
        quantised: whether its weights have been quantised, which moving it to a device does.
        code: whether user code between layers reads packed weights.
    """

    def __init__(self, blocks=None, *, quantised=True, code=False):
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(4)])
        self.code = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32).requires_grad_(False) if code else None
        self.out = nn.Linear(WIDTH, 8)
        if quantised:
            self.to("cpu")

    def loss(self, batch):
        x = self.into(batch)
        for block in self.blocks:
            x = block(x)
        if self.code is not None:
            x = bnb.matmul_4bit(x, self.code.weight, quant_state=self.code.weight.quant_state)
        return self.out(x).pow(2).mean()


def rows():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]


@pytest.mark.parametrize(
    "make",
    [Own, functools.partial(Own, quantised=False), functools.partial(Own, code=True)],
    ids=["linear", "not yet quantised", "user code"],
)
def test_modules_of_the_users_own(make):
    torch.manual_seed(3)
    module = make()
    assert_same(run("auto", module, rows()), trained(module, data=rows()))


# -- what travels ------------------------------------------------------------------------------------------------------


def uploads(module, monkeypatch):
    """Bytes of each layer's uploads, and the ids of the states that workers have computed with."""
    sent = {}
    states = set()
    real, product = SlotMemory._upload, bnb.matmul_4bit

    def upload(self, slot, layer, *args):
        sent[layer.name] = layer.weights.nbytes
        real(self, slot, layer, *args)

    def matmul(x, packed, quant_state, **kwargs):
        states.add(id(quant_state))
        return product(x, packed, quant_state, **kwargs)

    monkeypatch.setattr(SlotMemory, "_upload", upload)
    monkeypatch.setattr(bnb, "matmul_4bit", matmul)
    trained(module, plan=PLAN)
    return sent, states


def test_packed_bytes_travel_and_each_worker_has_a_state_of_its_own(monkeypatch):
    module = task()
    linear = [m for m in module.modules() if isinstance(m, bnb.nn.Linear4bit)]
    sent, states = uploads(module, monkeypatch)
    block = sent["model.base_model.model.model.layers.2"]
    weights = sum(m.in_features * m.out_features for m in linear) // 4
    adapters = 4 * sum(p.numel() for p in module.parameters() if p.requires_grad) // 4
    tables = 7 * (16 + 256 + 1 + 1) * 4  # two tables, an offset and a scale of scales for each of seven weights
    padding = (7 * 6 + 14 + 2) * 256
    least = weights / 2 + weights / 64 + adapters + 2 * 4 * WIDTH
    assert least < block <= least + tables + padding
    assert not states & {id(m.weight.quant_state) for m in linear}


def test_the_module_is_left_as_it_was(tmp_path):
    """Its state dict has the keys of bitsandbytes, and plain transformers loads what it saves."""
    module = task()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    result = trained(module)
    assert result.state.keys() == before.keys()
    assert not any(isinstance(value, nn.Parameter) for value in result.state.values())
    base = result.module.model.unload()
    base.save_pretrained(tmp_path)
    again = task(source=tmp_path)
    assert_same(run("auto", again, batches(1)), run("auto", module, batches(1)))


@pytest.mark.parametrize("name", ["int8", "packed experts"])
def test_resumes_from_a_checkpoint(name, tmp_path):
    """Plain Lightning calls the scales in its own checkpoint unexpected."""
    module, data = (with_experts() if name == "packed experts" else task(name)), batches()
    whole = trained(module, data=data * 2)
    trainer = trainer_of(ours(num_microbatches=2), devices=2)
    trainer.fit(copy.deepcopy(module), loader(data))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = copy.deepcopy(module)
    prepare(other)
    for tensor in [*other.parameters(), *companions(other)]:
        tensor.data.zero_()
    trainer_of(ours(num_microbatches=2), devices=2, max_epochs=2).fit(
        other, loader(data), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=False
    )
    for key, value in other.state_dict().items():
        if not key.endswith("__nf4"):
            assert torch.equal(value, whole.state[key]), key


def test_an_evaluation_before_leaves_the_weights_usable():
    """On some CPUs bitsandbytes lays weights out anew in evaluation, in a form that cannot be trained.

    Its way back, which state_dict() takes, too, leaves scales that are not quantised transposed and in bf16.
    """
    module = task("nf4 once")
    plain = run("auto", module, batches())
    module.eval()
    with torch.no_grad():
        loss = module.model(**batches()[0]).loss
    module.state_dict()
    result = trained(module.train())
    assert abs(result.losses[0] - loss) < 1e-3
    for one, other in zip(plain.losses, result.losses, strict=True):
        assert abs(one - other) < 4e-3
    for linear in (m for m in result.module.modules() if isinstance(m, bnb.nn.Linear4bit)):
        assert not getattr(linear.weight.quant_state, "packing_format_for_cpu", False)
        assert linear.weight.quant_state.absmax.dim() == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def spoiled(kind):
    module = Own()
    module.blocks[1].matrix = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    if kind == "trained":
        weight = task("nf4 in fp32")
        next(p for p in weight.parameters() if isinstance(p, bnb.nn.Params4bit)).requires_grad_(True)
        return weight
    if kind == "embedding":
        module.into = bnb.nn.EmbeddingNF4(32, 32)
    if kind == "tied":
        module.into = bnb.nn.Linear4bit(32, 32, bias=False)
        module.into.weight = module.out.weight
    if kind == "no scales":
        module.blocks[1].frozen.weight.quant_state = None
    if kind == "parametrization":
        replace_parameter_4bit(module.blocks[1], "matrix", compress_statistics=True)
    if kind == "loaded":  # by torch.load, which gives every parameter the class of plain ones
        frozen = module.blocks[1].frozen
        frozen.weight = nn.Parameter(frozen.weight.data, requires_grad=False)
    if kind == "sixteen":
        module.into = bnb.nn.Linear8bitLt(32, 32, has_fp16_weights=True)
    return module


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("trained", "adapters"),
        ("embedding", "llm_int8_skip_modules"),
        ("tied", "'into' is a layer in four bits whose weight is not quantised.*llm_int8_skip_modules"),
        ("sixteen", "llm_int8_has_fp16_weight=False"),
        ("parametrization", r"unpacks a parameter for each use.*quantize\.from_pretrained"),
        ("loaded", r"'blocks\.1\.frozen' has the dtype torch\.uint8 and is of no class of bitsandbytes"),
        ("no scales", r"'blocks\.1\.frozen' lacks its scales"),
    ],
)
def test_refused_by_name_with_a_remedy(kind, words):
    with pytest.raises(RoundPipeError, match=words):
        trained(spoiled(kind), data=rows())


@pytest.mark.slow
def test_a_checkpoint_of_another_quantisation_is_refused(tmp_path):
    trainer = trainer_of(ours(num_microbatches=2), devices=2)
    trainer.fit(task("nf4"), loader(batches(1)))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    for other in ("nf4 once", "int8"):
        with pytest.raises(RoundPipeError, match="quantised otherwise"):
            trainer_of(ours(num_microbatches=2), devices=2, max_epochs=2).fit(
                task(other), loader(batches(1)), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=False
            )
