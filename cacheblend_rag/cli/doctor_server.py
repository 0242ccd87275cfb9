"""``cacheblend-rag doctor --url``: whether a server answers, and whether it blends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cacheblend_rag.cli import output
from cacheblend_rag.engines.quiet import quiet_libraries
from cacheblend_rag.errors import CacheBlendError

NOT_TOLD = ("active", "refusal", "identity", "store", "vllm", "cacheblend_rag", "wire")


def check_server(url: str, model: str | None, namespace: str) -> dict[str, Any]:
    """Return what is to be said of the server at ``url``; ``problem`` says why it will not blend.

    model: whose tokenizer must be the server's; None leaves that open. namespace: the one that is
    asked about; servers tell theirs as a hash only.
    """
    from cacheblend_rag.engines.vllm.connection import ServerConnection

    async def ask() -> dict[str, Any]:
        connection = ServerConnection(url, timeout_seconds=60.0)
        try:
            return await _ask(connection, model, namespace)
        finally:
            await connection.close()

    try:
        return {"url": url, **asyncio.run(ask())}
    except CacheBlendError as error:
        return {"url": url, "problem": str(error)}


async def _ask(connection: Any, model: str | None, namespace: str) -> dict[str, Any]:
    from cacheblend_rag.engines.factory import load_tokenizer
    from cacheblend_rag.engines.vllm.client import status_request
    from cacheblend_rag.engines.vllm.protocol import status_of
    from cacheblend_rag.engines.vllm.server import check_vocabulary

    served = await connection.find_model(model)
    if model is not None:
        quiet_libraries()
        await check_vocabulary(connection, served, load_tokenizer(model))
    answer = await connection.complete(served.name, status_request())
    status = status_of(answer.params)
    return {
        "problem": None if status.active else status.refusal,
        "model": served.name,
        "context_window": served.context_window,
        "blending": status.active,
        "versions": {"vllm": status.vllm, "cacheblend-rag": status.cacheblend_rag},
        "store": asdict(status.store),
        "connector": {
            **{k: v for k, v in asdict(status).items() if k not in NOT_TOLD},
            "namespace": namespace_name(status.namespace, namespace),
        },
    }


def namespace_name(told: str, asked: str) -> str:
    """Return the namespace ``asked`` about where it is the one of the hash that a server told."""
    from cacheblend_rag.kv.chunk_kv import namespace_id

    if told == namespace_id(asked):
        return asked
    return told and f"not {asked!r} but another, {told}"


def print_server(found: Mapping[str, Any]) -> None:
    """Print what check_server found."""
    facts: dict[str, Any] = {"server": found["url"]}
    if "model" in found:
        store, connector = found["store"], found["connector"]
        facts |= {"model": f"{found['model']}, context window {found['context_window']:,}"}
        facts |= {name: value or "not told" for name, value in found["versions"].items()}
        facts["blending"] = "active" if found["blending"] else "not active"
        if found["blending"]:
            facts["store"] = f"{store['chunks']:,} chunks, {store['bytes'] / 2**20:,.1f} MiB"
            facts |= connector
    if found["problem"]:
        facts["problem"] = found["problem"]
    output.print_facts("usable" if found["problem"] is None else "not usable", facts)
