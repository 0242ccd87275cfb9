"""A job from an engine to a worker, and its form in ``kv_transfer_params``.

Requests come from any client of the server, so everything is checked: shapes, ranges and
types. A blend job refers to its request's own prompt. Every other job comes with any two tokens
as prompt, which vLLM computes itself: no block is promised that would hold another request's KV.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id, prefix_ids
from cacheblend_rag.prefill.conversation_kv import LEAST_TOKENS
from cacheblend_rag.settings import BlendConfig, LeadInKind

PARAMETER = "cacheblend"
SALT_PREFIX = "cacheblend-"
VERSION = 5
MOST_KEYS = 4096
"""Most keys, or segments to keep, in one job; clients split longer lists."""
_HASH = re.compile(r"(?:[0-9a-f]{32})?")

Kind = Literal[
    "blend",
    "precompute",
    "compare",
    "keep",
    "lookup",
    "verify",
    "evict",
    "prefetch",
    "release",
    "status",
    "report",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ASKS = ("status", "report")
"""Kinds that only read: they are answered for any model."""
CHANGES = ("precompute", "keep", "verify", "evict", "release")
"""Kinds that change the shared store."""
IDLE = ("compare", "keep")
"""Kinds that are only worked on while nothing else is."""


@dataclass(frozen=True, slots=True)
class SentChunk:
    """Tokens [start, end) to blend or precompute are a chunk.

    context_id: of its document context, "" without one. protected: must not be recomputed.
    context_start: where its document context starts (precompute only). before, after: the chunk's
    tokens at its edges that are missing in the prompt (blend only); together with those between
    they give the chunk's id, so only a client that knows the whole chunk can ask for it. turn: it
    is part of a conversation's turn; its context_id names what was before it, by the conversation's
    secret. exact: its KV is that of full prefill of this prompt (turns only). lead_in: that its KV
    was computed after, if the connector found the chunk itself; else it is the job's.
    """

    start: int
    end: int
    context_id: str = ""
    protected: bool = False
    context_start: int = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    turn: bool = False
    exact: bool = False
    lead_in: SentLeadIn | None = None

    def own_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the chunk by itself; tokens: the prompt or document."""
        return (*self.before, *tokens[self.start : self.end], *self.after)

    def to_row(self) -> list[Any]:
        """Return plain JSON values."""
        return [
            self.start,
            self.end,
            self.context_id,
            int(self.protected),
            self.context_start,
            list(self.before),
            list(self.after),
            int(self.turn),
            int(self.exact),
        ]


@dataclass(frozen=True, slots=True)
class SentSegment:
    """Tokens [start, end) to keep are a segment of a conversation's turn.

    context_id: of its key, which names the tokens before by the conversation's secret.
    """

    start: int
    end: int
    context_id: str


@dataclass(frozen=True, slots=True)
class SentLeadIn:
    """A lead-in: its name, the hash of its tokens and the document window."""

    name: str
    tokens: str
    window: int


