"""Mistakes on the command line of ``roundpipe-train``."""

from mistakes.user import Mistake


def command(*arguments):
    return lambda user: user.command(*arguments)


SECTION = "The command line of `roundpipe-train`"
COMMANDS = [
    Mistake(SECTION, "a setting that there is not", "roundpipe-train: there is no setting '…'. Did you mean …?",
        "All settings: roundpipe-train experiment=tiny --cfg job",
        (command("trainer.max_step=3"), command("strategy.microbatches=2"), command("lr=1e-4"), command("modle=hub"))),
    Mistake(SECTION, "a choice that there is not", "roundpipe-train: there is no …. Did you mean …?", "There are …",
        (command("experiment=smolm2_lora"), command("model=qwen3_9b"), command("lora=all"))),
    Mistake(SECTION, "a setting with dashes, or without a value",
        "roundpipe-train: '…' is no …; settings are written NAME=VALUE.",
        "Did you mean …? All settings: roundpipe-train experiment=tiny --cfg job",
        (command("--lr", "3"), command("--experiment=tiny"), command("smollm2_lora"))),
    Mistake(SECTION, "an argument that is no setting", "roundpipe-train: …",
        "All settings: roundpipe-train experiment=tiny --cfg job",
        (command("strategy.num_microbatches"), command("strategy.layers=[a"))),
    Mistake(SECTION, "text where a number has to be", "roundpipe-train: …='…' must be a", "number",
        (command("optimizer.lr=abc"), command("trainer.max_steps=ten"), command("lora=all_linear", "lora.r=big"))),
    Mistake(SECTION, "`data.vocab_size` that the model does not have",
        "roundpipe-train: data.vocab_size=… is more than the model's vocabulary, which has …",
        "Leave data.vocab_size out: it is filled in",
        (command("model=tiny_llama", "data=random_tokens", "data.vocab_size=129"),)),
    Mistake(SECTION, "`model.quantization` without adapters",
        "roundpipe-train: The model is quantised, and packed weights cannot be trained",
        "train adapters (lora=all_linear), or all weights of a model with model.quantization=null",
        (command("model.quantization=nf4"), command("model.quantization=int8"))),
    Mistake(SECTION, "adapters in experts that are quantised",
        "roundpipe-train: lora asks for adapters in experts that are quantised",
        "Use lora=attention, or model.quantization=null",
        (
            command("model=tiny_qwen3_235b_a22b", "lora=moe_experts", "model.quantization=nf4"),
            command("model=tiny_gpt_oss_20b", "lora=moe_experts", "model.quantization=fp4"),
        )),
    Mistake(SECTION, "a setting that has to be set", "roundpipe-train: … must be set",
        "for example on the command line: …=VALUE", (command("model=folder"), command("partition=by_hand"))),
    Mistake(SECTION, "an option of the strategy, as in the tables above", "roundpipe-train: num_microbatches=… must be",
        "a whole number of at least 1", (command("strategy.num_microbatches=0"),)),
    Mistake(SECTION, "text data for a model without tokenizer",
        "roundpipe-train: data=topics needs the model's tokenizer",
        "Choose a pretrained model (model=smollm2) or data=random_tokens", (command("data=topics"),)),
    Mistake(SECTION, "`trainer=gpu` without a GPU", "roundpipe-train: trainer.accelerator='gpu' needs a CUDA device",
        "set trainer=cpu for emulated devices", (command("trainer=gpu"),)),
    Mistake(SECTION, "devices that a batch does not fit", "roundpipe-train: Emulated CUDA device 0 is out of memory",
        "Use smaller microbatches", (command("experiment=tiny", "strategy.emulation.memory=1MB"),)),
]  # fmt: skip
