"""Prepares a prompt: its tokens, and the chunks in it with the keys of their KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from cacheblend_rag.errors import PromptError, PromptTooLongError
from cacheblend_rag.prefill.conversation_kv import ConversationKV
from cacheblend_rag.prefill.lead_in import LeadIn, PlacedChunk, confirmed, place_chunks
from cacheblend_rag.reason import Miss, Reason
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.text.chat import ChatPrompt, render_chat
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import EDGE_TOKENS, EncodedPrompt, PromptEncoder
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.registry import ChunkRegistry
from cacheblend_rag.text.tools import Message

BLOCK_TOKENS = 64
"""Tokens in a block of a stored prefix; an incomplete last block is not stored."""
CHARACTERS_PER_TOKEN = 8
"""A prompt with more of them for each token of the context window is first counted in pieces."""
PIECE_CHARACTERS = 1 << 15


@dataclass(frozen=True)
class PreparedFor:
    """The state for which a prompt was prepared; if any of it differs, it is prepared again.

    fingerprint: of the engine's chunk KV. generation: identifies its registry and the registry's
    content. context_window: of the engine.
    """

    fingerprint: str
    generation: object
    context_window: int


@dataclass(frozen=True)
class TurnPrompt:
    """A prompt as the next turn of a conversation.

    The KV of the conversation's earlier turns is reused in it, and that of the new turn and its
    answer is kept, if the engine keeps turns; others answer it as any prompt.

    Args:
        conversation: whose KV is reused and kept.
        prompt: a text, ready segments, or chat messages.
        question: the text with which the new turn ends, such as the user's last message. It must
            stand in the prompt; from there on nothing of earlier turns is reused.
    """

    conversation: ConversationKV
    prompt: str | BlendPrompt | ChatPrompt | Sequence[Message]
    question: str


@dataclass(frozen=True)
class PreparedPrompt:
    """A prepared prompt: an engine accepts it in place of a prompt, and encodes nothing.

    An engine with another fingerprint, registry or context window prepares ``source`` again, and so
    does the same engine after chunks were registered or forgotten.

    Args:
        source: the prompt as it was given.
        hints: chunks, or ids of documents, that it is known to hold.
        prepared_for: the engine's fingerprint, registry and context window.
        text: the whole prompt.
        encoded: its tokens, and where chunks stand.
        placed: the chunks in it, in order, with the keys that their KV is stored under.
        unmatched: reports of expected chunks that were not found in it.
        room: tokens that an answer may have within the context window, at least 1.
        find_seconds: duration of finding known chunks in the text.
        tokenize_seconds: duration of all of preparing after that.
        expects_chunks: whether known or hinted chunks are expected in it.
        found: parts of stored chunks, and of the conversation's earlier turns, that an engine in
            this process found in its tokens, in order, beside ``placed``.
        conversation: the one that it belongs to, or None.
        conversation_key: the conversation's, or that of one whose turns are kept elsewhere; or "".
        question_start: index of the first token, at the latest, of the new question in it.
        shared_tokens: how many of its first tokens, at most, other conversations may share.
        cache_salt: the KV of its prefix is shared only with prompts of the same one, as in vLLM;
            that of its chunks with all.
    """

    source: str | BlendPrompt | ChatPrompt | Sequence[Message] | TurnPrompt
    hints: Sequence[Chunk | str]
    prepared_for: PreparedFor
    text: str
    encoded: EncodedPrompt
    placed: tuple[PlacedChunk, ...]
    unmatched: tuple[ChunkReport, ...]
    room: int
    find_seconds: float
    tokenize_seconds: float
    expects_chunks: bool
    found: tuple[PlacedChunk, ...] = ()
    conversation: ConversationKV | None = None
    conversation_key: str = field(default="", repr=False)
    question_start: int = 0
    shared_tokens: int | None = None
    cache_salt: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent finding chunks in the text and tokenizing it."""
        return self.find_seconds + self.tokenize_seconds

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return self.encoded.token_ids

    @property
    def prefix_end(self) -> int | None:
        """Index of the first token behind the prefix for prefix caching; None if all are in it.

        It ends at the first chunk, or part of one, and in a conversation where the text ends that
        others share.
        """
        ends = [part.start for part in self.parts[:1]]
        ends += [] if self.shared_tokens is None else [self.shared_tokens]
        return min(ends, default=None)

    @property
    def turns_start(self) -> int:
        """Index of the first token that a conversation keeps KV of, behind whole shared blocks."""
        return (self.shared_tokens or 0) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def parts(self) -> tuple[PlacedChunk, ...]:
        """All of it that may be reused, in order."""
        return tuple(sorted((*self.placed, *self.found), key=lambda part: part.start))

    def with_found(self, found: Sequence[PlacedChunk]) -> PreparedPrompt:
        """Return the prompt with what was found of stored chunks in its tokens.

        A known chunk at least half of which that is, such as a text without the metadata that it is
        stored with, is left out in favor of it; from other chunks nothing is taken.
        """

        def shared(part: PlacedChunk, chunk: PlacedChunk) -> int:
            return max(0, min(part.end, chunk.end) - max(part.start, chunk.start))

        is_kept = [2 * sum(shared(o, one) for o in found) < one.tokens for one in self.placed]
        placed = tuple(compress(self.placed, is_kept))
        encoded = replace(self.encoded, spans=tuple(compress(self.encoded.spans, is_kept)))
        parts = tuple(part for part in found if not any(shared(part, one) for one in placed))
        return replace(self, encoded=encoded, placed=placed, found=parts)


