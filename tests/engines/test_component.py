"""What components of frameworks have in common: a store's settings as options, one-line errors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cacheblend_rag import (
    BlendConfig,
    ConfigError,
    EngineComponent,
    EngineConfig,
    GuardConfig,
    LeadInConfig,
    StoreConfig,
)


class Component(EngineComponent):
    """As an integration makes it."""

    model: str = "toy"

    def _own_options(self) -> dict[str, Any]:
        return {"engine": "transformers", "model": self.model}

    def opened_with(self) -> EngineConfig:
        """What its engine is opened with."""
        return self._engine_config()


def test_only_what_is_shown_is_serialized() -> None:
    made = Component(kv_path="kv", disk_bytes=7, api_key="s3cret", device="cpu")
    assert made.model_dump() == {
        "namespace": "default",
        "blend_config": None,
        "lead_in": None,
        "dtype": None,
        "model": "toy",
    }
    assert not any(told in repr(made) for told in ("kv_path", "disk_bytes", "s3cret"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"host_bytes": "much"}, "host_bytes='much' must be a size, such as 8GiB"),
        ({"kv_path": ""}, "kv_path"),
        ({"blend_config": "s3cret"}, "settings must be named values, not of type str"),
        ({"kv_paht": "s3cret"}, "unknown option 'kv_paht' of Component (did you mean 'kv_path'?)"),
        ({"min_tokens": "s3cret"}, "give it as blend_config={'min_tokens': ...}"),
        ({"store": {}, "host_bytes": 1}, "host_bytes: give it as a setting of store=, too"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Component(**given)
    line = str(raised.value)
    assert told in line
    assert "s3cret" not in line
    assert "\n" not in line


def test_an_engine_is_opened_by_all_that_is_told() -> None:
    made = Component(
        blend_config={"min_tokens": 3}, lead_in="bos", namespace="acme", host_bytes=0, kv_path="kv",
        api_key="s3cret", fill_on_miss=True, guard=0.25,
    )  # fmt: skip
    config = made.opened_with()
    assert (config.engine, config.model, config.namespace) == ("transformers", "toy", "acme")
    assert config.blend == BlendConfig(min_tokens=3)
    assert config.lead_in == LeadInConfig(kind="bos")
    assert config.store == StoreConfig(host_bytes=0, kv_path="kv")
    assert config.fill_on_miss
    assert config.guard == GuardConfig(sample_share=0.25)
    assert Component(guard={"limit": 0.5}).opened_with().guard == GuardConfig(limit=0.5)
    assert Component().opened_with().guard is None
    with pytest.raises(ConfigError, match="guard=2 must be a share of answers, above 0 and up to"):
        Component(guard=2)
    assert config.api_key is not None
    assert config.api_key.get_secret_value() == "s3cret"
    assert Component().opened_with().blend == BlendConfig()


def test_a_pickle_holds_no_key() -> None:
    assert b"s3cret" not in pickle.dumps(Component(api_key="s3cret"))
