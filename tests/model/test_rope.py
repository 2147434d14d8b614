"""``model.rope``: sequences beyond a model's positions train as plain Lightning trains them with the same setting."""

import copy
from functools import partial

import pytest
import torch
from harness import assert_same, ours, run
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from lightning_roundpipe.model.loading import from_config, from_folder, from_name
from lightning_roundpipe.model.rope import stretch
from lightning_roundpipe.tasks.causal_lm import CausalLM

POSITIONS, LENGTH = 32, 96
TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": POSITIONS, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
KINDS = {"yarn": YARN, "dynamic": {"rope_type": "dynamic", "factor": 4.0}}


def batches():
    torch.manual_seed(1)
    return [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(1, 64, (2, 4, LENGTH))]


def trained(model, strategy):
    module = CausalLM(copy.deepcopy(model), partial(torch.optim.SGD, lr=0.1))
    return run(strategy, module, batches(), devices=1 if strategy == "auto" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_beyond_the_configurations_positions_train_as_plain_training_does(kind):
    torch.manual_seed(0)
    settings = {key: value for key, value in TINY.items() if key not in ("model_type", "max_position_embeddings")}
    own = {"rope_theta": 10_000.0, **KINDS[kind]}
    grows = kind != "dynamic"
    positions = int(own["factor"] * POSITIONS) if grows else POSITIONS
    if kind == "yarn":
        own["original_max_position_embeddings"] = POSITIONS
    config = AutoConfig.for_model("llama", **settings, max_position_embeddings=positions, rope_parameters=own)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    same = from_config(**TINY, rope=KINDS[kind])
    assert same.config.max_position_embeddings == positions
    assert same.config.rope_parameters == config.rope_parameters
    same.model.load_state_dict(model.state_dict())
    alone = trained(model, "auto")
    assert_same(alone, trained(same.model, ours(num_microbatches=4)))
    unstretched = from_config(**TINY)
    unstretched.model.load_state_dict(model.state_dict())
    assert not torch.equal(alone.losses[0], trained(unstretched.model, "auto").losses[0])


def test_a_folder_keeps_the_setting(tmp_path):
    """Both ways in, and what is saved has it."""
    from_config(**TINY).model.save_pretrained(tmp_path / "before")
    for found in (from_folder(tmp_path / "before", rope=YARN), from_name(str(tmp_path / "before"), rope=YARN)):
        assert found.model.config.max_position_embeddings == 4 * POSITIONS
        assert found.model.config.rope_parameters["rope_type"] == "yarn"
    found.model.save_pretrained(tmp_path / "after")
    again = from_folder(tmp_path / "after")
    assert again.config.rope_parameters == found.config.rope_parameters
    named = from_config(**TINY, weights=str(tmp_path / "before"), rope={**YARN, "max_position_embeddings": 100})
    assert named.model.config.max_position_embeddings == 100


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarm", "factor": 4.0}, "needs a rope_type, one of default, linear, dynamic, yarn"),
        ({"rope_type": "yarn", "factors": 4.0}, "transformers does not take these parameters"),
    ],
)
def test_mistakes(rope, message):
    with pytest.raises(ValueError, match=r"model\.rope=") as error:
        from_config(**TINY, rope=rope)
    assert message in str(error.value)


def test_models_without_one_rotary_embedding_are_refused():
    with pytest.raises(ValueError, match=r"a gpt2 has no rotary embedding\. Leave model.rope out"):
        stretch(GPT2Config(), YARN)
    with pytest.raises(ValueError, match="a rotary embedding for each kind of layer"):
        stretch(AutoConfig.for_model("gemma3_text"), YARN)
