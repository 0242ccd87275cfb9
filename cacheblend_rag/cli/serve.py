"""``cacheblend-rag serve``: an OpenAI-compatible server that blends, vLLM's or the embedded one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from cacheblend_rag.cli import asking, options, output, serve_vllm
from cacheblend_rag.cli.named_settings import SetOption, gathered, named
from cacheblend_rag.cli.serve_vllm import Address, warn_of_memory
from cacheblend_rag.engines.vllm import serve
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.middleware.bodies import MAX_BODY_MIB
from cacheblend_rag.engines.vllm.middleware.keys import (
    KEY_VARIABLE,
    check_host,
    has_storers,
    is_loopback,
    new_entry,
)
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.models import DEFAULT_MODEL, LOCAL_MODELS, public_name
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import Asker
from cacheblend_rag.rag.prompt import PassageOrder
from cacheblend_rag.settings import (
    AUTO,
    EMBEDDED,
    VLLM,
    BlendConfig,
    EngineConfig,
    LeadInConfig,
    StoreConfig,
)
from cacheblend_rag.settings.base import Positive, Settings
from cacheblend_rag.settings.options import names_of

if TYPE_CHECKING:
    from fastapi import FastAPI

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
KINDS = (AUTO, VLLM, EMBEDDED)
MODULES = ("fastapi", "uvicorn")
OWN = {"engine", "model", "kv_path", "tenants"}
"""Settings that options of this command give."""
OF_RETRIEVAL = {"top_k", "order", "cite"}
OF_COLLECTIONS = {"device", "profile", "guard"}
"""Settings beside the store's that a collection leaves open."""


class ServerSettings(Settings):
    """The settings of the server itself, whatever engine it runs."""

    _noun: ClassVar[str] = "setting of a server"

    max_body_mib: Positive = MAX_BODY_MIB
    """Longest body of a request, in MiB."""
    top_k: Positive = asking.TOP_K
    """Passages of a collection to retrieve."""
    order: Literal["score", "document", "reverse"] = "score"
    """Their order in a prompt."""
    cite: bool = False
    """Whether answers from a collection end with their sources."""


def _print_new_keys(namespace: str | None) -> None:
    """Print two new keys on stderr, this once, and their entry, which has their hashes only."""
    if namespace is None:
        return
    ask, store, entry = new_entry(namespace)
    output.tell(f"key to ask: {ask}")
    output.tell(f"key to ask and store: {store}")
    typer.echo(entry)
    raise typer.Exit


def serve_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help=f"{LOCAL_MODELS}, or a hub name.", show_default=DEFAULT_MODEL),
    ] = None,
    *,
    engine: Annotated[
        str,
        typer.Option(
            help="vllm, transformers (embedded), or auto: vLLM where it is installed, with CUDA."
        ),
    ] = AUTO,
    kv_path: Annotated[
        Path | None,
        typer.Option(
            envvar=options.KV_PATH_VARIABLE,
            help="Folder of chunk KV.",
            show_default="memory only",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = (serve.HOST),
    port: Annotated[int, typer.Option(min=1, max=65535)] = serve.PORT,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further name of a server without a key."),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(help="TOML file of namespaces and hashed keys."),
    ] = None,
    new_key: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            callback=_print_new_keys,
            is_eager=True,
            help="Only print keys for --tenants.",
        ),
    ] = None,
    collection: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Answer from a collection made by `index`."),
    ] = None,
    settings: SetOption = None,
) -> None:
    """Start an OpenAI-compatible server that blends: vLLM's, or one over the embedded engine.

    --set takes guard and find, and of a collection top_k, order and cite. Other options are passed
    to vLLM. VLLM_API_KEY in the environment is the key that clients must send, on every path but
    /health; CACHEBLEND_STORE_KEY the one for storing and evicting.
    """
    kinds = (ConnectorSettings, EngineConfig, StoreConfig, BlendConfig, LeadInConfig)
    found = named(settings, *kinds, ServerSettings)
    _allow(found, found.keys() - OWN, "this command has an option of its own for it")
    own = ServerSettings(**{one: found.pop(one) for one in names_of(ServerSettings) & found.keys()})
    others = tuple(map(check_host, allowed_host or ()))
    address = Address(host, port, own.max_body_mib, others)
    if collection is not None:
        options.refuse(context, ("model", "kv_path"), "a collection has its own")
        allowed: Iterable[str] = OF_COLLECTIONS | names_of(StoreConfig) - {"kv_path"}
        _allow(found, allowed, "a collection has its own, which it was indexed with")
        _refuse_of_vllm(context, "--collection is served in this process")
        _serve_collection(
            collection,
            address,
            {**found, "fill_on_miss": True} | ({} if engine == AUTO else {"engine": engine}),
            own,
        )
        return
    for name in own.given().keys() & OF_RETRIEVAL:
        raise ConfigError(f"--set {name} is of a collection's passages: give --collection, too")
    model = model or DEFAULT_MODEL
    if model.startswith("-"):
        raise ConfigError(
            f"{model!r} comes before the model: give `serve MODEL` first, then options"
        )
    if tenants is not None:
        serve_vllm.check_tenants(tenants, found.get("namespace"), context.args)
    is_here = _picked(engine, model, found.get("device")) == EMBEDDED
    if is_here:
        _refuse_of_vllm(context, "this is served by the embedded engine")
        allowed = frozenset().union(*map(names_of, kinds[1:]))
        _allow(found, allowed, "a setting of vLLM, and the embedded engine serves here")
        _check(host)
    else:
        allowed = names_of(ConnectorSettings) - {"replicas"} | names_of(StoreConfig)
        _allow(found, allowed, "not a setting of vLLM's server, which has options for its own")
    kept = _store(found, kv_path)
    if serve.flag_value(context.args, (serve_vllm.SOCKET_FLAG,)) is None:
        serve.check_port(host, port)
    checks.check_model(model)
    if kept.kv_path is not None:
        kept = kept.with_changes(kv_path=_made(Path(kept.kv_path)))
    if is_here:
        found = {"unconfirmed_context": not has_storers(), **found}
        _serve_model(model, address, kept, found)
    else:
        serve_vllm.become_vllm(model, address, context.args, kept, found, tenants=tenants)


