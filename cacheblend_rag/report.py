"""The reports of a request, of each chunk in its prompt, and of indexing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.trace import Trace

PREFIX_CACHE = "prefix cache"
"""The tier of chunks whose KV is part of a cached prefix."""


@dataclass(frozen=True)
class ChunkReport:
    """The result of one chunk of a prompt.

    Args:
        chunk_id: hash of its token ids, 32 hex digits.
        start: index of its first token in the prompt; -1 if it was not found there.
        tokens: how many of its tokens were found there; 0 if it was not found.
        hit: whether its KV was reused.
        reason: why not, None on a hit.
        tier: where the KV was found ("host", "disk"); after a store error the tier that
            could not be read; None on any other miss.
        document_id: the document it is part of; None if it stands alone, or if several documents
            hold it and neither a hint nor the prompt says which is meant: its KV is then that
            without document context.
        recomputed: how many of its tokens were recomputed.
        edge_tokens: how many tokens at its edges, not counted in ``tokens``, the tokenizer joins
            with the text beside the chunk; they are computed.
        altered: how the chunk stands in the prompt, and how many of its tokens were found in all
            its parts, such as ``escaped, as in JSON: 195 of 203 tokens found``; None if it stands
            there whole and unaltered.
    """

    chunk_id: str
    start: int
    tokens: int
    hit: bool
    reason: Reason | None = None
    tier: str | None = None
    document_id: str | None = None
    recomputed: int = 0
    edge_tokens: int = 0
    altered: str | None = None

    @property
    def reason_code(self) -> ReasonCode | None:
        """The code of ``reason``, None on a hit."""
        return None if self.reason is None else self.reason.code

    def held(self, until: int) -> ChunkReport:
        """Return the report of a chunk in a cached prefix of so many tokens.

        What stands behind those is recomputed; all of a chunk behind them is a miss.
        """
        if self.start >= until:
            return replace(self, hit=False, reason=Miss.SLOW, tier=None)
        rest = max(0, self.start + self.tokens - until)
        return replace(self, hit=True, reason=None, tier=PREFIX_CACHE, recomputed=rest)


def count_chunks(chunks: Iterable[ChunkReport]) -> tuple[Counter[str], Counter[str]]:
    """Return how many chunks were hits, by tier, and how many were misses, by reason code."""
    hits, misses = Counter[str](), Counter[str]()
    for chunk in chunks:
        if chunk.hit:
            hits[chunk.tier or "unknown"] += 1
        else:
            misses[str(chunk.reason_code)] += 1
    return hits, misses


def reused_and_recomputed(chunks: Iterable[ChunkReport]) -> tuple[int, int]:
    """Return how many tokens kept their cached KV, and how many were recomputed."""
    hits = [chunk for chunk in chunks if chunk.hit]
    recomputed = sum(chunk.recomputed for chunk in hits)
    return sum(chunk.tokens for chunk in hits) - recomputed, recomputed


PREFILL_PHASES = (
    "find", "tokenize", "look_up", "load", "lay_in", "early_layers", "selection", "recompute",
    "first_token",
)  # fmt: skip
"""The phases of PhaseSeconds until the first token, in their order."""


@dataclass(frozen=True)
class PhaseSeconds:
    """Wall-clock seconds per phase, in the order in which they first begin.

    ``time_to_first_token`` is the sum of PREFILL_PHASES: all but ``decode`` and ``load_hidden``.

    Args:
        find: finding known chunks in the text; rendering chat messages.
        tokenize: tokenizing the prompt, and finding its chunks in the tokens.
        look_up: asking tiers which of the prompt's chunks and prefix they hold.
        load: waiting for stored KV.
        lay_in: making the buffer, and copying stored KV into it, re-rotated. On a GPU only the time
            to queue these copies: the device makes them beside other work.
        early_layers: running layers before the first check layer, on all chunk tokens; 0 if rows
            are chosen before layer 0.
        selection: probes, scoring.
        recompute: running the other layers (all of prefill when nothing was reused).
        first_token: last norm, logits, sampling. In vLLM everything else, too: its queue, its own
            prefill of what is not blended, and the way to a server.
        decode: all later tokens.
        load_hidden: reading stored KV while something else was computed, which added no time.
        load_by_tier: the parts of ``load`` by the name of the tier that was waited for: of each
            layer, the one that was read last.
    """

    find: float = 0.0
    tokenize: float = 0.0
    look_up: float = 0.0
    load: float = 0.0
    lay_in: float = 0.0
    early_layers: float = 0.0
    selection: float = 0.0
    recompute: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    load_hidden: float = 0.0
    load_by_tier: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def time_to_first_token(self) -> float:
        return math.fsum(getattr(self, phase) for phase in PREFILL_PHASES)


@dataclass(frozen=True)
class PhaseStarts:
    """When each phase first began, in seconds since the request began; None if it did not.

    Fields are those of PhaseSeconds.
    """

    find: float = 0.0
    tokenize: float | None = None
    look_up: float | None = None
    load: float | None = None
    lay_in: float | None = None
    early_layers: float | None = None
    selection: float | None = None
    recompute: float | None = None
    first_token: float | None = None
    decode: float | None = None

    @classmethod
    def of(cls, readings: Mapping[str, float], began: float) -> PhaseStarts:
        """Return the starts from readings of one clock by phase; ``began``: the request's own."""
        return cls(**{phase: max(0.0, at - began) for phase, at in readings.items()})


