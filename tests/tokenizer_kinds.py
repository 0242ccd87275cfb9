"""One small tokenizer of each kind there is, all with ChatML's special tokens and template."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The lighthouse at Vell was built in 1821 by a widow who had lost two ships at sea.",
    "She kept the lamp burning for forty years, and no vessel was lost there again.",
    "system user assistant tool Question Answer Context { } [ ] < > | _ im start end",
    "Half of the harbour is older than the town; who sailed it, and when (or why)?",
]
BOS, EOS, UNK = "<s>", "</s>", "<unk>"
START, END = "<|im_start|>", "<|im_end|>"
THINK, USER, CELL = "<think>", "<\uff5cUser\uff5c>", "<td>"
"""Added tokens that are not declared special: named by the template, in its form, and neither."""
SPECIAL = [BOS, EOS, UNK, START, END]
BYTES = [f"<0x{index:02X}>" for index in range(256)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if thinks %}<think>{% endif %}"
)
TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark of a space


def _byte_level(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece(
    *, normalizer: Any = None, pre_tokenizer: Any = None, first: bool = True
) -> Tokenizer:
    """BPE over whole texts; characters it does not know are bytes, which are no added tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNK, fuse_unk=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*SPECIAL, *BYTES],
        initial_alphabet=[SPACE],
        show_progress=False,
    )
    tokenizer.train_from_iterator([word for line in CORPUS for word in line.split()], trainer)
    stripped = [decoders.Strip(" ", 1, 0)] if first else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(state))


def _legacy_prepend() -> Tokenizer:
    return _sentencepiece(
        normalizer=normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    )


def _metaspace(scheme: Any) -> Tokenizer:
    return _sentencepiece(
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    )


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=SPECIAL, unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, "\n\t.,?!"], trainer)
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_level() -> Tokenizer:
    words = sorted({word for line in CORPUS for word in line.split()})
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _stripping() -> Tokenizer:
    """Drops spaces around whatever it encodes, hence words of two segments may run together."""
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte-level, prefix space": lambda: _byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "tiktoken": lambda: _byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(TIKTOKEN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "legacy prepend": _legacy_prepend,
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "prefix-free": lambda: _sentencepiece(normalizer=normalizers.Replace(" ", SPACE), first=False),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "word level": _word_level,
    "stripping": _stripping,
}
WORDS_ONLY = {"wordpiece", "word level"}
UNUSABLE = {"stripping"}
KINDS = [name for name in BUILDERS if name not in UNUSABLE]
SPELLS_EVERYTHING = [name for name in KINDS if name not in {*WORDS_ONLY, "unigram"}]


@cache
def tokenizer_of(kind: str, *, opens: bool = True) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a kind; opens: it puts BOS before prompts."""
    tokenizer = BUILDERS[kind]()
    added = [AddedToken(text, special=False, normalized=False) for text in (THINK, USER, CELL)]
    tokenizer.add_tokens(added)
    if opens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
        chat_template=CHATML,
    )
