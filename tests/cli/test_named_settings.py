"""``--set NAME=VALUE`` reads any setting by its name, in the type of its field."""

from __future__ import annotations

import pytest

from cacheblend_rag.cli.named_settings import engine_config
from cacheblend_rag.errors import ConfigError


def test_settings_reach_the_part_that_they_belong_to() -> None:
    given = [
        "device=cpu", "namespace=12", "lead_in=instruction", "guard=0.05", "check_layers=9,12",
        "recompute_ratio=0.2", "reuse_prefix=false", "tiers=host://", "tiers=redis://cache:1/0",
        "ttl_seconds=12h",
    ]  # fmt: skip
    config = engine_config(given, model="smollm2", engine=None)
    assert (config.model, config.device, config.namespace) == ("smollm2", "cpu", "12")
    assert config.lead_in.kind == "instruction"
    assert config.guard is not None
    assert config.guard.sample_share == 0.05
    assert config.blend.given() == {
        "recompute_ratio": 0.2, "check_layers": (9, 12), "reuse_prefix": False,
    }  # fmt: skip
    assert config.store.tiers == ("host://", "redis://cache:1/0")
    assert config.store.ttl_seconds == 43_200


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["device"], "must be NAME=VALUE"),
        (["devise=cpu"], "unknown setting 'devise' (did you mean 'device'?)"),
        (["device=cpu", "device=cuda"], "--set device is given twice"),
        (["api_key=abc"], "unknown setting 'api_key'"),
        (["model=x"], "--set model: this command has an option of its own"),
        (["recompute_ratio=high"], "recompute_ratio='high' must be"),
        (["lead_in=bos", "kind=none"], "--set lead_in: give its settings by their own names"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        engine_config(given, model="smollm2")
    assert said in str(found.value)
    assert "abc" not in str(found.value)
