"""Every step finds what it says, and the program tells of each how it ended."""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.errors import ConfigError
from tests.benchmarks.gpu import __main__ as gpu
from tests.benchmarks.gpu.__main__ import STEPS, TOTAL_SECONDS, Step
from tests.benchmarks.gpu.child import plain
from tests.benchmarks.gpu.peak import peak_extra_bytes
from tests.benchmarks.gpu.requests import CASES
from tests.benchmarks.gpu.scene import Dimensions, Scene
from tests.benchmarks.shapes import TOY

pytestmark = pytest.mark.timeout(1800)  # each step has a limit of its own

NEEDS_CUDA: set[str] = set() if torch.cuda.is_available() else {"link", "graphs", "checks"}
NO_CUDA = "skipped: no CUDA device"
SCENE = Scene(is_toy=True, dimensions=Dimensions.of(TOY))
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """What a step finds, in this process."""
    (step,) = (step for step in STEPS if step.name == name)
    module, function = step.measure.split(":")
    return [plain(row) for row in getattr(import_module(module), function)(SCENE, lambda _: None)]


def test_every_chosen_step_ran_or_says_why_not(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--out", str(out), "--step", "graphs", "--step", "products"])
    found = json.loads(out.read_text())
    assert (found["format"], found["toy"], found["shape"]) == (1, True, "toy")
    named = {"status", "reason", "about", "limit_seconds", "seconds", "rows"}
    assert all(set(step) == named for step in found["steps"].values())
    told = {name: (one["status"], one["reason"]) for name, one in found["steps"].items()}
    skipped = ("skipped", NO_CUDA) if "graphs" in NEEDS_CUDA else ("done", None)
    assert told == {"products": ("done", None), "graphs": skipped}


@pytest.mark.parametrize("name", [one.name for one in STEPS if one.name not in NEEDS_CUDA])
def test_every_step_has_rows(name: str) -> None:
    assert rows(name)


@on_cpu
def test_only_what_needs_a_gpu_has_no_figures() -> None:
    failed = {
        (name, row["failed"] == NO_CUDA, row.get("kernel", ""))
        for name in (step.name for step in STEPS if step.name not in NEEDS_CUDA)
        for row in rows(name)
        if "failed" in row
    }
    refused = {(name, kernel.split()[0]) for name, _, kernel in failed}
    assert refused <= {("attention", "SDPA")}, "backends that CPUs lack"
    assert {row["on the device"] for row in rows("layer") if "rows" in row} == {NO_CUDA}


def test_kernels_compute_the_same_attention() -> None:
    errors = [row["error"] for row in rows("attention") if "error" in row]
    assert len(errors) >= 4
    assert max(errors) < (0.1 if torch.cuda.is_available() else 1e-5)


def test_chunks_are_laid_from_each_tier() -> None:
    laid = {(row["tier"], row["precision"], row["ms"] > 0) for row in rows("laying")}
    assert laid == {("host", "native", True), ("host", "fp8", True), ("device", "native", True)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_compute_other_rows_of_another_prompt() -> None:
    assert all(row["error"] < 0.05 for row in rows("graphs"))


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


def test_chunks_come_from_each_tier() -> None:
    assert list(dict.fromkeys(row["tier"] for row in rows("tiers"))) == [
        "device", "host", "disk", "disk, cold"
    ]  # fmt: skip
    for row in rows("tiers"):
        in_memory = row["tier"] == "disk, cold" and "set TMPDIR to a folder on a disk" in str(row)
        assert in_memory or row["blend_ms"] > 0


SECONDS = 3.0
WAIT_SECONDS = 30.0


def step(name: str, **needs: bool) -> Step:
    return Step(name, f"what {name}", f"tests.benchmarks.gpu_steps:{name}", SECONDS, **needs)


def test_every_step_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    steps = [step("fails"), step("crashes"), step("unknown"), step("hangs"), step("ends")]
    found = gpu.measure_gpu(out, SCENE, steps)
    assert json.loads(out.read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    told = found["steps"]
    assert {name: told[name]["status"] for name in told} == {
        "fails": "failed", "crashes": "failed", "unknown": "failed", "hangs": "late", "ends": "done"
    }  # fmt: skip
    assert all(told[name]["rows"] == [{"case": 1}] for name in ("fails", "crashes", "hangs"))
    assert told["fails"]["reason"] == "ValueError: no figure"
    assert told["crashes"]["reason"] == "exit status 9, at: what crashes"
    assert "a driver's last words" in told["crashes"]["output"]
    assert "unknown" in told["unknown"]["reason"]
    row = {"layers": TOY.layers, "nothing": "nan", "pairs": [[1, 2.5]]}
    assert told["ends"]["rows"] == [row]
    process = int(told["hangs"]["reason"].partition(", at: ")[2])
    until = time.monotonic() + WAIT_SECONDS  # until the system has removed it
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(process), "a step ends with what it has started"


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_all_steps_fit_in_nine_minutes_and_none_begins_once_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(one.seconds for one in STEPS) <= TOTAL_SECONDS < 9 * 60
    monkeypatch.setattr(gpu, "TOTAL_SECONDS", 0.0)
    found = gpu.measure_gpu(tmp_path / "gpu.json", SCENE, [step("ends")])
    assert found["steps"]["ends"]["reason"] == "skipped: no time left"


def test_a_file_that_cannot_be_written_is_told_before_any_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out='.*' cannot be written .*: give a file"):
        gpu.measure_gpu(tmp_path / "none" / "gpu.json", SCENE, [step("hangs")])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak is Linux's")
def test_peak_sees_memory_that_is_gone_again() -> None:
    size = 96 << 20
    peak = peak_extra_bytes(lambda: torch.ones(size, dtype=torch.uint8), torch.device("cpu"))
    assert peak is not None
    assert abs(peak - size) < 16 << 20
