"""Step: time to first token by the tier that holds the chunks: device, host or disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial

from transformers import PreTrainedModel

from cacheblend_rag.bench.gpu.requests import CASES, build_model, chunk_tokens, open_requests
from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import attempt

REAL_CHUNKS, TOY_CHUNKS = 16, 2
REAL_REPEAT, TOY_REPEAT = 3, 1
NAMES = ("hkvd 0.15", "before layer 0, 0.05", "reuse only, 0")
TIERS = ("device", "host", "disk")


def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each tier and kind of blend; files are in the page cache."""
    doing("building the model")
    model = build_model(scene)
    for tier in TIERS:
        doing(f"precomputing chunks for {tier}")
        try:
            yield from _of_tier(scene, doing, model, tier)
        except Exception as error:  # no memory for a tier, say: the others go on
            yield attempt({"tier": tier}, partial(_again, error))


def _of_tier(scene: Scene, doing: Doing, model: PreTrainedModel, tier: str) -> Iterator[Row]:
    chunks = scene.pick(REAL_CHUNKS, TOY_CHUNKS)
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        url = f"disk://{folder}" if tier == "disk" else f"{tier}://?capacity=none"
        with open_requests(scene, model, url, tier, chunks) as requests:
            for name in NAMES:
                doing(f"{name}, from {tier}")
                row = {"tier": tier, "chunk_tokens": chunks * chunk_tokens(scene), "case": name}
                repeat = scene.pick(REAL_REPEAT, TOY_REPEAT)
                yield attempt(row, partial(requests.compared, chunks, CASES[name], repeat))


def _again(error: Exception) -> Row:
    raise error
