"""A store's settings as options of frameworks' components."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, create_model

from cacheblend_rag import StoreConfig, describe_errors, store_fields

Component: type[BaseModel] = create_model("Component", **store_fields(told={"kv_path"}))


def test_every_setting_of_a_store_is_a_field_with_its_default() -> None:
    made = Component()
    assert {name: getattr(made, name) for name in Component.model_fields} == StoreConfig().to_dict()
    assert [*Component.model_fields] == [one.name for one in fields(StoreConfig)]


def test_fields_read_what_a_store_reads(tmp_path: Path) -> None:
    given: dict[str, Any] = {"kv_path": tmp_path, "host_bytes": "8GiB", "disk_bytes": "1.5 MiB"}
    made = Component(**given)
    assert StoreConfig(**given).to_dict() == {n: getattr(made, n) for n in Component.model_fields}


def test_only_what_is_told_is_serialized_and_shown() -> None:
    made = Component(kv_path="kv", disk_bytes=7)
    assert made.model_dump() == {"kv_path": "kv"}
    assert repr(made) == "Component(kv_path='kv')"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"host_bytes": "s3cret"}, "host_bytes must be a valid integer"),
        ({"host_bytes": -1}, "host_bytes must be greater than or equal to 0"),
        ({"disk_bytes": 1.5}, "disk_bytes must be a valid integer"),
        ({"kv_path": 3}, "kv_path must be a valid string"),
        ({"kv_path": ""}, "kv_path: kv_path='' must be a folder"),
    ],
)
def test_what_is_wrong_is_said_as_of_all_fields(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Component(**given)
    line = describe_errors(raised.value.errors(include_input=False))
    assert told in line
    assert "s3cret" not in line