@dataclass(frozen=True)
class BlendJob:
    """One request's work: fuse the chunks of its prompt, store them, or look up, verify, evict or
    prefetch others; ``keep`` the KV of a conversation's turn; or ``release`` the memory that chunks
    take.

    Two kinds only ask: ``status`` for the state of the connector, ``report`` for the result of the
    finished request that had the same ``report_id``.

    tokens: lead-in and document to be computed (precompute), the prompt to be blended again
    (compare), or that and its answer (keep). answer, reference: what it is compared on and with,
    see Compared (compare only); without a reference it is the prompt.
    keys: (chunk id, context id) of chunks to look up, verify, evict or prefetch. turns: whether
    they are of conversations' turns (evict only). report_id: 32 hex digits under which the
    result is kept for a later ``report``, or "". idle: only to be worked on while nothing else is
    (precompute; compare and keep always are). kept: what to store, in order (keep only).
    """

    kind: Kind
    lead_in: SentLeadIn
    chunks: tuple[SentChunk, ...] = ()
    tokens: tuple[int, ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    config: BlendConfig = field(default_factory=BlendConfig)
    report_id: str = ""
    idle: bool = False
    answer: tuple[int, ...] = ()
    reference: tuple[int, ...] = ()
    kept: tuple[SentSegment, ...] = ()
    turns: bool = False

    def to_params(self) -> dict[str, Any]:
        """Return plain JSON values for ``kv_transfer_params``."""
        return {
            PARAMETER: {
                "version": VERSION,
                "kind": self.kind,
                "lead_in": [self.lead_in.name, self.lead_in.tokens, self.lead_in.window],
                "chunks": [chunk.to_row() for chunk in self.chunks],
                "tokens": list(self.tokens),
                "keys": [list(key) for key in self.keys],
                "config": self.config.to_dict(),
                "report_id": self.report_id,
                "idle": self.idle,
                "answer": list(self.answer),
                "reference": list(self.reference),
                "kept": [[one.start, one.end, one.context_id] for one in self.kept],
                "turns": self.turns,
            }
        }

    def salt(self, token_ids: Sequence[int]) -> str:
        """Return what vLLM's blocks with a blend's KV are shared by: equal work has the same.

        token_ids: the prompt, part of the hash if the question affects the choice of rows. Traced
        work shares nothing, so that it is always done.
        """
        params = (self if self.config.trace else replace(self, report_id="")).to_params()
        if make_selector(self.config.selector, self.config.selector_options).needs_question:
            params["prompt"] = chunk_id(token_ids)
        text = json.dumps(params, sort_keys=True, default=list)
        return SALT_PREFIX + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def check(self, *, longest: int, vocabulary: int) -> None:
        """Raise ConfigError when the tokens to store do not match the keys.

        Otherwise a client could store, under the key of another client's chunk, KV of that chunk
        after a different text, which would be reused for the other's questions. What is kept of a
        conversation has keys of turns, which are never those of chunks, and which nobody can make
        without the conversation's secret. longest: the model's context window. vocabulary: its
        number of tokens.
        """
        if self.kind in {"compare", "keep", "precompute"}:
            self._check_tokens(longest, vocabulary)
        if self.kind != "precompute":
            return
        tokens = self.tokens
        if any(chunk.turn for chunk in self.chunks):
            raise ConfigError(f"{PARAMETER}.chunks of turns are kept, not precomputed")
        if any(chunk.before or chunk.after for chunk in self.chunks):
            raise ConfigError(f"{PARAMETER}.chunks must be complete in the tokens to be stored")
        lead, first = self.lead_in, self.chunks[0].context_start
        if any(chunk.context_start != first for chunk in self.chunks):
            raise ConfigError(f"{PARAMETER}.chunks must have the same context_start")
        if lead.tokens != chunk_id(tokens[:first]):
            raise ConfigError(f"{PARAMETER}.lead_in differs from the first tokens")
        starts = [chunk.start - first for chunk in self.chunks]
        contexts = prefix_ids(tokens[first:], starts)
        if lead.name != "document":
            contexts = [""] * len(contexts)
        elif max(starts) > lead.window:
            raise ConfigError(f"{PARAMETER}.chunks: a context is longer than {lead.window} tokens")
        if contexts != [chunk.context_id for chunk in self.chunks]:
            raise ConfigError(f"{PARAMETER}.chunks: a context_id is not that of its tokens")

    def _check_tokens(self, longest: int, vocabulary: int) -> None:
        most = max(len(self.tokens), len(self.reference)) + len(self.answer)
        if most > longest or max((*self.tokens, *self.answer, *self.reference)) >= vocabulary:
            raise ConfigError(f"{PARAMETER}.tokens exceed the model's context or vocabulary")

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None, tokens: int) -> BlendJob | None:
        """Read a job for a prompt of ``tokens`` tokens; None if there is none.

        Raises ConfigError when it is malformed.
        """
        sent = (params or {}).get(PARAMETER)
        if sent is None:
            return None
        if not isinstance(sent, Mapping) or sent.get("version") != VERSION:
            raise ConfigError(f"{PARAMETER}.version must be {VERSION}")
        kind = sent.get("kind")
        if kind not in KINDS:
            known = ", ".join((*KINDS, "find", "off"))
            raise ConfigError(f"{PARAMETER}.kind={kind!r} must be one of {known}")
        config = sent.get("config", {})
        if not isinstance(config, Mapping):
            raise ConfigError(f"{PARAMETER}.config must be an object")
        own = _tokens(sent.get("tokens"), needed=kind in {"compare", "keep", "precompute"})
        has_reference, has_chunks = bool(sent.get("reference")), bool(sent.get("chunks"))
        # A prompt's last token is in no chunk.
        rooms = {"blend": tokens, "compare": len(own), "keep": len(own)}
        return cls(
            kind,
            _lead_in(sent.get("lead_in")),
            _chunks(
                sent.get("chunks"),
                rooms.get(kind, len(own) + 1),
                needed=kind in {"blend", "compare", "precompute"}
                or (kind == "keep" and has_chunks),
            ),
            own,
            _keys(sent.get("keys", ())),
            BlendConfig.of(config),
            _report_id(sent.get("report_id", ""), required=kind == "report"),
            kind in IDLE or (kind == "precompute" and sent.get("idle") is True),
            _tokens(sent.get("answer"), needed=kind == "compare"),
            _tokens(sent.get("reference"), needed=kind == "compare" and has_reference),
            _kept(sent.get("kept"), len(own), needed=kind == "keep"),
            kind == "evict" and _flag(sent.get("turns", False), "turns"),
        )


def sent_report_id(params: Mapping[str, Any] | None) -> str:
    """Return the report id of a job that may be malformed otherwise; "" without one."""
    sent = (params or {}).get(PARAMETER)
    named = sent.get("report_id") if isinstance(sent, Mapping) else None
    return named if isinstance(named, str) and _HASH.fullmatch(named) else ""


