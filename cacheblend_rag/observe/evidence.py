"""The facts about one request that the doctor's rules are tested on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from cacheblend_rag.observe.machine import CpuLoad
from cacheblend_rag.observe.similar import SimilarChunk
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import BlendReport, ChunkReport
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from cacheblend_rag.quality.verify import Verdict


@dataclass(frozen=True)
class PromptFacts:
    """A prompt, and what its engine expects of it.

    chunks, chunk_tokens: text of each chunk in it, and how many of its tokens are there.
    known_chunks: how many are registered. before, after: the text before the first chunk, and
    after the last. instruction, lead_in: what the engine computes chunks after. question: if known.
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
    """A blended request with a trace, and its loss; None if unknown.

    loss: how much farther from the reference its predictions are than full prefill's, in nats per
    token.
    """

    report: BlendReport
    loss: float | None = None


@dataclass(frozen=True)
class TierFacts:
    """What happened to one tier while the doctor ran.

    errors: uses that failed. skipped: reads that were skipped, since it had failed. read_bytes:
    size of those of the prompt's chunks that it holds. read_seconds: how long it took to read these
    once more; None if that was not measured.
    """

    errors: int = 0
    skipped: int = 0
    read_bytes: int = 0
    read_seconds: float | None = None


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes needed for the prompt's KV, available on the device, and kept as chunk KV in memory.

    lack: the allocator's message, if a request found no memory at all.
    """

    needed: int = 0
    available: int = 0
    kept: int = 0
    lack: str | None = None


@dataclass(frozen=True)
class Evidence:
    """All facts about one request.

    config: the settings in force. first: the first blended request, which may have read slow tiers.
    blends, fulls: further blended requests, and by full prefill, in turn. in_force: the config in
    force, compared with full prefill; more, less, earlier: the same with a higher ratio, a lower
    one, an earlier check layer; None if not tried. similar: chunks that the prompt holds in another
    form. tiers: if the engine's store is in this process. load: None if it is unknown or the model
    runs elsewhere. refusal: why the engine blends nothing. verdict: of `verify`, if it was run.
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
    verdict: Verdict | None = None

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


def waited(report: BlendReport) -> dict[str, float]:
    """Return the seconds that a request waited for stored KV, by tier.

    Looking chunks up counts as a wait for the slowest of them.
    """
    waits = dict(report.seconds.load_by_tier)
    if waits:
        waits[max(waits, key=lambda tier: waits[tier])] += report.seconds.look_up
    return waits


def _median_ttft(reports: Sequence[BlendReport]) -> float:
    return median([one.seconds.time_to_first_token for one in reports] or [0.0])
