"""Hugging Face's language models."""

from zoo.batches import VOCAB, causal_batch, classification_batch, seq2seq_batch
from zoo.modules import CausalLM, Classifier, Seq2SeqLM
from zoo.registry import BLOCKS, WIDTH, entry


def hugging_face(name, batch, module, model, config, **options):
    """``model`` of transformers, with what its configuration's class is given."""

    def build():
        import transformers

        kind = getattr(transformers, model)
        return kind(kind.config_class(**config))

    entry(name, batch, module, **options)(build)


TEXT = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LABELS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}

hugging_face("llama", causal_batch, CausalLM, "LlamaForCausalLM", TEXT | {"num_key_value_heads": 2}, lora=True)

QWEN = TEXT | GROUPED | {"tie_word_embeddings": True}
hugging_face("qwen3", causal_batch, CausalLM, "Qwen3ForCausalLM", QWEN, lora=True)

GPT2 = {
    "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
hugging_face("gpt2", causal_batch, CausalLM, "GPT2LMHeadModel", GPT2, lora=True)

T5 = {
    "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
hugging_face("t5", seq2seq_batch, Seq2SeqLM, "T5ForConditionalGeneration", T5)

hugging_face("bert", classification_batch, Classifier, "BertForSequenceClassification", TEXT | LABELS)

# With its router's loss, which is no mean over targets or samples. The experts are one parameter of three axes.
EXPERTS = {
    "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip
MIXTURE = TEXT | GROUPED | EXPERTS
hugging_face("qwen3_moe", causal_batch, CausalLM, "Qwen3MoeForCausalLM", MIXTURE, lora=True, coupled=True)

# Attention sinks, every other layer with a sliding window, experts with biases.
SINKS = {
    "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "sliding_window": 4,
}  # fmt: skip
hugging_face("gpt_oss", causal_batch, CausalLM, "GptOssForCausalLM", TEXT | GROUPED | SINKS, lora=True)

# Gemma 3: two rotary tables, sliding windows, scaled and tied embeddings.
SLIDING = {
    "num_hidden_layers": 2,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
hugging_face("gemma", causal_batch, CausalLM, "Gemma3ForCausalLM", TEXT | GROUPED | SLIDING, lora=True)

# One block that is called three times.
SHARED = {"embedding_size": 16, "classifier_dropout_prob": 0.0}
hugging_face("albert", classification_batch, Classifier, "AlbertForSequenceClassification", TEXT | LABELS | SHARED)
