"""What runs the steps of ``bench gpu``: each ends by itself, whatever the others do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cacheblend_rag.bench.gpu import run
from cacheblend_rag.bench.gpu.steps import STEPS, TOTAL_SECONDS, Step
from cacheblend_rag.bench.plans import GpuPlan
from cacheblend_rag.bench.shapes import TOY
from cacheblend_rag.errors import ConfigError

SECONDS = 3.0
WAIT_SECONDS = 30.0


def step(name: str, **needs: bool) -> Step:
    return Step(name, f"what {name}", f"tests.bench.gpu_steps:{name}", SECONDS, **needs)


def test_every_step_is_told_and_the_others_go_on(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    monkeypatch.setenv("GPU_OUT", str(out))
    steps = [step("fails"), step("crashes"), step("unknown"), step("reads"), step("ends")]
    labels: list[str] = []
    found = run.measure_gpu(GpuPlan(out=str(out), toy=True), labels.append, steps)
    assert json.loads(out.read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    told = found["steps"]
    assert {name: told[name]["status"] for name in told} == {
        "fails": "failed", "crashes": "failed", "unknown": "failed", "reads": "done", "ends": "done"
    }  # fmt: skip
    assert told["fails"]["rows"] == told["crashes"]["rows"] == [{"case": 1}]
    assert told["fails"]["reason"] == "ValueError: no figure"
    assert told["crashes"]["reason"] == "exit status 9, at: what crashes"
    assert "a driver's last words" in told["crashes"]["output"]
    assert "unknown" in told["unknown"]["reason"]
    (read,) = told["reads"]["rows"]
    assert list(json.loads(read["written"])["steps"]) == ["fails", "crashes", "unknown"]
    row = {"layers": TOY.layers, "nothing": "nan", "pairs": [[1, 2.5]]}
    assert told["ends"]["rows"] == [row]
    assert labels[0].startswith("1 of 5, fails: ")


def test_a_step_over_its_limit_ends_with_what_it_has_started(tmp_path):
    out = str(tmp_path / "gpu.json")
    found = run.measure_gpu(GpuPlan(out=out, toy=True), steps=[step("hangs"), step("ends")])
    late = found["steps"]["hangs"]
    assert late["status"] == "late"
    assert late["rows"] == [{"case": 1}]
    said, _, process = late["reason"].partition(", at: ")
    assert said == f"not done after {late['limit_seconds']:.0f} s"
    until = time.monotonic() + WAIT_SECONDS  # until the system has removed it
    while is_running(int(process)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(int(process))
    assert found["steps"]["ends"]["status"] == "done"


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_cannot_run_here_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    steps = [step("fails", needs_cuda=True), step("crashes", needs_checkout=True)]
    found = run.measure_gpu(GpuPlan(out=str(tmp_path / "gpu.json"), toy=True), steps=steps)
    told = found["steps"]
    assert told["fails"]["reason"] == "skipped: no CUDA device"
    assert told["crashes"]["reason"] == "skipped: not run from a checkout"
    assert {one["status"] for one in told.values()} == {"skipped"}


def test_no_step_begins_once_the_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TOTAL_SECONDS", 0.0)
    found = run.measure_gpu(GpuPlan(out=str(tmp_path / "gpu.json"), toy=True), steps=[step("ends")])
    assert found["steps"]["ends"]["reason"] == "skipped: no time left"


def test_all_steps_fit_in_nine_minutes():
    assert sum(one.seconds for one in STEPS) <= TOTAL_SECONDS < 9 * 60


def test_a_file_that_cannot_be_written_is_told_before_any_step(tmp_path):
    out = tmp_path / "none" / "gpu.json"
    with pytest.raises(ConfigError, match=r"out='.*' cannot be written .*: give a file"):
        run.measure_gpu(GpuPlan(out=str(out), toy=True), steps=[step("hangs")])
