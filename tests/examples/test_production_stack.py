"""The example's values fit the chart's names, and its connector's settings are ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cacheblend_rag.engines.vllm.affinity import AFFINITY_HEADER
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.middleware.access import MIDDLEWARE
from tests.examples.production_stack import NEEDED, unknown, values, violations


@pytest.fixture
def told() -> dict[str, Any]:
    return dict(values())


def test_the_values_fit_the_chart(told: dict[str, Any]) -> None:
    assert violations(told, NEEDED) == []
    assert unknown(told, NEEDED) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["routerSpec"].update(routingLogic="hash"), "routingLogic"),
        (lambda t: t["routerSpec"].update(session_key="x"), "session_key"),
        (lambda t: t["servingEngineSpec"]["modelSpec"][0].update(replicaCount="2"), "replicaCount"),
        (
            lambda t: t["servingEngineSpec"]["modelSpec"][0]["vllmConfig"].update(extraArgs=[1]),
            "extraArgs",
        ),
    ],
)
def test_what_does_not_fit_is_told(told: dict[str, Any], change: Any, said: str) -> None:
    change(told)
    assert [line for line in violations(told, NEEDED) if said in line]


def test_the_router_uses_our_header_and_vllm_our_connector(told: dict[str, Any]) -> None:
    assert told["routerSpec"]["sessionKey"] == AFFINITY_HEADER
    (model,) = told["servingEngineSpec"]["modelSpec"]
    given = model["vllmConfig"]["extraArgs"]
    assert given[given.index("--middleware") + 1] == MIDDLEWARE
    transfer = json.loads(given[given.index("--kv-transfer-config") + 1])
    extra = transfer.pop("kv_connector_extra_config")
    settings = ConnectorSettings.from_extra_config(extra)
    assert [tier.name for tier in settings.store.tiers or ()] == ["host", "redis", "s3"]
    ours = settings.to_transfer_config()
    ours.pop("kv_connector_extra_config")
    assert transfer == ours
    mounts = [model["extraVolumeMounts"], model["initContainer"]["extraVolumeMounts"]]
    assert mounts[0] == mounts[1]
    assert {"name": "PYTHONPATH", "value": mounts[0][0]["mountPath"]} in model["env"]
