"""Names of arguments: whose are taken, what is refused, and that no value is told."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from cacheblend_rag.errors import ConfigError, describe_errors
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.settings.options import Arguments, check_engine_name

TAKEN = Arguments(
    "option of Model",
    frozenset({"model", "engine", "max_tokens", "temperature", "device", "blend_config"}),
    {"blend_config": BlendConfig},
)


def test_other_libraries_names_become_ours() -> None:
    given = {"model_name": "toy", "base_url": "http://x", "max_new_tokens": 5, "temperature": 0}
    ours = {"model": "toy", "engine": "http://x", "max_tokens": 5, "temperature": 0}
    assert TAKEN.read(given) == ours


def test_two_names_of_one_argument_are_refused() -> None:
    for given, ours in (("model", "model_name"), "model"), (("base_url", "api_base"), "engine"):
        with pytest.raises(ConfigError, match=f"name one option of Model: give {ours}"):
            TAKEN.read(dict.fromkeys(given, 1))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("temprature", "(did you mean 'temperature'?)"),
        ("Temperature", "(did you mean 'temperature'?)"),
        ("device_map", "(did you mean 'device'?)"),
        ("bas_url", "(did you mean 'engine'?)"),
        ("min_tokens", "give it as blend_config={'min_tokens': ...}"),
        ("retries", "known: blend_config, device, engine, max_tokens, model, temperature"),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_do(name: str, answer: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TAKEN.read({name: "s3cret"})
    assert str(raised.value).startswith(f"unknown option '{name}' of Model")
    assert str(raised.value).endswith(answer)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("warp", "engine='warp' must be auto, transformers, vllm or a server's URL"),
        ("localhost:8000", "engine='localhost:8000' lacks a scheme: give http://localhost:8000"),
        ("ftp://host", "must be like http://host:8000"),
        ("me:s3cret@host:1", "give its key as api_key="),
        ("s3cret@host", "give its key as api_key="),
        ("host?key=s3cret", "give its key as api_key="),
        ("http://host/?key=s3cret", "give its key as api_key="),
    ],
)
def test_an_engine_that_is_none_is_refused(engine: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_engine_name(engine)
    assert told in str(raised.value)
    assert "s3cret" not in str(raised.value)


class Options(BaseModel):
    number: int = 0
    either: int | list[int] = 0
    pair: tuple[int, ...] = Field(default=(1,), min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Options:
        if self.number < 0:
            raise ValueError("number must be at least 0")
        return self


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"number": "s3cret"}, "number must be a valid integer, unable to parse string as an int"),
        ({"either": {}, "number": "1"}, "either must be a valid integer or a valid list"),
        ({"number": -1}, "number must be at least 0"),
        ({"pair": ["s3cret"]}, "pair must be a valid integer, unable to parse"),
        ({"number": 1.5, "either": ""}, "number must be a valid integer, got a .*; either must be"),
    ],
)
def test_what_pydantic_finds_is_told_in_a_line(given: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Options(**given)  # type: ignore[arg-type]
    line = describe_errors(raised.value.errors())
    assert re.match(told, line), line
    assert "\n" not in line
    assert "s3cret" not in line
