"""Steps: the card, its driver, versions of libraries, what they support; and the tests on it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import backends

from tests.benchmarks.gpu.scene import Doing, Row, Scene
from tests.benchmarks.gpu.timing import told
from tests.readme import ROOT

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "pydantic",
    "vllm",
    "flash-attn",
)
SMI = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,clocks.max.mem"
SMI_SECONDS = 10
FOLDERS = ("tests/blend", "tests/prefill", "tests/engines/transformers")
"""Where tests on a device are; others need packages that a bare machine lacks."""
MARK = "torch.cuda.is_available()"
"""What files with such tests say."""
NAMED = "cuda or a_gpu"
TAIL = 1500


def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield facts, each with a name and a value."""
    doing("versions")
    yield {"fact": "python", "value": platform.python_version()}
    for name in PACKAGES:
        yield {"fact": name, "value": _version(name)}
    yield {"fact": "CPUs", "value": os.cpu_count()}
    yield {"fact": "threads of torch", "value": torch.get_num_threads()}
    yield {"fact": "TORCH_CUDNN_SDPA_DEPRIORITIZED", "value": os.environ.get(
        "TORCH_CUDNN_SDPA_DEPRIORITIZED", "not set")}  # fmt: skip
    if not scene.has_cuda:
        yield {"fact": "CUDA", "value": "no CUDA device"}
        return
    doing("the card")
    cudnn: Any = backends.cudnn  # its functions have no types
    card = torch.cuda.get_device_properties(scene.device)
    for name in ("name", "multi_processor_count", "total_memory", "L2_cache_size"):
        yield {"fact": name.replace("_", " "), "value": getattr(card, name, None)}
    yield {"fact": "compute capability", "value": f"{card.major}.{card.minor}"}
    yield {"fact": "CUDA of torch", "value": torch.version.cuda}
    yield {"fact": "cuDNN", "value": cudnn.version()}
    for name, value in _supported().items():
        yield {"fact": name, "value": value}
    doing("nvidia-smi")
    yield {"fact": f"nvidia-smi {SMI}", "value": _smi()}


def _supported() -> dict[str, Any]:
    cuda: Any = backends.cuda  # its functions have no types
    return {
        "bfloat16": torch.cuda.is_bf16_supported(),
        "flash attention": cuda.flash_sdp_enabled() and cuda.is_flash_attention_available(),
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled(),
        "cuDNN attention": cuda.cudnn_sdp_enabled(),
        "importable triton": util.find_spec("triton") is not None,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return told(error)
    return (done.stdout or done.stderr).strip()


def run_tests(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each folder: how pytest ended, and what it said last."""
    for folder in FOLDERS:
        doing(folder)
        files = [path for path in sorted((ROOT / folder).rglob("test_*.py")) if MARK in _text(path)]
        where = files or [ROOT / folder]  # with no path pytest would collect everything
        # Without the project's own options: they may name plugins that are not installed.
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=",
            "--no-header", "--continue-on-collection-errors", "-k", NAMED, *map(str, where),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-TAIL:]]
        row: Row = {"tests": folder, "exit": done.returncode, "said": lines[-1]}
        yield row if done.returncode == 0 else {**row, "output": done.stdout[-TAIL:]}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
