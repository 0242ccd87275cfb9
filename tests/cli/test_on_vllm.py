"""Benchmarks and `eval` on the real vLLM; the models are tiny: starting takes the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.benchmarks import shapes
from tests.benchmarks.gpu import __main__ as gpu
from tests.benchmarks.throughput import engine_options
from tests.engines.vllm.forking import fork_engines
from tests.toy import TOY
from tests.toy.questions import toy_dataset

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module", autouse=True)
def _forked():
    if find_spec("vllm") is not None:
        fork_engines()


@needs_vllm
def test_time_to_first_token_beside_vllms_prefix_caching(cli):
    outcome = cli(
        "bench", "ttft", TOY, "--engine", "vllm", "--chunks", 3, "--chunk-tokens", 48,
        "--repeat", 2, "--set", "selector=prior", "--set", "recompute_ratio=0.25", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    row = outcome.json
    assert (row["engine"], row["model"], row["tiers"]) == ("vllm", "toy", ["host"])
    assert row["speedup"] == pytest.approx(row["full_seconds"] / row["blend_seconds"])
    assert row["bound"] > 1
    for name in ("full", "blend", "prefix_caching"):
        first, second = row["runs"][name]
        assert row[f"{name}_seconds"] == pytest.approx((first + second) / 2)


@needs_vllm
def test_eval_gives_the_table_of_the_embedded_engine(tmp_path):
    toy_dataset(["adjacent"], 4, 9_271_828).save(tmp_path / "notes.json")
    flags = (
        "--model", TOY, "--dataset", tmp_path / "notes.json", "--rules",
        "prior=0.15,hkvd=0.15", "--set", "dtype=float32", "--json",
    )  # fmt: skip
    embedded, vllm = (
        json.loads(
            subprocess.run(
                [sys.executable, "-m", "cacheblend_rag", "eval", *engine, *map(str, flags)],
                env={**os.environ, "VLLM_CPU_CI_ENV": "1"},  # no compiler, which takes a minute
                stdout=subprocess.PIPE, text=True, check=True,
            ).stdout
        )["rows"]
        for engine in ((), ("--engine", "vllm"))
    )  # fmt: skip
    for name in ("lead_in", "selector", "ratio"):
        assert [row[name] for row in vllm] == [row[name] for row in embedded]
    for ours, theirs in zip(embedded, vllm, strict=True):
        assert theirs["holds_answer"] == ours["holds_answer"]
        assert (theirs["kl"] is None) == (ours["selector"] in ("full", "no_passages"))
        assert theirs["recomputed_share"] == pytest.approx(ours["recomputed_share"])
        assert theirs["compute_share"] == pytest.approx(ours["compute_share"], abs=0.05)


@needs_vllm
def test_throughput_is_measured():
    sizes = "--chunk-tokens 48 --question-tokens 5 --questions 3 --chunks 4 --drawn 2"
    command = f"-m tests.benchmarks.throughput {sizes} --answer-tokens 3 --eager"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert (found["questions"], found["chunks"], found["prompt_tokens"]) == (3, 4, 2 * 48 + 5)
    assert found["over_plain"] == pytest.approx(found["blend_rps"] / found["plain_rps"])
    assert found["precompute_seconds"] > 0


@needs_vllm
@pytest.mark.parametrize(
    ("steps", "names"), [("exactness", ["embedded", "eager"]), ("ttft", ["blends", "plain"])]
)
def test_what_is_measured_of_vllm_on_a_gpu(tmp_path, steps, names):
    out = tmp_path / "found.json"
    chosen = [part for name in names for part in ("--step", name)]
    gpu.main(["--toy", "--steps", steps, *chosen, "--out", str(out)])
    told = json.loads(out.read_text())["steps"]
    assert [step["reason"] for step in told.values()] == [None, None]
    rows = {row["case"]: row for step in told.values() for row in step["rows"]}
    assert not any("failed" in row for row in rows.values())
    if steps == "ttft":
        assert rows["before layer 0, 0.05"]["compute_share"] < rows["hkvd 0.15"]["compute_share"]
        assert rows["plain"]["ms"] > 0 < rows["prefix caching"]["ms"]
        return
    for case in ("ratio 1 and ordinary prefill", "ordinary prefill before and after blends"):
        assert (rows[case]["same_tokens"], rows[case]["first_difference"]) == (16, 0.0)
    for case in ("ratio 0", "the default", "ordinary prefill"):
        assert rows[f"{case}, both engines"]["first_difference"] < 1e-4
    assert rows["a blend, and again from the prefix cache"]["same_tokens"] == 16
    assert rows["streams beside blends"]["same_streams"] == rows["streams beside blends"]["streams"]


@pytest.mark.parametrize("name", ["mistral-7b", "llama-3.1-8b"])
@pytest.mark.parametrize("chunks", [8, 62])
def test_large_shapes_take_the_documented_prompts(name, chunks):
    shape, tokens = shapes.named_shape(name), chunks * 512 + 32
    options = engine_options(shape, torch.bfloat16, tokens, prompts=1)
    assert tokens <= options["max_model_len"] <= shape.max_positions
    # 32 layers of keys and values, 8 heads of 128, 2 bytes each
    assert options["kv_cache_memory_bytes"] >= tokens * 32 * 2 * 8 * 128 * 2
