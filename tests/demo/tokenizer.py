"""Builds the toy model's tokenizer: byte-level BPE with one token for every word of the corpus.

Any text can be encoded and decoded without loss: the alphabet is all 256 bytes and there is no
unknown token. A line break is always a token of its own, so that a prompt has the same tokens
whether it is tokenized as a whole or by segment. The tokenizer puts BOS before a text that is
encoded with special tokens, and so does the chat template.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.toy import vocabulary

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MAX_LENGTH = 4096

_VOCABULARY_LIMIT = 4096
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'ll", "'m", "'d")
_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'system' %}{{ '\n\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer from the corpus's word list; the result depends on nothing else."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_LIMIT,
        min_frequency=1,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_word_forms(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the files for `AutoTokenizer`, with a class name that every version knows."""
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _word_forms() -> list[str]:
    """Each word after a space and, if possible, at the start of a segment."""
    words = sorted(vocabulary())
    capitalized = sorted({word.capitalize() for word in words if word.islower()})
    initial = [word for word in (*words, *capitalized) if word[0].isupper()]
    spaced = [f" {word}" for word in (*words, *capitalized)]
    return [*spaced, *initial, *_CONTRACTIONS, "---------------------"]
