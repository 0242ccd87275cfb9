"""Loads from disk and requests per second of a batch, by overlap and one after another.

Requests draw their chunks by Zipf's law. All chunks are on disk; memory has room for a share of
them and is empty when a run begins. The same requests are answered one after another, and as one
batch, whose groups share chunks and decode together.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.bench.workload import draw_ranks, draw_real_texts, zipf_weights
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.transformers.loading import GivenModel
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.text.chunk import SEPARATOR
from cacheblend_rag.text.encoder import PromptEncoder
from tests.benchmarks.command import run, say

ORDERS = {"arrival": 1, "overlap": None}
"""How many requests are answered together; None: all."""


def measure(
    *,
    model: str = "smollm2",
    requests: int = 32,
    chunks: int = 60,
    drawn: int = 4,
    chunk_tokens: int = 96,
    held: float = 0.08,
    answer_tokens: int = 8,
    ratio: float = 0.15,
    repeat: int = 2,
    seed: int = 7,
) -> dict[str, Any]:
    """Return ``orders``, a row for each with its loads and medians, and the parameters.

    same_answers: how many requests got the same greedy tokens in all runs.
    """
    rng, given = random.Random(seed), GivenModel.of(model, None, None, None)
    known = draw_real_texts(
        rng, PromptEncoder(given.tokenizer), chunks=chunks, chunk_tokens=chunk_tokens,
        question_tokens=8, selector="none", name="bench",
    ).chunks  # fmt: skip
    weights = zipf_weights(chunks, 1.0)
    questions = [one.question for one in load_passages().questions]
    prompts = []
    for _ in range(requests):
        parts: list[Chunk | str] = []
        for rank in draw_ranks(rng, weights, drawn):
            parts += [known[rank], SEPARATOR]
        prompts.append(BlendPrompt.of(*parts, f"Question: {rng.choice(questions)}\nAnswer:"))
    sampling = SamplingParams.greedy(answer_tokens, ignore_eos=True)
    config = BlendConfig(recompute_ratio=ratio, min_tokens=0, cost_model=False, reuse_prefix=False)

    def opened(host_bytes: int, folder: str) -> TransformersEngine:
        store = TieredKVStore.open(host_bytes=host_bytes, kv_path=Path(folder))
        return TransformersEngine(
            given.model, tokenizer=given.tokenizer, config=config, store=store
        )

    seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
    loads, answers = dict.fromkeys(ORDERS, 0), []
    with tempfile.TemporaryDirectory(prefix="cacheblend-") as folder:
        with closing(opened(1, folder)) as writer:
            writer.precompute(known, progress=False)
            stored = writer.store.stats()["disk"]["bytes"]
        room = round(held * stored)
        for turn in range(repeat):
            for order in sorted(ORDERS, reverse=bool(turn % 2)):
                say(f"turn {turn + 1} of {repeat}: by {order}")
                with closing(opened(room, folder)) as engine:
                    engine.register(known)
                    size = ORDERS[order] or requests
                    began, told = time.perf_counter(), []
                    for at in range(0, requests, size):
                        told += engine.generate_batch(prompts[at : at + size], sampling)
                    seconds[order].append(time.perf_counter() - began)
                    loads[order] = engine.store.stats()["disk"]["hits"]
                answers.append([answer.token_ids for answer in told])
    rows = [
        {
            "order": order,
            "requests_per_second": requests / median(taken),
            "seconds": median(taken),
            "loads": loads[order],
        }
        for order, taken in seconds.items()
    ]
    return {
        "model": model,
        "requests": requests,
        "chunks": chunks,
        "drawn": drawn,
        "chunk_tokens": chunk_tokens,
        "ratio": ratio,
        "stored_bytes": stored,
        "host_bytes": room,
        "loads_saved": 1 - loads["overlap"] / loads["arrival"],
        "speedup": rows[1]["requests_per_second"] / rows[0]["requests_per_second"],
        "same_answers": sum(len(set(one)) == 1 for one in zip(*answers, strict=True)),
        "orders": rows,
        "runs": seconds,
    }


if __name__ == "__main__":
    run(measure)
