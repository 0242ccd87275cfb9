"""``serve`` by vLLM: its server, with CacheBlend's connector, takes the place of this process."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.cli import options, output
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries
from cacheblend_rag.engines.vllm import serve
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.middleware.bodies import BODY_VARIABLE
from cacheblend_rag.engines.vllm.middleware.keys import (
    DEFAULT_NAMESPACE,
    HOSTS_VARIABLE,
    KEY_VARIABLE,
    STORE_KEY_VARIABLE,
    is_loopback,
    read_tenants,
)
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.models import public_name, resolve
from cacheblend_rag.settings import StoreConfig

logger = logging.getLogger(__name__)

KEY_FLAG = "--api-key"
SOCKET_FLAG = "--uds"
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


def warn_of_memory(store: StoreConfig) -> None:
    """Warn when a server's chunk KV ends with it."""
    if not store.outlives:
        output.warn("chunk KV is kept in memory only, until the server ends: --kv-path keeps it")


def become_vllm(
    model: str,
    address: Address,
    flags: Sequence[str],
    kept: StoreConfig,
    told: Mapping[str, Any],
    *,
    tenants: Path | None,
) -> None:
    """Replace this process by vLLM's server. flags: vLLM's own. told: the connector's settings."""
    command = serve.server_command(
        resolve(model),
        served_name=public_name(model),
        host=address.host,
        port=address.port,
        flags=[*_tool_flags(model, flags), *flags],
        settings=ConnectorSettings(store=kept, tenants=tenants is not None, **told),
    )
    warn_of_memory(kept)
    if not serve.has_flag(command, OF_TOOLS):
        output.say(
            "the chat template has no known form of tool calls, so requests with tools are "
            f"refused: {' '.join(TOOL_FLAGS)} NAME takes them, with a --chat-template of tools"
        )
    has_key = serve.flag_value(flags, (KEY_FLAG,)) or os.environ.get(KEY_VARIABLE)
    if not (has_key or tenants or is_loopback(address.host)):
        output.warn(
            f"any client of {address.host}:{address.port} may ask, store, evict and release: set "
            f"{KEY_VARIABLE}, and {STORE_KEY_VARIABLE} to restrict storing, evicting and releasing"
        )
    logger.info("starting %s", shlex.join(command[: len(command) - len(flags)]))
    environment = {
        **os.environ,
        **kept.environment(),
        **serve.server_environment(tenants),
        **address.environment,
    }
    os.execve(command[0], command, environment)  # noqa: S606  # signals and exit code: vLLM's own


def check_tenants(path: Path, namespace: str | None, flags: Sequence[str]) -> None:
    """Raise ConfigError for a tenants' file that is wrong, before the model is loaded."""
    if namespace is not None:
        raise ConfigError(
            "--tenants names the namespaces: leave --set namespace out; the server's own keys are "
            f"the namespace {DEFAULT_NAMESPACE}"
        )
    own = (
        serve.flag_value(flags, (KEY_FLAG,)),
        os.environ.get(KEY_VARIABLE),
        os.environ.get(STORE_KEY_VARIABLE),
    )
    read_tenants(path, filter(None, own))


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
