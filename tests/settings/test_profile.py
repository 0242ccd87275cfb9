"""Profiles: explicit settings override a profile's, which override the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, ConfigError, EngineConfig, LeadInConfig, Profile
from cacheblend_rag.component import EngineComponent
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.settings import PROFILES
from cacheblend_rag.settings.profile import VARIABLE
from tests.toy import TOY

TUNED = Profile(
    name="mine",
    model=TOY,
    blend={"recompute_ratio": 0.2, "selector": "prior", "check_layers": [2]},
    lead_in={"kind": "instruction"},
    measured={"kl": 0.01, "questions": 40},
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    TUNED.save(tmp_path / "mine.toml")
    return tmp_path / "mine.toml"


def test_packaged_profiles_become_cheaper_and_are_within_the_guides_ranges() -> None:
    ranges = [(0.20, 0.30), (0.15, 0.20), (0.08, 0.15)]
    ratios = [Profile.load(name).blend for name in PROFILES]
    for blend, (low, high) in zip(ratios, ranges, strict=True):
        assert low <= blend.ratio <= high
    assert Profile.load("speed").blend.ratio == BlendConfig().ratio


def test_a_file_holds_what_was_given_and_nothing_else(file: Path) -> None:
    assert Profile.load(file) == TUNED
    told = file.read_text()
    assert "min_tokens" not in told
    assert Profile.load(file).blend.model_fields_set == TUNED.blend.model_fields_set


def test_explicit_settings_come_before_the_profile_and_it_before_the_defaults(file: Path) -> None:
    config = EngineConfig(profile=file, blend={"recompute_ratio": 0.5})
    assert (config.blend.ratio, config.blend.selector) == (0.5, "prior")
    assert config.blend.min_tokens == BlendConfig().min_tokens
    assert config.lead_in.kind == "instruction"
    explicit = EngineConfig(profile=file, lead_in="bos", blend=BlendConfig(selector="hkvd"))
    assert (explicit.lead_in.kind, explicit.blend.selector, explicit.blend.ratio) == (
        "bos", "hkvd", 0.2,
    )  # fmt: skip
    changed = BlendConfig(selector="hkvd").with_changes(trace=True)
    assert TUNED.blended(changed).ratio == 0.2


def test_the_environment_names_a_profile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(file))
    assert EngineConfig().blend.selector == "prior"
    assert EngineConfig(profile="speed").blend.selector == BlendConfig().selector
    assert EngineConfig(lead_in="bos").lead_in == LeadInConfig(kind="bos")


class Component(EngineComponent):
    def _own_options(self) -> dict[str, Any]:
        return {"model": TOY}


def test_components_of_frameworks_take_a_profile(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Component(blend_profile=str(file), blend_config={"recompute_ratio": 0.5})
    assert found.blend_config is not None
    assert (found.blend_config.ratio, found.blend_config.selector) == (0.5, "prior")
    assert found._engine_config().lead_in.kind == "instruction"
    monkeypatch.setenv(VARIABLE, "speed")
    assert Component()._engine_config().blend.ratio == 0.08
    assert Component().blend_config == Profile.load("speed").blended(BlendConfig())


def test_a_servers_settings_carry_one_to_its_clients(file: Path) -> None:
    settings = ConnectorSettings(profile=file)
    again = ConnectorSettings.from_extra_config(settings.to_extra_config())
    assert again.profile == TUNED
    assert again.profile.blend.model_fields_set == TUNED.blend.model_fields_set
    assert ConnectorSettings().to_extra_config()["profile"] is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("= 3", "is not TOML"),
        ('name = "x"\n[blend]\nratio = 3', "unknown setting 'ratio' of a request"),
        ('name = "x"\n[blend]\nrecompute_ratio = 3.0', "recompute_ratio=3.0 must be"),
        ('name = ""', "name='': String should have at least 1 character"),
        ('name = "x"\ncolour = "red"', "unknown entry 'colour' of a profile"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=told) as raised:
        EngineConfig(profile=tmp_path / "x.toml")
    assert "\n" not in str(raised.value)
