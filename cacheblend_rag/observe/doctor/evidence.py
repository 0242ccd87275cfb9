"""The facts that findings are drawn from, measured once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from cacheblend_rag.observe.doctor.machine import CpuLoad
from cacheblend_rag.observe.doctor.similar import SimilarChunk
from cacheblend_rag.prefill.comparing import Comparison
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport
from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class PromptFacts:
    """A prompt, and what its engine expects of it.

    Args:
        tokens: how many it holds.
        chunks: the text of each chunk in it, in order.
        chunk_tokens: how many tokens of each chunk are in it.
        known_chunks: how many chunks are registered.
        before: the text before the first chunk; all of it without chunks.
        after: the text after the last chunk, without special tokens.
        instruction: the text that the engine expects before the first chunk.
        lead_in: the kind of lead-in.
        question: the question, if it is known.
    """

    tokens: int
    chunks: tuple[str, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    known_chunks: int = 0
    before: str = ""
    after: str = ""
    instruction: str = ""
    lead_in: str = "document"
    question: str = ""

    @property
    def words_after(self) -> int:
        """How many words stand after the last chunk."""
        return len(re.findall(r"\w+", self.after))


@dataclass(frozen=True)
class Trial:
    """One request with the prompt under a given BlendConfig, and its result.

    Args:
        config: the settings.
        report: of a request with them; it has a trace.
        divergence: from full prefill; None if it was not compared.
    """

    config: BlendConfig
    report: BlendReport
    divergence: Comparison | None = None

    @property
    def ratio(self) -> float:
        """The ratio that it was served with."""
        return self.report.recompute_ratio

    @property
    def loss(self) -> float | None:
        """How much farther from the reference it is than full prefill, in nats per token."""
        told = self.divergence
        return None if told is None else max(0.0, told.blend - told.prefill)


@dataclass(frozen=True)
class TierFacts:
    """What happened to one tier while the doctor ran.

    Args:
        errors: uses that failed.
        skipped: reads that were skipped, since it had failed.
        read_bytes: size of those of the prompt's chunks that it holds.
        read_seconds: median time to read these once more, one after another; None if it was not
            measured.
    """

    errors: int = 0
    skipped: int = 0
    read_bytes: int = 0
    read_seconds: float | None = None


@dataclass(frozen=True)
class MemoryFacts:
    """Memory of a request, in bytes; None for what is unknown.

    Args:
        needed: for the prompt's KV.
        available: on the engine's device.
        kept: chunk KV in this process's memory.
        lack: the allocator's message, if a request found no memory at all.
    """

    needed: int | None = None
    available: int | None = None
    kept: int | None = None
    lack: str | None = None


class Verified(Protocol):
    """The verdict of ``verify_model``."""

    @property
    def passed(self) -> bool:
        """Whether no check failed."""

    @property
    def failed(self) -> Sequence[Any]:
        """The checks of the model that failed, each with its ``name`` and what it ``found``."""

    @property
    def advice(self) -> str:
        """One line of advice: whether to use blending with this model."""


@dataclass(frozen=True)
class Evidence:
    """All facts about one request.

    Args:
        prompt: the prompt.
        config: the settings in force.
        first: the first blended request, which may have read slow tiers.
        blends: further blended requests.
        fulls: requests by full prefill, in turn with these.
        in_force: the config in force, compared with full prefill; None if nothing is blended.
        more: the same with a higher ratio, if there is one to try.
        less: the same with a lower ratio, if it is high.
        earlier: the same with an earlier check layer, if it is late.
        similar: registered chunks that the prompt holds in another form.
        tiers: what happened to each tier, if the engine's store is in this process.
        memory: what memory was needed and available.
        load: who used the CPUs meanwhile; None if unknown, or if the model runs elsewhere.
        refusal: why the engine blends nothing, or None.
        verdict: of `verify`, if it was run.
    """

    prompt: PromptFacts
    config: BlendConfig
    first: BlendReport | None = None
    blends: tuple[BlendReport, ...] = ()
    fulls: tuple[BlendReport, ...] = ()
    in_force: Trial | None = None
    more: Trial | None = None
    less: Trial | None = None
    earlier: Trial | None = None
    similar: tuple[SimilarChunk, ...] = ()
    tiers: Mapping[str, TierFacts] = field(default_factory=dict)
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    load: CpuLoad | None = None
    refusal: Reason | None = None
    verdict: Verified | None = None

    @property
    def reports(self) -> tuple[BlendReport, ...]:
        """The reports of all blended requests."""
        return (*(() if self.first is None else (self.first,)), *self.blends)

    @property
    def chunks(self) -> tuple[ChunkReport, ...]:
        """The reports of chunks of the first request."""
        return () if self.first is None else self.first.chunks

    @property
    def is_blended(self) -> bool:
        """Whether a request reused a chunk."""
        return any(report.blended for report in self.reports)

    @property
    def is_quiet(self) -> bool:
        """Whether no other process is known to have taken CPU time: times can be compared."""
        return self.load is None or not self.load.is_busy

    @property
    def full_seconds(self) -> float:
        """Median time to first token by full prefill; 0 if there was none."""
        return _median_ttft(self.fulls)

    @property
    def blend_seconds(self) -> float:
        """Median time to first token of blended requests; 0 if there was none."""
        return _median_ttft([report for report in self.blends if report.blended])

    def missed_tokens(self, *codes: ReasonCode) -> int:
        """Return the tokens of chunks that the first request missed for one of these reasons."""
        return sum(chunk.tokens for chunk in self.chunks if chunk.reason_code in codes)

    def missed(self, *codes: ReasonCode) -> int:
        """Return how many chunks the first request missed for one of these reasons."""
        return sum(chunk.reason_code in codes for chunk in self.chunks)

    def missed_tiers(self, code: ReasonCode) -> Counter[str]:
        """Return how many chunks were missed for a reason, by the tier that failed."""
        return Counter(
            chunk.tier for chunk in self.chunks if chunk.reason_code == code and chunk.tier
        )


def waited(report: BlendReport) -> Mapping[str, float]:
    """Return the seconds that a request waited for stored KV, by tier.

    Looking chunks up counts as a wait for the slowest of them.
    """
    waits = dict(report.seconds.load_by_tier)
    if waits:
        slowest = max(waits, key=lambda tier: waits[tier])
        waits[slowest] += report.seconds.look_up
    return waits


def _median_ttft(reports: Sequence[BlendReport]) -> float:
    return median([one.seconds.time_to_first_token for one in reports] or [0.0])
