"""Question time: prompts become requests, and requests answers with their reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from threading import Event
from typing import Any, cast

from cacheblend_rag.engines.after_answer import AfterAnswer, log_report
from cacheblend_rag.engines.answer import (
    NOT_STEERED,
    Delta,
    FinishReason,
    Generation,
    Request,
    TokenLogprob,
    answer_batch,
)
from cacheblend_rag.engines.backend import Backend, checked_config
from cacheblend_rag.engines.guard import Guard
from cacheblend_rag.engines.lifetime import Activity, Lifetime
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike, PromptPreparer
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.stream import Cancellation, Stream
from cacheblend_rag.engines.tool_use import ToolUse
from cacheblend_rag.prefill.lead_in import LeadIn
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


class Answering(Backend):
    """Answers prompts: whole, streamed, in batches, and asynchronously."""

    tokenizer: Any
    _lifetime: Lifetime
    _activity: Activity
    _led: LeadIn
    _preparer: PromptPreparer
    _hooks: AfterAnswer
    _guard: Guard

    def prepare(self, prompt: PromptLike, hints: Hints = ()) -> PreparedPrompt:
        """Return a prompt's tokens, and the chunks in it with the keys of their KV.

        Args:
            prompt: as for generate. A PreparedPrompt is prepared again if its engine had another
                fingerprint, registry or context window, or if chunks were registered or forgotten
                since; else it is returned as it is.
            hints: as for generate; none with a PreparedPrompt, which keeps its own.

        Raises:
            PromptError: when it is empty or longer than the context window.
        """
        self._lifetime.check()
        return self._preparer.prepare(prompt, hints)

    def prepare_tokens(
        self, token_ids: Sequence[int], *, conversation: str = "", until: int = 0
    ) -> PreparedPrompt:
        """Return a prompt of exactly these tokens.

        Args:
            token_ids: the prompt. Registered chunks are found in the text that it decodes to, if
                that encodes to the same tokens, and stored ones in its tokens.
            conversation: the key of one whose earlier turns are found, too; or "".
            until: so many tokens may hold such turns.

        Raises:
            PromptError: when they are no tokens of the model, or none, or too many.
        """
        self._lifetime.check()
        return self._preparer.prepare_tokens(token_ids, conversation=conversation, until=until)

    def generate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        cancel: Event | None = None,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: a text, a BlendPrompt, chat messages, or the result of ``prepare`` for one of
                them.
            sampling: how tokens are sampled; the defaults for None.
            config: how KV is blended; the engine's own for None.
            hints: chunks, or ids of documents, that the prompt is known to hold.
            cancel: set it to stop the work; what was generated so far is returned.

        Returns:
            The answer, with the report of what was reused.

        Raises:
            PromptError: when the prompt is empty or longer than the context window.
            ConfigError: when ``config`` does not suit the model, or names an unknown selector.
        """
        return self._generated(self._request(prompt, sampling, config, hints, cancel=cancel))

    def generate_full(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        hints: Hints = (),
        cache_salt: str | None = None,
    ) -> Generation:
        """Return the answer by ordinary prefill of the same tokens: the baseline to compare with.

        Args:
            prompt: as for generate.
            sampling: as for generate.
            hints: as given to generate, since they affect a prompt's segments and tokens.
            cache_salt: prompts with the same one may share the engine's own prefix cache, if it
                has one; without it, nothing of earlier prompts is reused.
        """
        options: dict[str, Any] = {"full": True, "cache_salt": cache_salt}
        return self._generated(self._request(prompt, sampling, None, hints, **options))

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        cancel: Event | None = None,
    ) -> Generator[Delta, None, None]:
        """Yield the answer piece by piece, the last with the report; closing it stops the work.

        prompt, sampling, config, hints, cancel: as for generate; errors come before any work.
        """
        request = self._request(prompt, sampling, config, hints, cancel=cancel, streamed=True)
        pieces = self._pieces(request)
        next(pieces)
        return pieces

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> list[Generation]:
        """Answer several prompts; all are checked, as generate does, before the first is served.

        Prompts are prefilled in turn, in groups that share chunks, and decoded together. If one
        fails, the others are cancelled. Returns the answers in the prompts' order.

        Args:
            prompts: each as for generate.
            sampling: of all of them.
            config: of all of them.
            hints: chunks, or ids of documents, that any of the prompts is known to hold.
        """
        requests = [self._request(one, sampling, config, hints) for one in prompts]
        with self._working(*requests):
            return answer_batch(self._begun, requests)

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> Generation:
        """Return the same as generate, off the event loop; cancelling the task stops the work.

        prompt, sampling, config, hints: as for generate.
        """
        request = await asyncio.to_thread(self._request, prompt, sampling, config, hints)
        async with aclosing(self._apieces(request)) as deltas:
            async for delta in deltas:
                last = delta
        return _generation(last)

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        full: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """Yield the same as stream, off the event loop; leaving the loop over it stops the work.

        prompt, sampling, config, hints: as for generate; errors come at the first step. full:
        whether by ordinary prefill, as by generate_full.
        """
        request = await asyncio.to_thread(
            self._request, prompt, sampling, config, hints, streamed=True, full=full
        )
        async with aclosing(self._apieces(request)) as deltas:
            async for delta in deltas:
                yield delta

    # A request, from its check to its last piece

    def _request(
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
        config = checked_config(config or self.config)
        self._check_config(config)
        config, steering = self._guard.steer(config) if steered else (config, NOT_STEERED)
        prepared = self.prepare(prompt, hints)
        settings = self.model_sampling.resolve(sampling or SamplingParams())
        settings = settings.with_changes(max_tokens=min(settings.max_tokens, prepared.room))
        if tools := ToolUse.of(prepared, settings, self.tokenizer):
            if tools.may_answer_in_form:
                self._check_sampling(settings)  # so that an error names what is wrong
            settings = tools.constrained
        self._check_sampling(settings)
        stop = Cancellation(cancel, lambda: not self._lifetime.is_open)
        if settings.prompt_logprobs is not None:
            options["full"] = True
        return Request(prepared, settings, config, tools, cancel=stop, steering=steering, **options)

    def _begun(self, request: Request) -> Stream[Delta]:
        return self._start(self._hooks.begin(request))

    def _generated(self, request: Request) -> Generation:
        with self._working(request):
            return _generation(self._begun(request).last())

    def _pieces(self, request: Request) -> Generator[Delta, None, None]:
        """Yield nothing, then the pieces: closing it before the first piece stops the work, too."""
        with self._working(request):
            deltas = iter(self._begun(request))
            with closing(cast("Generator[Delta]", deltas)):
                yield cast(Delta, None)
                yield from map(self._told_apart(request), deltas)

    async def _apieces(self, request: Request) -> AsyncGenerator[Delta, None]:
        told_apart = self._told_apart(request)
        with self._working(request):
            async with aclosing(cast(Any, aiter(self._begun(request)))) as deltas:
                async for delta in deltas:
                    yield told_apart(delta)

    @contextmanager
    def _working(self, *requests: Request) -> Iterator[None]:
        """Be at work on requests, and tell the hooks of what ends them without an answer."""
        with self._activity.working():
            try:
                yield
            except BaseException as error:
                self._hooks.fail(requests, error)
                raise

    def _told_apart(self, request: Request) -> Callable[[Delta], Delta]:
        """Return a function that sets a delta's ``content``: its text without tool calls."""
        tools = request.tools
        if tools is None:
            return lambda delta: delta
        stream = tools.content_stream()

        def told_apart(delta: Delta) -> Delta:
            if delta.generation is not None:
                return replace(delta, content=stream.finish(delta.generation.content))
            is_call = tools.hides_mark(delta.token_ids)
            return replace(delta, content=stream.feed(delta.text, is_call=is_call))

        return told_apart

    def _answered(
        self,
        request: Request,
        text: str,
        token_ids: Iterable[int],
        finish_reason: FinishReason,
        prefill: PrefillReport,
        *,
        hooks: bool = True,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> Delta:
        """Return the last piece of a stream: the whole answer.

        hooks: whether the after-answer hooks run. logprobs, prompt_logprobs: of its tokens and the
        prompt's, if they were asked for.
        """
        self._lifetime.check()
        report = self._report(request, prefill)
        log_report(report)
        token_ids, content, calls = tuple(token_ids), text, tuple[ToolCall, ...]()
        if request.tools is not None:
            content, calls = request.tools.read(text, token_ids)
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
            prompt_logprobs=prompt_logprobs,
        )
        return Delta("", self._hooks.run(request, answer) if hooks else answer)

    def _report(self, request: Request, prefill: PrefillReport) -> BlendReport:
        """Return the report of a prompt and of its chunks."""
        prepared = request.prepared
        tokens = len(prepared.token_ids)
        reused, recomputed = reused_and_recomputed(prefill.chunks)
        reused += prefill.prefix_tokens
        began = request.made_at - prepared.seconds
        starts = {"tokenize": began + prepared.find_seconds, **prefill.starts}
        return BlendReport(
            engine=self.name,
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
            lead_in=self._led.name,
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
            early_kv_bytes=prefill.early_kv_bytes,
        )


def _generation(last: Delta) -> Generation:
    return cast(Generation, last.generation)
