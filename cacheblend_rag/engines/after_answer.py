"""Hooks that are called with each answer of an engine, and what is logged of each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from cacheblend_rag.engines.answer import FULL_PREFILL, PROMPT_SCORED, Generation, Request
from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import (
    PREFILL_PHASES,
    BlendReport,
    ChunkReport,
    count_chunks,
    reused_and_recomputed,
)
from cacheblend_rag.text.reencoded import FORMS
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")

AnswerHook = Callable[[Request, Generation], Generation | None]
"""Called with a request (its prompt is ``request.prepared``) and its answer, which may be a
cancelled one. Returns None, or a changed answer, with other reports of chunks for example. It runs
in the thread that made the answer, and other requests may wait for it: longer work, and every call
of the engine, belongs in another thread."""


class RequestWatcher:
    """An AnswerHook that also sees requests begin, and requests that get no answer.

    Each method may be left as it is. One request has the same ``request_id`` in all of them.
    """

    def begins(self, request: Request) -> Request | None:
        """See a request before its work begins, in its caller's thread and context (contextvars).

        A request of a batch that found no memory beside the others begins twice.

        Args:
            request: checked and prepared.

        Returns:
            None, or a changed request, with other headers for example.
        """

    def __call__(self, request: Request, answer: Generation) -> Generation | None:
        """See an answer, as any AnswerHook.

        Args:
            request: as it was served.
            answer: as the hooks before left it; may be a cancelled one.

        Returns:
            None, or a changed answer.
        """

    def failed(self, request: Request, error: BaseException) -> None:
        """See that a request has ended without an answer.

        When a batch fails, its requests that were answered before fail with it.

        Args:
            request: as it was before ``begins`` changed it.
            error: what ended it. GeneratorExit, CancelledError or KeyboardInterrupt if nobody waits
                for its answer any more.
        """


class AfterAnswer:
    """The hooks of one engine, called in the order in which they were added.

    A hook's exceptions are logged, once per hook, and do not fail the request.
    """

    def __init__(self) -> None:
        self._hooks: list[AnswerHook] = []
        self._watchers: list[RequestWatcher] = []
        self._failed: set[int] = set()  # by id: hooks need not be hashable

    def add(self, hook: AnswerHook) -> None:
        """Call a hook with each answer from now on, after the hooks added before."""
        self._hooks.append(hook)
        if isinstance(hook, RequestWatcher):
            self._watchers.append(hook)

    def begin(self, request: Request) -> Request:
        """Tell watchers that a request begins; returns it as the last of them left it."""
        for watcher in tuple(self._watchers):
            request = self._called(watcher, watcher.begins, request) or request
        return request

    def run(self, request: Request, answer: Generation) -> Generation:
        """Call all hooks; returns the answer as the last of them left it."""
        for hook in tuple(self._hooks):
            answer = self._called(hook, hook, request, answer) or answer
        return answer

    def fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """Tell watchers that requests have ended with an error."""
        for request in requests if self._watchers else ():
            for watcher in tuple(self._watchers):
                self._called(watcher, watcher.failed, request, error)

    def _called(
        self, hook: AnswerHook, method: Callable[..., T | None], *given: object
    ) -> T | None:
        """Return what a hook's method returns; None if it fails."""
        try:
            return method(*given)
        except Exception:
            if id(hook) not in self._failed:
                self._failed.add(id(hook))
                logger.exception("%r failed; the request is served anyway", hook)
            return None


# Logged: a line of each request at DEBUG, and a warning of the first needless miss

