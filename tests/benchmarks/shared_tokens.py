"""How long a server takes to know what others have stored, from the tokens in an object store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli import output
from cacheblend_rag.engines.vllm.connector.finder import Finder
from cacheblend_rag.engines.vllm.connector.stored_tokens import Name, StoredTokens, id_of
from cacheblend_rag.engines.vllm.connector.token_objects import ObjectTokens
from cacheblend_rag.engines.vllm.protocol import SentLeadIn
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.settings.tier_url import TierUrl
from tests.benchmarks.command import benchmark_app
from tests.benchmarks.token_index import drawn

SEED = 20260101
AT_ONCE = 4096
WAIT_SECONDS = 3600.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SharedTokensPlan(Plan):
    """Time to know chunks from objects in a folder, which stands for a store nearby.

    Tokens are drawn as unevenly as words are in text, but one after another by chance: those of
    text take less room. Each chunk has a context of its own.
    """

    chunks: int = option(100_000, "Stored chunks.", least=1)
    chunk_tokens: int = option(512, "Tokens of each.", least=32)


def measure_shared_tokens(
    plan: SharedTokensPlan, advance: Advance = lambda _: None
) -> dict[str, Any]:
    """Return the seconds of writing, of opening, and the objects' number, MiB and bytes a token.

    opening_seconds: until a finder can find all of them, reading the files included;
    opening_cpu_seconds: what that takes of all threads, whatever else the machine does.
    """
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-") as folder:
        url = TierUrl((Path(folder) / "objects").as_uri())
        advance("writing")
        started = perf_counter()
        with closing(ObjectTokens(url, "model")) as log:
            for several in _chunks(plan):
                log.add(several)
        written = perf_counter() - started
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
        advance("opening")
        started, busy = perf_counter(), process_time()
        with closing(Finder(url, lambda: "model")) as finder:
            if not finder.settle(WAIT_SECONDS):
                raise CacheBlendError("the tokens are not read in an hour")
            opened, busy = perf_counter() - started, process_time() - busy
            last = several[-1].tokens.tolist()
            if not finder.find("default", [*last, 0]):
                raise CacheBlendError("what was written is not found")
    return {
        "chunks": plan.chunks,
        "chunk_tokens": plan.chunk_tokens,
        "writing_seconds": written,
        "opening_seconds": opened,
        "opening_cpu_seconds": busy,
        "objects": len(sizes) - 1,
        "mib": sum(sizes) / MIB,
        "bytes_per_token": sum(sizes) / (plan.chunks * plan.chunk_tokens),
    }


def _chunks(plan: SharedTokensPlan) -> Iterator[list[StoredTokens]]:
    draw = np.random.default_rng(SEED)
    lead_in, namespace, before = SentLeadIn("document", "", 2048), namespace_id("default"), ""
    for first in range(0, plan.chunks, AT_ONCE):
        several = []
        for _ in range(min(AT_ONCE, plan.chunks - first)):
            tokens = drawn(draw, plan.chunk_tokens)
            own, context = id_of(tokens), draw.bytes(16).hex()
            name = Name(namespace, own, context, lead_in)
            several.append(StoredTokens(name, tokens, before))
            before = own
        yield several


def show(found: dict[str, Any]) -> None:
    output.print_facts("tokens in an object store", found)


app = benchmark_app(SharedTokensPlan, measure_shared_tokens, show)

if __name__ == "__main__":
    app()
