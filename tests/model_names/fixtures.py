"""A GGUF file, and a place for what is made from it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for converted models."""
    folder = tmp_path / "converted models"
    monkeypatch.setenv("CACHEBLEND_MODELS", str(folder))
    return folder


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of ``tiny_llama()``, in float32."""
    from tests.model_names.tiny_gguf import tiny_llama, write_gguf

    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf", tiny_llama())
