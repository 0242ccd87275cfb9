"""Serves one request from its check to its last byte, for every route alike."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from cacheblend_rag.api.answers import Asked, Log, Pieces
from cacheblend_rag.api.errors import ApiError, of_engine
from cacheblend_rag.api.gate import ClientGoneError, Gate, while_connected
from cacheblend_rag.api.wire import EventStream, json_response
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.base import Engine

CLIENT_GONE = 499
"""The status of an answer that nobody reads, as nginx calls it."""


class Form(Protocol):
    """The form of a route's answers."""

    @property
    def prompt_field(self) -> str:
        """The field of the body that holds the prompt."""

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer."""

    def events(self, asked: Asked, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer."""

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""


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

    async def respond(
        self,
        request: Request,
        ask: Callable[[], Awaitable[Asked]],
        form: Form,
        *,
        streamed: bool,
        cache_salt: str | None,
    ) -> Response:
        """Answer a request.

        Args:
            request: of the client; its work stops when the client hangs up.
            ask: checks the body, and returns what the engine is asked.
            form: of the answer.
            streamed: whether the answer is sent piece by piece. Its first piece is computed before
                the status is sent, so that errors until then have theirs.
            cache_salt: of its prompts.

        Raises:
            ApiError: when the request is refused or has failed.
        """
        log = Log(f"{request.method} {request.url.path}")
        async with AsyncExitStack() as held:
            try:
                held.enter_context(self.gate.entered())
                asked = await while_connected(request, _run(ask))
                asked = asked.salted(cache_salt)
                pieces = Pieces(self.engine, self.gate, asked)
                held.push_async_callback(pieces.aclose)
                if streamed:
                    await while_connected(request, pieces.begin())
                    return EventStream(_events(form, asked, pieces, log), held.pop_all())
                answers = await while_connected(request, pieces.read())
                log.done(answers)
                return json_response(form.whole(asked, answers))
            except ClientGoneError:
                return Response(status_code=CLIENT_GONE)
            except Exception as error:
                told = of_engine(error, form.prompt_field)
                log.failed(told)
                raise told from error


async def _run(ask: Callable[[], Awaitable[Asked]]) -> Asked:
    return await ask()


async def _events(
    form: Form, asked: Asked, pieces: Pieces, log: Log
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer; an error becomes the last one."""
    try:
        async for sent in form.events(asked, pieces):
            yield sent
        log.done(pieces.in_order())
    except Exception as error:
        told = of_engine(error, form.prompt_field)
        log.failed(told)
        yield form.failure(told)
