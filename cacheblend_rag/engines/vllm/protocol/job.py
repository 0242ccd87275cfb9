"""A job from an engine to a worker, a request's wish about finding chunks, and how they travel.

Both are in ``kv_transfer_params``. Requests come from any client of the server, so everything is
checked: shapes, ranges and types. A blend job refers to its request's own prompt. Every other job
comes with any two tokens as prompt, which vLLM computes itself: no block is promised that would
hold another request's KV.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, TypeAdapter, ValidationError

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id, prefix_ids
from cacheblend_rag.prefill.lead_in import Hash, LeadInId, MaybeHash
from cacheblend_rag.settings import BlendConfig

PARAMETER = "cacheblend"
SALT_PREFIX = "cacheblend-"
VERSION = 5
FIND, OFF = "find", "off"
OFF_PARAMS: Mapping[str, Any] = {PARAMETER: {"version": VERSION, "kind": OFF}}
"""What a request says whose prompt is not to be searched: ordinary prefill answers it."""
MOST_KEYS = 4096
"""Most keys in one job; clients split longer lists."""
_HASH = re.compile(r"[0-9a-f]{32}")

Kind = Literal[
    "blend",
    "precompute",
    "compare",
    "lookup",
    "verify",
    "evict",
    "prefetch",
    "release",
    "status",
    "report",
]
ASKS = ("status", "report")
"""Kinds that only read: they are answered for any model."""
CHANGES = ("precompute", "verify", "evict", "release")
"""Kinds that change the shared store."""
NEEDED: Mapping[Kind, Sequence[str]] = {
    "blend": ("chunks",),
    "precompute": ("chunks", "tokens"),
    "compare": ("chunks", "tokens", "answer"),
    "report": ("report_id",),
}
ALLOWED: Mapping[Kind, Sequence[str]] = {"compare": ("reference",)}
"""What else of a job's lists its kind may have, beside what it needs."""
LISTS = ("chunks", "tokens", "answer", "reference")

