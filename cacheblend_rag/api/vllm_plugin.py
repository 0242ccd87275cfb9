"""Documents on a vLLM server: an endpoint plugin of vLLM's, ``VLLM_PLUGINS=cacheblend``.

``cacheblend-rag serve`` switches it on. The access middleware must run before it, since that checks
keys, and knows a request's namespace by them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cacheblend_rag.api.documents import NO_ENGINE, documents_router, store_router
from cacheblend_rag.api.gate import EngineLending
from cacheblend_rag.api.jobs import jobs_router
from cacheblend_rag.api.run import bound_headers
from cacheblend_rag.engines.factory import open_registry
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import OwnClient
from cacheblend_rag.engines.vllm.middleware.access import GRANT
from cacheblend_rag.engines.vllm.middleware.keys import JOBS, STORERS_STATE, Grant
from cacheblend_rag.engines.vllm.namespaces import are_told_apart
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.settings import LeadInConfig

ENGINE_SECONDS = 60.0


class DocumentsPlugin:
    """Adds the documents' routes to vLLM's server; vLLM calls its methods."""

    name = "cacheblend"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and their part of the OpenAPI page; engines close with the server.

        vLLM starts uvicorn later, which from now on bounds the headers of requests.
        """
        bound_headers()
        app.include_router(store_router)
        app.include_router(documents_router)
        app.include_router(jobs_router)
        app.include_router(APIRouter(lifespan=_closing))
        with suppress(ImportError):
            from vllm.exceptions import VLLMValidationError

            app.add_exception_handler(VLLMValidationError, refused)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Get ready to open engines; engine_client: vLLM's, None on a server without a model."""
        if engine_client is not None:
            setattr(state, STORERS_STATE, ServerEngines(engine_client, args.model))


class ServerEngines(EngineLending):
    """Lends one engine for each namespace, opened with its first request about documents.

    A namespace's documents are known from a registry beside its KV, and survive restarts with it.
    """

    def __init__(self, client: Any, model: str) -> None:
        super().__init__(self._of_request)
        self._client, self._model = client, model
        self._settings = ConnectorSettings.of_vllm(client.vllm_config)
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._opened: dict[str, VLLMEngine] = {}
        self._tokenizer: Any = None
        self._is_closed = False

    def _of_request(self, request: Request) -> VLLMEngine:
        """Return the engine of the namespace of a request's key."""
        granted = request.scope.get(GRANT)
        asks = request.url.path.endswith(JOBS)  # which jobs are for whom is checked there
        if not isinstance(granted, Grant) or not (granted.may_change or asks):
            raise EngineUnavailableError(NO_ENGINE)
        by_key = are_told_apart(tenants=self._settings.tenants)
        namespace = granted.namespace if by_key else self._settings.namespace
        with self._lock:
            if self._is_closed:
                raise EngineUnavailableError("the server is shutting down: ask again later")
            engine = self._opened.get(namespace)
            if engine is None or not engine.is_open:
                engine = self._open(namespace, namespace if by_key else None)
                self._opened[namespace] = engine
                self._tokenizer = engine.tokenizer
            return engine

    def close(self) -> None:
        """Close all engines: what they run is cancelled, and none is opened from now on.

        Call it in a thread, since it waits for an engine that is being opened, and while the
        server's event loop runs, since that is needed to open it.
        """
        with self._lock:
            self._is_closed = True
            opened, self._opened = [*self._opened.values()], {}
        for engine in opened:
            engine.close()

    def _open(self, namespace: str, named: str | None) -> VLLMEngine:
        async def make() -> OwnClient:
            return OwnClient(self._client, self._model, named)

        transport = asyncio.run_coroutine_threadsafe(make(), self._loop).result(ENGINE_SECONDS)
        store = self._settings.store
        return VLLMEngine(
            transport,
            tokenizer=self._tokenizer,
            namespace=namespace,
            lead_in=LeadInConfig(unconfirmed_context=self._settings.takes_unconfirmed),
            registry=open_registry(
                Path(store.kv_path) if store.kv_path else None,
                namespace,
                read_only=store.read_only,
            ),
        )


async def refused(request: Request, error: Exception) -> Response:
    """Answer as vLLM does, but with the code that clients look for if a prompt is too long."""
    handlers = request.app.exception_handlers
    vllms = next(handlers[kind] for kind in type(error).__mro__[1:] if kind in handlers)
    answer: Response = await vllms(request, error)
    if "maximum context length" in str(error):
        told = json.loads(bytes(answer.body))
        told["error"]["code"] = "context_length_exceeded"
        answer = JSONResponse(told, answer.status_code)
    return answer


@asynccontextmanager
async def _closing(app: FastAPI) -> AsyncIterator[None]:
    """Close the engines when the server shuts down."""
    yield
    engines: ServerEngines | None = getattr(app.state, STORERS_STATE, None)
    if engines is not None:
        await asyncio.to_thread(engines.close)
