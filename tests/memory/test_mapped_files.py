"""Frozen weights that lie in files stay there; what is trained, or begins to be, does not."""

import copy

import pytest
import torch
import zoo
from harness import assert_identical, assert_same, ours, run
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.host_layer import begin_to_train, host_layers
from lightning_roundpipe.memory.mapped_files import mapped_weights
from lightning_roundpipe.model.loading import from_config, from_folder

LOW = Formats(torch.bfloat16)


def in_a_file(path, dtype=torch.float32):
    """A frozen module whose parameters lie in ``path``, but for one that is trained."""
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7)).to(dtype)
    save_file({name: p.detach() for name, p in module.named_parameters()}, path)
    module.load_state_dict(load_file(path), assign=True)
    module.requires_grad_(False)
    module[1].bias.requires_grad_(True)
    return module


FROZEN = {"0.weight", "0.bias", "1.weight"}


def layer_of(module, device, formats=None):
    formats = formats or Formats()
    ids = mapped_weights(module.parameters(), device, formats)
    [layer] = host_layers({"layer": module}, device, formats, double_buffered=False, mapped=ids)
    return layer


def uploaded(layer, device):
    segment = torch.zeros(layer.weights.nbytes, dtype=torch.uint8)
    layer.weights.upload(device.weights_up, segment)
    device.weights_up.synchronize()
    return dict(zip((n for n, _ in layer.module.named_parameters()), layer.weights.views(segment), strict=True))


def test_uploads_read_the_file(device, tmp_path):
    module = in_a_file(tmp_path / "a.safetensors")
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    layer = layer_of(module, device)
    for name, view in uploaded(layer, device).items():
        parameter = module.get_parameter(name)
        assert torch.equal(view, before[name][1]) and torch.equal(parameter, before[name][1])
        assert (parameter.data_ptr() == before[name][0]) is (name in FROZEN)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "saving it would save its file"
        assert torch.equal(layer.weights.read(parameter), parameter)


def test_what_begins_to_be_trained_leaves_the_file(device, tmp_path):
    path = tmp_path / "a.safetensors"
    module = in_a_file(path, torch.bfloat16)
    content, before = path.read_bytes(), copy.deepcopy(module.state_dict())
    layer = layer_of(module, device, LOW)
    module[0].weight.requires_grad_(True)
    begin_to_train([layer], [], LOW, double_buffered=False)
    assert module[0].weight.dtype is torch.float32
    with torch.no_grad():
        module[0].weight.add_(1.0)
    for flat in layer.weights.flats:
        flat.refresh()
    changed = before | {"0.weight": before["0.weight"] + 1.0}
    for name, view in uploaded(layer, device).items():
        assert torch.equal(view.float(), changed[name].float()), name
    module.requires_grad_(False)
    assert not mapped_weights([module[0].weight], device, Formats())
    assert path.read_bytes() == content


# ---------------------------------------------------------------------------------------------------------- in training


def adapted(folder, **options):
    """A model from files, with adapters."""
    model = from_folder(folder, **options).model.train()
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return zoo.ENTRIES["llama"].module(get_peft_model(model, config))


class KeepsFile(zoo.CausalLM):
    """Is not copied by copying, or its weights would leave their file."""

    def __deepcopy__(self, memo):
        return self


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(7)
    model = from_config(
        "llama", vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ).model  # fmt: skip
    model.save_pretrained(tmp_path / "fp32")
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "dtype", "precision"), [("fp32", "float32", "32-true"), ("bf16", "auto", "bf16-true")]
)
def test_training_adapters_reads_the_base_where_it_is(device, folder, files, dtype, precision):
    """To the bit what training from a copy gives, user code that reads the tied embedding included."""
    content = (folder / files / "model.safetensors").read_bytes()
    batches, results = zoo.make_batches("llama", 3), []
    for copied in (False, True):
        module = adapted(folder / files, dtype=dtype)
        module.__class__ = KeepsFile
        frozen = [p for p in module.parameters() if not p.requires_grad]
        for parameter in frozen if copied else ():
            parameter.data = parameter.data.clone()
        results.append(run(ours(num_microbatches=3), module, batches, devices=2, precision=precision))
        assert len(mapped_weights(frozen, device, Formats())) == (0 if copied else len(frozen))
    assert_identical(*results)
    if precision == "32-true":
        # After steps of AdamW, which makes much of little.
        assert_same(run("auto", adapted(folder / files, dtype=dtype), batches), results[0], rtol=1e-4)
    assert (folder / files / "model.safetensors").read_bytes() == content
