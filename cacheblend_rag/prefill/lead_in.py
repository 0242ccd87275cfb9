"""Lead-ins: the tokens before a chunk while it is precomputed, and the key of its KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from cacheblend_rag.kv.chunk_kv import KVKey, chunk_id, fingerprint
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.settings import LeadInConfig, LeadInKind
from cacheblend_rag.text.chat import begins_as_rendered
from cacheblend_rag.text.chunk import Chunk, Context, stands_before
from cacheblend_rag.text.encoder import ChunkSpan, PromptEncoder, TokenIds

CACHED_KEYS = 200_000
CACHED_WINDOWS = 4096

Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
MaybeHash = Annotated[str, Field(pattern="^(?:[0-9a-f]{32})?$")]

DocumentWindow = tuple[TokenIds, ...]
"""The tokens of a document's pieces that may stand before a chunk, in order."""


@dataclass(frozen=True, slots=True)
class LeadInId:
    """What chunks were computed after: the kind, the hash of its tokens, the document window."""

    name: LeadInKind
    tokens: MaybeHash
    window: Annotated[int, Field(ge=0)]

    def fingerprint(self, identity: Mapping[str, Any], namespace: str) -> str:
        """Return the fingerprint of KV that a model has computed after it, for a namespace."""
        own = {"lead_in": self.name, "lead_tokens": self.tokens, "window": self.window}
        return fingerprint({**identity, **own}, namespace)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A chunk with the tokens before it, after which its KV is computed.

    token_ids: the chunk's own tokens. lead: tokens of BOS and instruction; without BOS if a chat
    template rendered the instruction without one. context: tokens of its own document within the
    window, whatever the lead-in. key: of its KV. is_turn: it is part of a conversation's turn,
    whose KV is computed after its context with every lead-in.
    """

    token_ids: tuple[int, ...]
    lead: tuple[int, ...]
    context: tuple[int, ...]
    key: KVKey
    is_turn: bool = False


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """Tokens [start, end) of a prompt are those of the chunk stored under ``key``.

    protected: recomputing some of its tokens would lose the document context in its cached KV.
    before, after: how many of the chunk's tokens stand before and after them: their stored KV is
    not used. is_turn: it is part of a conversation's turn, not a registered chunk. is_exact: its KV
    is that of full prefill of this prompt. is_block: it is a block of the prompt's prefix, which is
    not reported. altered: see ChunkReport.
    """

    key: KVKey
    start: int
    end: int
    protected: bool = False
    document_id: str | None = None
    before: int = 0
    after: int = 0
    is_turn: bool = False
    is_exact: bool = False
    is_block: bool = False
    altered: str | None = None

    @property
    def tokens(self) -> int:
        """How many of the chunk's tokens stand in the prompt."""
        return self.end - self.start

    @property
    def stored_tokens(self) -> int:
        """How many tokens the stored chunk has."""
        return self.before + self.tokens + self.after

    def behind(self, start: int) -> PlacedChunk:
        """Return the part from position ``start`` on."""
        cut = max(0, start - self.start)
        return replace(self, start=self.start + cut, before=self.before + cut)

    def report(self, reason: Reason | None, tier: str | None = None) -> ChunkReport:
        """Report a hit in a tier, or a miss for a reason, perhaps with the tier that failed."""
        return ChunkReport(
            chunk_id=self.key.chunk_id,
            start=self.start,
            tokens=self.tokens,
            hit=reason is None,
            reason=reason,
            tier=tier,
            document_id=self.document_id,
            edge_tokens=0 if self.is_turn or self.altered else self.before + self.after,
            altered=self.altered,
        )


