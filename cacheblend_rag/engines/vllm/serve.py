"""Builds the command of a blending vLLM server."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.engines.structured import ONE_LINE
from cacheblend_rag.engines.vllm.namespaces import TENANTS_VARIABLE
from cacheblend_rag.engines.vllm.versions import (
    check_allocator,
    check_version,
    installed_version,
    memory_share,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import public_name

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

SERVER = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = "cacheblend_rag.engines.vllm.middleware.access.AccessMiddleware"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
PLUGIN = "cacheblend"
PLUGIN_KINDS = ("general", "io_processor", "platform", "stat_logger")
"""All but the endpoint plugins, which vLLM loads only if they are named."""
KV_FLAG = "--kv-transfer-config"
NO_STATS = "--disable-log-stats"
DATA_PARALLEL_FLAGS = ("--data-parallel-size", "-dp")
MEMORY_FLAG = "--gpu-memory-utilization"
USAGE_FLAGS = ("--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details")
"""Whether responses tell how many tokens of a prompt were reused (``cached_tokens``)."""
FORMS_FLAG = "--structured-outputs-config"
HOST = "127.0.0.1"
PORT = 8000
POOL_FLAGS = ("--enable-sleep-mode", "--enable-cumem-allocator")


def server_command(
    model: str | Path,
    *,
    host: str = HOST,
    port: int = PORT,
    served_name: str | None = None,
    connector: bool = True,
    settings: ConnectorSettings | None = None,
    flags: Sequence[str] = (),
) -> list[str]:
    """Return the command that serves ``model`` through vLLM's OpenAI-compatible server.

    served_name: the model's name for clients, its public name by default. connector: whether to
    blend. settings: the connector's; the number of replicas is read from the flags. flags:
    vLLM's own, last, so that they override.

    Raises MissingExtraError without vLLM, EngineUnavailableError when it is too old, ConfigError
    when the flags bring a KV connector of their own, or vLLM would start with none.
    """
    blending = [*_blending_flags(settings, flags)] if connector else []
    check_version(installed_version())
    return [
        *(sys.executable, "-m", SERVER, "--model", str(model)),
        *("--served-model-name", served_name or public_name(str(model))),
        *("--host", host, "--port", str(port)),
        *([] if NO_STATS in flags else ["--enable-per-request-metrics"]),
        *blending,
        *flags,
    ]


def _blending_flags(settings: ConnectorSettings | None, flags: Sequence[str]) -> Iterator[str]:
    """Yield the flags of a server that blends, but for those that are given."""
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

    if flag_value(flags, (KV_FLAG,)) is not None:
        raise ConfigError(f"{KV_FLAG} is set by cacheblend-rag: leave it out, or use vllm serve")
    check_allocator(has_own_pool=has_flag(flags, POOL_FLAGS))
    replicas = flag_value(flags, DATA_PARALLEL_FLAGS) or "1"
    if not replicas.isdigit() or int(replicas) < 1:
        raise ConfigError(f"{DATA_PARALLEL_FLAGS[0]}={replicas!r} must be a number of at least 1")
    settings = (settings or ConnectorSettings()).with_changes(replicas=int(replicas))
    yield from (KV_FLAG, json.dumps(settings.to_transfer_config()), "--middleware", MIDDLEWARE)
    if not flag_value(flags, (MEMORY_FLAG,)):
        yield from (MEMORY_FLAG, str(memory_share()))
    if not has_flag(flags, USAGE_FLAGS):
        yield USAGE_FLAGS[0]
    if not flag_value(flags, (FORMS_FLAG,)):
        yield from (FORMS_FLAG, json.dumps(ONE_LINE))


def server_environment(tenants: Path | None = None) -> dict[str, str]:
    """Return the environment variables that a server needs beside its command.

    The endpoint plugin with the documents' routes must be named in VLLM_PLUGINS. Once that is set,
    vLLM loads no plugin that it does not name, of no kind: so it names all that are installed,
    unless it is set here already.

    tenants: the tenants' file, if there is one.
    """
    named = os.environ.get(PLUGINS_VARIABLE)
    if named is None:
        groups = [entry_points(group=f"vllm.{kind}_plugins") for kind in PLUGIN_KINDS]
        found = {plugin.name for group in groups for plugin in group}
    else:
        found = set(named.split(","))
    environment = {PLUGINS_VARIABLE: ",".join(sorted(found - {""} | {PLUGIN}))}
    return environment | ({TENANTS_VARIABLE: str(tenants.resolve())} if tenants else {})


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when a port is in use, which vLLM would notice only after loading.

    Other reasons why the port cannot be used are left to vLLM.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
                tried.listen()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"port {port} of {host} is in use: stop what listens there, or give "
                        "another --port"
                    ) from error


def flag_value(flags: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of an option in vLLM's flags, by any of its names; the last one counts.

    None if it is missing, "" if it has no value.
    """
    found: str | None = None
    for flag, following in pairwise([*flags, ""]):
        name, joined, value = flag.partition("=")
        if name.replace("_", "-") in names:
            found = value if joined else following
    return found


def has_flag(flags: Sequence[str], names: Sequence[str]) -> bool:
    """Whether an option without a value is among vLLM's flags, by any of its names."""
    return any(flag.partition("=")[0].replace("_", "-") in names for flag in flags)
