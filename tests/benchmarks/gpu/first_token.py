"""Steps: time to first token of blends, by length and by tier, and their peak memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.settings.tier_url import TierUrl
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.gpu.peak import peak_extra_bytes
from tests.benchmarks.gpu.requests import (
    CASES,
    WARM_UPS,
    Requests,
    build_model,
    chunk_tokens,
    open_requests,
)
from tests.benchmarks.gpu.scene import Doing, Row, Scene
from tests.benchmarks.gpu.timing import attempt

REAL_CHUNKS, TOY_CHUNKS = (8, 16, 32), (3,)
REAL_TIER_CHUNKS, TOY_TIER_CHUNKS = 16, 2
REAL_REPEAT, TOY_REPEAT = 3, 1
HOST = "host://?capacity=none"
NAMES = ("hkvd 0.15", "before layer 0, 0.05", "reuse only, 0")
"""Those of CASES that are measured by tier, and whose memory is."""
COLD = "disk, cold"
"""Files are dropped from the page cache before each blend, and read past it."""
TIERS = ("device", "host", "disk", COLD)
MIB = 1 << 20


def measure_ttft(scene: Scene, doing: Doing) -> Iterator[Row]:
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


def measure_tiers(scene: Scene, doing: Doing) -> Iterator[Row]:
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
    chunks = scene.pick(REAL_TIER_CHUNKS, TOY_TIER_CHUNKS)
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        url = {
            "disk": f"disk://{folder}",
            COLD: f"disk://{folder}",
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


def measure_memory(scene: Scene, doing: Doing) -> Iterator[Row]:
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


def drop_from_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that the next read waits for the disk.

    Raises CacheBlendError where the system keeps them in memory, as on a tmpfs.
    """
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        with path.open("rb+") as file:
            os.fsync(file)  # pages that are not written yet stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if _is_cached(file.fileno(), path.stat().st_size):
                raise CacheBlendError(
                    f"cold: the system keeps {path} in memory; set TMPDIR to a folder on a disk"
                )


def _is_cached(file: int, nbytes: int) -> bool:
    """Whether any page of an open file is in the page cache, as ``mincore`` tells."""
    if not nbytes:
        return False
    told = np.empty(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
    with mmap.mmap(file, nbytes, prot=mmap.PROT_READ) as mapped:
        at = np.frombuffer(mapped, dtype=np.uint8).ctypes.data_as(ctypes.c_void_p)
        result = told.ctypes.data_as(ctypes.c_void_p)
        failed = ctypes.CDLL(None).mincore(at, ctypes.c_size_t(nbytes), result)
        del at  # it keeps the file mapped
    return bool(failed or (told & 1).any())
