"""Every step finds what it says, and the program tells of each how it ended."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.errors import ConfigError
from tests.benchmarks.gpu import __main__ as gpu
from tests.benchmarks.gpu import steps
from tests.benchmarks.gpu.__main__ import CALLS, FACTS, TOTAL_SECONDS, Step
from tests.benchmarks.gpu.requests import CASES, Scene

SCENE = Scene("toy")
WAIT_SECONDS = 30.0


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """What a step finds, in this process."""
    return list(getattr(steps, name)(SCENE.name, ""))


def test_every_chosen_step_ran_or_says_why_not(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--out", str(out), "--step", "facts", "--step", "checks"])
    told = json.loads(out.read_text())["steps"]
    assert (told["facts"]["status"], told["facts"]["rows"][0]["fact"]) == ("done", "python")
    if not torch.cuda.is_available():
        assert told["checks"]["reason"] == "no CUDA device"


def test_every_blend_is_compared_with_ordinary_prefill_of_the_same_prompt() -> None:
    measured = rows("ttft")
    assert [row["case"] for row in measured] == list(CASES)
    lengths = [run[0] for row in measured for run in row["runs"]]
    assert len(set(lengths)) == len(lengths), "each prompt has a new length"
    for row in measured:
        assert row["speedup"] == pytest.approx(row["ordinary_ms"] / row["blend_ms"], rel=0.01)
    share = {row["case"]: row["compute_share"] for row in measured}
    assert share["reuse only, 0"] < share["before layer 0, 0.15"] < share["hkvd 0.15"] < 1
    assert share["hkvd 0.05"] < share["hkvd 0.15"]


def test_chunks_come_from_each_tier_and_memory_is_told() -> None:
    assert list(dict.fromkeys(row["tier"] for row in rows("tiers"))) == list(steps.TIERS)
    assert all(row["blend_ms"] > 0 for row in rows("tiers"))
    assert all(row["prompt_kv_mib"] > 0 for row in rows("memory"))


def test_every_step_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "TOY_FACTOR", 1.0)
    out = tmp_path / "gpu.json"
    limits = {"fails": 60, "crashes": 60, "hangs": 15, "ends": 60}
    steps_of = "tests.benchmarks.gpu_steps"
    chosen = [Step(name, "", f"{steps_of}:{name}", limit) for name, limit in limits.items()]
    found = gpu.measure_gpu(out, SCENE, chosen)
    assert json.loads(out.read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    told = found["steps"]
    wanted = {"fails": "failed", "crashes": "failed", "hangs": "late", "ends": "done"}
    assert {name: told[name]["status"] for name in told} == wanted
    assert all(told[name]["rows"] == [{"case": 1}] for name in ("fails", "crashes", "hangs"))
    assert told["fails"]["reason"] == "exit 1: ValueError: no figure"
    assert told["crashes"]["reason"] == "exit 9: a driver's last words"
    assert told["ends"]["rows"] == [{"shape": "toy", "nothing": "nan", "pairs": [[1, 2.5]]}]
    process = told["hangs"]["reason"].split()[-1]
    until = time.monotonic() + WAIT_SECONDS  # until the system has removed it
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(process), "a step ends with what it has started"


def is_running(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_all_steps_fit_in_nine_minutes_and_none_begins_once_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, chosen in CALLS.values():
        assert sum(one.seconds for one in chosen) <= TOTAL_SECONDS < 9 * 60
    monkeypatch.setattr(gpu, "TOTAL_SECONDS", 0.0)
    found = gpu.measure_gpu(tmp_path / "gpu.json", SCENE, [FACTS])
    assert found["steps"]["facts"]["reason"] == "no time left"


def test_a_file_that_cannot_be_written_is_told_before_any_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out='.*' cannot be written .*: give a file"):
        gpu.measure_gpu(tmp_path / "none" / "gpu.json", SCENE, [FACTS])