PromptLike = str | BlendPrompt | ChatPrompt | Sequence[Message] | TurnPrompt | PreparedPrompt
"""A prompt text, ready segments, chat messages (rendered by the model's chat template), with tools
or without, one of these as a conversation's next turn, or the result of ``Engine.prepare`` for any
of them."""


@dataclass(frozen=True)
class PromptPreparer:
    """Splits prompts at registered chunks, and tokenizes them.

    context_window: tokens of a prompt and its answer together. find: returns what else of a
    prepared prompt is stored; a server finds that itself.
    """

    tokenizer: Any
    encoder: PromptEncoder
    registry: ChunkRegistry
    lead_in: LeadIn
    context_window: int
    find: Callable[[PreparedPrompt], Sequence[PlacedChunk]]

    def prepare(self, prompt: PromptLike, hints: Sequence[Chunk | str]) -> PreparedPrompt:
        """Segment and tokenize; raises PromptError when a prompt is empty or too long.

        A prompt that is prepared for this engine and its current registry is returned as it is.
        """
        # Read first: a chunk that is registered meanwhile must make the prompt outdated.
        now = PreparedFor(self.lead_in.fingerprint, self.registry.generation, self.context_window)
        if isinstance(prompt, PreparedPrompt):
            if hints:
                raise PromptError("a prepared prompt has its hints: give them to engine.prepare()")
            if prompt.prepared_for == now:
                return prompt
            return replace(self.prepare(prompt.source, prompt.hints), cache_salt=prompt.cache_salt)
        started = time.perf_counter()
        plain = prompt.prompt if isinstance(prompt, TurnPrompt) else prompt
        segmented = self._segments(plain, hints)
        found = time.perf_counter()
        encoded = segmented.encode(self.encoder)
        if not self.lead_in.unconfirmed_context:
            encoded = replace(encoded, spans=tuple(confirmed(encoded.spans, hints)))
        if not segmented.segments or not encoded.token_ids:
            raise PromptError("prompt is empty: give at least one token")
        prepared = PreparedPrompt(
            source=prompt,
            hints=hints,
            prepared_for=now,
            text=segmented.text,
            encoded=encoded,
            placed=tuple(place_chunks(encoded.spans, self.lead_in)),
            unmatched=tuple(self._unmatched(encoded, hints)),
            room=self._room(len(encoded.token_ids)),
            find_seconds=found - started,
            tokenize_seconds=0.0,
            expects_chunks=bool(hints or encoded.spans),
        )
        if isinstance(prompt, TurnPrompt):
            prepared = self._in_conversation(prepared, prompt)
        prepared = prepared.with_found(self.find(prepared))
        return replace(prepared, tokenize_seconds=time.perf_counter() - found)

    def prepare_tokens(
        self, token_ids: Sequence[int], *, conversation: str = "", until: int = 0
    ) -> PreparedPrompt:
        """Return a prompt of exactly these tokens; see ``Engine.prepare_tokens``."""
        if not token_ids:
            raise PromptError("prompt holds no token ids: give at least one")
        self._room(len(token_ids))
        if not all(0 <= token < len(self.tokenizer) for token in token_ids):
            last = len(self.tokenizer) - 1
            raise PromptError(f"prompt holds a token id outside 0 to {last}")
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        segmented = BlendPrompt.from_text(text, self.registry) if text else BlendPrompt.of(" ")
        prepared = self.prepare(replace(segmented, is_rendered=True), ())
        if prepared.token_ids != tuple(token_ids):
            prepared = replace(
                prepared,
                encoded=EncodedPrompt(tuple(token_ids)),
                placed=(),
                unmatched=(),
                room=self._room(len(token_ids)),
                expects_chunks=False,
            )
        prepared = replace(prepared, conversation_key=conversation, question_start=until)
        return prepared.with_found(self.find(prepared))

    def _in_conversation(self, prompt: PreparedPrompt, turn: TurnPrompt) -> PreparedPrompt:
        """Return a prompt as its conversation's next; waits for the turn before to be stored.

        Raises PromptError when the question does not stand in it.
        """
        ids = prompt.token_ids
        question_tokens = self._question_tokens(prompt.text, turn.question)
        turn.conversation.settle()
        return replace(
            prompt,
            conversation=turn.conversation,
            conversation_key=turn.conversation.key,
            shared_tokens=self._shared_tokens(ids),
            question_start=max(0, len(ids) - question_tokens),
        )

    def _shared_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens a prompt begins with are those of the engine's instruction."""
        lead = self.lead_in.tokens
        pairs = zip(token_ids, lead, strict=False)
        return next((at for at, (here, there) in enumerate(pairs) if here != there), len(lead))

    def _question_tokens(self, text: str, question: str) -> int:
        """Return an upper bound of the tokens from a question on."""
        at = text.rfind(question.strip())
        if at < 0 or not question.strip():
            raise PromptError("TurnPrompt.question must be in the prompt, and not be blank")
        return self.encoder.count(text[at:]) + EDGE_TOKENS

    def _room(self, tokens: int) -> int:
        if tokens >= self.context_window:
            raise PromptTooLongError(tokens, self.context_window)
        return self.context_window - tokens

    def _segments(
        self,
        prompt: str | BlendPrompt | ChatPrompt | Sequence[Message],
        hints: Sequence[Chunk | str],
    ) -> BlendPrompt:
        if isinstance(prompt, BlendPrompt):
            return prompt
        text = prompt if isinstance(prompt, str) else render_chat(prompt, self.tokenizer)
        self._check_length(text if isinstance(text, str) else text.text)
        return BlendPrompt.from_text(text, self.registry, hints)

    def _check_length(self, text: str) -> None:
        """Raise PromptTooLongError for a text that is by far too long, before it is searched.

        Its pieces have a few more tokens than the whole; at twice the context window, none fits.
        """
        if len(text) <= CHARACTERS_PER_TOKEN * self.context_window:
            return
        tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            tokens += self.encoder.count(text[start : start + PIECE_CHARACTERS])
            if tokens > 2 * self.context_window:
                raise PromptTooLongError(self.context_window, self.context_window, at_least=True)

    def _unmatched(self, prompt: EncodedPrompt, hints: Sequence[Chunk | str]) -> list[ChunkReport]:
        """Report chunks that are inseparable from the text beside them, or altered."""
        present = {span.chunk.text for span in prompt.spans}
        present |= {chunk.text for chunk in prompt.inseparable}
        reports = [self._missed(chunk, Miss.INSEPARABLE) for chunk in prompt.inseparable]
        for hint in hints:
            if isinstance(hint, str) or hint.text in present:
                continue
            reason = Miss.ALTERED_TEXT if hint.text in self.registry else Miss.UNKNOWN
            reports.append(self._missed(hint, reason))
        return reports

    def _missed(self, chunk: Chunk, reason: Reason) -> ChunkReport:
        key = self.lead_in.key(chunk)
        return ChunkReport(key.chunk_id, -1, 0, False, reason, document_id=chunk.document_id)