@dataclass(frozen=True)
class PrefillReport:
    """The report of a prompt's prefill.

    reason: why no chunk was reused, None if one was. chunks: of the prompt, in order. seconds:
    by phase, as PhaseSeconds names them. starts: readings of ``time.perf_counter`` when phases
    began. was_run: False if it was cancelled before. load_by_tier: see PhaseSeconds. The others are
    as in BlendReport.
    """

    reason: Reason | None = None
    selector: str = "none"
    selector_reason: Reason | None = None
    ratio_reason: Reason | None = None
    ratio: float = 1.0
    compute_share: float = 1.0
    chunks: Sequence[ChunkReport] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    was_run: bool = True
    starts: dict[str, float] = field(default_factory=dict)
    trace: Trace | None = None
    prefix_tokens: int = 0
    early_kv_bytes: int = 0
    load_by_tier: Mapping[str, float] = field(default_factory=dict)

    @property
    def blended(self) -> bool:
        """Whether any chunk was reused."""
        return any(chunk.hit for chunk in self.chunks)


REASONS = ("reason", "selector_reason", "ratio_reason")
"""Fields of a BlendReport that hold a reason or None."""


@dataclass(frozen=True)
class BlendReport:
    """The report of one request.

    ``prompt_tokens = reused_tokens + recomputed_tokens + computed_tokens``. Each reason is a
    sentence with a ``code``: ``reason_code`` is that of ``reason``.

    Args:
        engine: the kind of engine that served it.
        blended: False when the prompt was served by ordinary prefill.
        reason: why no chunk was reused, None when one was.
        prompt_tokens: length of the prompt.
        reused_tokens: those that kept their cached KV.
        recomputed_tokens: chunk tokens that had cached KV but were recomputed.
        computed_tokens: those that had none (text segments, missing chunks, chunks' edges).
        recompute_ratio: the requested share of chunk tokens, 1 if nothing was reused.
        selector: the rule that chose the recomputed tokens, ``none`` if there was no choice.
        lead_in: kind of the lead-in of chunks.
        compute_share: floating-point work of the pass, probes included, as a share of full
            prefill's.
        seconds: how long each phase took.
        chunks: the report of each chunk: those of the prompt, in order, then those that were
            expected but not found in it.
        selector_reason: why ``selector`` is not the requested rule, None if it is.
        ratio_reason: what was chosen by measured speeds, and why:
            chunks that are computed faster than loaded; else why the guard raised the ratio. None
            if nothing was chosen or raised.
        request_id: 16 random hex digits; vLLM's own id of the request contains it.
        starts: when each phase began.
        trace: the chosen tokens and their scores, how far fresh KV is from cached KV, what the
            question attends to; None unless ``BlendConfig(trace=True)`` requests it and the prompt
            was blended.
        prefix_tokens: those of ``reused_tokens`` that are a cached prefix: their KV equals full
            prefill's but for rounding. In vLLM those of its own prefix cache, counted for requests
            that were to be blended.
        early_kv_bytes: bytes of chunk KV, in the model's dtype, that had to be there before layer
            0, for the question's probe; others are read while layers before them are computed.
    """

    engine: str
    blended: bool
    reason: Reason | None
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    recompute_ratio: float
    selector: str
    lead_in: str
    compute_share: float
    seconds: PhaseSeconds
    chunks: tuple[ChunkReport, ...] = ()
    selector_reason: Reason | None = None
    ratio_reason: Reason | None = None
    request_id: str = ""
    starts: PhaseStarts = field(default_factory=PhaseStarts)
    trace: Trace | None = None
    prefix_tokens: int = 0
    early_kv_bytes: int = 0

    @property
    def reason_code(self) -> ReasonCode | None:
        """The code of ``reason``, None when a chunk was reused."""
        return None if self.reason is None else self.reason.code

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; each reason with its code, and the time to first token."""
        plain = asdict(self)
        plain["seconds"]["time_to_first_token"] = self.seconds.time_to_first_token
        for name in REASONS:
            reason: Reason | None = getattr(self, name)
            plain[name] = None if reason is None else str(reason)
            plain[f"{name}_code"] = None if reason is None else reason.code.value
        plain["chunks"] = [
            {**told, "reason_code": chunk.reason_code}
            for told, chunk in zip(plain["chunks"], self.chunks, strict=True)
        ]
        return plain


class Evicted(int):
    """How many chunks were stored, and are evicted; the sum of several has the tiers of all.

    Attributes:
        pending: names of tiers that did not answer. What they hold of the chunks is not read any
            more, and is removed once they answer.
        is_noted: whether that is noted on disk; otherwise it is forgotten when the process ends.
    """

    pending: tuple[str, ...]
    is_noted: bool

    def __new__(cls, count: int = 0, pending: Iterable[str] = (), *, is_noted: bool = True) -> Self:
        """Count chunks, and name tiers."""
        self = super().__new__(cls, count)
        self.pending, self.is_noted = tuple(sorted(set(pending))), is_noted
        return self

    @property
    def waiting(self) -> str | None:
        """What is not deleted yet, as a sentence; None if all is."""
        if not self.pending:
            return None
        until = "" if self.is_noted else ", unless this process ends before"
        return (
            f"no answer from {', '.join(self.pending)}: what is kept there is no longer read, and "
            f"is deleted when it answers{until}"
        )

    def __add__(self, other: int) -> Evicted:
        """Add the counts, and merge the tiers."""
        if not isinstance(other, Evicted):
            other = Evicted(other)
        return Evicted(
            int(self) + int(other),
            (*self.pending, *other.pending),
            is_noted=self.is_noted and other.is_noted,
        )

    __radd__ = __add__


@dataclass(frozen=True)
class PrecomputeReport:
    """The result of precompute.

    Args:
        computed: chunks whose KV was computed and stored.
        skipped: chunks whose KV was stored already.
        computed_tokens: tokens of the chunks that were computed.
        seconds: what all of it took.
        refused: how many chunks were not stored, by reason: what is wrong with a chunk, or the
            error of the tier that could not store it.
        replaced: how many chunks that documents no longer have lost their KV.
        registered: chunks that were only registered, as requested.
        failed: those of ``refused`` that another precompute may store, once the cause is gone: a
            tier failed, or there was no memory to compute them. If a tier that outlives the
            process failed, they are refused even if this process has them in memory.
    """

    computed: int = 0
    skipped: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0
    refused: Mapping[Reason, int] = field(default_factory=dict)
    replaced: Evicted = field(default_factory=Evicted)
    registered: int = 0
    failed: Mapping[Reason, int] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """How many chunks were computed, skipped or refused."""
        return self.computed + self.skipped + sum(self.refused.values())

    def __add__(self, other: PrecomputeReport) -> PrecomputeReport:
        """Add up the counts and the seconds."""
        return PrecomputeReport(
            computed=self.computed + other.computed,
            skipped=self.skipped + other.skipped,
            computed_tokens=self.computed_tokens + other.computed_tokens,
            seconds=self.seconds + other.seconds,
            refused=dict(Counter(self.refused) + Counter(other.refused)),
            replaced=self.replaced + other.replaced,
            registered=self.registered + other.registered,
            failed=dict(Counter(self.failed) + Counter(other.failed)),
        )

    @property
    def refused_codes(self) -> dict[ReasonCode, int]:
        """How many chunks were not stored, by the code of the reason."""
        counts = Counter[ReasonCode]()
        for reason, count in self.refused.items():
            counts[reason.code] += count
        return dict(counts)


@dataclass(frozen=True)
class FillReport(PrecomputeReport):
    """The result so far of precomputing the chunks that requests missed (``fill_on_miss``).

    Args:
        waiting: chunks that wait for idle time, or are being computed.
        dropped: chunks that were dropped: too many waited, filling failed, or the engine closed.
    """

    waiting: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class GuardReport:
    """The state of a guard, and its counts since it was turned on; zeros while it is off.

    Divergences are Kullback-Leibler divergences from what the model predicts along an answer after
    full prefill of the reference: the prompt, with the text of its documents that its chunks were
    computed after.

    Args:
        compared: answers that were compared.
        unknown: sampled answers without a reference, since it is too long; they count for nothing.
        outdated: sampled answers that were served before the latest step.
        dropped: sampled answers that were not compared: too many waited, the prompt was too long,
            its chunks were no longer stored, the comparison failed, or the engine closed.
        waiting: sampled answers that wait for idle time, or are being compared.
        divergence: mean over compared answers, of the blended prompt, in nats per token.
        prefill_divergence: the same of ordinary prefill; 0 if it is always the reference.
        excess: how much nearer to the reference ordinary prefill is than the blend, mean of the
            latest samples since the last step; of 1 - exp(-divergence), so from -0.25 to 1.
        ratio: the least recompute ratio now; 0 if it was not raised, 1 if blending has stopped.
        stopped: whether blending has stopped.
        raised: how often the ratio was raised.
        lowered: how often it was lowered again.
    """

    compared: int = 0
    unknown: int = 0
    outdated: int = 0
    dropped: int = 0
    waiting: int = 0
    divergence: float = 0.0
    prefill_divergence: float = 0.0
    excess: float = 0.0
    ratio: float = 0.0
    stopped: bool = False
    raised: int = 0
    lowered: int = 0
