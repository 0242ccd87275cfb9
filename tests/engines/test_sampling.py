"""Ranges of sampling fields, what those that are None become, and what of a model's is ignored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import SamplingParams, TransformersEngine
from cacheblend_rag.engines.sampling import (
    ResolvedSampling,
    ignored_settings,
    warn_of_ignored,
)
from cacheblend_rag.errors import ConfigError
from tests.models import QWEN_SAMPLING, make_tokenizer, save_model

QWEN = ResolvedSampling.of_model(QWEN_SAMPLING)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens=True must be a valid integer"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
        ({"top_p": 0}, "top_p=0 must be greater than 0"),
        ({"presence_penalty": 3}, "presence_penalty=3 must be less than or equal to 2"),
        ({"seed": 1 << 63}, "seed=9223372036854775808 must be less than 9223372036854775808"),
        ({"stop": ["a", ""]}, "stop=['a', '']: String should have at least 1 character"),
        ({"logprobs": 21}, "logprobs=21 must be less than or equal to 20"),
        ({"structured_outputs": {}}, "structured_outputs needs exactly one of"),
        ({"max_token": 5}, "unknown setting 'max_token' of sampling (did you mean 'max_tokens'?)"),
    ],
    ids=str,
)
def test_a_field_out_of_range_is_named_in_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(**given)
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


def test_fields_that_are_none_take_the_models() -> None:
    asked = SamplingParams(max_tokens=9, seed=4, stop=("x",), ignore_eos=True)
    assert QWEN.resolve(asked) == ResolvedSampling(
        max_tokens=9,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.0,
        repetition_penalty=1.1,
        seed=4,
        stop=("x",),
        ignore_eos=True,
    )


def test_what_no_engine_follows_is_told_unless_it_is_off(caplog: pytest.LogCaptureFixture) -> None:
    values = {"num_beams": 4, "no_repeat_ngram_size": 0, "bad_words_ids": [[3]], "top_p": 0.9}
    assert ignored_settings(values) == [
        "num_beams=4 is not supported",
        "bad_words_ids=[[3]] is not supported",
    ]
    with caplog.at_level(logging.WARNING):
        warn_of_ignored({**QWEN_SAMPLING, "max_new_tokens": 16, "eos_token_id": [1, 2]})
    assert caplog.records == []


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": 3, "tools": [], "stop": None}, {"max_tokens": 3}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": 3}, {"logprobs": None}),
        ({"top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"structured_outputs": {"json": SCHEMA}},
        ),
    ],
)
def test_a_call_may_ask_in_openais_form(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert SamplingParams.of_call(given) == SamplingParams(**expected)


def test_a_form_is_given_once() -> None:
    form = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}
    with pytest.raises(ConfigError, match="structured_outputs and response_format: give one"):
        SamplingParams.of_call(form)


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
