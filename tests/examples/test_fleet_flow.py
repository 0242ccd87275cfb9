"""The fleet's steps over nginx, with servers that have no model: no request is lost."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.toy import TOY

HERE = Path(__file__).parent


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, its replicas replaced by stand-ins."""
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "examples" / "distributed"))
    module, services = importlib.import_module("fleet"), importlib.import_module("services")

    def stand_in(folder: Path, name: str, *_: Any) -> Any:
        port = services.free_port()
        command = [sys.executable, str(HERE / "stand_in_server.py"), str(port)]
        return services.Program(command, port, folder / f"{name}.log", "/health")

    monkeypatch.setattr(module, "replica", stand_in)
    return module


def test_a_killed_replica_loses_nothing_and_comes_back(fleet: ModuleType) -> None:
    told = fleet.run(TOY, 30, 2, 200, lambda _: None)
    steps = told["steps"]
    assert [counts["lost"] for counts in steps.values()] == [0] * 5, told
    killed = steps["replica one killed"]
    assert killed["retried"] >= 2, "two whole requests were at work on it"
    assert killed["ended"] >= 2, "two long streams were at work on it"
    for error in killed["errors"]:
        assert "broke off" in error
        assert "\n" not in error
    assert killed["requests"] == killed["answered"] + killed["ended"]
    assert told["served"]["one"] > told["served_before"]["one"] > 0
    assert told["served_before"]["other"] > 0
    shown = fleet.table(told)
    assert f"| replica one killed | {killed['requests']} | {killed['retried']} " in shown
    assert shown.splitlines()[-1].startswith(
        f"| all | {sum(s['requests'] for s in steps.values())}"
    )