Count = Annotated[int, Field(ge=0)]
Tokens = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], FailFast()]


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
    context_id: MaybeHash = ""
    protected: bool = False
    context_start: Count = 0
    before: Tokens = ()
    after: Tokens = ()
    turn: bool = False
    exact: bool = False
    lead_in: LeadInId | None = None

    def own_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the chunk by itself; tokens: the prompt or document."""
        return (*self.before, *tokens[self.start : self.end], *self.after)


@dataclass(frozen=True)
class BlendJob:
    """One request's work: fuse the chunks of its prompt, store them, or look up, verify, evict or
    prefetch others; or ``release`` the memory that chunks take.

    Two kinds only ask: ``status`` for the state of the connector, ``report`` for the result of the
    finished request that had the same ``report_id``.

    tokens: lead-in and document to be computed (precompute), or the prompt to be blended again
    (compare). answer, reference: what it is compared on and with, see Compared (compare only);
    without a reference it is the prompt.
    keys: (chunk id, context id) of chunks to look up, verify, evict or prefetch. turns: whether
    they are of conversations' turns (evict only). report_id: 32 hex digits under which the
    result is kept for a later ``report``, or "". idle: only to be worked on while nothing else is
    (precompute; compare always is).
    """

    kind: Kind
    lead_in: LeadInId
    chunks: Annotated[tuple[SentChunk, ...], FailFast()] = ()
    tokens: Tokens = ()
    keys: Annotated[tuple[tuple[Hash, MaybeHash], ...], Field(max_length=MOST_KEYS)] = ()
    config: BlendConfig = field(default_factory=BlendConfig)
    report_id: MaybeHash = ""
    idle: bool = False
    answer: Tokens = ()
    reference: Tokens = ()
    turns: bool = False

    @property
    def is_of_turns(self) -> bool:
        """Whether it stores or evicts the KV of conversations' turns."""
        return self.turns or (self.kind == "precompute" and self.chunks[0].turn)

    def to_params(self) -> dict[str, Any]:
        """Return plain JSON values for ``kv_transfer_params``."""
        plain = _JOB.dump_python(self, mode="json", exclude={"config"}, exclude_defaults=True)
        return {PARAMETER: {"version": VERSION, **plain, "config": self.config.to_dict()}}

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
        after a different text, which would be reused for the other's questions. The keys of
        conversations' turns are never those of chunks, and nobody can make them without the
        conversation's secret: what was before a turn is not checked. longest: the model's context
        window. vocabulary: its number of tokens.
        """
        if self.kind in {"compare", "precompute"}:
            self._check_tokens(longest, vocabulary)
        if self.kind != "precompute":
            return
        tokens = self.tokens
        if any(chunk.before or chunk.after for chunk in self.chunks):
            raise ConfigError(f"{PARAMETER}.chunks must be complete in the tokens to be stored")
        lead, first = self.lead_in, self.chunks[0].context_start
        if any(chunk.context_start != first for chunk in self.chunks):
            raise ConfigError(f"{PARAMETER}.chunks must have the same context_start")
        if any(chunk.turn != self.is_of_turns for chunk in self.chunks):
            raise ConfigError(f"{PARAMETER}.chunks must all be of turns, or none")
        if self.is_of_turns:
            return
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
        try:
            job = _JOB.validate_python(dict(sent))
        except ValidationError as error:
            raise ConfigError(f"{PARAMETER}.{problem_of(error)}") from None
        job._check_lists(tokens)
        return replace(
            job,
            idle=job.kind == "compare" or (job.kind == "precompute" and job.idle),
            turns=job.kind == "evict" and job.turns,
        )

    def _check_lists(self, prompt: int) -> None:
        """Raise ConfigError unless a job has what its kind needs, in order and within its tokens.

        prompt: tokens of the request's.
        """
        needed = NEEDED.get(self.kind, ())
        if lacking := [name for name in needed if not getattr(self, name)]:
            raise ConfigError(f"{PARAMETER}.{lacking[0]} must not be empty")
        others = {*LISTS} - {*needed, *ALLOWED.get(self.kind, ())}
        if foreign := [name for name in LISTS if name in others and getattr(self, name)]:
            raise ConfigError(f"{PARAMETER}.{foreign[0]} is nothing for kind={self.kind!r}")
        # A prompt's last token is in no chunk.
        rooms = {"blend": prompt, "precompute": len(self.tokens) + 1}
        room = rooms.get(self.kind, len(self.tokens))
        for chunk in self.chunks:
            if not chunk.context_start <= chunk.start < chunk.end < room:
                where = f"[{chunk.start}, {chunk.end}) after {chunk.context_start}"
                raise ConfigError(f"{PARAMETER}.chunks: {where} does not fit {room} tokens")
            if chunk.turn and not chunk.context_id:
                raise ConfigError(f"{PARAMETER}.chunks: a turn's context_id must be 32 hex digits")
            if chunk.exact and not chunk.turn:
                raise ConfigError(f"{PARAMETER}.chunks: only a turn's KV may be exact")
            if chunk.lead_in is not None:
                raise ConfigError(f"{PARAMETER}.chunks: a chunk's lead-in is its job's")
        if any(b.start < a.end for a, b in pairwise(self.chunks)):
            raise ConfigError(f"{PARAMETER}.chunks must be in order and not overlap")


_JOB = TypeAdapter(BlendJob)


def problem_of(error: ValidationError) -> str:
    """Return one line about the first field that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    line = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(line.split())


def sent_report_id(params: Mapping[str, Any] | None) -> str:
    """Return the report id of a job that may be malformed otherwise; "" without one."""
    sent = (params or {}).get(PARAMETER)
    named = sent.get("report_id") if isinstance(sent, Mapping) else None
    return named if isinstance(named, str) and _HASH.fullmatch(named) else ""


@dataclass(frozen=True)
class FindJob:
    """A request's own wish about chunks in its prompt.

    wanted: whether they are searched for. config: settings of a BlendConfig, as plain JSON values;
    those that are missing are the server's.
    """

    wanted: bool
    config: Mapping[str, Any]

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> FindJob | None:
        """Read a wish; None if there is none, or a job of another kind.

        Raises ConfigError when it is malformed.
        """
        sent = (params or {}).get(PARAMETER)
        if not isinstance(sent, Mapping) or sent.get("kind") not in (FIND, OFF):
            return None
        if sent.get("version") != VERSION:
            raise ConfigError(f"{PARAMETER}.version must be {VERSION}")
        config = sent.get("config", {})
        if not isinstance(config, Mapping):
            raise ConfigError(f"{PARAMETER}.config must be an object")
        return cls(sent["kind"] == FIND, config)
