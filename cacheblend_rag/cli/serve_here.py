"""``serve`` in this process: the embedded engine, or a collection, behind our own server."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.cli import asking, output
from cacheblend_rag.engines.vllm import serve
from cacheblend_rag.engines.vllm.middleware.bodies import BODY_VARIABLE
from cacheblend_rag.engines.vllm.middleware.hosts import HOSTS_VARIABLE, is_loopback
from cacheblend_rag.engines.vllm.middleware.keys import KEY_VARIABLE
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import public_name
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import Asker
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.ordering import PassageOrder
from cacheblend_rag.settings import AUTO, EMBEDDED, VLLM

if TYPE_CHECKING:
    from fastapi import FastAPI

    from cacheblend_rag.settings import StoreConfig

KINDS = (AUTO, VLLM, EMBEDDED)
MODULES = ("fastapi", "uvicorn")


@dataclass(frozen=True)
class Address:
    """Where the server listens, the longest body that it takes, and further names of its host."""

    host: str
    port: int
    max_body_mib: int
    other_hosts: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell the access middleware so."""
        hosts = [self.host, *self.other_hosts, *filter(None, [os.environ.get(HOSTS_VARIABLE)])]
        return {BODY_VARIABLE: str(self.max_body_mib), HOSTS_VARIABLE: ",".join(hosts)}


def picked(engine: str, model: str, device: str | None) -> str:
    """Return the kind of engine that serves; raises ConfigError, and MissingExtraError for vLLM."""
    from cacheblend_rag.engines.factory import pick_engine
    from cacheblend_rag.settings import EngineConfig

    if engine not in KINDS:
        raise ConfigError(f"--engine {engine!r} must be one of {', '.join(KINDS)}")
    if engine == AUTO:
        return pick_engine(EngineConfig(model=model, device=device))
    return engine


def check(host: str) -> None:
    """Raise what is wrong before anything is loaded.

    Raises ConfigError when other machines could reach the server without a key, and
    MissingExtraError without the server's libraries.
    """
    checks.check_installed(MODULES, "serve with the embedded engine", "server")
    if not is_loopback(host) and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"--host {host}: other machines can reach it: set {KEY_VARIABLE} to a key that clients "
            "must send, or listen on 127.0.0.1"
        )


def warn_of_memory(store: StoreConfig) -> None:
    """Warn when a server's chunk KV ends with it."""
    if not store.outlives:
        output.warn("chunk KV is kept in memory only, until the server ends: --kv-path keeps it")


def serve_model(
    model: str,
    address: Address,
    store: StoreConfig,
    *,
    device: str | None,
    dtype: str | None,
    **settings: Any,
) -> None:
    """Serve a model by the embedded engine until the process is told to end.

    store: where chunk KV is kept. settings: others of EngineConfig.
    """
    from cacheblend_rag.settings import EngineConfig

    checks.check_placement(device, dtype)
    config = EngineConfig(
        engine=EMBEDDED,
        model=model,
        store=store,
        device=device,
        dtype=dtype,
        fill_on_miss=not store.read_only,
        **settings,
    )
    warn_of_memory(store)
    with output.progress_bar(lines=True) as bar:
        engine = asking.load_engine(config, bar)
    os.environ.update(address.environment)
    with closing(engine):
        from cacheblend_rag.api.app import create_app

        name = public_name(model)
        _run(address, name, create_app(engine, name=name))


def serve_collection(
    folder: Path,
    address: Address,
    *,
    engine: str | None,
    placement: Placement,
    guard: float | None,
    top_k: int,
    order: PassageOrder,
    cites: bool,
) -> None:
    """Serve a collection: chats are answered from its passages."""
    check(address.host)
    serve.check_port(address.host, address.port)
    with output.progress_bar(lines=True) as bar:
        asker = Asker(folder, placement, engine, progress=bar)
    os.environ.update(address.environment)
    with asker:
        from cacheblend_rag.api.app import create_app
        from cacheblend_rag.api.collection import Retriever, name_of
        from cacheblend_rag.settings import GuardConfig

        asker.engine.guard = None if guard is None else GuardConfig.of(guard)
        retriever = Retriever(asker, top_k, order, cites)
        name = name_of(folder)
        made = create_app(asker.engine, name=name, retriever=retriever, documents=False)
        _run(address, name, made)


def _run(address: Address, name: str, app: FastAPI) -> None:
    from cacheblend_rag.api.run import run

    log = logging.getLogger("cacheblend_rag.api")
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)

    def ready() -> None:
        host = f"[{address.host}]" if ":" in address.host else address.host
        output.say(f"{name} is served at http://{host}:{address.port}/v1")

    run(app, address.host, address.port, ready)
