"""LoRA on conversations, from a JSONL file to adapters that plain PEFT loads.

A small Llama with random weights, which stay as they are, learns by heart to answer questions. ``TextFiles`` reads
the conversations, writes them out by the tokenizer's chat template, packs them into rows in which they do not see each
other, and lets the model learn the answers only. It is an ordinary data module, and so is everything else ordinary:
PEFT's adapters, Hugging Face's ``generate``. Only the strategy is new. Rows differ in how many tokens are learnt, and
``loss_weight="targets"`` makes the loss of a step the mean over all of them.

    python examples/lora_chat.py          (under a minute, no GPU)

Prints how much of the model is trained, the loss before and after, answers, and that plain PEFT gives the same ones.
"""

import copy
import json
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.data import TextFiles

STEPS = 44
CAPITALS = {
    "France": "Paris",
    "Peru": "Lima",
    "Ghana": "Accra",
    "Japan": "Tokyo",
    "Cuba": "Havana",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Fiji": "Suva",
}
CHATS = [
    [
        {"role": "user", "content": f"What is the capital of {country}?"},
        {"role": "assistant", "content": f"{capital} is the capital of {country}."},
    ]
    for country, capital in CAPITALS.items()
]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words in these conversations. A pretrained model brings its own."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<end>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((message["content"] for chat in CHATS for message in chat), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE
    )


class ChatTuning(pl.LightningModule):
    def __init__(self, base: LlamaForCausalLM) -> None:
        super().__init__()
        # The output layer is trained as a whole: these random weights have never learnt to say anything.
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
        self.model = get_peft_model(base, lora)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch, use_cache=False).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=5e-3)


def answer(model, tokenizer, country: str) -> str:
    question = [{"role": "user", "content": f"What is the capital of {country}?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model.eval()
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    model.train()
    return tokenizer.decode(tokens, skip_special_tokens=True)


def main() -> None:
    pl.seed_everything(1, verbose=False)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    base = LlamaForCausalLM(config)
    untouched = copy.deepcopy(base)
    module = ChatTuning(base)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=RoundPipeStrategy(loss_weight="targets"),
        max_steps=STEPS,
        accumulate_grad_batches=8,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        chats = Path(folder) / "chats.jsonl"
        chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS * 8))
        data = TextFiles(
            chats,
            tokenizer,
            len(tokenizer),
            sequence_length=96,
            batch_size=1,
            validation_path=chats,  # learnt by heart: nothing is held out
        )
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        print(f"trained: {trained:,} of {sum(p.numel() for p in module.parameters()):,} parameters")
        [before] = trainer.validate(module, data, verbose=False)
        said = answer(module.model, tokenizer, "Peru")
        trainer.fit(module, data)
        [after] = trainer.validate(module, data, verbose=False)
        print(f"loss on the answers: {before['val_loss']:.3f} before, {after['val_loss']:.3f} after")
        print(f"before, of Peru: {said!r}")

        module.model.save_pretrained(folder)
        plain = PeftModel.from_pretrained(untouched, folder)
        for country in CAPITALS:
            said, again = answer(module.model, tokenizer, country), answer(plain, tokenizer, country)
            print(f"after, of {country}: {said!r} (plain PEFT: {'the same' if said == again else repr(again)})")


if __name__ == "__main__":
    main()
