"""One run of `index` over a collection.

A file is indexed whole: its KV is stored chunk by chunk as it is computed, then its text and
vectors are written in one transaction. After any interruption, files that are written are known by
their content's hash and passed over, and of the file in work only what was not stored is computed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cacheblend_rag.chunks import Chunk, Document
from cacheblend_rag.cli import checks, output
from cacheblend_rag.cli.collection import (
    FILE_NAME,
    Collection,
    CollectionSettings,
    clear,
    source_name,
)
from cacheblend_rag.cli.collection_engine import (
    Choices,
    default_instruction,
    new_settings,
    open_known,
    open_new,
)
from cacheblend_rag.cli.foreign import is_foreign, warn_of_foreign
from cacheblend_rag.cli.models import DEMO_MODEL
from cacheblend_rag.cli.reading import EXTRA, FileReader, UnreadableFileError, make_splitter
from cacheblend_rag.cli.retrieval import Embedder, Vectors
from cacheblend_rag.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from rich.progress import Progress

    from cacheblend_rag.engines.base import Engine

PART_CHUNKS = 64
SHOWN_CHARACTERS = 30
NAME_BREAKS = re.compile(r"[-_.\s]+")


@dataclass
class IndexReport:
    """What one run did.

    added, changed, unchanged: files. removed: documents whose files are gone; vanished: such that
    were kept. unknown: files with an extension that is not read. skipped: files that could not be
    indexed, and why. computed_chunks, stored_chunks: chunks of files that were read whose KV was
    computed, or was there already. refused_chunks: chunks that have no KV, by reason. documents,
    chunks: all that the collection holds in the end.
    """

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    vanished: int = 0
    unknown: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    computed_chunks: int = 0
    stored_chunks: int = 0
    refused_chunks: dict[str, int] = field(default_factory=dict)
    documents: int = 0
    chunks: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


class Indexing:
    """A collection being indexed; models are loaded when the first file needs them.

    asked: the fields of Choices that the user gave; a collection that is there must agree with
    them. rebuild: delete the collection as soon as there is something to put in its place, and make
    it anew, as asked or else as it was.

    Raises ConfigError when the collection does not agree, StoreError when it is damaged.
    """

    def __init__(
        self,
        folder: Path,
        asked: Mapping[str, Any],
        *,
        device: str | None = None,
        rebuild: bool = False,
    ) -> None:
        self.report = IndexReport()
        self._folder = folder
        self._device = device
        self._rebuild = rebuild
        self._reader = FileReader()
        self._collection: Collection | None = None
        self._models: _Models | None = None
        self._warned = False
        if rebuild:
            asked = {**_chosen_before(folder, asked), **asked}
        elif (folder / FILE_NAME).exists():
            self._collection = Collection.open(folder)
            _check_agreement(folder, self._collection.settings, asked)
        self._choices = Choices(**asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()
        if self._models:
            self._models.engine.close()
        if self._collection:
            self._collection.close()

    def add(self, files: Sequence[Path], bar: Progress) -> None:
        """Index the files that are new or changed."""
        known = self._collection.content_hashes() if self._collection else {}
        task = bar.add_task("files", total=len(files))
        for path in files:
            source = source_name(self._folder, path)
            try:
                self._add_file(path, source, known.get(source), bar)
            except UnreadableFileError as error:
                self.skip(path, str(error))
            bar.advance(task)

    def remove_vanished(self, paths: Iterable[Path], files: Iterable[Path], *, prune: bool) -> None:
        """Find documents below ``paths`` whose files are gone; delete them when ``prune``."""
        if self._collection is None:
            return
        there = {source_name(self._folder, path) for path in files}
        above = [path.resolve() for path in paths]
        for source in self._collection.content_hashes():
            path = self._collection.path_of(source)
            if source in there or not any(path.is_relative_to(folder) for folder in above):
                continue
            if not _is_gone(path):
                continue
            if not prune:
                self.report.vanished += 1
                continue
            _, models = self._ready()
            models.engine.evict_document(source)
            self._collection.remove(source)
            self.report.removed += 1

    def skip(self, path: Path, reason: str) -> None:
        """Warn of what is not indexed, and note it."""
        name = " ".join(output.printable(str(path)).splitlines())
        output.warn(f"{name} skipped: {reason}")
        self.report.skipped.append({"path": str(path), "reason": reason})

    def count(self) -> None:
        """Note in the report what the collection holds now."""
        if self._collection:
            self.report.documents, self.report.chunks = self._collection.counts()

    def _add_file(self, path: Path, source: str, known: str | None, bar: Progress) -> None:
        content_hash = _content_hash(path)
        if content_hash == known:
            self.report.unchanged += 1
            return
        text = self._reader.read(path)
        self._warn_once(source, text)
        collection, models = self._ready()
        try:
            document = Document(source, tuple(models.split(text)))
        except ValueError as error:
            raise UnreadableFileError(f"cannot be split: {error}") from error
        vectors = self._precompute(document, models, bar)
        collection.replace(document, content_hash, vectors)
        if known is None:
            self.report.added += 1
        else:
            self.report.changed += 1

    def _warn_once(self, source: str, text: str) -> None:
        """Warn of the first file that the bundled model cannot read."""
        if self._settled("model") == DEMO_MODEL and not self._warned and is_foreign(text):
            rebuild = "" if self._collection is None else "--rebuild "
            warn_of_foreign(source, f"{rebuild}--model ")
            self._warned = True

    def _settled(self, name: str) -> Any:
        """Return what the collection is made with, or is going to be."""
        settings = self._collection.settings if self._collection else self._choices
        return getattr(settings, name)

    def _precompute(self, document: Document, models: _Models, bar: Progress) -> Vectors:
        """Embed the chunks and store their KV, a part at a time.

        Each is embedded under its file's name, which often says what the text alone does not: who
        "she" is, which product a manual is about. Prompts do not hold it.
        """
        chunks = document.to_chunks()
        title = NAME_BREAKS.sub(" ", Path(document.document_id).stem)
        task = bar.add_task(title[:SHOWN_CHARACTERS], total=len(chunks))
        vectors: list[Vectors] = []
        for part in _parts(chunks):
            vectors.append(models.embedder.embed([f"{title}\n{chunk.text}" for chunk in part]))
            done = models.engine.precompute(part, progress=False)
            self.report.computed_chunks += done.computed
            self.report.stored_chunks += done.skipped
            self._count_refused(done.refused)
            bar.advance(task, len(part))
        # The document as a whole takes the place of what the file held before.
        models.engine.precompute([document], progress=False)
        bar.remove_task(task)
        return np.concatenate(vectors)

    def _count_refused(self, refused: Mapping[str, int]) -> None:
        counts = self.report.refused_chunks
        for reason, count in refused.items():
            counts[reason] = counts.get(reason, 0) + count

    def _ready(self) -> tuple[Collection, _Models]:
        """Load the models, and make the collection if there is none."""
        if self._collection is None:
            settings = new_settings(self._choices)
            if self._rebuild:
                clear(self._folder)
            settings, engine = open_new(self._folder, settings, self._device)
            self._models = _Models.load(engine, settings)
            self._collection = Collection.create(self._folder, settings)
        elif self._models is None:
            settings = self._collection.settings
            checks.check_model(settings.model)
            engine = open_known(self._folder, settings, self._device)
            self._models = _Models.load(engine, settings)
        return self._collection, self._models


@dataclass(frozen=True)
class _Models:
    engine: Engine
    embedder: Embedder
    split: Callable[[str], list[str]]

    @classmethod
    def load(cls, engine: Engine, settings: CollectionSettings) -> _Models:
        split = make_splitter(engine.tokenize, settings.chunk_size, settings.chunk_overlap)
        return cls(engine, Embedder(settings.embedding_model, EXTRA), split)


def _chosen_before(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a collection was made with; nothing when there is none or it is damaged.

    What suited its model is left out when another model is asked for.
    """
    try:
        with Collection.open(folder) as before:
            chosen: dict[str, Any] = before.settings.chosen()
    except StoreError:
        return {}
    model = chosen["model"]
    if asked.get("model", model) != model:
        del chosen["dtype"]
        if chosen["instruction"] == default_instruction(model):
            del chosen["instruction"]
    return chosen


def _check_agreement(folder: Path, settings: CollectionSettings, asked: Mapping[str, Any]) -> None:
    there = settings.chosen()
    for name, value in asked.items():
        if value != there[name]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{folder} was indexed with {option} {there[name]!r}, not {value!r}: leave the "
                "option out, index with --rebuild, or --into another folder"
            )


def _parts(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    for start in range(0, len(chunks), PART_CHUNKS):
        yield chunks[start : start + PART_CHUNKS]


def _content_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnreadableFileError(error.strerror or str(error)) from error


def _is_gone(path: Path) -> bool:
    """Whether there is surely no such file: a folder that may not be read proves nothing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
