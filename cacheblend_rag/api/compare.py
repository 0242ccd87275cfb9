"""POST /v1/compare: a chat answered twice, by full prefill and by blending, and its tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response

from cacheblend_rag.api.answers import Answers, Asked, event
from cacheblend_rag.api.chat import ChatRequest
from cacheblend_rag.api.errors import OneLineRoute, bad_field
from cacheblend_rag.api.serving import Serving, log_answers
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.observe.explain import Explanation, token_texts
from cacheblend_rag.report import BlendReport

compare_router = APIRouter(route_class=OneLineRoute)
_turns = count()


@compare_router.post("/v1/compare")
async def compare(request: Request, body: ChatRequest) -> Response:
    """Answer a chat by full prefill and by blending, one after the other, as server-sent events.

    The first of the two changes from request to request. The body is a chat completion's; the
    answer is always streamed. Events: ``{"side", "text"}`` for each piece, ``{"side", "report"}``
    at the end of each side, then ``{"tokens", "explanation", "sources"}`` of the prompt.
    """
    if (body.n or 1) > 1:
        raise bad_field("n", "must be 1: one answer of each kind is compared")
    serving: Serving = request.app.state.serving
    return await serving.streamed(request, _events(serving, request, body))


async def _events(
    serving: Serving, request: Request, body: ChatRequest
) -> AsyncGenerator[bytes, None]:
    """Yield the events; an error after the first one becomes the last one."""
    is_begun = False
    try:
        async with serving.admitted(request, body) as asked:
            # Full prefill reuses no cached prefix, so the blend compared with it does not either.
            config = (asked.config or serving.engine.config).with_changes(reuse_prefix=False)
            blend = replace(asked, config=config)
            sides = [("full", replace(asked, full=True)), ("blend", blend)]
            reports: dict[str, BlendReport] = {}
            for side, one in sides if next(_turns) % 2 == 0 else reversed(sides):
                yield event({"side": side, "text": ""})
                is_begun, begun = True, time.perf_counter()
                async with Answers(serving.engine, serving.gate, one) as answers:
                    async for _, delta in answers:
                        yield event({"side": side, "text": delta.content})
                log_answers(request, answers.finished, time.perf_counter() - begun)
                reports[side] = answers.finished[0].report
                yield event({"side": side, "report": reports[side].to_dict()})
            yield event(await _explained(serving, blend, reports["blend"]))
    except ApiError as error:
        if not is_begun:
            raise
        yield event(error.body())


async def _explained(serving: Serving, blend: Asked, report: BlendReport) -> dict[str, Any]:
    """Blend once more, with a trace, which the timed blend, whose report is given, does without."""
    config = (blend.config or serving.engine.config).with_changes(trace=True)
    traced = replace(blend, config=config, sampling=blend.sampling.with_changes(max_tokens=1))
    async with Answers(serving.engine, serving.gate, traced) as answers:
        async for _ in answers:
            pass
    (prompt,) = blend.prompts
    told = replace(report, trace=answers.finished[0].report.trace)
    return {
        "tokens": token_texts(serving.engine.tokenizer, prompt),
        "explanation": Explanation.of(told).to_dict(),
        "sources": [source.to_dict() for source in blend.sources or ()],
    }
