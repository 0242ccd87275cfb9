"""The JSON schema of all settings, and docs/settings.md, which is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cacheblend_rag import BlendConfig, ConfigError, EngineConfig, LeadInConfig, StoreConfig
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.observe.settings_schema import MODELS, settings_page, settings_schema
from cacheblend_rag.settings import Settings
from tests.toy import TOY

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
GIVEN: list[tuple[type[Settings], dict[str, Any]]] = [
    (EngineConfig, {"model": TOY, "lead_in": {"kind": "bos"}, "store": {"host_bytes": "8GiB"}}),
    (StoreConfig, {"kv_path": "kv", "ttl_seconds": "12h", "disk_bytes": 5, "precision": "fp8"}),
    (StoreConfig, {"tiers": ["host://", "s3://bucket/prefix"]}),
    (LeadInConfig, {"document_window": 3}),
    (BlendConfig, {"recompute_ratio": "auto", "selector_options": {"deviation": "k"}}),
    (BlendConfig, {"check_layers": [1, 3], "recompute_ratios": [0.3, 0.1]}),
    (ConnectorSettings, {"attention": "flex", "slice_seconds": 0.5, "namespace": "acme"}),
]
WRONG: list[tuple[type[Settings], dict[str, Any]]] = [
    (EngineConfig, {"modle": "toy"}),
    (EngineConfig, {"lead_in": {"kind": "everything"}}),
    (EngineConfig, {"fill_on_miss": 1}),
    (EngineConfig, {"device": 0}),
    (StoreConfig, {"kv_path": ""}),
    (StoreConfig, {"host_bytes": -1}),
    (StoreConfig, {"host_bytes": "much"}),
    (StoreConfig, {"ttl_seconds": 0}),
    (StoreConfig, {"precision": "fp4"}),
    (LeadInConfig, {"document_window": 0}),
    (BlendConfig, {"recompute_ratio": 2}),
    (BlendConfig, {"recompute_ratio": "most"}),
    (BlendConfig, {"check_layers": []}),
    (BlendConfig, {"check_layers": [1.5]}),
    (BlendConfig, {"ratio_bounds": [0.1]}),
    (BlendConfig, {"min_tokens": -1}),
    (ConnectorSettings, {"attention": "magic"}),
    (ConnectorSettings, {"slice_seconds": 0}),
    (ConnectorSettings, {"replicas": 0}),
]


def validator(model: type[Settings]) -> Draft202012Validator:
    schema = settings_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator({**schema, "$ref": f"#/$defs/{model.__name__}"})


def test_the_page_of_the_docs_is_what_the_command_prints() -> None:
    assert PAGE.read_text() == settings_page(), "cacheblend-rag settings > docs/settings.md"


def test_every_setting_has_a_description_and_stands_on_the_page() -> None:
    models, page = settings_schema()["$defs"], settings_page()
    assert {*models} == {model.__name__ for model in MODELS}
    for model in models.values():
        assert "Raises" not in model["description"]
        for name, field in model["properties"].items():
            assert field["description"], name
            assert f"| `{name}` |" in page


@pytest.mark.parametrize("model", MODELS)
def test_what_settings_are_by_default_is_valid(model: type[Settings]) -> None:
    plain = json.loads(json.dumps(model().to_dict()))
    assert validator(model).is_valid(plain)
    assert model.of(plain) == model()


@pytest.mark.parametrize(("model", "given"), GIVEN)
def test_the_schema_takes_what_settings_take(model: type[Settings], given: dict[str, Any]) -> None:
    assert validator(model).is_valid(given)
    again = json.loads(json.dumps(model.of(given).to_dict()))
    assert validator(model).is_valid(again)


@pytest.mark.parametrize(("model", "given"), WRONG)
def test_the_schema_refuses_what_settings_refuse(
    model: type[Settings], given: dict[str, Any]
) -> None:
    assert not validator(model).is_valid(given)
    with pytest.raises(ConfigError):
        model.of(given)
