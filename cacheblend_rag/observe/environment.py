"""Examines versions, devices, models and servers; returns plain JSON values."""

from __future__ import annotations

import platform
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from cacheblend_rag.engines.model_files import quiet_libraries

PACKAGES = ("cacheblend-rag", "torch", "transformers", "tokenizers", "safetensors", "numpy")
NOT_TOLD = {"active", "refusal", "identity", "store", "vllm", "cacheblend_rag"}
"""What a server's status has beside the connector's settings."""


def examine_versions() -> dict[str, str]:
    """Return the version of Python and of each package."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def examine_devices() -> list[dict[str, Any]]:
    """Return the devices that models can run on, the CPU first."""
    import torch

    devices: list[dict[str, Any]] = [{"device": "cpu", "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        told = {"device": f"cuda:{index}", "name": found.name, "memory_bytes": found.total_memory}
        devices.append(told)
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
    refusal = engine.blend_refusal
    return {
        "model": name,
        "problem": refusal,
        "problem_code": refusal and refusal.code,
        "architecture": type(engine.model).__name__,
        "device": str(engine.model.device),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "context_window": engine.context_window,
    }


def examine_server(url: str, model: str | None, namespace: str) -> dict[str, Any]:
    """Return facts about the server at ``url``; ``problem`` says why it does not blend.

    model: its tokenizer must equal the server's; None skips that check. namespace: the expected
    one; servers report only a hash of theirs. Raises what a request raises.
    """
    from cacheblend_rag.engines.model_files import load_tokenizer
    from cacheblend_rag.engines.vllm.connection import VLLMServer
    from cacheblend_rag.kv.chunk_kv import namespace_id

    with closing(VLLMServer(url, model=model, timeout_seconds=60.0)) as server:
        if model is not None:
            quiet_libraries()
            server.check_tokenizer(load_tokenizer(model))
        status = server.ask_status()
    told = status.namespace
    if told == namespace_id(namespace):
        told = namespace
    elif told:  # a server that does not blend tells none
        told = f"not {namespace!r} but another, {told}"
    return {
        "url": url,
        "problem": status.problem,
        "problem_code": status.problem and status.problem.code,
        "model": server.model_name,
        "context_window": server.context_window,
        "blending": status.active,
        "versions": {"vllm": status.vllm, "cacheblend-rag": status.cacheblend_rag},
        "store": asdict(status.store),
        "connector": {
            **TypeAdapter(type(status)).dump_python(status, mode="json", exclude=NOT_TOLD),
            "namespace": told,
        },
    }