class LeadIn:
    """Applies one lead-in of one model to chunks."""

    def __init__(
        self,
        encoder: PromptEncoder,
        config: LeadInConfig,
        *,
        instruction: str,
        identity: Mapping[str, Any],
        namespace: str,
    ) -> None:
        self.encoder = encoder
        self.name = config.kind
        self.window = config.document_window
        self.unconfirmed_context = config.unconfirmed_context
        self.tokens = self._lead_tokens(instruction)
        self.namespace = namespace
        self._windows: dict[Context, DocumentWindow] = {}
        self.identity = identity
        self.fingerprint = self.id.fingerprint(identity, namespace)
        self.key = lru_cache(CACHED_KEYS)(self._key)

    @property
    def id(self) -> LeadInId:
        """What tells this lead-in from others."""
        window = self.window if self.name == "document" else 0
        return LeadInId(self.name, chunk_id(self.tokens), window)

    def resolve(self, chunk: Chunk) -> ChunkPlan:
        """Return the chunk's tokens, its lead-in and its key."""
        return ChunkPlan(
            self.encoder.chunk(chunk.text), self.tokens, self._context(chunk), self.key(chunk)
        )

    def window_of(self, chunk: Chunk) -> list[tuple[Context, TokenIds]]:
        """Return the pieces of its document that a chunk's KV was computed after, in order.

        Each is given as the context that ends with it, and its tokens. There are none unless the
        lead-in is ``document``.
        """
        if self.name != "document":
            return []
        pieces: list[tuple[Context, TokenIds]] = []
        context = Context.of(chunk.context)
        for tokens in reversed(self._window_of(context)):
            pieces.append((context, tokens))
            context = context.before
        return pieces[::-1]

    def _lead_tokens(self, instruction: str) -> tuple[int, ...]:
        if self.name == "none":
            return ()
        if self.name == "bos" or not instruction:
            return self.encoder.opening
        is_rendered = begins_as_rendered(instruction, self.encoder.tokenizer)
        return self.encoder.leading(instruction, opens=not is_rendered)

    def _key(self, chunk: Chunk) -> KVKey:
        own = chunk_id(self.encoder.chunk(chunk.text))
        context = self._context(chunk) if self.name == "document" else ()
        return KVKey(own, self.fingerprint, chunk_id(context) if context else "")

    def _piece(self, text: str) -> TokenIds:
        """Return the tokens of a piece that is followed by more of its document."""
        return self.encoder.separator(text) if text.isspace() else self.encoder.chunk(text)

    def _context(self, chunk: Chunk) -> tuple[int, ...]:
        return tuple(token for piece in self._window_of(chunk.context) for token in piece)

    def _window_of(self, pieces: Sequence[str]) -> DocumentWindow:
        """Return the tokens of the pieces within the window that ends after the last piece.

        A document's next chunk has the same pieces and few more, so results are cached.
        """
        context = Context.of(pieces)
        waiting: list[Context] = []
        while context and context not in self._windows:
            waiting.append(context)
            context = context.before
        kept = self._windows.get(context, ())
        if len(self._windows) > CACHED_WINDOWS:
            self._windows = {}
        for context in reversed(waiting):
            piece = self._piece(context.last)
            kept = self._windows[context] = next_window(kept, piece, self.window)
        return kept


def confirmed(spans: Sequence[ChunkSpan], hints: Sequence[Chunk | str]) -> list[ChunkSpan]:
    """Return the chunks of a prompt, without a context that nothing confirms.

    It is confirmed by a hint, or by the chunks before it in the prompt (``stands_before``).
    """
    chosen: list[ChunkSpan] = []
    earlier: list[str] = []
    for span in spans:
        chunk = span.chunk
        if not (
            stands_before(chunk.context, earlier)
            or any(
                hint in (chunk, chunk.document_id)
                or (isinstance(hint, Chunk) and hint.document_id == chunk.document_id)
                for hint in hints
            )
        ):
            span = replace(span, chunk=Chunk(chunk.text))
        chosen.append(span)
        earlier.append(chunk.text)
    return chosen


def place_chunks(spans: Sequence[ChunkSpan], lead_in: LeadIn) -> list[PlacedChunk]:
    """Return the chunks of a prompt with their keys, and which of them are protected.

    Recomputing loses the context in contextual KV, unless the document's earlier chunks stand
    right before the chunk in the prompt, in order.
    """
    placed: list[PlacedChunk] = []
    earlier: list[str] = []
    for span in spans:
        chunk = span.chunk
        placed.append(
            PlacedChunk(
                key=lead_in.key(chunk),
                start=span.start,
                end=span.end,
                protected=lead_in.name == "document" and not stands_before(chunk.context, earlier),
                document_id=chunk.document_id,
                before=len(span.before),
                after=len(span.after),
            )
        )
        earlier.append(chunk.text)
    return placed


def next_window(kept: DocumentWindow, piece: TokenIds, window: int) -> DocumentWindow:
    """Return the pieces within the window after another one was added to those ``kept``.

    When they exceed the window, all but the last half window is dropped at once, so that many
    chunks share a start, hence a pass: a document of any length is computed at most twice. The
    result depends only on the text before the chunk.
    """
    pieces = (*kept, piece)
    total = sum(map(len, pieces))
    if total <= window:
        return pieces
    start = 0
    while total > window // 2 and start < len(pieces):
        total -= len(pieces[start])
        start += 1
    return pieces[start:]
