"""``cacheblend-rag serve``: an OpenAI-compatible server that blends, vLLM's or the embedded one."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import asking, options, output, serve_here
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries
from cacheblend_rag.engines.vllm import serve
from cacheblend_rag.engines.vllm.middleware.bodies import MAX_BODY_MIB
from cacheblend_rag.engines.vllm.middleware.hosts import check_host, is_loopback
from cacheblend_rag.engines.vllm.middleware.keys import (
    DEFAULT_NAMESPACE,
    KEY_VARIABLE,
    STORE_KEY_VARIABLE,
    has_storers,
    new_entry,
    read_tenants,
)
from cacheblend_rag.errors import ConfigError, ModelLoadError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.models import DEFAULT_MODEL, LOCAL_MODELS, public_name, resolve
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.ordering import PassageOrder
from cacheblend_rag.settings import AUTO, EMBEDDED, LeadInConfig

if TYPE_CHECKING:
    from cacheblend_rag.settings import StoreConfig

logger = logging.getLogger(__name__)

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
KEY_FLAG = "--api-key"
SOCKET_FLAG = "--uds"
DTYPE_FLAG = "--dtype"
TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser")
OF_TOOLS = (*TOOL_FLAGS, "--no-enable-auto-tool-choice")
TOOL_PARSERS = {
    "[TOOL_CALLS]": "mistral",
    "<|header_start|>": "llama4_pythonic",
    "ipython": "llama3_json",
    "<|channel|>": "openai",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<seed:tool_call>": "seed_oss",
    "<minimax:tool_call>": "minimax_m2",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|tool_call>": "gemma4",
    "<function_calls>": "olmo3",
    "<|action_start|>": "internlm",
    "<tool_call>": "hermes",
    "<|start_of_role|>": "granite",
}
"""vLLM's parser of tool calls, by what only the chat templates of such models have; in order."""
OF_VLLM = ("slice_seconds", "tenants", "find")
OF_MODELS = ("model", "namespace", "dtype", "kv_path", "verify")
DTYPE_NAMES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""


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
            help="'vllm', 'transformers' (embedded), or 'auto': vLLM if it is installed and there "
            "is a CUDA device; with --collection also the URL of a `serve`."
        ),
    ] = AUTO,
    collection: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Answer from a collection made by `index`, with its model.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = (
        serve.HOST
    ),
    port: Annotated[int, typer.Option(min=1, max=65535)] = serve.PORT,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Without a key: a name under which clients and pages reach the server, beside "
            "localhost and --host. Repeatable.",
            show_default="none",
        ),
    ] = None,
    kv_path: Annotated[
        Path | None,
        typer.Option(
            envvar=options.KV_PATH_VARIABLE,
            help="Folder of chunk KV.",
            show_default="memory only",
        ),
    ] = None,
    store: options.StoreOption = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Of all KV here; clients name the same.", show_default="default"),
    ] = None,
    slice_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            callback=options.finite,
            help="Blending between two steps, while others decode.",
            show_default="0.03",
        ),
    ] = None,
    guard: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            callback=options.finite,
            help="Share of blended answers to compare with full prefill in idle time.",
            show_default="none",
        ),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of namespaces and the SHA-256 of their keys, see --new-key.",
            show_default="the server's own keys only",
        ),
    ] = None,
    new_key: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            callback=_print_new_keys,
            is_eager=True,
            help="Start nothing: print a namespace's entry for --tenants, and its keys on stderr.",
        ),
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            help="Find stored chunks in prompts of any client: on, asked (where a request asks "
            "for it) or off.",
            show_default="on",
        ),
    ] = None,
    unconfirmed_context: Annotated[
        bool | None,
        typer.Option(
            "--unconfirmed-context/--confirmed-context",
            help="Whether KV computed in a document answers for a passage of it that stands alone "
            "in a prompt.",
            show_default="unless others store than ask: --tenants, CACHEBLEND_STORE_KEY",
        ),
    ] = None,
    max_body_mib: Annotated[
        int, typer.Option(min=1, help="Longest body of a request, in MiB.")
    ] = MAX_BODY_MIB,
    profile: options.ProfileOption = None,
    device: options.DeviceOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of the weights; the model's by default.")
    ] = None,
    top_k: Annotated[
        int, typer.Option(min=1, help="With --collection: passages to retrieve.")
    ] = asking.TOP_K,
    order: asking.OrderOption = PassageOrder.SCORE,
    cite: Annotated[
        bool, typer.Option("--cite", help="With --collection: end answers with their sources.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="First run `verify` on the model; do not start if it fails."),
    ] = False,
) -> None:
    """Start an OpenAI-compatible server that blends: vLLM's, or one over the embedded engine.

    All other options are passed to vLLM unchanged. VLLM_API_KEY in the environment is the key that
    clients must send, on every path but /health; CACHEBLEND_STORE_KEY is the key for documents,
    and for storing, evicting and releasing chunk KV.
    """
    flags = ([DTYPE_FLAG, dtype] if dtype else []) + context.args
    others = tuple(map(check_host, allowed_host or ()))
    address = serve_here.Address(host, port, max_body_mib, others)
    shared = {"namespace": namespace, "profile": profile, "guard": guard}
    if collection is not None:
        options.refuse(context, OF_MODELS, "a collection has its own, which it was indexed with")
        _refuse_of_vllm(context, "--collection is served in this process")
        serve_here.serve_collection(
            collection,
            address,
            engine=None if engine == AUTO else engine,
            placement=Placement(
                device,
                options.collection_store(store),
                fill_on_miss=True,
                profile=profile,
            ),
            guard=guard,
            top_k=top_k,
            order=order,
            cites=cite,
        )
        return
    model = model or DEFAULT_MODEL
    if model.startswith("-"):
        raise ConfigError(
            f"{model!r} comes before the model: give `serve MODEL` first, then options"
        )
    if cite:
        raise ConfigError("--cite names the sources of a collection: give --collection too")
    kept = options.store_settings(store, kv_path=kv_path)
    if kept.kv_path is None and kept.disk_bytes is not None:
        raise ConfigError("--store disk_bytes is room in a folder: give --kv-path too")
    if kept.kv_path is None and kept.tiers is None and kept.host_bytes == 0:
        raise ConfigError("--store host_bytes=0 keeps no KV: give --kv-path, or more memory")
    if tenants is not None:
        _check_tenants(tenants, namespace, context.args)
    is_here = serve_here.picked(engine, model, device) == EMBEDDED
    if is_here:
        _refuse_of_vllm(context, "this is served by the embedded engine")
        serve_here.check(host)
    elif device is not None:
        raise ConfigError("--device is for --engine transformers: leave it out with vLLM")
    if serve.flag_value(flags, (SOCKET_FLAG,)) is None:
        serve.check_port(host, port)
    checks.check_model(model)
    if kept.kv_path is not None:
        kept = kept.with_changes(kv_path=_made(Path(kept.kv_path)))
    told = {name: value for name, value in shared.items() if value is not None}
    if is_here:
        if verify:
            _verify(model, dtype)
        is_open = not has_storers() if unconfirmed_context is None else unconfirmed_context
        lead_in = LeadInConfig(unconfirmed_context=is_open)
        serve_here.serve_model(
            model, address, kept, device=device, dtype=_plain(dtype), lead_in=lead_in, **told
        )
        return
    of_vllm = {
        "slice_seconds": slice_seconds,
        "tenants": True if tenants else None,
        "find": find,
        "unconfirmed_context": unconfirmed_context,
    }
    told |= {name: value for name, value in of_vllm.items() if value is not None}
    _become_vllm(model, address, flags, kept, told, tenants=tenants, verify=verify)


