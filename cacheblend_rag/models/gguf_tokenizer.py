"""Converts the tokenizer of a GGUF file into hub format, with the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cacheblend_rag.errors import first_line
from cacheblend_rag.models.gguf_header import HUB_FORMAT, CannotConvertError, GgufHeader

logger = logging.getLogger(__name__)

BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Byte-level pre-tokenizers that split off every digit."""
AS_GPT2 = {"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2"}
WHOLE_WORDS_FIRST = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken"}
"""Byte-level vocabularies that use whole words without merging, and begin with BOS unless the file
says otherwise."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
ANSWER = "xyzzy"
BYTE_LETTERS = bytes_to_unicode()
SPACE = "\u2581"
"""The character for a space in SentencePiece vocabularies."""


def save_tokenizer(file: Path, header: GgufHeader, folder: Path) -> list[int]:
    """Write a GGUF file's tokenizer into a folder; return the tokens that end an answer.

    file: in a folder of its own, since transformers prefers a tokenizer.json beside it. Raises
    CannotConvertError when the converted tokenizer would give different tokens.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if header.tokenizer("model") == BYTE_LEVEL:
        check_merges(header.tokens, header.tokenizer("merges", ()))
    read = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend: Tokenizer = read.backend_tokenizer
    check_vocabulary(backend, header.tokens)
    _split_as_trained(backend, header)
    names = {
        f"{role}_token": str(backend.id_to_token(number))
        for role, key in ROLES.items()
        if (number := header.special_token(key)) is not None
    }
    _put_around(backend, header, names)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=int(header.settings().get("context_length", 1 << 20)),
        chat_template=header.metadata.get("tokenizer.chat_template"),
        **names,
    )
    tokenizer.save_pretrained(folder)
    return _end_tokens(tokenizer, header)


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
            raise CannotConvertError(
                f"its tokenizer has an unknown pre-tokenizer ({rule!r}): {HUB_FORMAT}"
            )
        if rule in WHOLE_WORDS_FIRST:
            backend.model.ignore_merges = True
    elif kind == SENTENCE_PIECE and _adds_space(backend) != bool(
        header.tokenizer("add_space_prefix", True)
    ):
        raise CannotConvertError(
            f"transformers ignores its tokenizer's add_space_prefix: {HUB_FORMAT}"
        )


def _adds_space(backend: Tokenizer) -> bool:
    """Whether a text's first word is encoded as if there were a space before it."""
    tokens: list[str] = backend.encode("a", add_special_tokens=False).tokens
    return tokens[:1] != ["a"]


def _put_around(backend: Tokenizer, header: GgufHeader, names: dict[str, str]) -> None:
    """Let the tokenizer begin texts with BOS and end them with EOS if the file says so."""
    rule = header.tokenizer("pre", "default")
    begins = header.tokenizer("model") == SENTENCE_PIECE or rule in WHOLE_WORDS_FIRST
    first = last = ""
    if header.tokenizer("add_bos_token", begins) and "bos_token" in names:
        first = names["bos_token"]
    if header.tokenizer("add_eos_token", False) and "eos_token" in names:
        last = names["eos_token"]
    one = " ".join(part for part in (first, "$A", last) if part)
    two = " ".join(part for part in (first, "$B", last) if part)
    special = [(token, backend.token_to_id(token)) for token in {first, last} - {""}]
    backend.post_processor = processors.TemplateProcessing(
        single=one, pair=f"{one} {two}", special_tokens=special
    )


def _end_tokens(tokenizer: Any, header: GgufHeader) -> list[int]:
    """Return the tokens that end an answer: EOS, and the chat template's end of a turn."""
    found = [header.special_token("eos"), header.special_token("eot")]
    if tokenizer.chat_template:
        found.append(_after_answer(tokenizer))
    return list(dict.fromkeys(token for token in found if token is not None))


def _after_answer(tokenizer: Any) -> int | None:
    """Return the control token that the chat template puts after an answer, if it puts one."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # templates are programs of their own
        logger.debug("the chat template cannot be tried: %s", first_line(error))
        return None
    after = text.rpartition(ANSWER)[2].lstrip()
    ids = tokenizer(after, add_special_tokens=False).input_ids
    added = tokenizer.added_tokens_decoder
    return int(ids[0]) if ids and ids[0] in added and added[ids[0]].special else None


def check_merges(tokens: Sequence[str], merges: Sequence[str]) -> None:
    """Raise CannotConvertError unless each merge joins two tokens to a third."""
    known = set(tokens)
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise CannotConvertError(
                f"its tokenizer merges {left!r} and {right!r}, which are no tokens or make none: "
                f"{HUB_FORMAT}"
            )


def check_vocabulary(backend: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise CannotConvertError unless each token's id is its index in the list.

    For a token that is listed twice, either id is right.
    """
    for number, token in enumerate(tokens):
        spellings = _spellings(token)
        held = backend.id_to_token(number)
        is_known = any(backend.token_to_id(each) is not None for each in spellings)
        if held not in {None, *spellings} or not is_known:
            raise CannotConvertError(
                f"transformers reads token {number} of its tokenizer as {held!r}, not {token!r}: "
                f"{HUB_FORMAT}"
            )


def _spellings(token: str) -> set[str]:
    """Return a token's spellings in vocabularies: with other characters for spaces or bytes."""
    by_bytes = "".join(BYTE_LETTERS[byte] for byte in token.encode("utf-8", "surrogatepass"))
    return {token, token.replace(" ", SPACE), by_bytes}
