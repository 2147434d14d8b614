"""Mistakes in the files that ``data=texts`` and ``data=completions`` train on, and in their settings."""

import json

import datasets
import tiny_tokenizer as tokenizers
from torch.optim import AdamW
from transformers import BloomConfig, BloomForCausalLM

from lightning_roundpipe.data import TextFiles
from lightning_roundpipe.tasks.causal_lm import CausalLM
from mistakes.commands import command
from mistakes.user import Mistake

QUESTION = {"prompt": "what?", "completion": "that"}


def _reading(*records, name="a.jsonl", **settings):
    """Trains on a file with these records, as far as its rows."""

    def way(user):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (user.folder / name).write_text("".join(f"{line}\n" for line in lines))
        _open(user, **settings)

    return way


def _open(user, **settings):
    options = {"path": user.folder, "tokenizer": tokenizers.tiny_tokenizer(), "vocab_size": 300}
    options |= {"sequence_length": 16, "batch_size": 1} | settings
    TextFiles(**options).setup("fit")


class _Slow:
    is_fast = False


def _broken_tokenizer(user):
    (user.folder / "tokenizer.json").write_text("{")
    _open(user, tokenizer=user.folder)


def _dictionary(user):
    split = datasets.Dataset.from_list([QUESTION])
    datasets.DatasetDict(train=split, test=split).save_to_disk(user.folder / "data")
    _open(user, path=user.folder / "data")


def _mixing(user):
    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    CausalLM(BloomForCausalLM(config), AdamW).keep_documents_apart()


SECTION = "Data files of `roundpipe-train`"
DATA = [
    Mistake(SECTION, "`data.path` that is not there", "data.path='…' is not there",
        "Name a file that ends in .jsonl, .json, .parquet or .txt, or a folder of such",
        (lambda user: _open(user, path=user.folder / "nowhere"),)),
    Mistake(SECTION, "`data.path` without such files",
        "data.path='…' holds no file that ends in .jsonl, .json, .parquet or .txt", "Name such a file or a folder",
        (_open, _reading(name="a.csv"))),
    Mistake(SECTION, "records that are none, or cannot be learnt from",
        "data.path: … has records that cannot be used: record …: …", "Correct or remove",
        (_reading(QUESTION, {"messages": [{"role": "user", "content": "what?"}]}),)),
    Mistake(SECTION, "files that are broken, or empty", "data.path: …", "Correct it, or save it again",
        (_reading(QUESTION, "{"), _reading(name="a.jsonl"))),
    Mistake(SECTION, "records whose fields are no format", "data.path: … has records that cannot be used: record …: …",
        "Rename them", (_reading(QUESTION, {"question": "what?", "answer": "that"}),)),
    Mistake(SECTION, "conversations or instructions for a tokenizer without a chat template",
        "data.path: … record …: it is a conversation, and the tokenizer has no chat template",
        "Set data.chat_template to plain or to a file with a template",
        (_reading({"instruction": "a", "output": "b"}, tokenizer=tokenizers.tiny_tokenizer(None)),)),
    Mistake(SECTION, "`data.chat_template` that is not there", "data.chat_template='…' is not a file",
        "set it to plain, or to null", (_reading(QUESTION, chat_template="chatml"),)),
    Mistake(SECTION, "a folder that `DatasetDict.save_to_disk` wrote", "data.path: '…' holds a DatasetDict of …",
        "Name the folder of one split", (_dictionary,)),
    Mistake(SECTION, "records that are too long",
        "data.sequence_length=… is too short for … of more than … tokens, … record … first",
        "Raise it, or set data.too_long to truncate or drop, or data.rows=joined for texts",
        (_reading(QUESTION, {"text": "x" * 99}), _reading(QUESTION, {"text": "x" * 99}, rows="padded"))),
    Mistake(SECTION, "a record whose prompt alone is too long, truncated",
        "data.too_long='truncate' leaves nothing to be learnt of … record …", "Raise that, or set data.too_long=drop",
        (_reading(QUESTION, {"prompt": "x" * 99, "completion": "y"}, too_long="truncate"),)),
    Mistake(SECTION, "prompts or conversations joined and cut", "data.rows='joined' cuts records anywhere",
        "Set data.rows=packed, or data.loss_on=everything", (_reading(QUESTION, rows="joined"),)),
    Mistake(SECTION, "packed rows for a model that cannot keep their documents apart",
        "documents of a packed row see each other in …", "Set data.rows=padded, or data.rows=joined", (_mixing,)),
    Mistake(SECTION, "too few records to hold some out",
        "data.path has too few different records (… or fewer) to be divided",
        "Set data.validation_path to held-out records", (_reading(QUESTION), _reading(QUESTION, QUESTION))),
    Mistake(SECTION, "the tokenizer of another model",
        "data.path: the tokenizer makes token …, and the model's vocabulary has …",
        "Set data.tokenizer to that of the model", (_reading(QUESTION, vocab_size=20),)),
    Mistake(SECTION, "`data=texts` for a model without tokenizer",
        "roundpipe-train: data.path needs the model's tokenizer",
        "Set data.tokenizer to a folder with one, or choose a pretrained model (model=smollm2) or data=random_tokens",
        (command("data=texts", "data.path=here"), command("data=completions", "data.path=here"))),
    Mistake(SECTION, "`data.tokenizer` that is not there", "data.tokenizer='…' is not a folder",
        "Name one that a tokenizer's save_pretrained() wrote", (_reading(QUESTION, tokenizer="nowhere"),)),
    Mistake(SECTION, "`data.tokenizer` that is broken", "data.tokenizer='…': … cannot be read",
        "repair: copy or download the folder again", (_broken_tokenizer,)),
    Mistake(SECTION, "a tokenizer that does not say where its tokens stand",
        "data.tokenizer: … does not say which characters a token stands for",
        "Take the fast kind of it (tokenizer.json)", (_reading(QUESTION, tokenizer=_Slow()),)),
    Mistake(SECTION, "`data.rows`, `data.loss_on` or `data.too_long` that there is not", "data.…='…' must be",
        "'…' or '…'", tuple(_reading(QUESTION, **{name: "x"}) for name in ("rows", "loss_on", "too_long"))),
]  # fmt: skip
