"""The application: an OpenAI-compatible server over any engine."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from cacheblend_rag.api import errors
from cacheblend_rag.api.chat import ChatRequest
from cacheblend_rag.api.compare import compare_router
from cacheblend_rag.api.completions import CompletionRequest
from cacheblend_rag.api.documents import documents_router, store_router
from cacheblend_rag.api.gate import RUNNING, WAITING, EngineLending, Gate
from cacheblend_rag.api.jobs import jobs_router
from cacheblend_rag.api.page import page_router
from cacheblend_rag.api.responses import ResponseRequest
from cacheblend_rag.api.serving import Serving
from cacheblend_rag.engines.vllm.middleware.access import OPEN_STATE, AccessMiddleware
from cacheblend_rag.engines.vllm.middleware.keys import STORERS_STATE

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever
    from cacheblend_rag.engines.base import Engine

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    engine: Engine,
    *,
    name: str | None = None,
    running: int = RUNNING,
    waiting: int = WAITING,
    retriever: Retriever | None = None,
    documents: bool = True,
) -> FastAPI:
    """Return an application with the routes of the OpenAI API.

    Args:
        engine: answers; it is not closed.
        name: the model's name for clients; the engine's by default.
        running: so many answers are computed at the same time; others wait.
        waiting: so many requests wait; further ones get 503 with Retry-After.
        retriever: finds passages for chats without tools.
        documents: whether clients may store and evict documents.

    Raises:
        ConfigError: when CACHEBLEND_MAX_BODY_MIB is no positive number.
    """
    app = FastAPI(title="cacheblend-rag", version=version("cacheblend-rag"))
    serving = Serving(engine, name or engine.model_name, Gate(running, waiting), retriever)
    app.state.serving = serving
    app.router.route_class = errors.OneLineRoute
    errors.install(app)
    _add_access(app, engine)
    _add_facts(app, serving)
    _add_answers(app, serving)
    app.include_router(compare_router)
    page = page_router(serving.name, has_collection=retriever is not None)
    setattr(app.state, OPEN_STATE, {one.path for one in page.routes if isinstance(one, Route)})
    app.include_router(page)
    app.include_router(store_router)
    if documents:
        app.include_router(documents_router)
        app.include_router(jobs_router)
    if find_spec("prometheus_client") is not None:
        from cacheblend_rag.observe.metrics import EngineMetrics

        counted = EngineMetrics(engine)

        @app.get("/metrics")
        def metrics() -> Response:
            return Response(counted.text(), media_type=METRICS_TYPE)

    return app


def _add_access(app: FastAPI, engine: Engine) -> None:
    """Add checks of the key (VLLM_API_KEY) and of bodies: length, depth, number of values."""
    app.state.args = SimpleNamespace()  # vLLM has its flags there
    setattr(app.state, STORERS_STATE, EngineLending(lambda _: engine))
    anything: Any = ["*"]  # as by vLLM: who may ask is checked before
    app.add_middleware(
        CORSMiddleware, allow_origins=anything, allow_methods=anything, allow_headers=anything
    )
    app.add_middleware(AccessMiddleware)


def _add_facts(app: FastAPI, serving: Serving) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if serving.engine.is_open else 503)

    @app.get("/version")
    async def told_version() -> dict[str, str]:
        return {"version": app.version, "engine": serving.engine.name}

    def plain() -> dict[str, Any]:
        return {
            "id": serving.name,
            "object": "model",
            "created": serving.created,
            "owned_by": "cacheblend-rag",
            "root": serving.engine.model_name,
            "max_model_len": serving.engine.context_window,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [plain()]}

    @app.get("/v1/models/{model:path}")
    async def model_called(model: str) -> dict[str, Any]:
        serving.check_model(model)
        return plain() if model else await models()


def _add_answers(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/chat/completions")
    async def create_chat(request: Request, body: ChatRequest) -> Response:
        return await serving.respond(request, body)

    @app.post("/v1/completions")
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        return await serving.respond(request, body)

    @app.post("/v1/responses")
    async def create_response(request: Request, body: ResponseRequest) -> Response:
        return await serving.respond(request, body)
