"""Runs of models of some 200 MB, each in a process of its own, that say what memory they took."""

import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import torch
from harness import loader, ours, quiet, trainer_of
from peft import LoraConfig, get_peft_model

from lightning_roundpipe.model.loading import from_config, from_folder

WIDTH, BLOCKS, VOCABULARY = 512, 16, 512
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
BATCHES = [{"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}] * 2


def private_bytes():
    """What this process has of memory that no file backs."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@contextmanager
def watched():
    """How much ``private_bytes`` grew at most, looked at all the time: ``peak``, in bytes."""
    found, over, before = {"peak": 0}, threading.Event(), private_bytes()

    def look():
        while not over.wait(0.001):
            found["peak"] = max(found["peak"], private_bytes() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield found
    over.set()
    thread.join()
    found["peak"] = max(found["peak"], private_bytes() - before)


class Tuned(pl.LightningModule):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.optimizer = model.train(), optimizer

    def training_step(self, batch, batch_idx):
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def fit(module, *callbacks, **options):
    trainer = trainer_of(ours(num_microbatches=2), devices=2, callbacks=list(callbacks), **options)
    with quiet():
        trainer.fit(module, loader(BATCHES))
    return trainer


def write(folder, dtype):
    """A random model's files, in shards. Its bytes."""
    model = from_config("llama", dtype=dtype, **SHAPE).model
    model.save_pretrained(folder, max_shard_size="50MB")
    return sum(p.nbytes for p in model.parameters())


def loading(folder):
    """All weights are trained, in twice the files' format."""
    with watched() as found:
        module = Tuned(from_folder(folder, dtype="float32").model, torch.optim.SGD)
        fit(module, max_steps=0)
    return found | {"weights": sum(p.nbytes for p in module.parameters())}


def adapters(folder, precision, copied):
    """Only adapters are trained; the base is in its files, or ``copied`` out of them before."""
    before = private_bytes()
    with watched() as found:
        model = from_folder(folder, dtype="auto").model
        for parameter in model.parameters() if copied else ():
            parameter.data = parameter.data.clone()
        module = Tuned(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])), torch.optim.AdamW)
        trainer = fit(module, precision=precision)
    devices = sum(trainer.strategy.report()["peak_device_bytes"])
    weights = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    return found | {"weights": weights, "devices": devices, "after": private_bytes() - before}


class Saving(pl.Callback):
    """Saves after the last step, and says what that took."""

    def __init__(self, path):
        self.path = path
        self.found = {}

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == len(BATCHES):
            trainer.save_checkpoint(self.path)  # what is on its way is done now
            with watched() as self.found:
                trainer.save_checkpoint(self.path)


def saving(folder):
    """All weights and AdamW's state."""
    path = Path(folder) / "at.ckpt"
    module = Tuned(from_config("llama", **SHAPE).model, torch.optim.AdamW)
    callback = Saving(path)
    fit(module, callback)
    return callback.found | {"weights": sum(p.nbytes for p in module.parameters()), "file": path.stat().st_size}


def main(what, *arguments):
    torch.set_num_threads(1)
    tiny = SHAPE | {"hidden_size": 16, "intermediate_size": 16}
    fit(Tuned(from_config("llama", **tiny).model, torch.optim.AdamW))  # what is loaded and started once
    print(json.dumps(globals()[what](*arguments)))
