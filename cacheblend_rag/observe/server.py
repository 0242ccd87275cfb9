"""Asks a server whether it answers and whether it blends."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.kv.chunk_kv import namespace_id

NOT_TOLD = ("active", "refusal", "identity", "store", "vllm", "cacheblend_rag", "wire")


def examine_server(url: str, model: str | None, namespace: str) -> dict[str, Any]:
    """Return facts about the server at ``url``; ``problem`` says why it does not blend.

    model: its tokenizer must equal the server's; None skips that check. namespace: the expected
    one; servers report only a hash of theirs. Raises EngineUnavailableError and other errors of a
    request.
    """
    from cacheblend_rag.engines.vllm.connection import ServerConnection

    async def ask() -> dict[str, Any]:
        connection = ServerConnection(url, timeout_seconds=60.0)
        try:
            return await _ask(connection, model, namespace)
        finally:
            await connection.close()

    return {"url": url, **asyncio.run(ask())}


async def _ask(connection: Any, model: str | None, namespace: str) -> dict[str, Any]:
    from cacheblend_rag.engines.vllm.http import check_vocabulary, names_at_server
    from cacheblend_rag.engines.vllm.job_client import status_request
    from cacheblend_rag.engines.vllm.protocol import status_of

    served = await connection.find_model(names_at_server(model))
    if model is not None:
        quiet_libraries()
        await check_vocabulary(connection, served, load_tokenizer(model))
    answer = await connection.complete(served.name, status_request())
    status = status_of(answer.params)
    return {
        "problem": status.problem,
        "problem_code": status.problem and status.problem.code,
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
    """Return the namespace ``asked`` if the server's hash is its hash, else a note."""
    if told == namespace_id(asked):
        return asked
    return told and f"not {asked!r} but another, {told}"
