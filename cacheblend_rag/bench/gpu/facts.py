"""Step: the card, its driver, versions of libraries, and what they support."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata, util
from typing import Any

import torch
from torch import backends

from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import told

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
        done = subprocess.run(  # noqa: S603 (the command is made here)
            command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return told(error)
    return (done.stdout or done.stderr).strip()