def _allow(found: dict[str, Any], allowed: Iterable[str], why: str) -> None:
    """Raise ConfigError for a setting that is not in ``allowed``; why: for the message."""
    for name in found.keys() - set(allowed):
        raise ConfigError(f"--set {name}: {why}: leave it out")


def _store(found: dict[str, Any], kv_path: Path | None) -> StoreConfig:
    """Take the store's settings out of those that were found; raises ConfigError."""
    names = names_of(StoreConfig) & found.keys()
    path = None if kv_path is None else str(kv_path)
    kept = StoreConfig(kv_path=path, **{name: found.pop(name) for name in names})
    if kept.kv_path is None and kept.disk_bytes is not None:
        raise ConfigError("--set disk_bytes is room in a folder: give --kv-path too")
    if kept.kv_path is None and kept.tiers is None and kept.host_bytes == 0:
        raise ConfigError("--set host_bytes=0 keeps no KV: give --kv-path, or more memory")
    return kept


def _refuse_of_vllm(context: typer.Context, why: str) -> None:
    """Raise ConfigError for an option that only vLLM has."""
    given = [flag.partition("=")[0] for flag in context.args]
    if serve_vllm.KEY_FLAG in given:
        raise ConfigError(f"{serve_vllm.KEY_FLAG}: an option of vLLM, set {KEY_VARIABLE} instead")
    told = f"an option of vLLM, and {why}: leave it out, or give --engine vllm"
    options.refuse(context, ("tenants",), told)
    if given:
        name = given[0].removeprefix("--").replace("-", "_")
        known = name in names_of(EngineConfig) | names_of(StoreConfig)
        raise ConfigError(f"{given[0]}: " + (f"give it as --set {name}=VALUE" if known else told))


def _made(folder: Path) -> Path:
    try:
        make_folder(folder)
    except OSError as error:
        raise StoreError(f"--kv-path {folder} cannot be used: {error.strerror}") from error
    return folder.resolve()


def _picked(engine: str, model: str, device: str | None) -> str:
    """Return the kind of engine that serves; raises ConfigError, and MissingExtraError for vLLM."""
    from cacheblend_rag.engines.factory import pick_engine

    if engine not in KINDS:
        raise ConfigError(f"--engine {engine!r} must be one of {', '.join(KINDS)}")
    if engine == AUTO:
        return pick_engine(EngineConfig(model=model, device=device))
    return engine


def _check(host: str) -> None:
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


def _serve_model(
    model: str, address: Address, store: StoreConfig, settings: Mapping[str, Any]
) -> None:
    """Serve a model by the embedded engine until the process is told to end.

    store: where chunk KV is kept. settings: others of the engine, blending and the lead-in.
    """
    checks.check_placement(settings.get("device"), settings.get("dtype"))
    fixed = {"engine": EMBEDDED, "model": model, "store": store}
    config = gathered({"fill_on_miss": not store.read_only, **settings, **fixed})
    warn_of_memory(store)
    with output.progress_bar(lines=True) as bar:
        engine = asking.load_engine(config, bar)
    os.environ.update(address.environment)
    with closing(engine):
        from cacheblend_rag.api.app import create_app

        name = public_name(model)
        _run(address, name, create_app(engine, name=name))


def _serve_collection(
    folder: Path,
    address: Address,
    given: Mapping[str, Any],
    own: ServerSettings,
) -> None:
    """Serve a collection: chats are answered from its passages; given: as for Asker."""
    _check(address.host)
    serve.check_port(address.host, address.port)
    with output.progress_bar(lines=True) as bar:
        asker = Asker(folder, given, progress=bar)
    os.environ.update(address.environment)
    with asker:
        from cacheblend_rag.api.app import create_app
        from cacheblend_rag.api.collection import Retriever, name_of

        retriever = Retriever(asker, own.top_k, PassageOrder(own.order), own.cite)
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