CAUSES: Mapping[ReasonCode | None, str] = {
    ReasonCode.UNKNOWN: "its passages were never given to precompute (CacheBlendPrecompute in "
    "LlamaIndex, CacheBlendTransformer in LangChain) of an engine with this registry: kv_path, "
    "namespace",
    ReasonCode.ALTERED_TEXT: "its passages differ from the indexed ones: cut, or changed by a "
    "template",
    ReasonCode.NOT_STORED: "their KV was never computed, or was evicted: precompute them, or give "
    "the engine fill_on_miss=True",
    ReasonCode.OTHER_MODEL: "their KV was computed after another instruction, or by another model "
    "or tokenizer: precompute them with the engine that answers",
}
RE_ENCODED = (
    "its passages stand in it {}, and too few of their tokens are left to find them by: put them "
    "into prompts as they are indexed (json.dumps with ensure_ascii=False)"
)


def log_report(report: BlendReport) -> None:
    """Log a request's summary; codes and numbers only, no text of the prompt."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    why = "" if report.reason is None else f" ({report.reason.code.value})"
    logger.debug(
        "request %s: %d tokens reused, %d recomputed, %d computed%s; %s; first token %.1f ms: %s",
        report.request_id,
        report.reused_tokens,
        report.recomputed_tokens,
        report.computed_tokens,
        why,
        _hits(report.chunks),
        report.seconds.time_to_first_token * 1000,
        _phases(vars(report.seconds), report.seconds.load_by_tier),
    )


def log_blend(
    request_id: str,
    chunks: Sequence[ChunkReport],
    seconds: Mapping[str, float],
    load_by_tier: Mapping[str, float],
) -> None:
    """Log what a worker's blend of a request reused, and its phases."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    logger.debug(
        "request %s: %d tokens reused, %d recomputed; %s; %s",
        request_id,
        *reused_and_recomputed(chunks),
        _hits(chunks),
        _phases(seconds, load_by_tier),
    )


def _hits(chunks: Sequence[ChunkReport]) -> str:
    """Return how many chunks were hits in which tier, and misses by code."""
    found, missed = count_chunks(chunks)
    told = ", ".join(f"{count} {name}" for name, count in sorted((found + missed).items()))
    return f"{found.total()} of {len(chunks)} chunks hit" + (told and f" ({told})")


def _phases(seconds: Mapping[str, float], load_by_tier: Mapping[str, float]) -> str:
    """Return the phases that took time, in milliseconds, and loading by tier."""
    spent = {name: seconds.get(name) for name in PREFILL_PHASES}
    told = " ".join(f"{name} {value * 1000:.1f}" for name, value in spent.items() if value)
    tiers = ", ".join(f"{tier} {value * 1000:.1f}" for tier, value in load_by_tier.items())
    return told + (tiers and f" (load from {tiers})")


class FirstMiss:
    """Warns once, about the first prompt that reuses nothing although chunks were expected.

    Chunks are expected if hints were given, or if the prompt holds known chunks, be it re-encoded.
    """

    def __init__(self, registry: ChunkRegistry) -> None:
        self._registry = registry
        self._said = False

    def see(self, request: Request, answer: Generation) -> None:
        """Check the result of a prompt; an AnswerHook."""
        report, prepared = answer.report, request.prepared
        is_asked = (
            report.reason in (FULL_PREFILL, PROMPT_SCORED) or request.steering.refusal is not None
        )
        uncalled = is_asked or answer.finish_reason == "cancelled"
        is_healing = any(one.reason_code == ReasonCode.BEING_FILLED for one in report.chunks)
        if self._said or report.blended or uncalled or is_healing:
            return
        cause = self._cause(prepared.text, prepared.expects_chunks, answer)
        if cause:
            self._said = True
            logger.warning("nothing was reused of a prompt with retrieved passages: %s", cause)

    def _cause(self, text: str, expected: bool, answer: Generation) -> str:
        codes = Counter(chunk.reason_code for chunk in answer.report.chunks)
        code = codes.most_common(1)[0][0] if codes else None
        if code in {None, ReasonCode.UNKNOWN, ReasonCode.ALTERED_TEXT}:
            for how, undo in FORMS.items():
                if (plain := undo(text)) != text and self._registry.find(plain):
                    return RE_ENCODED.format(how)
        return CAUSES.get(code, answer.report.reason or "") if expected else ""