def _report_id(sent: Any, *, required: bool) -> str:
    if not isinstance(sent, str) or not _HASH.fullmatch(sent) or (required and not sent):
        raise ConfigError(f"{PARAMETER}.report_id must be 32 hex digits")
    return sent


def _lead_in(sent: Any) -> SentLeadIn:
    name, tokens, window = _row(sent, "lead_in", (str, str, int))
    if name not in get_args(LeadInKind):
        raise ConfigError(f"{PARAMETER}.lead_in={name!r:.100} is unknown")
    if not _HASH.fullmatch(tokens):
        raise ConfigError(f"{PARAMETER}.lead_in tokens must be 32 hex digits")
    return SentLeadIn(name, tokens, window)


def _tokens(sent: Any, *, needed: bool) -> tuple[int, ...]:
    if not needed:
        return ()
    if not isinstance(sent, list | tuple) or not sent:
        raise ConfigError(f"{PARAMETER}.tokens must be a non-empty list")
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in sent):
        raise ConfigError(f"{PARAMETER}.tokens must hold token ids")
    return tuple(sent)


def _chunks(sent: Any, tokens: int, *, needed: bool) -> tuple[SentChunk, ...]:
    if not needed:
        return ()
    if not isinstance(sent, Sequence) or isinstance(sent, str) or not sent:
        raise ConfigError(f"{PARAMETER}.chunks must be a non-empty list")
    chunks = tuple(_chunk(row, tokens) for row in sent)
    if any(b.start < a.end for a, b in pairwise(chunks)):
        raise ConfigError(f"{PARAMETER}.chunks must be in order and not overlap")
    return chunks


def _keys(sent: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(sent, Sequence) or isinstance(sent, str):
        raise ConfigError(f"{PARAMETER}.keys must be a list")
    if len(sent) > MOST_KEYS:
        raise ConfigError(f"{PARAMETER}.keys names {len(sent)} chunks, more than {MOST_KEYS}")
    keys = [_row(row, "keys", (str, str)) for row in sent]
    if not all(chunk and all(map(_HASH.fullmatch, (chunk, context))) for chunk, context in keys):
        raise ConfigError(f"{PARAMETER}.keys must hold 32 hex digits each")
    return tuple((chunk, context) for chunk, context in keys)


def _chunk(row: Any, tokens: int) -> SentChunk:
    start, end, context_id, protected, context_start, before, after, turn, exact = _row(
        row, "chunks", (int, int, str, int, int, list, list, int, int)
    )
    if not 0 <= context_start <= start < end < tokens or not _HASH.fullmatch(context_id):
        raise ConfigError(f"{PARAMETER}.chunks: {list(row)!r} does not fit {tokens} tokens")
    if turn and not context_id:
        raise ConfigError(f"{PARAMETER}.chunks: a turn's context_id must be 32 hex digits")
    if exact and not turn:
        raise ConfigError(f"{PARAMETER}.chunks: only a turn's KV may be exact")
    left, right = (_tokens(edge, needed=bool(edge)) for edge in (before, after))
    return SentChunk(
        start, end, context_id, bool(protected), context_start, left, right, bool(turn), bool(exact)
    )


def _kept(sent: Any, tokens: int, *, needed: bool) -> tuple[SentSegment, ...]:
    """Read the segments to keep; they are as long as those of a conversation, and in order."""
    if not needed:
        return ()
    if not isinstance(sent, Sequence) or isinstance(sent, str) or not sent:
        raise ConfigError(f"{PARAMETER}.kept must be a non-empty list")
    if len(sent) > MOST_KEYS:
        raise ConfigError(f"{PARAMETER}.kept names {len(sent)} segments, more than {MOST_KEYS}")
    kept, last = list[SentSegment](), 0
    for row in sent:
        start, end, context_id = _row(row, "kept", (int, int, str))
        if not last <= start <= end - LEAST_TOKENS <= tokens - LEAST_TOKENS:
            raise ConfigError(
                f"{PARAMETER}.kept must be in order and not overlap, each of at least "
                f"{LEAST_TOKENS} of the {tokens} tokens"
            )
        if not context_id or not _HASH.fullmatch(context_id):
            raise ConfigError(f"{PARAMETER}.kept: a context_id must be 32 hex digits")
        kept.append(SentSegment(start, end, context_id))
        last = end
    return tuple(kept)


def _flag(sent: Any, name: str) -> bool:
    if type(sent) is not bool:
        raise ConfigError(f"{PARAMETER}.{name} must be true or false")
    return sent


def _row(sent: Any, name: str, types: tuple[type, ...]) -> list[Any]:
    if (
        not isinstance(sent, Sequence)
        or len(sent) != len(types)
        or any(type(value) is not kind for value, kind in zip(sent, types, strict=True))
    ):
        raise ConfigError(f"{PARAMETER}.{name} must hold {len(types)} values of the right types")
    return list(sent)
