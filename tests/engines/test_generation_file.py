"""generation_config.json with values that nobody can use."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import SamplingParams, TransformersEngine
from tests.models import QWEN_SAMPLING, make_tokenizer, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_model("llama", folder, head_dim=16)
    make_tokenizer().save_pretrained(folder)
    return folder


def write(folder: Path, content: Any) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "generation_config.json").write_bytes(raw)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({**QWEN_SAMPLING, "watermarking_config": "x"}, "watermarking_config"),
        ({"early_stopping": "x", **QWEN_SAMPLING, "max_new_tokens": -1}, None),
        ({**QWEN_SAMPLING, "eos_token_id": [[1]]}, None),
    ],
)
def test_a_wrong_value_costs_itself_alone(
    folder: Path, content: Any, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, content)
    with caplog.at_level(logging.WARNING, "cacheblend_rag"):
        engine = TransformersEngine(folder)
    lines = [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]
    assert len(lines) == (told is not None)
    assert all(told in line and "\n" not in line for line in lines if told)
    answer = engine.generate("w5 w6", SamplingParams(max_tokens=2))
    assert {
        name: getattr(answer.sampling, name) for name in QWEN_SAMPLING if name != "do_sample"
    } == {name: value for name, value in QWEN_SAMPLING.items() if name != "do_sample"}
    engine.close()


@pytest.mark.parametrize("content", [b"{nope", b"[1, 2]", b"\xff"])
def test_a_file_that_holds_no_object_is_ignored(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, content)
    with caplog.at_level(logging.WARNING, "cacheblend_rag"):
        engine = TransformersEngine(folder)
    (line,) = [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]
    assert "generation_config.json is ignored: " in line
    assert engine.generate("w5 w6", SamplingParams(max_tokens=2)).sampling.temperature == 0
    engine.close()
