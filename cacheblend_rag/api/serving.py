"""Serves one request from its check to its last byte, for every route alike."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cacheblend_rag.api.answers import Answers, Asked
from cacheblend_rag.api.errors import of_engine
from cacheblend_rag.api.fields import Body
from cacheblend_rag.api.gate import ClientGoneError, Gate, while_connected
from cacheblend_rag.engines.vllm.refused import ApiError

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.base import Engine

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The status of an answer that nobody reads, as nginx calls it."""


@dataclass
class Serving:
    """What all routes share.

    Args:
        engine: answers.
        name: the model's name for clients.
        gate: bounds what runs and waits.
        retriever: finds passages for questions; None if there is no collection.
        created: when the server started, in seconds of Unix time.
    """

    engine: Engine
    name: str
    gate: Gate
    retriever: Retriever | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless a request names the served model, or none."""
        if name not in (None, "", self.name):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name!r:.100}: this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def respond(self, request: Request, body: Body) -> Response:
        """Answer a request; its work stops when the client hangs up.

        The first piece of a stream is computed before the status is sent, so that errors until then
        have theirs. Raises ApiError when the request is refused or has failed.
        """
        if body.stream:
            return await self.streamed(request, self._events(request, body))
        try:
            return await while_connected(request, self._whole(request, body))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)

    async def streamed(self, request: Request, events: AsyncGenerator[bytes, None]) -> Response:
        """Return the response that sends events; what the first one raises is raised here."""
        try:
            return EventStream(await while_connected(request, anext(events)), events)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)

    async def _whole(self, request: Request, body: Body) -> Response:
        async with self._answering(request, body) as answers:
            async for _ in answers:
                pass
            return JSONResponse(body.form(answers.asked, self.name).whole(answers.finished))

    async def _events(self, request: Request, body: Body) -> AsyncGenerator[bytes, None]:
        """Yield the events of an answer; an error after the first one becomes the last one."""
        form = None
        try:
            async with self._answering(request, body) as answers:
                async for index, delta in answers:
                    begun: list[bytes] = []
                    if form is None:
                        form = body.form(answers.asked, self.name)
                        begun = form.beginning()
                    for sent in [*begun, *form.of_piece(index, delta)]:
                        yield sent
                for sent in form.ending(answers.finished) if form else ():
                    yield sent
        except ApiError as error:
            if form is None:
                raise
            for sent in form.failure(error):
                yield sent

    @asynccontextmanager
    async def _answering(self, request: Request, body: Body) -> AsyncIterator[Answers]:
        """Let a request in, and compute its answers while the block lasts; it logs a line."""
        async with self.admitted(request, body) as asked:
            begun = time.perf_counter()
            async with Answers(self.engine, self.gate, asked) as answers:
                yield answers
            log_answers(request, answers.finished, time.perf_counter() - begun)

    @asynccontextmanager
    async def admitted(self, request: Request, body: Body) -> AsyncIterator[Asked]:
        """Let a request in while the block lasts, and check and prepare what it asks.

        Whatever is raised in the block leaves it as an ApiError.
        """
        try:
            with self.gate.entered():
                self.check_model(body.model)
                asked = await self.gate.prepared(lambda: body.asked(self.engine, self.retriever))
                yield asked.salted(body.cache_salt)
        except Exception as error:
            told = of_engine(error, body.prompt_field)
            logger.info("%s: %d %s", _route(request), told.status, told)
            raise told from error


class EventStream(StreamingResponse):
    """Server-sent events, the first of which is there; however it ends, the others are closed."""

    def __init__(self, first: bytes, others: AsyncGenerator[bytes, None]) -> None:
        self._first, self._others = first, others
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._all(), headers=headers, media_type="text/event-stream")

    async def _all(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        async for sent in self._others:
            yield sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI)."""
        async with aclosing(self._others):
            await super().__call__(scope, receive, send)


def _route(request: Request) -> str:
    return f"{request.method} {request.url.path}"


def log_answers(request: Request, answers: Sequence[Generation], seconds: float) -> None:
    """Log a line of an answered request: no text, only what was reused and how long it took."""
    reports = [answer.report for answer in answers]
    reason, counts = reports[0].reason, ("prompt_tokens", "reused_tokens", "recomputed_tokens")
    logger.info(
        "%s: %d prompt tokens, %d reused, %d recomputed%s; %d answered; first token %.2f s, "
        "all %.2f s",
        _route(request),
        *(sum(getattr(report, name) for report in reports) for name in counts),
        f" ({reason.code.value})" if reason else "",
        sum(len(answer.token_ids) for answer in answers),
        max(report.seconds.time_to_first_token for report in reports),
        seconds,
    )
