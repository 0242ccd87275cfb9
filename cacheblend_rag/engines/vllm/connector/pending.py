"""What the scheduler's side knows of a request between its arrival and its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cacheblend_rag.engines.vllm.protocol.job import BlendJob
from cacheblend_rag.engines.vllm.protocol.result import Result
from cacheblend_rag.reason import Reason, ReasonCode

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from cacheblend_rag.engines.vllm.connector.continued import Stretch
    from cacheblend_rag.engines.vllm.connector.found_chunk import Generation


@dataclass
class Pending:
    """The state of a request: its job, and why it was not blended.

    tokens: of the prompt to provide. sent: whether a worker has the job, so that a result will
    come. report_id: under which the result is kept, or "". blends: whether the job is a blend.
    mark: a blend's, see ``set_apart``; equal work has the same. work: the blend's, see
    ``_work_of``. shared: tokens in the blocks that it shares with ordinary requests. may_go_on:
    whether it is a blend of exact KV only, looked up as an ordinary request until it is begun.
    first: tokens that vLLM's prefix cache has. found: the chunks that were found here, if the
    request brought none. answers: whether the client, which knows of jobs, gets the result.
    request: vLLM's. namespace: of the KV that it may use; None is of none. stretches: how the
    blocks of found chunks are set apart. held: how many of the job's first chunks an earlier prompt
    may have left in vLLM's prefix cache. alone: how blocks are set apart if it has not. salt: the
    request's, before its blocks were set apart. parts: all of the job, and what is left if the
    cache has the held chunks. is_rest: whether the job is what is left.
    """

    job: BlendJob | None
    reason: Reason | None = None
    report_id: str = ""
    blends: bool = True
    mark: str = ""
    sent: bool = False
    tokens: int = 0
    work: str = ""
    shared: int = 0
    may_go_on: bool = False
    result: Result | None = None
    first: int = 0
    found: tuple[Generation, ...] = ()
    answers: bool = True
    request: Request | None = None
    namespace: str | None = None
    stretches: tuple[Stretch, ...] = ()
    held: int = 0
    alone: Stretch | None = None
    salt: str | None = None
    is_rest: bool = False
    parts: tuple[Part, Part] | None = None

    def split(self, shared: int) -> None:
        """Split the job at the chunks that are held, if there are others.

        shared: tokens in the blocks before the first of the others.
        """
        if self.job is not None and 0 < self.held < len(self.job.chunks):
            later = replace(self.job, chunks=self.job.chunks[self.held :])
            self.parts = (
                Part(self.job, self.found, self.shared),
                Part(later, self.found[self.held :], shared),
            )

    def choose(self, computed: int) -> None:
        """Blend only what vLLM's prefix cache lacks; computed: tokens that it has."""
        if self.parts is not None and self.job is not None:
            whole, later = self.parts
            self.is_rest = computed >= later.shared
            part = later if self.is_rest else whole
            self.job, self.found, self.shared = part.job, part.found, part.shared

    @property
    def lacks_earlier(self) -> bool:
        """Whether a blend would write into blocks that are marked as an earlier prompt's.

        Their KV is not that prompt's then, so they need marks of their own: ``begin_anew``.
        """
        is_alone = self.alone is None or self.stretches == (self.alone,)
        return not is_alone and not self.is_rest

    def begin_anew(self, alone: Stretch) -> None:
        """Blend all of the prompt's chunks, as if it continued no other."""
        self.stretches, self.mark, self.held, self.parts = (alone,), alone.mark, 0, None

    def too_little(self, computed: int) -> Reason | None:
        """Return why what is left to blend after so many cached tokens is not worth it, or None."""
        if self.job is None or not self.is_rest:
            return None
        tokens, least = sum(c.end - c.start for c in self.job.chunks), self.job.config.min_tokens
        if tokens >= least:
            return None
        return Reason(
            ReasonCode.TOO_SHORT,
            f"vLLM's prefix cache holds the first {computed} tokens; the {tokens} reusable tokens "
            f"after them are fewer than min_tokens={least}",
        )


@dataclass(frozen=True)
class Part:
    """A blend of some chunks. shared: tokens in the blocks before, whose KV is taken as it is."""

    job: BlendJob
    found: tuple[Generation, ...]
    shared: int
