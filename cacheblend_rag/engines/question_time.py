"""Turns prompts into requests, and requests into answers with their reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, cast

from cacheblend_rag.engines.after_answer import AfterAnswer
from cacheblend_rag.engines.answer import (
    NOT_STEERED,
    Delta,
    FinishReason,
    Generation,
    Request,
    TokenLogprob,
)
from cacheblend_rag.engines.backend import Backend, checked_config
from cacheblend_rag.engines.batch import answer_batch
from cacheblend_rag.engines.guard import Guard
from cacheblend_rag.engines.idle import Activity
from cacheblend_rag.engines.lifetime import Lifetime
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike, PromptPreparer
from cacheblend_rag.engines.request_log import log_report
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.stream import Cancellation, Stream
from cacheblend_rag.engines.tool_use import ToolUse
from cacheblend_rag.report import (
    BlendReport,
    PhaseSeconds,
    PhaseStarts,
    PrefillReport,
    reused_and_recomputed,
)
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.tools import ToolCall

Hints = Sequence[Chunk | str]
"""Chunks, or ids of documents, that a prompt is known to hold."""


@dataclass(frozen=True)
class QuestionTime:
    """Answers prompts through one backend: whole, streamed, in batches, and asynchronously.

    backend: begins requests; may be a weak proxy. lifetime: of the engine. preparer: of prompts.
    after_answer: hooks. activity: counts the running requests. guard: steers them. Methods
    raise the same errors as Engine's methods of the same names.
    """

    backend: Backend
    lifetime: Lifetime
    preparer: PromptPreparer
    after_answer: AfterAnswer
    activity: Activity
    guard: Guard

    def prepare(self, prompt: PromptLike, hints: Hints) -> PreparedPrompt:
        """Return a prompt's tokens, and the chunks in it with the keys of their KV."""
        self.lifetime.check()
        return self.preparer.prepare(prompt, hints)

    def request(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        config: BlendConfig | None = None,
        hints: Hints = (),
        *,
        cancel: Event | None = None,
        steered: bool = True,
        **options: Any,
    ) -> Request:
        """Check and prepare; raises PromptError and ConfigError before any work is done.

        steered: whether the guard may raise its ratio, or have it served by ordinary prefill.
        """
        config = checked_config(config or self.backend.config)
        self.backend._check_config(config)
        config, steering = self.guard.steer(config) if steered else (config, NOT_STEERED)
        prepared = self.prepare(prompt, hints)
        settings = self.backend.model_sampling.resolve(sampling or SamplingParams())
        settings = replace(settings, max_tokens=min(settings.max_tokens, prepared.room))
        if tools := ToolUse.of(prepared, self.preparer.tokenizer):
            if tools.may_answer_in(settings.structured_outputs):
                self.backend._check_sampling(settings)  # so that an error names what is wrong
            settings = tools.constrained(settings)
        self.backend._check_sampling(settings)
        stop = Cancellation(cancel, lambda: not self.lifetime.is_open)
        return Request(prepared, settings, config, cancel=stop, steering=steering, **options)

    def generate(self, request: Request) -> Generation:
        """Answer a request."""
        with self._working(request):
            return _generation(self._start(request).last())

    def stream(self, request: Request) -> Iterator[Delta]:
        """Answer a request piece by piece; closing the iterator stops the work."""
        pieces = self._pieces(request)
        next(pieces)
        return pieces

    def _pieces(self, request: Request) -> Iterator[Delta]:
        """Yield nothing, then the pieces: closing it before the first piece stops the work, too."""
        with self._working(request):
            deltas = iter(self._start(request))
            with closing(cast("Generator[Delta]", deltas)):
                yield cast(Delta, None)
                yield from map(self._told_apart(request), deltas)

    def generate_batch(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer several requests, some at a time, in groups that share chunks."""
        with self._working(*requests):
            return answer_batch(self._start, requests, self.backend._wanting)

    def _start(self, request: Request) -> Stream[Delta]:
        return self.backend._start(self.after_answer.begin(request))

    @contextmanager
    def _working(self, *requests: Request) -> Iterator[None]:
        """Be at work on requests, and tell the hooks of what ends them without an answer."""
        with self.activity.working():
            try:
                yield
            except BaseException as error:
                self.after_answer.fail(requests, error)
                raise

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        config: BlendConfig | None,
        hints: Hints,
    ) -> Generation:
        """Answer off the event loop; cancelling the task stops the work."""
        request = await asyncio.to_thread(self.request, prompt, sampling, config, hints)
        async with aclosing(self._apieces(request)) as deltas:
            async for delta in deltas:
                last = delta
        return _generation(last)

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        config: BlendConfig | None,
        hints: Hints,
    ) -> AsyncGenerator[Delta, None]:
        """Answer off the event loop, piece by piece; leaving the loop over it stops the work."""
        request = await asyncio.to_thread(
            self.request, prompt, sampling, config, hints, streamed=True
        )
        async with aclosing(self._apieces(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def _apieces(self, request: Request) -> Any:
        told_apart = self._told_apart(request)
        with self._working(request):
            async with aclosing(cast(Any, aiter(self._start(request)))) as deltas:
                async for delta in deltas:
                    yield told_apart(delta)

    def _told_apart(self, request: Request) -> Callable[[Delta], Delta]:
        """Return what tells a delta's content from the calls of tools in its text."""
        tools = self._tools(request)
        stream = None if tools is None else tools.content_stream(is_json=request.is_json)

        def told_apart(delta: Delta) -> Delta:
            if stream is None:
                return delta
            if delta.generation is not None:
                return replace(delta, content=stream.finish(delta.generation.content))
            return replace(delta, content=stream.feed(delta.text))

        return told_apart

    def _tools(self, request: Request) -> ToolUse | None:
        return ToolUse.of(request.prepared, self.preparer.tokenizer)

    def _content_and_calls(
        self, request: Request, text: str, token_ids: Sequence[int]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        tools = self._tools(request)
        if tools is None:
            return text, ()
        return tools.read(text, token_ids, is_json=request.is_json)

    def answered(
        self,
        request: Request,
        text: str,
        token_ids: Iterable[int],
        finish_reason: FinishReason,
        prefill: PrefillReport,
        *,
        hooks: bool = True,
        logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> Delta:
        """Return the last piece of a stream: the whole answer.

        hooks: whether the after-answer hooks run. logprobs: of its tokens, if they were asked for.
        """
        self.lifetime.check()
        report = self.report(request, prefill)
        log_report(report)
        token_ids = tuple(token_ids)
        content, calls = self._content_and_calls(request, text, token_ids)
        answer = Generation(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_tokens=len(request.prepared.token_ids),
            report=report,
            sampling=request.sampling,
            content=content,
            tool_calls=calls,
            logprobs=logprobs,
        )
        return Delta("", self.after_answer.run(request, answer) if hooks else answer)

    def report(self, request: Request, prefill: PrefillReport) -> BlendReport:
        """Return the report of a prompt and of its chunks."""
        prepared = request.prepared
        tokens = len(prepared.token_ids)
        reused, recomputed = reused_and_recomputed(prefill.chunks)
        reused += prefill.prefix_tokens
        began = request.made_at - prepared.seconds
        starts = {"tokenize": began + prepared.find_seconds, **prefill.starts}
        return BlendReport(
            engine=self.backend.name,
            blended=prefill.blended,
            reason=prefill.reason,
            prompt_tokens=tokens,
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            computed_tokens=tokens - reused - recomputed if prefill.was_run else 0,
            recompute_ratio=prefill.ratio,
            selector=prefill.selector,
            selector_reason=prefill.selector_reason,
            ratio_reason=prefill.ratio_reason
            or (request.steering.raised if prefill.blended else None),
            lead_in=self.preparer.lead_in.name,
            compute_share=prefill.compute_share,
            seconds=PhaseSeconds(
                find=prepared.find_seconds,
                tokenize=prepared.tokenize_seconds,
                load_by_tier=dict(prefill.load_by_tier),
                **prefill.seconds,
            ),
            chunks=(*prefill.chunks, *prepared.unmatched),
            request_id=request.request_id,
            starts=PhaseStarts.of(starts, began),
            trace=prefill.trace,
            prefix_tokens=prefill.prefix_tokens,
        )


def _generation(last: Delta) -> Generation:
    return cast(Generation, last.generation)
