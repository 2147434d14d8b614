"""Hugging Face's language models."""

from __future__ import annotations

from torch import nn

from zoo.batches import VOCAB, causal_batch, classification_batch, seq2seq_batch
from zoo.modules import CausalLM, Classifier, Seq2SeqLM
from zoo.registry import BLOCKS, WIDTH, entry


@entry("llama", causal_batch, CausalLM, lora=True)
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
        )
    )


@entry("qwen3", causal_batch, CausalLM, lora=True)
def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.1,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )


@entry("gpt2", causal_batch, CausalLM, lora=True)
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=WIDTH,
            n_layer=BLOCKS,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.1,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


@entry("t5", seq2seq_batch, Seq2SeqLM)
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


@entry("bert", classification_batch, Classifier)
def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,
            num_labels=3,
            pad_token_id=0,
        )
    )


@entry("qwen3_moe", causal_batch, CausalLM, lora=True, coupled=True)
def qwen3_moe() -> nn.Module:
    """With its router's loss, which is no mean over targets or samples. The experts are one parameter of three axes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.1,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
            pad_token_id=0,
        )
    )


@entry("gpt_oss", causal_batch, CausalLM, lora=True)
def gpt_oss() -> nn.Module:
    """Attention sinks, every other layer with a sliding window, experts with biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=4,
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
        )
    )


@entry("gemma", causal_batch, CausalLM, lora=True)
def gemma() -> nn.Module:
    """Gemma 3: two rotary tables, sliding windows, scaled and tied embeddings."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
        )
    )


@entry("albert", classification_batch, Classifier)
def albert() -> nn.Module:
    """One block that is called three times."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    return AlbertForSequenceClassification(
        AlbertConfig(
            vocab_size=VOCAB,
            embedding_size=16,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            initializer_range=0.1,
            num_labels=3,
            pad_token_id=0,
        )
    )
