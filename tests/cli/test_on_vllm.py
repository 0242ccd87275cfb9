"""Benchmarks and `eval` on the real vLLM; the models are tiny: starting takes the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from cacheblend_rag.bench import shapes
from cacheblend_rag.bench.plans import TtftPlan
from cacheblend_rag.bench.vllm import engine_options
from cacheblend_rag.bench.workload import run_in_turns
from tests.engines.vllm.forking import fork_engines
from tests.toy import TOY
from tests.toy.questions import toy_dataset

TINY = shapes.ModelShape(
    "tiny", "llama", 4, 128, 2, 1, 64, 512, 4096, {"rope_type": "default", "rope_theta": 1e4}
)
SIZES = ("--shape", "tiny", "--chunk-tokens", 48, "--question-tokens", 5, "--eager")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module", autouse=True)
def _forked():
    if find_spec("vllm") is not None:
        fork_engines()


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": TINY})


@needs_vllm
@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_time_to_first_token(cli, engine):
    outcome = cli(
        "bench", "ttft", "--engine", engine, *SIZES, "--chunks", 3, "--repeat", 2,
        "--ratio", 0.25, "--ratio", 0, "--selector", "prior", "--tier", "disk", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    rows = outcome.json["rows"]
    assert [(row["tier"], row["ratio"]) for row in rows] == [("disk", 0.25), ("disk", 0)]
    recomputed, reused = (row["work_bound"] for row in rows)
    assert recomputed > 1
    assert reused is None, "vLLM computes the question itself"
    for row in rows:
        assert (row["engine"], row["prompt_tokens"]) == (engine, 3 * 48 + 5)
        assert row["batched_tokens"] >= row["prompt_tokens"]
        assert row["speedup"] == pytest.approx(row["full_seconds"] / row["blend_seconds"])
        for name in ("full", "blend", "prefix_caching"):
            first, second = row["runs"][name]
            assert row[f"{name}_seconds"] == pytest.approx((first + second) / 2)


@needs_vllm
@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_time_to_first_token_of_a_model_by_its_name(cli, engine):
    outcome = cli(
        "bench", "ttft", "--engine", engine, "--model", TOY, "--chunk-tokens", 48,
        "--question-tokens", 5, "--eager", "--chunks", 3, "--repeat", 1, "--ratio", 0.25,
        "--selector", "question_mid", "--tier", "host", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    row = outcome.json
    assert (row["engine"], row["model"], row["shape"]) == (engine, "toy", None)
    assert 3 * 45 <= row["prompt_tokens"] <= 3 * 48 + 5 + 2 * 3 + 1
    assert row["batched_tokens"] >= row["prompt_tokens"]


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
        assert theirs["exact_match"] == ours["exact_match"]
        assert (theirs["kl"] is None) == (ours["selector"] in ("full", "no_passages"))
        assert theirs["recomputed_share"] == pytest.approx(ours["recomputed_share"])
        assert theirs["compute_share"] == pytest.approx(ours["compute_share"], abs=0.05)


@needs_vllm
def test_throughput_is_measured():
    sizes = "--chunk-tokens 48 --question-tokens 5 --questions 3 --chunks 4 --drawn 2"
    command = f"-m tests.benchmarks.throughput {sizes} --answer-tokens 3 --eager --json"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert (found["questions"], found["chunks"], found["prompt_tokens"]) == (3, 4, 2 * 48 + 5)
    assert found["over_plain"] == pytest.approx(found["blend_rps"] / found["plain_rps"])
    assert found["precompute_seconds"] > 0


def test_every_turn_begins_with_another_case_and_the_first_is_not_counted():
    done: list[tuple[str, int]] = []

    def case(name):
        def run(turn):
            done.append((name, turn))
            return float(turn)

        return run

    seconds = run_in_turns({name: case(name) for name in "abc"}, 2, lambda _: None)
    assert seconds == {name: [1.0, 2.0] for name in "abc"}
    assert ["".join(n for n, t in done if t == turn) for turn in range(3)] == ["abc", "bca", "cab"]


@pytest.mark.parametrize("name", ["mistral-7b", "llama-3.1-8b"])
@pytest.mark.parametrize("chunks", [8, 62])
def test_large_shapes_take_the_documented_prompts(name, chunks):
    plan = TtftPlan(shape=name, chunks=chunks, dtype="bfloat16")
    options = engine_options(plan, plan.prompt_tokens, prompts=1)
    assert plan.prompt_tokens <= options["max_model_len"] <= plan.model_shape.max_positions
    # 32 layers of keys and values, 8 heads of 128, 2 bytes each
    assert options["kv_cache_memory_bytes"] >= plan.prompt_tokens * 32 * 2 * 8 * 128 * 2
