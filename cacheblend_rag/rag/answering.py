"""Answers questions from a collection: retrieval, the prompt, the streamed answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.progress import ProgressCallbacks
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.collection import Collection
from cacheblend_rag.rag.ordering import PassageOrder, Source
from cacheblend_rag.rag.prompt import PromptFitter, RagPrompt, Turn
from cacheblend_rag.rag.readers import EXTRA
from cacheblend_rag.rag.retrieval import Embedder, FollowUps, VectorSearch

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Delta, Generation
    from cacheblend_rag.engines.sampling import SamplingParams

REPEATED = 16
"""How many passages are looked at for each that is wanted: a document may repeat itself."""


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
        self._follow_ups = FollowUps([chunk.text for chunk, _ in self._chunks])
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
        ``earlier`` ones, half of them are nearest to it and what it refers to, see FollowUps.
        """
        context = self._follow_ups.in_context(question, earlier)
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
