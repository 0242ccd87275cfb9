"""What requests about documents, and the answers to them, look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from fastapi import Path
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

LONGEST_ID = 512
LONGEST_NAME = 256
MOST_CHUNKS = 4096
MOST_CHARACTERS = 4 << 20
LONGEST_CHUNK = 1 << 20
LEAST_CHUNK_TOKENS, CHUNK_TOKENS, MOST_CHUNK_TOKENS = 16, 512, 8192
MOST_LISTED = 1000
SHOWN = 40
"""So much of a name is told in errors."""
UNREADABLE = "\ufffd"
"""What a server reads bytes of a path as that are not UTF-8."""

Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_CHUNK)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_CHUNKS)]
Names = Annotated[list[Name], Field(max_length=MOST_CHUNKS)]
WholeText = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]


def _check_id(document_id: str) -> str:
    """Return an id; raises ValueError for one that cannot be logged or listed."""
    if not document_id.isprintable() or not document_id.strip() or UNREADABLE in document_id:
        raise ValueError("document_id is not of printable characters in UTF-8")
    return document_id


DocumentId = Annotated[
    str,
    Path(min_length=1, max_length=LONGEST_ID, description="Your own name of the document."),
    AfterValidator(_check_id),
]


class Told(BaseModel):
    """A model whose fields are described by the texts below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class DocumentIn(Told):
    """A document to store: either its ``chunks``, or its ``text``, which the server splits.

    Prompts must hold chunks verbatim, as they are here, or as the answer to GET has them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    chunks: Texts | None = None
    """The passages, in order."""
    text: WholeText | None = None
    """The whole text; it is split at paragraphs, lines, sentences and words."""
    chunk_tokens: int | None = Field(None, ge=LEAST_CHUNK_TOKENS, le=MOST_CHUNK_TOKENS)
    """With text: most tokens of a chunk, 512 by default."""
    separator: Name = "\n\n"
    """What prompts have between two chunks."""
    boundaries: Names | None = None
    """For each chunk, who may read it: a chunk's KV depends on no text beyond a change. None: who
    reads one chunk may read all."""
    collection: Name = ""
    """The index that the document belongs to."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.chunks is None) == (self.text is None):
            raise ValueError("give either chunks or text")
        if self.chunks is None:
            if self.boundaries is not None:
                raise ValueError("boundaries are of chunks: give chunks instead of text")
            if not str(self.text).strip():
                raise ValueError("text is only white space: give a text")
            return self
        if self.chunk_tokens is not None:
            raise ValueError("chunk_tokens is for text, which the server splits: leave it out")
        seen: dict[str, int] = {}
        for index, chunk in enumerate(self.chunks):
            if not chunk.strip():
                raise ValueError(f"chunks.{index} is only white space: leave it out")
            first = seen.setdefault(chunk, index)
            if first != index:
                raise ValueError(f"chunks.{index} is the same as chunks.{first}: give each once")
        if sum(map(len, self.chunks)) > MOST_CHARACTERS:
            raise ValueError(
                f"chunks hold more than {MOST_CHARACTERS:,} characters: send the document in "
                "parts, each with an id of its own"
            )
        if self.boundaries is not None and len(self.boundaries) != len(self.chunks):
            raise ValueError(
                f"boundaries has {len(self.boundaries)} entries for {len(self.chunks)} chunks: "
                "give one for each chunk, or none"
            )
        return self


class Waiting(Told):
    """What could not be deleted yet."""

    pending: list[str] = []
    """Tiers that did not answer: KV there is not read any more, and is deleted once they do."""
    message: str | None = None
    """What waits to be deleted; null if nothing does."""


class StoredDocument(Waiting):
    """What came of storing a document; the counts are of chunks."""

    object: Literal["document"] = "document"
    id: str
    collection: str = ""
    chunks: int
    computed: int
    """Whose KV was computed and stored."""
    skipped: int
    """Chunks that were not computed, since their KV was stored already."""
    refused: dict[str, int]
    """That are not stored, by reason."""
    failed: int
    """Those of refused that another try may store."""
    replaced: int
    """Of the version before, whose KV was evicted."""
    computed_tokens: int
    seconds: float


class DocumentChunk(BaseModel):
    """A passage, verbatim. stored: whether its KV is; None if the engine cannot tell."""

    text: str
    stored: bool | None
    collection: str = ""


class Document(BaseModel):
    """A document's passages, in order."""

    object: Literal["document"] = "document"
    id: str
    chunks: list[DocumentChunk]


class ListedDocument(BaseModel):
    """A document in a list. chunks: how many it has."""

    object: Literal["document"] = "document"
    id: str
    collection: str
    chunks: int


class DocumentList(BaseModel):
    """A page of documents, by their ids."""

    object: Literal["list"] = "list"
    data: list[ListedDocument]
    has_more: bool


class DeletedDocument(Waiting):
    """A document that was forgotten. evicted: the chunks whose KV was stored, and is no longer."""

    object: Literal["document.deleted"] = "document.deleted"
    id: str
    deleted: bool
    """Whether its KV is gone everywhere."""
    evicted: int


class Stats(Told):
    """The state of a namespace's documents."""

    object: Literal["cacheblend.stats"] = "cacheblend.stats"
    model: str
    documents: int
    chunks: int
    stored_chunks: int | None
    """Chunks whose KV is stored, in vLLM by other clients, too; None if the engine cannot tell."""
    reuses: bool
    """Whether requests reuse chunks."""
    reason: str | None
    """Why they do not."""
    read_only: bool
    tiers: dict[str, dict[str, Any]] = {}
    """What each tier of an embedded engine's store holds: ``entries``, ``bytes``, ..."""


class Released(BaseModel):
    """Memory that was freed."""

    released_bytes: int


class Fault(BaseModel):
    """What is wrong, in one line; param: the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Failure(BaseModel):
    """An error, as OpenAI's API tells it."""

    error: Fault
