"""``cacheblend-rag serve``: starts vLLM's OpenAI-compatible server with blending."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.engines.vllm import serve
from cacheblend_rag.engines.vllm.middleware.access import (
    BODY_VARIABLE,
    KEY_VARIABLE,
    MAX_BODY_MIB,
    STORE_KEY_VARIABLE,
)
from cacheblend_rag.engines.vllm.middleware.tenants import DEFAULT_NAMESPACE, read_tenants
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models import LOCAL_MODELS, public_name, resolve
from cacheblend_rag.rag import checks

logger = logging.getLogger(__name__)

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
GIB = 1 << 30
KEY_FLAG = "--api-key"
SOCKET_FLAG = "--uds"
DTYPE_FLAG = "--dtype"
DTYPE_NAMES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=f"{LOCAL_MODELS}, or a hub name.")],
    *,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = (
        serve.HOST
    ),
    port: Annotated[int, typer.Option(min=1, max=65535)] = serve.PORT,
    kv_path: Annotated[
        Path | None,
        typer.Option(
            envvar=options.KV_PATH_VARIABLE,
            help="Folder of chunk KV.",
            show_default="memory only",
        ),
    ] = None,
    host_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=options.finite,
            help="Memory for chunk KV, in each worker, in GiB.",
            show_default="4",
        ),
    ] = None,
    disk_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=options.finite,
            help="Room in --kv-path, in GiB.",
            show_default="no limit",
        ),
    ] = None,
    store: options.StoreOption = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Of all KV here; clients name the same.", show_default="default"),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="Of recomputed rows: auto, native (vLLM's own), sdpa or flex (FlexAttention).",
            show_default="auto",
        ),
    ] = None,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Blend while other requests wait.")
    ] = False,
    slice_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            callback=options.finite,
            help="Blending between two steps, while others decode.",
            show_default="0.03",
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --synchronous: tokens blended in one step.", show_default="8192"
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
            help="TOML file of namespaces and the SHA-256 of their keys (`cacheblend-rag tenant`); "
            "SIGHUP rereads it.",
            show_default="the server's own keys only",
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
    max_body_mib: Annotated[
        int, typer.Option(min=1, help="Longest body of a request, in MiB.")
    ] = MAX_BODY_MIB,
    profile: options.ProfileOption = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="First run `verify` on the model; do not start if it fails."),
    ] = False,
) -> None:
    """Start a vLLM server that blends; all other options are passed to vLLM unchanged.

    VLLM_API_KEY in the environment is the key that clients must send, on every path but /health;
    CACHEBLEND_STORE_KEY is the key for documents, and for storing, evicting and releasing chunk KV.
    """
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

    if model.startswith("-"):
        raise ConfigError(
            f"{model!r} comes before the model: give `serve MODEL` first, then options"
        )
    kept = options.store_settings(
        store, kv_path=kv_path, host_bytes=_bytes(host_gib), disk_bytes=_bytes(disk_gib)
    )
    if kept.kv_path is None and kept.disk_bytes is not None:
        raise ConfigError("--disk-gib is room in a folder: give --kv-path too")
    if kept.kv_path is None and kept.tiers is None and kept.host_bytes == 0:
        raise ConfigError("--host-gib 0 keeps no KV anywhere: give --kv-path, or more memory")
    if tenants is not None:
        _check_tenants(tenants, namespace, context.args)
    given: dict[str, Any] = {
        "namespace": namespace,
        "tenants": True if tenants else None,
        "slice_seconds": slice_seconds,
        "step_tokens": step_tokens,
        "attention": attention,
        "profile": profile,
        "guard": guard,
        "find": find,
    }
    told = {name: value for name, value in given.items() if value is not None}
    if serve.flag_value(context.args, (SOCKET_FLAG,)) is None:
        serve.check_port(host, port)
    checks.check_model(model)
    if kept.kv_path is not None:
        kept = kept.with_changes(kv_path=_made(Path(kept.kv_path)))
    connector = ConnectorSettings(store=kept, asynchronous=not synchronous, **told)
    command = serve.server_command(
        resolve(model),
        served_name=public_name(model),
        host=host,
        port=port,
        flags=context.args,
        settings=connector,
    )
    if not kept.outlives:
        output.warn("chunk KV is kept in memory only, until the server ends: --kv-path keeps it")
    has_key = serve.flag_value(context.args, (KEY_FLAG,)) or os.environ.get(KEY_VARIABLE)
    if not (has_key or tenants or _is_loopback(host)):
        output.warn(
            f"any client of {host}:{port} may ask, store, evict and release: set "
            f"{KEY_VARIABLE}, and "
            f"{STORE_KEY_VARIABLE} to restrict storing, evicting and releasing"
        )
    if verify:
        _verify(model, serve.flag_value(context.args, (DTYPE_FLAG,)))
    logger.info("starting %s", shlex.join(command[: len(command) - len(context.args)]))
    environment = {
        **os.environ,
        **kept.environment(),
        **serve.server_environment(tenants),
        BODY_VARIABLE: str(max_body_mib),
    }
    os.execve(command[0], command, environment)  # noqa: S606  # signals and exit code: vLLM's own


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
    from cacheblend_rag.engines.transformers.loading import checkpoint_dtype

    stated = str(checkpoint_dtype(model) or "float32").removeprefix("torch.")
    named = stated if dtype in (None, "", "auto") else DTYPE_NAMES.get(dtype or "", dtype)
    command = [sys.executable, "-m", "cacheblend_rag", "verify", model, DTYPE_FLAG, str(named)]
    code = subprocess.run(command, check=False).returncode  # noqa: S603
    if code:
        output.tell("the server is not started, since the model failed --verify")
        raise typer.Exit(code)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--kv-path {folder} cannot be used: {error.strerror}") from error
    return folder.resolve()