def _become_vllm(
    model: str,
    address: serve_here.Address,
    flags: Sequence[str],
    kept: StoreConfig,
    told: Mapping[str, Any],
    *,
    tenants: Path | None,
    verify: bool,
) -> None:
    """Replace this process by vLLM's server. told: settings of the connector."""
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

    command = serve.server_command(
        resolve(model),
        served_name=public_name(model),
        host=address.host,
        port=address.port,
        flags=[*_tool_flags(model, flags), *flags],
        settings=ConnectorSettings(store=kept, **told),
    )
    serve_here.warn_of_memory(kept)
    if not serve.has_flag(command, OF_TOOLS):
        output.say(
            "the chat template has no known form of tool calls, so requests with tools are "
            f"refused: {' '.join(TOOL_FLAGS)} NAME takes them, with a --chat-template of tools"
        )
    has_key = serve.flag_value(flags, (KEY_FLAG,)) or os.environ.get(KEY_VARIABLE)
    if not (has_key or tenants or is_loopback(address.host)):
        output.warn(
            f"any client of {address.host}:{address.port} may ask, store, evict and release: set "
            f"{KEY_VARIABLE}, and "
            f"{STORE_KEY_VARIABLE} to restrict storing, evicting and releasing"
        )
    if verify:
        _verify(model, serve.flag_value(flags, (DTYPE_FLAG,)))
    logger.info("starting %s", shlex.join(command[: len(command) - len(flags)]))
    environment = {
        **os.environ,
        **kept.environment(),
        **serve.server_environment(tenants),
        **address.environment,
    }
    os.execve(command[0], command, environment)  # noqa: S606  # signals and exit code: vLLM's own


