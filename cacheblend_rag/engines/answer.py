"""The engine's request and answer types, and how a batch of requests is ordered and run."""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, cast

from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.stream import Cancellation, Stream, result_of
from cacheblend_rag.engines.tool_use import ToolUse
from cacheblend_rag.errors import OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import BlendReport, PrefillReport
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.tools import ToolCall

FinishReason = Literal["stop", "length", "cancelled"]
FULL_PREFILL = Reason(ReasonCode.FULL_PREFILL_ASKED, "full prefill was asked for")
PROMPT_SCORED = Reason(
    ReasonCode.FULL_PREFILL_ASKED, "log-probabilities of the prompt were asked for"
)
LEAST_LOGPROB = -9999.0
"""What vLLM's server writes for minus infinity, which JSON cannot hold: the log-probability of what
a form rules out."""
CANCELLED = PrefillReport(
    Reason(ReasonCode.CANCELLED, "cancelled"), compute_share=0.0, was_run=False
)
"""The reason of a request that was cancelled before its prefill was done."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token of an answer was.

    Args:
        token_id: the token.
        token: its text.
        logprob: the natural logarithm of its probability by the model alone, before penalties and
            temperature, among the tokens that ``structured_outputs`` allow.
        top: the most likely tokens in its place, with texts and log-probabilities, in order.
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()

    def to_openai(self) -> dict[str, Any]:
        """Return OpenAI's form of it: ``token``, ``logprob``, ``bytes`` and ``top_logprobs``."""
        others = [_openai(text, logprob) for _, text, logprob in self.top]
        return {**_openai(self.token, self.logprob), "top_logprobs": others}


def _openai(token: str, logprob: float) -> dict[str, Any]:
    spelled = list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelled}


class RawLogprob(NamedTuple):
    """A token, its log-probability, and (token, log-probability) of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, token_id: int, likely: Mapping[int, float], most: int) -> Self:
        """Make it from log-probabilities by token id, of which it keeps the ``most`` likely."""
        top = sorted(likely.items(), key=lambda pair: -pair[1])
        return cls(token_id, likely[token_id], tuple(top[:most]))


def with_texts(raw: Iterable[RawLogprob], tokenizer: Any) -> tuple[TokenLogprob, ...]:
    """Return log-probabilities with the tokens' texts; tokens that were ruled out are left out."""

    def text(token_id: int) -> str:
        return str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    return tuple(
        TokenLogprob(
            one.token_id,
            text(one.token_id),
            one.logprob,
            tuple(
                (token_id, text(token_id), logprob)
                for token_id, logprob in one.top
                if math.isfinite(logprob) and logprob > LEAST_LOGPROB
            ),
        )
        for one in raw
    )


@dataclass(frozen=True)
class Generation:
    """One finished answer.

    Args:
        text: the answer, without the stop string that ended it.
        token_ids: its tokens, without the end token.
        finish_reason: ``stop`` (an end token or stop string), ``length`` or ``cancelled``.
        prompt_tokens: length of the prompt.
        report: what was reused, and why the rest was not.
        sampling: the settings that its tokens were sampled with; the model's own for fields that
            the request left out.
        content: the answer without its tool calls, also one that is cut off; by default ``text``.
        tool_calls: of the tools that a ChatPrompt has; arguments are JSON text.
        logprobs: of each token of ``token_ids``, if they were asked for.
        prompt_logprobs: of each token of the prompt, if they were asked for; NaN for the first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    report: BlendReport
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    content: str = cast(str, None)
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def __post_init__(self) -> None:
        if self.content is None:
            object.__setattr__(self, "content", self.text)

    @property
    def openai_finish_reason(self) -> str:
        """Why the answer ended, in OpenAI's words: ``tool_calls`` if it is whole and calls some."""
        calls = self.tool_calls and self.finish_reason == "stop"
        return "tool_calls" if calls else self.finish_reason


