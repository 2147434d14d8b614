"""Other architectures, of which one run each is compared: what was tried by hand stays tried."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from zoo import language
from zoo.batches import VOCAB, causal_batch, classification_batch, image_batch, segmentation_batch
from zoo.batches import seq2seq_batch as text_batch
from zoo.modules import CausalLM, Classifier, PixelClassifier, PlainLM, Seq2SeqLM
from zoo.plain import ResidualBlock
from zoo.registry import WIDTH, entry

TEXT = language.TEXT | {"intermediate_size": 48, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    "attention_dropout": 0.0, "init_std": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "decoder_start_token_id": 1,
}  # fmt: skip


hugging_face = partial(language.hugging_face, other=True)


# --------------------------------------------------------------------------------------------------------- Hugging Face

MIXTURE = {"num_local_experts": 4, "num_key_value_heads": 2, "output_router_logits": True}
hugging_face("mixtral", causal_batch, CausalLM, "MixtralForCausalLM", TEXT | MIXTURE, lora=True, coupled=True)

hugging_face("mamba", causal_batch, CausalLM, "MambaForCausalLM", TEXT | {"state_size": 4, "time_step_rank": 4})


LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
hugging_face("deepseek3", causal_batch, CausalLM, "DeepseekV3ForCausalLM", TEXT | LATENT, lora=True)

# Sets a tensor that requires grad on a module inside the layer.
GRIFFIN = {
    "num_key_value_heads": 2, "lru_width": WIDTH, "attention_window_size": 8, "block_types": ("recurrent", "attention"),
}  # fmt: skip
hugging_face("recurrent_gemma", causal_batch, CausalLM, "RecurrentGemmaForCausalLM", TEXT | GRIFFIN)

# One convolution beside the blocks, relative positions shared by all of them.
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0, "position_buckets": 4,
    "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "num_labels": 3,
}  # fmt: skip
DEBERTA_MODEL = "DebertaV2ForSequenceClassification"
hugging_face("deberta", classification_batch, Classifier, DEBERTA_MODEL, TEXT | NO_DROPOUT | DEBERTA)

SWIN = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2}
SWIN_MODEL = "SwinForImageClassification"
hugging_face("swin", image_batch, Classifier, SWIN_MODEL, SWIN | NO_DROPOUT | {"drop_path_rate": 0.0, "num_labels": 3})


def speech_batch(generator, samples, length):
    labels = text_batch(generator, samples, length)["labels"]
    return {"input_features": torch.randn(samples, 8, 16, generator=generator), "labels": labels}


WHISPER = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
hugging_face("whisper", speech_batch, Seq2SeqLM, "WhisperForConditionalGeneration", SEQ2SEQ | WHISPER)


# --------------------------------------------------------------------------------------------------------- torch's own


class TorchTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        h = self.transformer(self.source(ids), self.target(ids), tgt_mask=mask, src_key_padding_mask=ids == 0)
        return self.head(h)


entry("torch_transformer", causal_batch, PlainLM, other=True)(TorchTransformer)


class BasicBlock(nn.Module):
    """As in a ResNet, in place wherever it can be."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        h = self.second(self.relu(self.norm(self.first(x))))
        h += self.down(x)
        return self.relu(h)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x):
        return F.interpolate(self.head(self.layers(self.stem(x))), scale_factor=2.0)


entry("resnet", segmentation_batch, PixelClassifier, other=True, coupled=True)(ResNet)


class Experts(nn.Module):
    """Experts that only some tokens reach, in an order and number that the data decide; some get none."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        h = self.embed(ids)
        shares = self.gate(h).softmax(-1)
        best, out = shares.argmax(-1), torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            if (mine := best == index).any():
                out[mine] = expert(h[mine]) * shares[mine][:, index : index + 1]
        return self.head(out)


entry("experts_in_user_code", causal_batch, PlainLM, other=True)(Experts)
