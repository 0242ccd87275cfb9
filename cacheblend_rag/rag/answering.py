"""Answers questions from a collection: retrieval, the prompt, the streamed answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Self, cast

from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.collection import Collection, CollectionSettings
from cacheblend_rag.rag.collection_engine import Placement, open_known
from cacheblend_rag.rag.ordering import PassageOrder, Source, arranged
from cacheblend_rag.rag.progress import ProgressCallbacks
from cacheblend_rag.rag.prompt import AskedTurn, FittedPrompt, PromptFitter, RagPrompt
from cacheblend_rag.rag.readers import EXTRA
from cacheblend_rag.rag.retrieval import Embedder, VectorSearch

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Delta, Generation
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.sampling import SamplingParams

REPEATED = 16
"""How many passages are looked at for each that is wanted: a document may repeat itself."""


class Asker:
    """Answers questions from a collection.

    placement: where the engine runs. engine: replaces the collection's own, such as the current URL
    of its server. ratio, selector, reuse_prefix: override how answers are blended. progress: gets
    progress.
    Arguments are checked before models are loaded.

    Raises StoreError when the collection is missing or damaged, ConfigError when its models are not
    those it was indexed with, ModelLoadError, MissingExtraError.
    """

    def __init__(
        self,
        folder: Path,
        placement: Placement | None = None,
        engine: str | None = None,
        *,
        ratio: float | None = None,
        selector: str | None = None,
        reuse_prefix: bool | None = None,
        progress: ProgressCallbacks | None = None,
    ) -> None:
        progress, placement = progress or ProgressCallbacks(), placement or Placement()
        with Collection.open(folder) as collection:
            settings = replace(collection.settings, engine=engine or collection.settings.engine)
            stored = collection.load()
        _check(settings, placement.device, ratio, selector)
        self._load(folder, settings, placement, progress)
        self._chunks = [
            (chunk, position)
            for document in stored.documents
            for position, chunk in enumerate(document.to_chunks())
        ]
        self._size = stored.vectors.shape[1]
        self._search = VectorSearch(stored.vectors, EXTRA)
        self._embedding_model = settings.embedding_model
        self.instruction = settings.instruction
        self.config = self.engine.config.with_given(
            recompute_ratio=ratio, selector=selector, reuse_prefix=reuse_prefix
        )
        self._prompt = RagPrompt(self.engine.tokenizer, settings.instruction)
        self._fitter = PromptFitter(self.engine, self._prompt)

    def _load(
        self,
        folder: Path,
        settings: CollectionSettings,
        placement: Placement,
        progress: ProgressCallbacks,
    ) -> None:
        with progress.phase("loading the libraries"):
            quiet_libraries()
        with progress.phase(f"loading the embedding model {settings.embedding_model}"):
            self._embedder = Embedder(settings.embedding_model, EXTRA)
        with progress.phase(f"loading the model {settings.model}"):
            self.engine: Engine = open_known(folder, settings, placement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def stopping(self, sampling: SamplingParams) -> SamplingParams:
        """Return sampling settings with stop strings for the beginning of the next turn."""
        return sampling.with_changes(stop=(*sampling.stop, *self._prompt.stop))

    def retrieve(self, question: str, top_k: int, order: PassageOrder) -> list[Source]:
        """Return the passages nearest to a question, in the order for the prompt.

        Of passages of a document with the same text one is returned.
        """
        (vector,) = self._embedder.embed([question])
        if len(vector) != self._size:
            raise ConfigError(
                f"embedding model {self._embedding_model!r} gives {len(vector)} numbers per text, "
                f"the collection holds {self._size}: index with --rebuild"
            )
        found: dict[tuple[str | None, str], Source] = {}
        for place, score in self._search.nearest(vector, REPEATED * top_k):
            source = Source(*self._chunks[place], score)
            found.setdefault((source.chunk.document_id, source.chunk.text), source)
        return arranged(list(found.values())[:top_k], order)

    def fit(
        self,
        earlier: Sequence[AskedTurn],
        question: str,
        sources: Sequence[Source],
        max_tokens: int,
    ) -> FittedPrompt:
        """Build the prompt; the oldest turns, then the worst passages, are dropped until it fits.

        Raises PromptError when the question alone is too long.
        """
        return self._fitter.fit(earlier, question, sources, max_tokens)

    def stream(
        self, fitted: FittedPrompt, sampling: SamplingParams, cancel: Event | None = None
    ) -> Iterator[Delta]:
        """Stream the answer."""
        return self.engine.stream(fitted.prepared, sampling, config=self.config, cancel=cancel)


def _check(
    settings: CollectionSettings, device: str | None, ratio: float | None, selector: str | None
) -> None:
    """Raise errors that are known before anything is loaded."""
    checks.check_blend(ratio, selector)
    checks.check_engine(settings.engine)
    checks.check_model(settings.model)
    checks.check_embedding_model(settings.embedding_model)
    checks.check_installed(checks.RETRIEVAL_MODULES, "retrieval", EXTRA)
    checks.check_placement(device)


def clean_question(text: str) -> str:
    """Return a question without blanks around it; raises PromptError when nothing is left."""
    cleaned = text.encode("utf-8", "replace").decode("utf-8").strip()
    if not cleaned:
        raise PromptError("the question is empty")
    return cleaned


def finished(deltas: Iterable[Delta]) -> Generation:
    """Run a stream to its end and return the whole answer."""
    *_, last = deltas
    return cast("Generation", last.generation)
