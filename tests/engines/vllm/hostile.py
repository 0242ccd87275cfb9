"""What strangers may put into a request: values that are not what they should be."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.protocol.job import BlendJob, SentChunk, SentLeadIn
from tests.contracts import wire

DOCUMENTS = "/v1/cacheblend/documents"
CONFIG = BlendConfig(min_tokens=0, recompute_ratio=0.15, cost_model=False)

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**5000, 1e308, math.nan, math.inf, "", "abc", "\ud800", "0" * 32,
    "x" * 100_000, [], {}, [[]], {"a": {}}, [0] * 10_000, {"\ud800": 1}, [None], [1, "2"],
    [math.nan],
)  # fmt: skip


def mutated(value: Any, draw: random.Random, deepest: int = 2_000) -> Any:
    """Return a value with something in it replaced, left out or added."""
    return wire.mutated(value, draw, deepest, HOSTILE)


def hostile_order(draw: random.Random) -> bytes:
    """Return a request with an order in which something is wrong, or no request at all."""
    if draw.random() < 0.02:
        return draw.choice(
            [b"", b"{", b"\xff" * 100, b"[" * 10_000, b" " * 20_000_000, b'{"a":' * 90 + b"}" * 90]
        )
    lead_in = SentLeadIn("document", "0" * 32, 2048)
    spans = (SentChunk(3, 60), SentChunk(70, 120, "0" * 32, True))
    order = draw.choice(
        [
            BlendJob("blend", lead_in, spans, config=CONFIG, report_id="1" * 32),
            BlendJob("precompute", lead_in, spans, tokens=tuple(range(5, 160))),
            BlendJob("evict", lead_in, keys=(("0" * 32, ""),)),
            BlendJob("prefetch", lead_in, keys=(("0" * 32, ""),)),
            BlendJob("status", lead_in),
            BlendJob("report", lead_in, report_id="1" * 32),
        ]
    )
    params: Any = order.to_params()
    if draw.random() < 0.9:
        params = mutated(params, draw, deepest=900)
    body = {
        "model": "toy",
        "prompt": [draw.randrange(3, 2000) for _ in range(draw.choice([2, 150]))],
        "max_tokens": draw.choice([1, 2, 8]),
        "cache_salt": draw.choice(["cacheblend-x", "other"]),
        "kv_transfer_params": params,
        "stream": draw.random() < 0.2,
    }
    if draw.random() < 0.1:
        body = mutated(body, draw, deepest=900)
    return json.dumps(body).encode()


def about_documents(draw: random.Random) -> tuple[str, str, bytes]:
    """Return a request in which something is wrong, mostly: method, path, body."""
    text = " ".join(f"w{draw.randrange(500)}" for _ in range(draw.choice([5, 60])))
    good: dict[str, Any] = draw.choice(
        [
            {"chunks": [text, f"{text} and more"], "separator": " ", "boundaries": ["a", "b"]},
            {"text": text, "chunk_tokens": 32, "collection": "c"},
        ]
    )
    sent = json.dumps(mutated(good, draw, deepest=900)).encode()
    if draw.random() < 0.2:
        sent = sent[: draw.randrange(len(sent) + 1)]
    if draw.random() < 0.02:
        sent = draw.choice([b"", b"\xff" * 100, b"[" * 10_000, b" " * 20_000_000, b"\0"])
    names = [
        "kept",
        "a",
        "a/b",
        "..",
        "%2e%2e",
        "%00",
        "%0a",
        "%ff",
        "x" * 600,
        "",
        "?limit=x",
        "😀",
    ]
    path = f"{DOCUMENTS}/{draw.choice(names)}"
    path = draw.choice(
        [path] * 8
        + [
            "/v1/cacheblend/stats",
            "/v1/cacheblend/release",
            "/v1/cacheblend/",
            f"{DOCUMENTS}?limit=-1",
        ]
        + [f"/{DOCUMENTS}", "/v1/cacheblend/../models", f"{DOCUMENTS}?after={'x' * 9999}"]
    )
    method = draw.choice(["PUT"] * 5 + ["GET", "DELETE", "POST", "PATCH", "HEAD"])
    return method, path, sent
