"""BlendConfig: what it takes, what it refuses, and what the message says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.config import PRESET_RATIOS, BlendConfig
from cacheblend_rag.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("recompute_ratio", -0.1),
        ("recompute_ratio", 1.1),
        ("recompute_ratio", float("nan")),
        ("recompute_ratio", True),
        ("recompute_ratio", "0.2"),
        ("check_layers", ()),
        ("check_layers", (-1,)),
        ("check_layers", (1.5,)),
        ("check_layers", (2, 1)),
        ("check_layers", (1, 1)),
        ("recompute_ratios", (0.2, 0.1)),
        ("recompute_ratios", (2.0,)),
        ("selector", ""),
        ("selector", None),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("min_tokens", True),
        ("document_window", 0),
        ("lead_in", "everything"),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        BlendConfig(**{field: value})


def test_a_rising_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not rise"):
        BlendConfig(check_layers=(1, 2), recompute_ratios=(0.1, 0.2))


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        BlendConfig(recompute_ratio=7)


@pytest.mark.parametrize("name", PRESET_RATIOS)
def test_presets_set_the_ratio_and_yield_to_overrides(name: Any) -> None:
    assert BlendConfig.preset(name).recompute_ratio == PRESET_RATIOS[name]
    assert BlendConfig.preset(name, min_tokens=3).min_tokens == 3
    assert BlendConfig.preset(name, recompute_ratio=0.5).recompute_ratio == 0.5


def test_quality_recomputes_more_than_speed() -> None:
    ratios = [BlendConfig.preset(name).recompute_ratio for name in ("quality", "balanced", "speed")]
    assert ratios == sorted(ratios, reverse=True)
    assert BlendConfig() == BlendConfig.preset("balanced")


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="preset='fastest' must be one of"):
        BlendConfig.preset("fastest")


ratios = st.floats(0, 1)


@st.composite
def configs(draw: st.DrawFn) -> BlendConfig:
    layers = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=4)))
    schedule = sorted(
        draw(st.lists(ratios, min_size=len(layers), max_size=len(layers))), reverse=True
    )
    return BlendConfig(
        recompute_ratio=draw(ratios),
        check_layers=tuple(layers),
        recompute_ratios=draw(st.none() | st.just(tuple(schedule))),
        min_tokens=draw(st.integers(0, 1000)),
        lead_in=draw(st.sampled_from(["none", "bos", "instruction", "document"])),
    )


@given(configs())
def test_plain_values_make_the_same_config(config: BlendConfig) -> None:
    values = asdict(config)
    lists = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    assert BlendConfig.from_dict(values) == BlendConfig.from_dict(lists) == config


@given(configs())
def test_the_ratio_in_force_never_rises(config: BlendConfig) -> None:
    in_force = [config.ratio_at(check) for check in range(len(config.check_layers))]
    assert in_force == sorted(in_force, reverse=True)
    if config.recompute_ratios is None:
        assert set(in_force) == {config.recompute_ratio}


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recompute_rate is no setting: did you mean recompute_"):
        BlendConfig.from_dict({"recompute_rate": 0.2})
    with pytest.raises(ConfigError, match="settings are a str: give names with values"):
        BlendConfig.from_dict("quality")  # type: ignore[arg-type]


def test_changes_are_validated_and_leave_the_original() -> None:
    config = BlendConfig(recompute_ratio=0.3)
    assert config.with_changes(min_tokens=0) == BlendConfig(recompute_ratio=0.3, min_tokens=0)
    with pytest.raises(ConfigError, match="recompute_ratio"):
        config.with_changes(recompute_ratio=3)
    assert config.recompute_ratio == 0.3


def test_options_are_copied() -> None:
    options = {"deviation": "k"}
    config = BlendConfig(selector_options=options)
    options["deviation"] = "v"
    assert config.selector_options == {"deviation": "k"}