@dataclass(frozen=True)
class Delta:
    """One step of a stream.

    Args:
        text: the new text; may be empty.
        generation: the whole answer on the last step, None on all others.
        content: the new text that is certainly no part of a tool call; by default ``text``.
        logprobs: of the new tokens, if they were asked for.
        token_ids: the new tokens, without one that ends the answer.
    """

    text: str
    generation: Generation | None = None
    content: str = cast(str, None)
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.content is None:
            object.__setattr__(self, "content", self.text)


@dataclass(frozen=True, slots=True)
class Steering:
    """What the guard decided about a request.

    Args:
        raised: why its ratio was raised, if so.
        refusal: why it is served by ordinary prefill, if so.
        steps: how many steps the guard had taken by then.
    """

    raised: Reason | None = None
    refusal: Reason | None = None
    steps: int = 0


NOT_STEERED = Steering()


@dataclass(frozen=True)
class Request:
    """One request, checked and prepared.

    Args:
        prepared: its prompt. sampling: what was asked for, the model's own settings
            for the rest, ``max_tokens`` within the context window.
        config: how its chunks' KV is fused. tools: what its answer may call, None for nothing.
        full: ordinary prefill was asked for.
        cache_salt: see ``Engine.generate_full``. streamed: whether pieces are wanted as they come.
        cancel: is set to stop the work. request_id: names it in its report and in vLLM's logs.
        steering: what the guard decided about it.
        made_at: a reading of ``time.perf_counter`` once it was prepared.
        headers: sent with it to vLLM, such as the trace that it belongs to.
    """

    prepared: PreparedPrompt
    sampling: ResolvedSampling
    config: BlendConfig
    tools: ToolUse | None = None
    full: bool = False
    cache_salt: str | None = None
    streamed: bool = False
    cancel: Cancellation = field(default_factory=Cancellation)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    steering: Steering = NOT_STEERED
    made_at: float = field(default_factory=time.perf_counter)
    headers: Mapping[str, str] = field(default_factory=dict)


# Batches: prompts that share chunk KV run next to each other, a few at a time. Chunk KV that one of
# them loaded is then still in memory for the others, even if all prompts together have more chunks
# than fit there.

MOST_TOGETHER = 8
"""Most prompts that are at work at the same time."""
MOST_COMPARED = 64
"""The next prompt is one of so many that have waited longest."""


def by_overlap(prompts: Sequence[Mapping[KVKey, int]]) -> list[int]:
    """Return the indices of a batch's prompts, ordered so that neighbours share chunks.

    The next one shares most tokens with those that began last; of equal ones it is the first.
    prompts: the chunks of each, with their numbers of tokens.
    """
    waiting, order = [*range(len(prompts))], list[int]()
    while waiting:
        loaded = set[KVKey]().union(*(prompts[index] for index in order[-MOST_TOGETHER:]))
        shared = [
            sum(tokens for key, tokens in prompts[index].items() if key in loaded)
            for index in waiting[:MOST_COMPARED]
        ]
        order.append(waiting.pop(shared.index(max(shared))))
    return order


def answer_batch(
    start: Callable[[Request], Stream[Delta]], requests: Sequence[Request]
) -> list[Generation]:
    """Return the answers of requests, in their order.

    One that finds no memory beside the others is answered again after them. If one fails, the
    others are cancelled and its error is raised.

    Args:
        start: begins to answer a request.
        requests: at most ``MOST_TOGETHER`` of them are answered at a time.
    """
    chunks = [{one.key: one.tokens for one in request.prepared.placed} for request in requests]
    waiting = deque(by_overlap(chunks))
    running: dict[Future[Delta], int] = {}
    last: dict[int, Delta] = {}
    try:
        while waiting or running:
            while waiting and len(running) < MOST_TOGETHER:
                index = waiting.popleft()
                running[start(requests[index]).future()] = index
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                index = running.pop(done)
                with suppress(OutOfMemoryError):
                    last[index] = result_of(done)
        ends = [last.get(index) or start(one).last() for index, one in enumerate(requests)]
    finally:
        for request in requests:
            request.cancel.set()
    return [cast(Generation, end.generation) for end in ends]
