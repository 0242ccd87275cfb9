"""Step: time to first token of blends and of ordinary prefill of the same prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cacheblend_rag.bench.gpu.requests import CASES, build_model, chunk_tokens, open_requests
from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import attempt

REAL_CHUNKS, TOY_CHUNKS = (8, 16, 32), (3,)
REAL_REPEAT, TOY_REPEAT = 3, 1
HOST = "host://?capacity=none"


def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each length of prompt and kind of blend."""
    doing("building the model")
    model = build_model(scene)
    counts = scene.pick(REAL_CHUNKS, TOY_CHUNKS)
    doing("precomputing chunks")
    with open_requests(scene, model, HOST, "host", max(counts)) as requests:
        for chunks in counts:
            for name, config in CASES.items():
                tokens = chunks * chunk_tokens(scene)
                doing(f"{tokens} tokens, {name}")
                repeat = scene.pick(REAL_REPEAT, TOY_REPEAT)
                row = {"chunk_tokens": tokens, "case": name}
                yield attempt(row, partial(requests.compared, chunks, config, repeat))
