"""What a server is started with. No vLLM is needed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from cacheblend_rag.engines.vllm import serve, versions
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.serve import server_command
from cacheblend_rag.errors import ConfigError, EngineUnavailableError, MissingExtraError


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "installed_version", lambda: "0.32.0")


def settings(command: list[str]) -> dict[str, Any]:
    """What the connector is told."""
    told: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert told["kv_load_failure_policy"] == "recompute"
    return dict(told["kv_connector_extra_config"])


def test_options_reach_the_connector_and_flags_vllm() -> None:
    command = server_command(
        "org/model",
        port=9,
        settings=ConnectorSettings(namespace="a"),
        flags=["--max-model-len", "512"],
    )
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--served-model-name") + 1] == "org/model"
    assert command[-2:] == ["--max-model-len", "512"]
    assert settings(command)["namespace"] == "a"
    plain = server_command("org/model", connector=False)
    assert "--kv-transfer-config" not in plain
    assert command[command.index("--middleware") + 1] == serve.MIDDLEWARE


@pytest.mark.parametrize("flags", [["--data-parallel-size", "3"], ["-dp=3"]])
def test_the_connector_knows_of_replicas(flags: list[str]) -> None:
    assert settings(server_command("org/model", flags=flags))["replicas"] == 3
    assert settings(server_command("org/model"))["replicas"] == 1


@pytest.mark.parametrize(("for_gpus", "share"), [(True, "0.85"), (False, "0.5")])
def test_vllm_leaves_room_on_a_device(
    monkeypatch: pytest.MonkeyPatch, for_gpus: bool, share: str
) -> None:
    flag = "--gpu-memory-utilization"
    monkeypatch.setattr(versions, "is_for_gpus", lambda: for_gpus)
    command = server_command("org/model")
    assert command[command.index(flag) + 1] == share
    assert flag not in server_command("org/model", connector=False)
    own = server_command("org/model", flags=[f"{flag}=0.7"])
    assert [word for word in own if word.startswith(flag)] == [f"{flag}=0.7"]


def test_an_allocator_with_which_vllm_takes_no_connector_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ConfigError, match=r"^PYTORCH_CUDA_ALLOC_CONF: .*--enable-sleep-mode"):
        server_command("org/model")
    server_command("org/model", connector=False)
    server_command("org/model", flags=["--enable-sleep-mode"])


@pytest.mark.parametrize("flag", ["--kv-transfer-config={}", "--kv_transfer_config"])
def test_a_second_connector_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="set by cacheblend-rag"):
        server_command("org/model", flags=[flag])


def test_an_old_vllm_is_refused() -> None:
    with pytest.raises(EngineUnavailableError, match=r"vLLM 0\.25\.2 is too old, 0\.26 or newer"):
        versions.check_version("0.25.2")


@pytest.mark.parametrize(
    ("found", "warned"),
    [("0.30.0", True), ("0.31.0", False), ("0.32.4+cu130", False), ("0.40", True), ("dev", True)],
)
def test_a_vllm_that_was_not_tested_is_warned_of(
    caplog: pytest.LogCaptureFixture, found: str, warned: bool
) -> None:
    versions.check_version(found)
    assert bool(caplog.records) == warned


def test_vllm_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[vllm\]"):
        versions.installed_version()
