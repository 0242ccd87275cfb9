"""ConnectorStatus: whether a vLLM blends, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cacheblend_rag.engines.vllm.protocol.job import PARAMETER

NO_CONNECTOR = (
    "the server runs vLLM without the CacheBlend connector: start it with `cacheblend-rag serve`"
)


@dataclass(frozen=True)
class ConnectorStatus:
    """What the connector says of itself.

    active: whether it blends; refusal: why not. identity: a hash of the model's weights, precision
    and shard. wire: version of what orders look like. replicas: engines behind one address, each
    with a memory of its own. shared: whether they keep chunk KV in one folder, too. namespace: its
    hash. chunks, bytes: what its store holds, in one worker.
    """

    active: bool
    refusal: str = ""
    identity: str = ""
    vllm: str = ""
    cacheblend_rag: str = ""
    wire: int = 0
    replicas: int = 1
    shared: bool = False
    tensor_parallel: int = 1
    asynchronous: bool = True
    attention: str = ""
    namespace: str = ""
    chunks: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> ConnectorStatus:
        """Read the answer to a ``status`` order."""
        answer = (params or {}).get(PARAMETER)
        if not isinstance(answer, Mapping):
            return cls(False, NO_CONNECTOR)
        if "active" not in answer:
            return cls(False, str(answer.get("error") or answer.get("reason") or "no status came"))
        known = {field.name for field in fields(cls)}
        store = answer.get("store") or {}
        given = {**answer, "chunks": store.get("chunks", 0), "bytes": store.get("bytes", 0)}
        return cls(**{name: value for name, value in given.items() if name in known})
