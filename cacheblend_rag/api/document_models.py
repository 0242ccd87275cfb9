"""What requests about documents, and the answers to them, look like."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cacheblend_rag.api.errors import bad_field, of_validation

LONGEST_ID = 512
LONGEST_NAME = 256
MOST_CHUNKS = 4096
MOST_CHARACTERS = 4 << 20
LONGEST_CHUNK = 1 << 20
LONGEST_SEPARATOR = 256
LEAST_CHUNK_TOKENS, CHUNK_TOKENS, MOST_CHUNK_TOKENS = 16, 512, 8192
MOST_LISTED = 1000
SHOWN = 40
UNREADABLE = "\ufffd"
"""What a server reads bytes of a path as that are not UTF-8."""

PENDING = "Tiers that did not answer: KV there is not read any more, and is deleted once they do."
MESSAGE = "What waits to be deleted; null if nothing does."

Text = Annotated[str, Field(min_length=1, max_length=LONGEST_CHUNK)]


class DocumentIn(BaseModel):
    """A document to store: either its ``chunks``, or its ``text``, which the server splits.

    Prompts must hold chunks verbatim, as they are here, or as the answer to GET has them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    chunks: Annotated[list[Text], Field(min_length=1, max_length=MOST_CHUNKS)] | None = Field(
        None, description="The passages, in order."
    )
    text: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)] | None = Field(
        None,
        description="The whole text; it is split at paragraphs, lines, sentences and words.",
    )
    chunk_tokens: int | None = Field(
        None,
        ge=LEAST_CHUNK_TOKENS,
        le=MOST_CHUNK_TOKENS,
        description=f"With text: most tokens of a chunk, {CHUNK_TOKENS} by default.",
    )
    separator: str = Field(
        "\n\n", max_length=LONGEST_SEPARATOR, description="What prompts have between two chunks."
    )
    boundaries: (
        Annotated[
            list[Annotated[str, Field(max_length=LONGEST_NAME)]], Field(max_length=MOST_CHUNKS)
        ]
        | None
    ) = Field(
        None,
        description="For each chunk, who may read it: a chunk's KV depends on no text beyond a "
        "change. None: who reads one chunk may read all.",
    )
    collection: str = Field(
        "", max_length=LONGEST_NAME, description="The index that the document belongs to."
    )

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
        _check_chunks(self.chunks)
        if self.boundaries is not None and len(self.boundaries) != len(self.chunks):
            raise ValueError(
                f"boundaries has {len(self.boundaries)} entries for {len(self.chunks)} chunks: "
                "give one for each chunk, or none"
            )
        return self


def _check_chunks(chunks: list[str]) -> None:
    seen: dict[str, int] = {}
    for index, chunk in enumerate(chunks):
        if not chunk.strip():
            raise ValueError(f"chunks.{index} is only white space: leave it out")
        first = seen.setdefault(chunk, index)
        if first != index:
            raise ValueError(f"chunks.{index} is the same as chunks.{first}: give each once")
    if sum(map(len, chunks)) > MOST_CHARACTERS:
        raise ValueError(
            f"chunks hold more than {MOST_CHARACTERS:,} characters: send the document in parts, "
            "each with an id of its own"
        )


def read_document(body: bytes) -> DocumentIn:
    """Read the body of a PUT; raises ApiError, which names the field."""
    try:
        return DocumentIn.model_validate_json(body)
    except ValidationError as error:
        raise of_validation(error.errors()) from error


def check_id(document_id: str) -> None:
    """Raise ApiError for an id that cannot be logged or listed, such as one with a line end."""
    if not document_id.isprintable() or not document_id.strip() or UNREADABLE in document_id:
        raise bad_field(
            "document_id", f"{document_id[:SHOWN]!r} must be printable characters, in UTF-8"
        )


class StoredDocument(BaseModel):
    """What came of storing a document; the counts are of chunks."""

    object: Literal["document"] = "document"
    id: str
    collection: str = ""
    chunks: int
    computed: int = Field(description="Whose KV was computed and stored.")
    skipped: int = Field(description="Whose KV was stored already.")
    refused: dict[str, int] = Field(description="That are not stored, by reason.")
    failed: int = Field(description="Those of refused that another try may store.")
    replaced: int = Field(description="Of the version before, whose KV was evicted.")
    pending: list[str] = Field([], description=PENDING)
    message: str | None = Field(None, description=MESSAGE)
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


class DeletedDocument(BaseModel):
    """A document that was forgotten. evicted: the chunks whose KV was stored, and is no longer."""

    object: Literal["document.deleted"] = "document.deleted"
    id: str
    deleted: bool = Field(description="Whether its KV is gone everywhere.")
    evicted: int
    pending: list[str] = Field([], description=PENDING)
    message: str | None = Field(None, description=MESSAGE)


class Stats(BaseModel):
    """The state of a namespace's documents."""

    object: Literal["cacheblend.stats"] = "cacheblend.stats"
    model: str
    documents: int
    chunks: int
    stored_chunks: int | None = Field(
        description="With KV; None if the engine cannot tell. In vLLM, those of all documents."
    )
    reuses: bool = Field(description="Whether requests reuse chunks.")
    reason: str | None = Field(description="Why they do not.")
    read_only: bool


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
