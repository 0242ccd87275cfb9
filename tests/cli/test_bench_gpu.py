"""``bench gpu --toy``: every step runs or says why not, and the result has its form."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from cacheblend_rag.bench.gpu.requests import CASES
from cacheblend_rag.bench.gpu.steps import STEPS
from cacheblend_rag.cli.gpu_tables import print_gpu
from cacheblend_rag.cli.main import app
from tests.cli.conftest import outcome_of

pytestmark = pytest.mark.timeout(1800)  # each step has a limit of its own

NEEDS_CUDA = {"link", "graphs", "checks"}
NO_CUDA = "skipped: no CUDA device"
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    outcome = outcome_of(app, "bench", "gpu", "--toy", "--out", out, "--json")
    assert outcome.code == 0
    assert json.loads(out.read_text()) == outcome.json
    return outcome.json


def rows(found: dict[str, Any], step: str) -> list[dict[str, Any]]:
    return found["steps"][step]["rows"]


def test_every_step_ran_or_says_why_not(found):
    steps = found["steps"]
    assert list(steps) == [step.name for step in STEPS]
    assert (found["format"], found["toy"], found["shape"]) == (1, True, "toy")
    for name, step in steps.items():
        assert set(step) - {"output"} == {
            "status", "reason", "about", "limit_seconds", "seconds", "rows"
        }, name  # fmt: skip
        if name in NEEDS_CUDA and not torch.cuda.is_available():
            assert (step["status"], step["reason"], step["rows"]) == ("skipped", NO_CUDA, [])
        else:
            assert (step["status"], step["reason"]) == ("done", None), step
            assert step["rows"]


@on_cpu
def test_only_what_needs_a_gpu_has_no_figures(found):
    failed = {
        (name, row["failed"] == NO_CUDA, row.get("kernel", ""))
        for name in found["steps"]
        for row in rows(found, name)
        if "failed" in row
    }
    without = {(name, kernel) for name, skipped, kernel in failed if skipped}
    assert without == {("attention", "flex")}
    refused = {(name, kernel.split()[0]) for name, skipped, kernel in failed if not skipped}
    assert refused <= {("attention", "SDPA")}, "backends that CPUs lack"
    assert {row["on the device"] for row in rows(found, "layer") if "rows" in row} == {NO_CUDA}


def test_kernels_compute_the_same_attention(found):
    errors = [row["error"] for row in rows(found, "attention") if "error" in row]
    assert len(errors) >= 4
    assert max(errors) < (0.1 if torch.cuda.is_available() else 1e-5)


def test_chunks_are_laid_from_each_tier(found):
    laid = {(row["tier"], row["precision"], row["ms"] > 0) for row in rows(found, "laying")}
    assert laid == {("host", "native", True), ("host", "fp8", True), ("device", "native", True)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_compute_other_rows_of_another_prompt(found):
    assert all(row["error"] < 0.05 for row in rows(found, "graphs"))


def test_every_blend_is_compared_with_ordinary_prefill_of_the_same_prompt(found):
    measured = rows(found, "ttft")
    assert [row["case"] for row in measured] == list(CASES)
    lengths = [run[0] for row in measured for run in row["runs"]]
    assert len(set(lengths)) == len(lengths), "each prompt has a new length"
    for row in measured:
        assert row["speedup"] == pytest.approx(row["ordinary_ms"] / row["blend_ms"], rel=0.01)
    share = {row["case"]: row["compute_share"] for row in measured}
    assert share["reuse only, 0"] < share["before layer 0, 0.15"] < share["hkvd 0.15"] < 1
    assert share["hkvd 0.05"] < share["hkvd 0.15"]


def test_chunks_come_from_each_tier(found):
    assert list(dict.fromkeys(row["tier"] for row in rows(found, "tiers"))) == [
        "device", "host", "disk", "disk, cold"
    ]  # fmt: skip
    for row in rows(found, "tiers"):
        in_memory = row["tier"] == "disk, cold" and "set TMPDIR to a folder on a disk" in str(row)
        assert in_memory or row["blend_ms"] > 0


def test_the_result_is_shown_as_tables(found, capsys):
    print_gpu(found)
    shown = capsys.readouterr().out
    for name, step in found["steps"].items():
        assert f"{name}: {step['about']}" in shown
    assert NO_CUDA in shown or torch.cuda.is_available()
    assert "ordinary ms" in shown
    assert "runs" not in shown


def test_one_step_can_be_chosen(cli, tmp_path):
    found = cli(
        "bench", "gpu", "--toy", "--step", "facts", "--out", tmp_path / "gpu.json", "--json"
    ).json
    assert list(found["steps"]) == ["facts"]
    facts = {row["fact"]: row["value"] for row in rows(found, "facts")}
    assert facts["torch"] == torch.__version__
