"""Settings: what they take, what they refuse, and what the message says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import fingerprint, namespace_id
from cacheblend_rag.settings import BlendConfig, EngineConfig, LeadInConfig, StoreConfig
from cacheblend_rag.settings.base import Secret
from tests.engines.toy_engine import ToyEngine
from tests.toy import TOY


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown setting 'recompute_rate' of a request \(did you mean 'recompute_",
    ):
        BlendConfig.of({"recompute_rate": 0.2})
    with pytest.raises(ConfigError, match="settings must be named values, not of type str"):
        BlendConfig.of("quality")  # type: ignore[arg-type]


def test_changes_are_validated_and_leave_the_original() -> None:
    config = BlendConfig(recompute_ratio=0.3)
    assert config.with_changes(min_tokens=0) == BlendConfig(recompute_ratio=0.3, min_tokens=0)
    with pytest.raises(ConfigError, match="recompute_ratio"):
        config.with_changes(recompute_ratio=3)
    assert config.recompute_ratio == 0.3


def test_a_lead_in_may_be_given_by_its_kind() -> None:
    assert LeadInConfig.of("bos") == LeadInConfig.of({"kind": "bos"}) == LeadInConfig(kind="bos")
    with pytest.raises(ConfigError, match=r"^lead_in='everything' must be 'none', 'bos', 'instr"):
        LeadInConfig.of("everything")


@pytest.mark.parametrize(
    ("model", "field", "value", "message"),
    [
        (BlendConfig, "recompute_ratio", "0.2", "a valid number or a valid tuple"),
        (BlendConfig, "recompute_ratio", [0.2, 0.1], "one ratio for each of check_layers"),
        (BlendConfig, "recompute_ratio", [0.1, 0.2], "that does not rise: check layers only drop"),
        (BlendConfig, "check_layers", (2, 1), "must be strictly rising"),
        (StoreConfig, "host_bytes", True, "must be a valid integer"),
        (StoreConfig, "disk_bytes", "8 parsecs", "must be a size, such as 8GiB"),
        (StoreConfig, "ttl_seconds", float("inf"), "must be a finite number"),
        (StoreConfig, "ttl_seconds", "soon", "must be a time, such as 12h"),
    ],
)
def test_a_bad_setting_is_refused_by_name_and_with_what_it_must_be(
    model: Any, field: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=.*{message}"):
        model(**{field: value})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("host_bytes", "8GiB", 8 << 30),
        ("host_bytes", "1.5 MiB", 3 << 19),
        ("disk_bytes", "2gb", 2 * 10**9),
        ("disk_bytes", "512", 512),
        ("ttl_seconds", "12h", 43200),
        ("ttl_seconds", "1.5 m", 90),
    ],
)
def test_sizes_and_times_are_read_with_their_units(name: str, text: str, value: float) -> None:
    assert getattr(StoreConfig(**{name: text}), name) == value  # type: ignore[arg-type]


def test_a_store_is_the_same_again_from_plain_values(tmp_path: Path) -> None:
    store = StoreConfig(kv_path=tmp_path, host_bytes=None, disk_bytes=7)  # type: ignore[arg-type]
    assert store.kv_path == str(tmp_path)
    assert StoreConfig.of(json.loads(json.dumps(store.to_dict()))) == store
    with pytest.raises(ConfigError, match="did you mean 'host_bytes'"):
        StoreConfig.of({"host_byte": 1})


def test_an_engine_is_the_same_again_from_plain_values_but_for_its_key() -> None:
    config = EngineConfig(
        engine="http://host:8000",
        model="org/model",
        instruction="Answer.",
        namespace="tenant",
        blend=BlendConfig(selector="prior", check_layers=(1, 3), recompute_ratio=(0.4, 0.2)),
        lead_in=LeadInConfig(kind="instruction", document_window=99),
        store=StoreConfig(kv_path="kv", host_bytes=5),
        dtype="bfloat16",
        api_key=Secret("sesame"),
    )
    plain = json.dumps(config.to_dict())
    assert "sesame" not in plain + repr(config)
    assert EngineConfig.of(json.loads(plain)) == config.with_changes(api_key=None)


@pytest.mark.parametrize("what", ["model", "instruction", "tokenizer"])
def test_what_is_no_text_is_not_serialized(what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        EngineConfig(**{"model": TOY, what: lambda _: ""}).to_dict()  # type: ignore[arg-type]


def test_options_of_a_store_may_be_given_to_the_engine_by_name() -> None:
    gathered = EngineConfig.gather(engine="transformers", model=TOY, kv_path="kv", disk_bytes=9)
    assert gathered.store == StoreConfig(kv_path="kv", disk_bytes=9)
    assert EngineConfig.gather(store={"host_bytes": 3}).store == StoreConfig(host_bytes=3)
    with pytest.raises(ConfigError, match="kv_path: "):
        EngineConfig.gather(kv_path="kv", store=StoreConfig())
    with pytest.raises(ConfigError, match="did you mean 'namespace'"):
        EngineConfig.gather(namespaces="a")


@pytest.mark.parametrize("namespace", ["\ud800", "tenant\udcff", 7, None, b"default"])
def test_a_namespace_that_is_no_text_is_refused_wherever_it_enters(namespace):
    told = "holds a lone surrogate" if isinstance(namespace, str) else "must be a name"
    for takes in (
        lambda: EngineConfig(namespace=namespace),
        lambda: ConnectorSettings(namespace=namespace),
        lambda: namespace_id(namespace),
        lambda: fingerprint({}, namespace),
        lambda: ToyEngine(None, namespace=namespace),
    ):
        with pytest.raises(ConfigError, match=told) as raised:
            takes()
        assert "\n" not in str(raised.value)
        str(raised.value).encode()


@pytest.mark.parametrize("module", ["cacheblend_rag", "cacheblend_rag.cli.main"])
def test_importing_the_package_builds_no_model(module: str) -> None:
    code = f"import sys, {module}; raise SystemExit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_secret_is_in_no_error_and_not_in_its_context() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(api_key="sesame", namespace=3)
    assert str(raised.value) == "namespace=3 must be a name"
    assert raised.value.__context__ is None
    assert "sesame" not in repr(EngineConfig(api_key="sesame").model_dump())


def test_devices_and_dtypes_are_told_by_their_names() -> None:
    config = EngineConfig(device=torch.device("cpu"), dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert (config.device, config.dtype) == ("cpu", "bfloat16")
    for wrong in ({"device": 3}, {"dtype": 3}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=3 must be a valid string"):
            EngineConfig(**wrong)


TEXTS = {"kv_path", "selector", "instruction", "namespace", "device", "dtype"}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (model, name)
        for model in (BlendConfig, LeadInConfig, StoreConfig, EngineConfig, ConnectorSettings)
        for name in model.model_fields
        if name not in ("model", "tokenizer", "api_key")  # which take anything
    ],
)
def test_every_field_refuses_what_is_none_of_its_kind_by_name_and_in_one_line(
    model: Any, name: str
) -> None:
    shown = "lead_in" if name == "kind" else name
    for wrong in (object(), b"\n", float("nan"), -1, "\n" * 200):
        if isinstance(wrong, str) and name in TEXTS:
            continue
        with pytest.raises(ConfigError) as raised:
            model(**{name: wrong})
        told = str(raised.value)
        assert "\n" not in told
        assert told.startswith((shown, "settings must be named values, not of type "))
