"""Serves one request from its check to its last byte, for every route alike."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cacheblend_rag.api.answers import Answers, Asked
from cacheblend_rag.api.errors import of_engine
from cacheblend_rag.api.gate import ClientGoneError, Gate, while_connected
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.text.chat import ChatPrompt

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.sampling import SamplingParams

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The status of an answer that nobody reads, as nginx calls it."""
DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """The form of a route's answers."""

    @property
    def prompt_field(self) -> str:
        """The field of the body that holds the prompt."""

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer."""

    def events(self, asked: Asked, answers: Answers) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer; the first one once the first piece is there."""

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""


class Body(Protocol):
    """The body of a request for answers (``fields.Body``)."""

    model: str | None
    stream: bool | None
    cache_salt: str | None

    def check(self) -> None:
        """Raise ApiError for a known field that the server lacks."""

    async def asked(self, serving: Serving) -> Asked:
        """Return the prompts and settings for the engine; raises ApiError, or an engine's error."""

    def form(self, model: str) -> Form:
        """Return what writes the answers as JSON; model: the name that clients call the model."""


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

    async def prepare(self, prompt: PromptLike) -> PreparedPrompt:
        """Prepare a prompt, off the event loop: once, however many answers it gets."""
        return await self.gate.prepared(lambda: self.engine.prepare(prompt))

    async def ask_chat(self, chat: ChatPrompt, sampling: SamplingParams, n: int = 1) -> Asked:
        """Return the prompts and settings of a chat; passages are retrieved unless it has tools."""
        if self.retriever is not None and not chat.tools:
            return await self.retriever.ask(chat.messages, sampling, n, self.gate)
        return Asked([await self.prepare(chat)], sampling, n)

    async def respond(self, request: Request, body: Body) -> Response:
        """Answer a request; its work stops when the client hangs up.

        The first piece of a stream is computed before the status is sent, so that errors until then
        have theirs. Raises ApiError when the request is refused or has failed.
        """
        log = _Log(f"{request.method} {request.url.path}")
        form = body.form(self.name)
        try:
            if body.stream:
                events = self._events(body, form, log)
                return EventStream(await while_connected(request, anext(events)), events)
            return await while_connected(request, self._whole(body, form, log))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            told = of_engine(error, form.prompt_field)
            log.failed(told)
            raise told from error

    async def _whole(self, body: Body, form: Form, log: _Log) -> Response:
        async with self._answering(body) as (asked, answers):
            async with aclosing(answers.pieces()) as pieces:
                async for _ in pieces:
                    pass
            log.done(answers.finished)
            return JSONResponse(form.whole(asked, answers.finished))

    async def _events(self, body: Body, form: Form, log: _Log) -> AsyncGenerator[bytes, None]:
        """Yield the events of an answer; an error after the first one becomes the last one."""
        has_begun = False
        try:
            async with (
                self._answering(body) as (asked, answers),
                aclosing(form.events(asked, answers)) as events,
            ):
                async for sent in events:
                    has_begun = True
                    yield sent
                log.done(answers.finished)
        except Exception as error:
            if not has_begun:
                raise
            told = of_engine(error, form.prompt_field)
            log.failed(told)
            yield form.failure(told)

    @asynccontextmanager
    async def _answering(self, body: Body) -> AsyncIterator[tuple[Asked, Answers]]:
        """Let a request in, and check it."""
        with self.gate.entered():
            self.check_model(body.model)
            body.check()
            asked = (await body.asked(self)).salted(body.cache_salt)
            yield asked, Answers(self.engine, self.gate, asked)


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


def event(plain: Any, name: str | None = None) -> bytes:
    """Return one server-sent event with JSON data; name: its type, if it has one."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


class _Log:
    """Logs one line for a request: no text, only what was reused and how long it took."""

    def __init__(self, route: str) -> None:
        self._route, self._started = route, time.perf_counter()

    def done(self, answers: Sequence[Generation]) -> None:
        reports = [answer.report for answer in answers]
        reason = reports[0].reason
        logger.info(
            "%s: %d prompt tokens, %d reused, %d recomputed%s; %d answered; first token %.2f s, "
            "all %.2f s",
            self._route,
            sum(report.prompt_tokens for report in reports),
            sum(report.reused_tokens for report in reports),
            sum(report.recomputed_tokens for report in reports),
            f" ({reason.code.value})" if reason else "",
            sum(len(answer.token_ids) for answer in answers),
            max(report.seconds.time_to_first_token for report in reports),
            time.perf_counter() - self._started,
        )

    def failed(self, error: ApiError) -> None:
        logger.info("%s: %d %s", self._route, error.status, error)
