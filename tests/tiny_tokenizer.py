"""A fast tokenizer made on the spot: bytes, and a few merges, one of which is across what a prompt may end with."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{{ '<begin>' }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<turn>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""One that marks what the assistant says."""
FORGETFUL = CHAT.replace("message['content']", "(message['content'] if loop.last else '...')")
"""A chat template that shortens what was said before."""

SPECIAL = ("<end>", "<begin>", "<turn>", "<user>", "<assistant>", "<system>")


def tiny_tokenizer(chat_template=CHAT, begins=False):
    """One token for each byte, and for a few words.

    Args:
        chat_template: None: there is none.
        begins: whether texts begin with ``<begin>`` and end with ``<end>``.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "b"), ("a", "b"), ("Ġb", "e"), ("t", "h"), ("th", "e")]
    tokens = [*SPECIAL, *letters, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<begin> $A <end>", special_tokens=[("<begin>", 1), ("<end>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", bos_token="<begin>", chat_template=chat_template
    )
