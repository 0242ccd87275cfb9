"""What the connector is told: a request's wish about the chunks in its prompt, and jobs.

A wish is in a request's ``kv_transfer_params``, which any client of the server fills as it likes. A
job comes in the trace headers of a request with any two tokens as prompt, which vLLM computes
itself: no block is promised that would hold another request's KV. vLLM lets only two headers of a
client's get there, so a job comes from this server alone: from an engine in its process, or from
its route for jobs. Since that passes clients' jobs on, all values of both are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import KVKey, chunk_id, prefix_ids
from cacheblend_rag.prefill.conversation_kv import turn_context
from cacheblend_rag.prefill.lead_in import ChunkPlan, Hash, LeadInId, MaybeHash
from cacheblend_rag.settings import BlendConfig

PARAMETER = "cacheblend"
"""The field of a request's ``kv_transfer_params`` with its wish, and with the result."""
SALT_PREFIX = "cacheblend-"
VERSION: Literal[5] = 5
MOST_KEYS = 4096
"""Most keys in one job; clients split longer lists."""

Count = Annotated[int, Field(ge=0)]
Tokens = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], FailFast()]
SomeTokens = Annotated[Tokens, Field(min_length=1)]
Key: TypeAlias = tuple[Hash, MaybeHash]
"""A chunk id and a context id."""


ConversationKey = Annotated[MaybeHash, Field(repr=False)]
"""The key of a conversation: without it, nobody finds or names the KV of its turns."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Wish(_Message):
    """Whether chunks are to be found in a request's prompt, and how they are blended.

    kind: ``idle`` is ``off``, once vLLM has nothing else to do. config: of a BlendConfig; missing
    settings are the server's. report_id: 32 hex digits under which ``report`` finds the result, or
    "". conversation: key of one whose turns are found, too, in the first ``until`` tokens; or "".
    """

    version: Literal[5] = VERSION
    kind: Literal["find", "off", "idle"] = "find"
    config: Mapping[str, Any] = {}
    report_id: MaybeHash = ""
    conversation: ConversationKey = ""
    until: Count = 0

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Wish | None:
        """Return a request's wish, None without one; raises ConfigError when it is malformed."""
        sent = (params or {}).get(PARAMETER)
        if sent is None:
            return None
        try:
            return cls.model_validate(sent)
        except ValidationError as error:
            raise ConfigError(f"{PARAMETER}.{problem_of(error)}") from None

    def to_params(self) -> dict[str, Any]:
        """Return plain JSON values for ``kv_transfer_params``."""
        return {PARAMETER: self.model_dump(mode="json")}


NOTHING_FOUND = Wish(kind="off")
"""The wish of a request in whose prompt no chunks are looked for: ordinary prefill serves it."""


class Span(NamedTuple):
    """Tokens [start, end) of a document are a chunk."""

    start: Count
    end: Count


class Precompute(_Message):
    """Compute and store the KV of a document's chunks.

    lead_in: what they are computed after. tokens: the lead-in's, and the document's from
    ``context_start`` on. conversation: the key of one whose turns the chunks are, or "": these
    are computed after all tokens before them, and nobody else can name their KV. idle: whether to
    work only while nothing else is to be done.
    """

    kind: Literal["precompute"] = "precompute"
    lead_in: LeadInId
    tokens: SomeTokens
    chunks: Annotated[tuple[Span, ...], FailFast(), Field(min_length=1)]
    context_start: Count = 0
    conversation: ConversationKey = ""
    idle: bool = False

    def names(self) -> list[Key]:
        """Return the chunk id and the context id of each chunk.

        They are made of the tokens, not sent: KV of a chunk after a different text must not get the
        name of another client's chunk.
        """
        starts = [chunk.start for chunk in self.chunks]
        if self.conversation:
            before = prefix_ids(self.tokens, starts)
            contexts = [turn_context(one, self.conversation) for one in before]
        elif self.lead_in.name == "document":
            first = self.context_start
            contexts = prefix_ids(self.tokens[first:], [start - first for start in starts])
        else:
            contexts = [""] * len(starts)
        own = [chunk_id(self.tokens[chunk.start : chunk.end]) for chunk in self.chunks]
        return list(zip(own, contexts, strict=True))

    def plans(self, fingerprint: str) -> list[ChunkPlan]:
        """Return the chunks with the tokens before them, and keys under a fingerprint."""
        tokens, first, is_turn = self.tokens, self.context_start, bool(self.conversation)
        return [
            ChunkPlan(
                token_ids=tokens[start:end],
                lead=tokens[:first],
                context=tokens[first:start],
                key=KVKey(own, fingerprint, context),
                is_turn=is_turn,
            )
            for (start, end), (own, context) in zip(self.chunks, self.names(), strict=True)
        ]

    def check(self) -> None:
        """Raise ConfigError unless the chunks and the lead-in are those of the tokens."""
        for chunk in self.chunks:
            if not self.context_start <= chunk.start < chunk.end <= len(self.tokens):
                raise ConfigError(f"chunks: {[*chunk]} does not fit {len(self.tokens)} tokens")
        if any(later.start < earlier.end for earlier, later in pairwise(self.chunks)):
            raise ConfigError("chunks must be in order and not overlap")
        if self.conversation:
            return
        if self.lead_in.tokens != chunk_id(self.tokens[: self.context_start]):
            raise ConfigError("lead_in differs from the first tokens")
        longest = self.chunks[-1].start - self.context_start
        if self.lead_in.name == "document" and longest > self.lead_in.window:
            raise ConfigError(f"chunks: a context is longer than {self.lead_in.window} tokens")


class Compare(_Message):
    """Compare a blended prompt with full prefill, while nothing else is to be done.

    tokens: the prompt. answer, reference: what it is compared on and with, see Compared; without a
    reference it is the prompt. config, conversation, until: as of a Wish.
    """

    kind: Literal["compare"] = "compare"
    tokens: SomeTokens
    answer: SomeTokens
    reference: Tokens = ()
    config: BlendConfig
    conversation: ConversationKey = ""
    until: Count = 0


StoreKind = Literal["lookup", "verify", "evict", "prefetch"]


class StoreJob(_Message):
    """Look up, verify, evict or prefetch stored KV.

    conversation: the key of one whose turns the keys are of, or "".
    """

    kind: StoreKind
    lead_in: LeadInId
    keys: Annotated[tuple[Key, ...], Field(max_length=MOST_KEYS)]
    conversation: ConversationKey = ""


class Ask(_Message):
    """Ask for the connector's status, for the result of the finished request that had the same
    ``report_id``, or to release the memory that chunks take.
    """

    kind: Literal["status", "report", "release"]
    report_id: MaybeHash = ""


Job: TypeAlias = Annotated[Precompute | Compare | StoreJob | Ask, Field(discriminator="kind")]
CHANGES = frozenset({"precompute", "verify", "evict", "release"})
"""Kinds that change what is stored."""
_JOB: TypeAdapter[Precompute | Compare | StoreJob | Ask] = TypeAdapter(Job)


def read_job(text: str | bytes) -> Job:
    """Return a job that was sent as JSON; raises ConfigError when it is malformed."""
    try:
        job = _JOB.validate_json(text)
    except ValidationError as error:
        raise ConfigError(problem_of(error)) from None
    if isinstance(job, Precompute):
        job.check()
    if isinstance(job, Ask) and (job.kind == "report") != bool(job.report_id):
        raise ConfigError("report_id must be 32 hex digits of a report, and of nothing else")
    return job


def problem_of(error: ValidationError) -> str:
    """Return one line about the first field that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    line = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    return " ".join(line.split())
