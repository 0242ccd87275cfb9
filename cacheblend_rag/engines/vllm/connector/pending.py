"""What the scheduler's side knows of a request between its arrival and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheblend_rag.engines.vllm.protocol import BlendJob, Result
from cacheblend_rag.reason import Reason

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from cacheblend_rag.engines.vllm.connector.token_file import Name


@dataclass
class Pending:
    """The state of a request: its job, and why it was not blended.

    tokens: of the prompt to provide. sent: whether a worker has the job, so that a result will
    come. report_id: under which the result is kept, or "". blends: whether the job is a blend.
    mark: a blend's, see ``set_apart``; equal work has the same. work: the blend's, see
    ``_work_of``. shared: tokens in the blocks that it shares with ordinary requests. may_go_on:
    whether it is a blend of exact KV only, looked up as an ordinary request until it is begun.
    first: tokens that vLLM's prefix cache has. names: of the chunks that were found here, if the
    request brought none. answers: whether the client, which knows of jobs, gets the result.
    request: vLLM's. namespace: of the KV that it may use; None is of none.
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
    names: tuple[Name, ...] = ()
    answers: bool = True
    request: Request | None = None
    namespace: str | None = None