def _tool_flags(model: str, flags: Sequence[str]) -> list[str]:
    """Return the flags with which vLLM takes tools; none if some are given, or no parser fits."""
    if serve.has_flag(flags, OF_TOOLS):
        return []
    template = serve.flag_value(flags, ("--chat-template",))
    if template and Path(template).is_file():
        template = options.read_text(Path(template), "--chat-template")
    if not template:
        quiet_libraries()
        trusted = serve.has_flag(flags, ("--trust-remote-code",))  # else it would ask the user
        with suppress(ModelLoadError):  # of which vLLM tells
            template = str(load_tokenizer(model, trust_remote_code=trusted).chat_template)
    for mark, parser in TOOL_PARSERS.items():
        if mark in (template or ""):
            return [*TOOL_FLAGS, parser]
    return []


def _refuse_of_vllm(context: typer.Context, why: str) -> None:
    """Raise ConfigError for an option that only vLLM has."""
    given = [flag.partition("=")[0] for flag in context.args]
    if KEY_FLAG in given:
        raise ConfigError(f"{KEY_FLAG}: an option of vLLM, set {KEY_VARIABLE} instead")
    told = f"an option of vLLM, and {why}: leave it out, or give --engine vllm"
    options.refuse(context, OF_VLLM, told)
    if given:
        raise ConfigError(f"{given[0]}: {told}")


def _check_tenants(path: Path, namespace: str | None, flags: list[str]) -> None:
    """Refuse a tenants' file that is wrong, before the model is loaded."""
    if namespace is not None:
        raise ConfigError(
            "--tenants names the namespaces: leave --namespace out; the server's own keys are the "
            f"namespace {DEFAULT_NAMESPACE}"
        )
    own = (
        serve.flag_value(flags, (KEY_FLAG,)),
        os.environ.get(KEY_VARIABLE),
        os.environ.get(STORE_KEY_VARIABLE),
    )
    read_tenants(path, filter(None, own))


def _verify(model: str, dtype: str | None) -> None:
    """Verify a model in a process of its own, which gives its memory back; exit if it fails.

    dtype: the one that vLLM is told; by default the one of the weights, as in vLLM.
    """
    from cacheblend_rag.engines.model_files import whole_config
    from cacheblend_rag.engines.transformers.loading import stated_dtype

    stated = str(stated_dtype(whole_config(model)) or "float32").removeprefix("torch.")
    named = _plain(dtype) or stated
    command = [sys.executable, "-m", "cacheblend_rag", "verify", model, "--set", f"dtype={named}"]
    code = subprocess.run(command, check=False).returncode  # noqa: S603
    if code:
        output.tell("the server is not started, since the model failed --verify")
        raise typer.Exit(code)


def _plain(dtype: str | None) -> str | None:
    """Return PyTorch's name of a dtype of vLLM's; None for the model's own."""
    return None if dtype in (None, "", "auto") else DTYPE_NAMES.get(dtype or "", dtype)


def _made(folder: Path) -> Path:
    try:
        make_folder(folder)
    except OSError as error:
        raise StoreError(f"--kv-path {folder} cannot be used: {error.strerror}") from error
    return folder.resolve()
