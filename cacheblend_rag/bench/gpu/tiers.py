"""Step: time to first token by the tier that holds the chunks: device, host or disk.

Files are in the page cache, or are dropped from it before each blend and read past it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from cacheblend_rag.bench.gpu.requests import CASES, build_model, chunk_tokens, open_requests
from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import attempt
from cacheblend_rag.bench.page_cache import drop_from_page_cache
from cacheblend_rag.settings.tier_url import TierUrl

REAL_CHUNKS, TOY_CHUNKS = 16, 2
REAL_REPEAT, TOY_REPEAT = 3, 1
NAMES = ("hkvd 0.15", "before layer 0, 0.05", "reuse only, 0")
COLD = "disk, cold"
TIERS = ("device", "host", "disk", COLD)


def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each tier and kind of blend."""
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
        url = {
            "disk": f"disk://{folder}?direct=no",
            COLD: f"disk://{folder}?direct=yes",
        }.get(tier, f"{tier}://?capacity=none")
        with open_requests(scene, model, url, TierUrl(url).name, chunks) as requests:
            if tier == COLD:
                requests.before = partial(drop_from_page_cache, Path(folder))
            for name in NAMES:
                doing(f"{name}, from {tier}")
                row = {"tier": tier, "chunk_tokens": chunks * chunk_tokens(scene), "case": name}
                repeat = scene.pick(REAL_REPEAT, TOY_REPEAT)
                yield attempt(row, partial(requests.compared, chunks, CASES[name], repeat))


def _again(error: Exception) -> Row:
    raise error
