"""What the examples give to vLLM on Kubernetes and Ray are settings of the connector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.serve import MIDDLEWARE

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"


def check(transfer: dict[str, Any]) -> None:
    extra = transfer.pop("kv_connector_extra_config")
    settings = ConnectorSettings.from_extra_config(extra)
    assert [tier.name for tier in settings.store.tiers or ()] == ["host", "redis", "s3"]
    ours = settings.to_transfer_config()
    ours.pop("kv_connector_extra_config")
    assert transfer == ours


def test_vllm_uses_our_connector() -> None:
    told = yaml.safe_load((FOLDER / "production-stack.yaml").read_text())
    (model,) = told["servingEngineSpec"]["modelSpec"]
    given = model["vllmConfig"]["extraArgs"]
    assert given[given.index("--middleware") + 1] == MIDDLEWARE
    check(json.loads(given[given.index("--kv-transfer-config") + 1]))
    mounts = [model["extraVolumeMounts"], model["initContainer"]["extraVolumeMounts"]]
    assert mounts[0] == mounts[1]
    assert {"name": "PYTHONPATH", "value": mounts[0][0]["mountPath"]} in model["env"]


def test_ray_serve_gives_vllm_our_connector() -> None:
    (application,) = yaml.safe_load((FOLDER / "ray-serve.yaml").read_text())["applications"]
    (config,) = application["args"]["llm_configs"]
    check(config["engine_kwargs"]["kv_transfer_config"])
