"""Converts the tokenizer of a GGUF file into hub format, with the same tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from cacheblend_rag.errors import first_line
from cacheblend_rag.models.gguf_header import ROLES, CannotConvertError, GgufHeader

logger = logging.getLogger(__name__)

BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Byte-level pre-tokenizers that split off every digit."""
AS_GPT2 = {"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2"}
WHOLE_WORDS_FIRST = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken"}
"""Byte-level vocabularies that use whole words without merging, and begin with BOS unless the file
says otherwise."""
ANSWER = "xyzzy"


def save_tokenizer(file: Path, header: GgufHeader, folder: Path) -> list[int]:
    """Write a GGUF file's tokenizer into a folder; return the tokens that end an answer.

    file: in a folder of its own, since transformers prefers a tokenizer.json beside it. Raises
    CannotConvertError when the converted tokenizer would give different tokens.
    """
    from transformers import PreTrainedTokenizerFast

    kind, rule = header.tokenizer("model"), header.tokenizer("pre", "default")
    tokens = header.tokenizer("tokens")
    if kind == BYTE_LEVEL:
        known = set(tokens)
        for merge in header.tokenizer("merges", ()):
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= known:
                raise CannotConvertError(
                    f"its tokenizer merges {left!r} and {right!r}, which are no tokens or make none"
                )
    read = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    backend: Tokenizer = read.backend_tokenizer
    _split_as_trained(backend, header)
    begins = kind == SENTENCE_PIECE or rule in WHOLE_WORDS_FIRST
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=int(header.settings.get("context_length", 1 << 20)),
        chat_template=header.metadata.get("tokenizer.chat_template"),
        add_bos_token=header.tokenizer("add_bos_token", begins),
        add_eos_token=header.tokenizer("add_eos_token", False),
        **{
            f"{name}_token": str(backend.id_to_token(number))
            for role, name in ROLES.items()
            if (number := header.tokenizer(f"{role}_token_id")) is not None
        },
    )
    tokenizer.save_pretrained(folder)
    ends = [header.tokenizer("eos_token_id"), header.tokenizer("eot_token_id")]
    ends.append(_after_answer(tokenizer))
    return [*dict.fromkeys(one for one in ends if one is not None and one < len(tokens))]


def _split_as_trained(backend: Tokenizer, header: GgufHeader) -> None:
    """Set the pre-tokenizer with which the vocabulary's merges were learned.

    transformers knows some rules by their names in GGUF files, and uses GPT-2's for all others,
    which is right for few.
    """
    kind, rule = header.tokenizer("model"), header.tokenizer("pre", "default")
    if kind == BYTE_LEVEL:
        if rule in DIGITS_ALONE:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and rule not in AS_GPT2:
            raise CannotConvertError(f"its tokenizer has an unknown pre-tokenizer ({rule!r})")
        if rule in WHOLE_WORDS_FIRST:
            backend.model.ignore_merges = True
    elif kind == SENTENCE_PIECE:
        adds_space = backend.encode("a", add_special_tokens=False).tokens[:1] != ["a"]
        if adds_space != bool(header.tokenizer("add_space_prefix", True)):
            raise CannotConvertError("transformers ignores its tokenizer's add_space_prefix")


def _after_answer(tokenizer: Any) -> int | None:
    """Return the control token that the chat template puts after an answer, if it puts one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # templates are programs of their own
        logger.debug("the chat template cannot be tried: %s", first_line(error))
        return None
    after = text.rpartition(ANSWER)[2].lstrip()
    ids: list[int] = tokenizer(after, add_special_tokens=False).input_ids
    added = tokenizer.added_tokens_decoder
    return ids[0] if ids and ids[0] in added and added[ids[0]].special else None
