"""What the scheduler's side knows of a request between its arrival and its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheblend_rag.engines.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.connector.prefix import Stretch, undo
from cacheblend_rag.engines.vllm.protocol.job import Job
from cacheblend_rag.engines.vllm.protocol.result import Result
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Blend:
    """What is blended for a request: the chunks that were found in its prompt, in order."""

    chunks: tuple[FoundChunk, ...]
    config: BlendConfig


@dataclass
class Pending:
    """The state of a request: what is to be done for it, and why it is not blended.

    As it arrived: job, that it brought; blend, of the chunks in its prompt; reason: why there is
    neither. stretches: how its blocks are set apart. report_id: under which the result is kept, or
    "". answers: whether the client, which knows of wishes, gets the result. counts: whether the
    metrics count it as a blend, or as one that was refused. is_last: whether it waits until there
    is no other. request: vLLM's. namespace: of the KV that it may use; None is of none.

    Its blocks: may_go_on: whether vLLM's prefix cache seems to have all of it as exact KV, so that
    it is looked up as an ordinary request. salt: the request's, before its blocks were set apart.
    shared_by: tokens in the blocks before each stretch; 0 if it shares none.

    What is promised: left_out: how many of the first chunks vLLM's prefix cache has, blended for
    earlier prompts. cached: their reports. tokens: of the prompt to provide. first: those that the
    prefix cache has. work: the blend's, see ``_work_of``. sent: whether a worker has the work, so
    that a result will come. result: that came.
    """

    job: Job | None = None
    blend: Blend | None = None
    reason: Reason | None = None
    report_id: str = ""
    stretches: tuple[Stretch, ...] = ()
    answers: bool = True
    counts: bool = False
    is_last: bool = False
    request: Request | None = None
    namespace: str | None = None
    may_go_on: bool = False
    salt: str | None = None
    shared_by: list[int] = field(default_factory=lambda: [0])
    left_out: int = 0
    cached: tuple[ChunkReport, ...] = ()
    tokens: int = 0
    first: int = 0
    work: str = ""
    sent: bool = False
    result: Result | None = None

    @property
    def mark(self) -> str:
        """Of the chunks that are blended for this prompt; equal work has the same."""
        return self.stretches[-1].mark if self.stretches else ""

    @property
    def shared(self) -> int:
        """Tokens in the blocks before those of the work, whose KV is taken as it is."""
        return self.shared_by[-1 if self.left_out else 0]

    @property
    def work_found(self) -> tuple[FoundChunk, ...]:
        """The found chunks that are blended."""
        return self.blend.chunks[self.left_out :] if self.blend else ()

    def leave_out(self, computed: int) -> None:
        """Leave out chunks that were blended for earlier prompts, if the cache has all of them.

        computed: tokens that vLLM's prefix cache has.
        """
        self.left_out = 0
        if 1 < len(self.stretches) == len(self.shared_by) and computed >= self.shared_by[-1]:
            last = self.stretches[-1]
            self.left_out = last.first if last.is_own else 0

    @property
    def lacks_earlier(self) -> bool:
        """Whether a blend would write into blocks that are marked as an earlier prompt's.

        Their KV is not that prompt's then, so they need marks of this prompt's own.
        """
        is_all_own = len(self.stretches) <= 1 and all(one.is_own for one in self.stretches)
        return not is_all_own and not self.left_out

    def share_all(self) -> None:
        """Have vLLM share the blocks of a prompt that it computes itself, if all KV is its own.

        Those of a conversation stay apart.
        """
        is_plain = self.first <= self.shared_by[0] and not any(c.is_turn for c in self.work_found)
        if self.request and self.blend and self.blend.config.reuse_prefix and is_plain:
            undo(self.request, self.salt)
