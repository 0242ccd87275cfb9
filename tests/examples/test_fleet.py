"""The fleet of the example: one command, two replicas, and no request lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.toy import TOY

pytest.importorskip("vllm")

FLEET = Path(__file__).parents[2] / "examples" / "distributed" / "fleet.py"


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    small = ("--model", TOY, "--questions", "30", "--threads", "2", "--tokens", "400")
    done = subprocess.run(
        [sys.executable, str(FLEET), "--json", *small],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return dict(json.loads(done.stdout))


def total(told: dict[str, Any], name: str) -> int:
    return sum(counts[name] for counts in told["steps"].values())


def test_no_request_is_lost_when_a_replica_and_redis_are_killed(told: dict[str, Any]) -> None:
    assert total(told, "lost") == 0, told
    assert total(told, "requests") == total(told, "answered") + total(told, "ended")
    killed = told["steps"]["replica one killed"]
    assert killed["retried"] > 0
    assert killed["ended"] >= 2, "two long streams were at work on it"
    assert not any("\n" in error for error in killed["errors"])
    assert total(told, "ended") == killed["ended"]


def test_replicas_reuse_what_the_other_has_computed(told: dict[str, Any]) -> None:
    other = told["steps"]["asked of replica other"]
    assert other["hits"]["redis"] > 0
    assert other["misses"] == 0


def test_a_replica_that_comes_back_has_its_chunks(told: dict[str, Any]) -> None:
    assert told["computed_after_restart"] == 0
    back = told["steps"]["asked of replica one"]
    assert back["hits"]["redis"] > 0
    assert back["misses"] == 0


def test_without_redis_chunks_come_from_s3(told: dict[str, Any]) -> None:
    without = told["steps"]["Redis killed"]
    assert without["hits"]["s3"] > 0
    assert without["answered"] == without["requests"]


def test_a_replica_that_comes_back_is_asked_again(told: dict[str, Any]) -> None:
    assert told["served"]["one"] > told["served_before"]["one"] > 0
