"""Tiny models saved as folders, and vLLM engines over them; starting one takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_e*.py"]  # `make setup` does not install vLLM yet

from cacheblend_rag.engines.vllm.engine import VLLMEngine
from tests.models import make_tokenizer, save_model

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

EngineFactory = Callable[..., VLLMEngine]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a model family to a folder with a random model of it."""
    base = tmp_path_factory.mktemp("models")

    def save(family: str) -> Path:
        folder = base / family
        if not folder.exists():
            save_model(family, folder, head_dim=64)
            make_tokenizer().save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def open_vllm(model_folder: Callable[[str], Path]) -> Iterator[EngineFactory]:
    """Open engines; all are closed at the end of the module."""
    opened: list[VLLMEngine] = []

    def open_engine(family: str = "llama", **options: Any) -> VLLMEngine:
        arguments: dict[str, Any] = {
            "config": BlendConfig(min_tokens=0, selector="hkvd"),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "disable_log_stats": True,
        }
        engine = VLLMEngine(model_folder(family), **{**arguments, **options})
        opened.append(engine)
        return engine

    yield open_engine
    for engine in opened:
        if engine.is_open:
            engine.close()


@pytest.fixture(scope="module")
def engine(open_vllm: EngineFactory) -> VLLMEngine:
    """The engine most tests of a module share."""
    return open_vllm()
