"""What the example gives to Ray Serve LLM is what vLLM and the connector accept."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from cacheblend_rag.engines.vllm.connector.settings import CONNECTOR, ConnectorSettings
from tests.toy import TOY

FILE = Path(__file__).parents[2] / "examples" / "distributed" / "ray-serve.yaml"

pytest.importorskip("vllm")


@pytest.fixture
def given() -> dict[str, Any]:
    (application,) = yaml.safe_load(FILE.read_text())["applications"]
    (config,) = application["args"]["llm_configs"]
    return dict(config["engine_kwargs"])


def test_vllm_accepts_them(given: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert given.keys() <= {field.name for field in fields(AsyncEngineArgs)}
    transfer = KVTransferConfig(**given.pop("kv_transfer_config"))
    given["max_model_len"] = 512  # of the bundled model, which has fewer positions
    arguments = AsyncEngineArgs(model=TOY, kv_transfer_config=transfer, dtype="float32", **given)
    made = arguments.create_engine_config()
    assert made.kv_transfer_config.kv_connector == CONNECTOR
    assert made.kv_transfer_config.kv_load_failure_policy == "recompute"
    settings = ConnectorSettings.of_vllm(made)
    assert [tier.name for tier in settings.store.tiers or ()] == ["host", "redis", "s3"]
    assert (
        transfer.kv_connector_module_path
        == settings.to_transfer_config()["kv_connector_module_path"]
    )
