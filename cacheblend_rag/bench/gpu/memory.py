"""Step: the peak memory that a request holds beyond weights and store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from cacheblend_rag.bench.gpu.requests import (
    CASES,
    WARM_UPS,
    Requests,
    build_model,
    chunk_tokens,
    open_requests,
)
from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import attempt
from cacheblend_rag.bench.memory import peak_extra_bytes
from cacheblend_rag.text.prompt import BlendPrompt

REAL_CHUNKS, TOY_CHUNKS = (8, 16, 32), (2,)
NAMES = ("hkvd 0.15", "before layer 0, 0.05", "reuse only, 0")
HOST = "host://?capacity=none"
MIB = 1 << 20


def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each length of prompt and way to its first token."""
    doing("building the model")
    model = build_model(scene)
    counts = scene.pick(REAL_CHUNKS, TOY_CHUNKS)
    doing("precomputing chunks")
    with open_requests(scene, model, HOST, "host", max(counts)) as requests:
        ways: dict[str, Callable[[BlendPrompt], object]] = {"ordinary prefill": requests.ordinary}
        ways |= {name: partial(requests.blend, config=CASES[name]) for name in NAMES}
        for chunks in counts:
            for name, way in ways.items():
                row = {"chunk_tokens": chunks * chunk_tokens(scene), "case": name}
                doing(f"{row['chunk_tokens']} tokens, {name}")
                yield attempt(row, partial(_measured, requests, chunks, way))


def _measured(requests: Requests, chunks: int, way: Callable[[BlendPrompt], object]) -> Row:
    scene = requests.scene
    for _ in range(WARM_UPS):
        way(requests.prompt(chunks))
    prompt = requests.prompt(chunks)
    peak = peak_extra_bytes(lambda: way(prompt), scene.device)
    own = scene.shape().kv_bytes(chunks * chunk_tokens(scene), scene.dtype)
    row: Row = {"prompt_kv_mib": round(own / MIB, 2)}
    if peak is None:
        return {**row, "peak_mib": "not measurable here"}
    return {**row, "peak_mib": round(peak / MIB, 2), "peak_by_kv": round(peak / own, 3)}
