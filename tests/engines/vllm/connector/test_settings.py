"""What a server can settle, and how it travels. No vLLM is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend_rag import StoreConfig
from cacheblend_rag.engines.vllm.connector.settings import MODULE, ConnectorSettings
from cacheblend_rag.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"colour": "red"}, "unknown setting 'colour'"),
        ({"slice_seconds": 0}, "slice_seconds=0"),
        ({"store": {}}, "unknown setting 'store'"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], said: str) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config=given)
    with pytest.raises(ConfigError, match=said):
        ConnectorSettings.of_vllm(SimpleNamespace(kv_transfer_config=transfer))


ALL = ConnectorSettings(
    store=StoreConfig(kv_path="kv", host_bytes=1 << 20, disk_bytes=1 << 30),
    namespace="tenant",
    slice_seconds=0.5,
    replicas=3,
)


def test_they_come_to_vllm_as_they_were_given() -> None:
    for settings in (ConnectorSettings(), ALL):
        transfer = json.loads(json.dumps(settings.to_transfer_config()))
        config = SimpleNamespace(kv_connector_extra_config=transfer["kv_connector_extra_config"])
        read = ConnectorSettings.of_vllm(SimpleNamespace(kv_transfer_config=config))
        assert read == settings
        assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == (
            "CacheBlendConnector",
            "cacheblend_rag.engines.vllm.connector",
        )
    assert ConnectorSettings.of_vllm(SimpleNamespace(kv_transfer_config=None)) == (
        ConnectorSettings()
    )


def test_they_are_read_without_vllm() -> None:
    code = f"""import sys
from {MODULE}.settings import ConnectorSettings
import {MODULE} as module
assert not {{"vllm", "torch"}} & set(sys.modules)
try:
    module.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
else:
    raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
