from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cacheblend_rag.bench import shapes
from cacheblend_rag.blend import rectangles
from cacheblend_rag.blend.onednn import has_onednn
from tests.toy import TOY

TINY = shapes.ModelShape(
    "tiny", "llama", 4, 32, 4, 2, 64, 512, 2048, {"rope_type": "default", "rope_theta": 1e4}
)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": TINY})


def test_attention_of_scattered_rows(bench, monkeypatch):
    monkeypatch.setattr(rectangles, "LEAF_KEYS", 50)
    given = ("attention", "--shape", "tiny", "--tokens", 100, "--repeat", 1)
    (row,) = bench(*given, "--json").json["rows"]
    assert row["computed_rows"] == 32 + round(0.15 * 68)
    products = {"matmul", "full prefill, matmul"} if has_onednn() else set()
    assert set(row["seconds"]) == {"full prefill", "sdpa", "rectangles"} | products
    assert all(0 <= far < 1e-5 for far in row["largest_difference"].values())
    assert "42 of" in bench(*given).stdout

    outcome = bench("attention", "--shape", "tiny", "--tokens", 20)
    assert outcome.code == 2
    assert "tokens=20 must be above 32" in outcome.stderr


def test_onednn(bench):
    given = ("onednn", "--shape", "tiny", "--prompt-tokens", 100, "--cached-tokens", 20)
    found = bench(*given, "--repeat", 1, "--json").json
    assert [row["what"] for row in found["rows"]] == ["prefill", "decode step"]
    for row in found["rows"]:
        assert set(row["seconds"]) == {"pytorch", "packed", "packed, matmul attention"}
        assert min(row["seconds"].values()) > 0
    assert found["packed_weights"] == 0  # they are small
    assert found["matmul_attention"] is has_onednn()
    assert "decode step" in bench(*given, "--repeat", 1).stdout


def test_registry(bench):
    outcome = bench(
        "registry", "--chunks", 40, "--prompt-characters", 6000, "--repeat", 2, "--json"
    )
    assert outcome.json["chunks"] == 40
    assert outcome.json["found"] == outcome.json["expected"] > 0
    assert "chunk registry" in bench("registry", "--chunks", 4, "--repeat", 1).stdout


def test_token_index(bench):
    given = (
        "token_index", "--chunks", 40, "--chunk-tokens", 200, "--prompt-tokens", 1000,
        "--repeat", 1,
    )  # fmt: skip
    found = bench(*given, "--json").json
    shares = {row["prompt"]: row["found"] for row in found["prompts"]}
    assert shares["without chunks"] == shares["anchors of one chunk"] == 0
    assert shares["with chunks"] > 0.8
    assert shares["parts of many chunks"] > 0.9
    assert found["mib"] > 40 * 200 * 4 / 2**20
    assert "while adding" in bench(*given).stdout


def test_shared_tokens(bench):
    given = ("shared_tokens", "--chunks", 30, "--chunk-tokens", 200)
    found = bench(*given, "--json").json
    assert found["objects"] == 1
    assert 1 < found["bytes_per_token"] < 3
    assert "tokens in an object store" in bench(*given).stdout


def test_token_edges(bench):
    given = ("token_edges", "--model", TOY, "--tokens", 100, "--passages", 8)
    rows = bench(*given, "--json").json["rows"]
    assert {(row["model"], row["tokens"], row["passages"]) for row in rows} == {("toy", 100, 8)}
    assert min(row["found"] for row in rows) >= 0.97
    assert max(row["most_lost"] for row in rows) in (1, 2)
    assert "bullets -" in bench(*given).stdout


def test_precision_tells_bytes_time_and_error(bench):
    outcome = bench(
        "precision", "--shape", "tiny", "--chunk-tokens", 256, "--questions", 1,
        "--repeat", 1, "--json",
    )  # fmt: skip
    assert outcome.code == 0
    native, fp8, int8 = outcome.json["rows"]
    assert [row["precision"] for row in (native, fp8, int8)] == ["native", "fp8", "int8"]
    assert native["keys_error"] == native["values_error"] == 0
    assert 0 < int8["keys_error"] < fp8["keys_error"] < 0.05
    assert 0 < int8["values_error"] < fp8["values_error"] < 0.05
    assert fp8["bytes_per_token"] < 0.7 * native["bytes_per_token"]
    assert all(
        row[f"{verb}_seconds"] > 0 for row in (native, fp8, int8) for verb in ("put", "load")
    )


def test_prompts_that_begin_alike(bench):
    given = (
        "prefix", "--shape", "tiny", "--instruction-tokens", 200, "--chunks", 2,
        "--chunk-tokens", 40, "--question-tokens", 8, "--repeat", 1,
    )  # fmt: skip
    found = bench(*given, "--json").json
    assert found["prompt_tokens"] == 288
    assert {len(taken) for taken in found["runs"].values()} == {1}
    assert "question speedup" in bench(*given).stdout
    outcome = bench(*given[:3], "--instruction-tokens", 2000)
    assert outcome.code == 2
    assert "positions of tiny" in outcome.stderr


def test_answers_decoded_together(bench):
    given = (
        "batch_decode", "--model", TOY, "--prompts", 3, "--chunks", 2, "--chunk-tokens", 24,
        "--answer-tokens", 5, "--repeat", 1,
    )  # fmt: skip
    found = bench(*given, "--json").json
    names = {"one", "one after another", "batch", "threads"}
    assert set(found["runs"]) == names
    assert all(found[f"{name} seconds"] > 0 for name in names)
    assert found["batch over one"] > 0
    assert found["same answers by batch"] == found["same answers by threads"] == 3
    assert "speedup of batch" in bench(*given).stdout


def test_requests_after_a_start(bench):
    given = (
        "warm_start", "--model", TOY, "--requests", 2, "--chunks", 2, "--sentences", 6,
        "--repeat", 1,
    )  # fmt: skip
    found = bench(*given, "--json").json
    assert [len(run["seconds"]) for run in found["runs"]] == [2]
    first, last = found["seconds"]
    assert found["first_over_last"] == first / last
    assert found["prompt_tokens"] > 2 * 6 * 10

    outcome = bench("warm_start", "--engine", "other")
    assert outcome.code == 2
    assert "engine='other' must be transformers or vllm" in outcome.stderr


def test_seconds_from_a_command_to_its_first_token(bench, monkeypatch, tmp_path):
    from tests.benchmarks import start

    monkeypatch.setattr(start, "TEXTS", 1)
    root = Path(__file__).parents[2]
    given = ("start", "--model", TOY, "--repeat", 1, "--against", root)
    found = bench(*given, "--json").json
    for what in ("import", "toy"):
        for unit in ("seconds", "processor seconds"):
            assert found[f"{what} here {unit}"] > 0
            ratio = found[f"{what} against {unit}"] / found[f"{what} here {unit}"]
            assert found[f"{what} {unit} over ours"] == pytest.approx(ratio)

    for wrong, said in ((("--model", "other"), "model='other'"), (("--against", tmp_path), "root")):
        outcome = bench("start", *wrong)
        assert (outcome.code, said in outcome.stderr) == (2, True)


FEW = ("--chunks", 60, "--room", 0.3, "--requests", 120, "--drawn", 3, "--chunk-tokens", 12)


def test_filling_warms_a_store_by_its_traffic(bench):
    given = ("--question-tokens", 4, "--pause", 0.03, "--neighbours", 20, "--shape", "tiny")
    found = bench("fill", *FEW, *given, "--json").json
    assert [row["requests"] for row in found["hundreds"]] == [100, 20]
    for row in found["hundreds"]:
        assert 0 < row["hit_share"] <= row["seen_share"] <= 1, "only what was missed is stored"
        assert row["speedup"] > 0
    assert found["computed"] >= 18 == found["room_chunks"]
    assert found["neighbours"]["requests"] == 20
    assert found["neighbours"]["filled_meanwhile"] > 0
    table = bench("fill", *FEW, *given)
    assert "60 chunks registered, room for 18" in table.stdout


@pytest.mark.parametrize("wrong", [("--drawn", 61), ("--room", 0), ("--selector", "nonsense")])
def test_a_fill_that_cannot_be_measured_is_refused(bench, wrong):
    outcome = bench("fill", *FEW, "--shape", "tiny", *wrong)
    assert (outcome.code, outcome.stdout) == (2, "")


def test_lookups_among_few_and_many(bench, monkeypatch):
    given = ("--few", 10, "--many", 200, "--asked", 5, "--repeat", 1)
    found = bench("lookups", *given, "--json").json
    assert [(row["tier"], row["stored"]) for row in found["lookups"]] == [
        (tier, stored) for tier in ("host", "disk", "redis") for stored in (10, 200)
    ]
    few, many, *_ = found["lookups"]
    assert min(v for row in found["lookups"] for v in row.values() if isinstance(v, float)) > 0
    for kind in ("find", "miss", "open"):
        name = f"{kind}_microseconds"
        assert found["ratios"][0][kind] == pytest.approx(many[name] / few[name])
    (row,) = bench("lookups", *given, "--many", 12, "--tier", "s3", "--json").json["ratios"]
    assert row["tier"] == "s3"
    monkeypatch.setattr("shutil.which", lambda name: None)
    outcome = bench("lookups", *given)
    assert "disk" in outcome.stdout
    assert "redis-server" in outcome.stderr
    assert bench("lookups", *given, "--few", 3).code == 2


def test_faults_compares_with_memory_alone(bench):
    given = ("--shape", "tiny", "--chunks", 2, "--chunk-tokens", 24, "--repeat", 2)
    found = bench("faults", *given, "--json").json
    assert [(row["chunks"], row["redis"]) for row in found["rows"]] == [
        (where, death) for where in ("stored", "missing") for death in ("refuses", "hangs")
    ]
    assert min(row[f] for row in found["rows"] for f in ("seconds", "alone_seconds", "ratio")) > 0
    assert "Redis hangs, missing chunks" in bench("faults", *given).stdout
    outcome = bench("faults", "--shape", "tiny", "--chunk-tokens", 900)
    assert outcome.code == 2
    assert "prompt_tokens=3616 must be below 2048" in outcome.stderr


def test_tiers_are_measured_on_servers_of_their_own(bench):
    found = bench("tiers", "--chunk-mib", 1, "--repeat", 1, "--json").json
    assert [row.pop("tier") for row in found["tiers"]] == ["host", "disk", "redis", "s3"]
    for row in found["tiers"]:
        assert min(row.values()) > 0
    assert found["left_out"] == []


def test_servers_that_are_not_installed_are_left_out_and_named(bench, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("tests.local_servers.find_spec", lambda name: None)
    found = bench("tiers", "--chunk-mib", 1, "--repeat", 1, "--json").json
    assert [row["tier"] for row in found["tiers"]] == ["host", "disk"]
    assert ["redis-server" in found["left_out"][0], "moto" in found["left_out"][1]] == [True, True]


def test_help_is_made_of_the_plan(bench):
    shown = bench("registry", "--help").stdout
    assert "Time to find registered chunks" in shown
    assert "--prompt-characters" in shown


def test_a_neighbours_prompt_that_has_no_room_is_refused_before_vllm_starts(bench):
    outcome = bench("decode_gap", "--chunks", 200)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "prompt_tokens=102432" in outcome.stderr


def test_layers_are_profiled(bench, tmp_path):
    given = ("profile_layers", "--model", TOY, "--questions", 2, "--answer-tokens", 2)
    found = bench(*given, "--json").json
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2, 3]
    assert all(
        0 <= row[name] <= 1 for row in found["layers"] for name in ("all_layers", "question")
    )
    assert found["layers"][3]["question"] > found["layers"][0]["question"], (
        "it looks at upper layers"
    )
    rows = {row["set"]: row for row in found["sets"]}
    assert rows["question"]["compute_share"] > rows["random"]["compute_share"]
    assert rows["question"]["compute_share"] > rows["question_mid"]["compute_share"]
    assert rows["question"]["kv_before"] == 1
    assert rows["random"]["kv_before"] == 0
    text = "one two three four five six seven"
    passages = [{"question": "why?", "answers": ["so"], "ctxs": [{"title": "", "text": text}] * 3}]
    (tmp_path / "data.json").write_text(json.dumps(passages))
    outcome = bench(
        *given, "--data", tmp_path / "data.json", "--passages", 2, "--chunk-words", 3,
        "--passage-words", 6, "--ratio", 0.5,
    )  # fmt: skip
    assert "share of KV before layer 0" in outcome.stdout


def test_a_guard_finds_what_is_bad(bench):
    outcome = bench("guard", "--questions", 1, "--runs", 40, "--samples", 60, "--json")
    rows = {(row["lead_in"], row["ratio"], row["setting"]): row for row in outcome.json["measured"]}
    assert len(rows) == 9
    assert all(row["compared"] == 1 for row in rows.values())
    assert rows["instruction", 0.0, "adjacent"]["divergence"] > 0.1
    contextual = rows["document", 0.0, "fragments"]
    assert contextual["divergence"] < contextual["prefill_divergence"]
    assert outcome.json["simulated"]["false_alarms"] == 0
    assert outcome.json["simulated"]["noticed"] >= 0.95
    assert "said" in bench("guard", "--questions", 0, "--runs", 5).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_long_documents(bench):
    given = (
        "long_document", "--model", TOY, "--tokens", "1500,3000", "--chunk-tokens", 256,
        "--overlap", 32, "--window", 3, "--max-tokens", 2,
    )  # fmt: skip
    first, second = bench(*given, "--json").json["rows"]
    assert first["computed_chunks"] == first["chunks"] < second["chunks"]
    assert second["windows"] == second["chunks"] - 2
    assert second["computed_tokens"] < second["prompt_tokens"] / 2
    assert first["bytes_on_disk"] < second["bytes_on_disk"]
    assert second["memory_before"] < second["peak_memory"]
    assert 0 < second["mean_kl"] < 10


def test_what_spans_cost(bench):
    given = (
        "tracing", "--model", TOY, "--chunks", 2, "--sentences", 6, "--repeat", 2,
    )  # fmt: skip
    found = bench(*given, "--json").json
    assert found["blended"]
    assert found["prompt_tokens"] > 2 * 6 * 10
    off, on, again = found["runs"].values()
    assert [len(run) for run in (off, on, again)] == [2, 2, 2]
    turns = [one / other - 1 for one, other in zip(on, off, strict=True)]
    assert found["slowdown"] == pytest.approx(sum(turns) / 2)
    assert found["making_share"] == found["making_seconds"] / found["off_seconds"]
    assert found["received_spans"] > 3 * 3, "of three requests, each with phases below"
    assert "what spans cost" in bench(*given).stdout


def test_what_a_trace_adds(bench):
    given = (
        "trace_overhead", "--model", TOY, "--chunks", 2, "--chunk-tokens", 40, "--repeat", 1,
    )  # fmt: skip
    found = bench(*given, "--json").json
    assert found["prompt_tokens"] > 80
    assert [row["selector"] for row in found["rows"]] == ["question_mid", "hkvd"]
    for row in found["rows"]:
        assert {len(taken) for taken in row["runs"].values()} == {1}
        assert set(row["seconds"]) == set(row["runs"])
    assert "overhead" in bench(*given, "--selector", "hkvd").stdout


def test_structured_outputs_are_valid(bench):
    given = ("structured", "--model", TOY, "--answers", 2, "--calls", 2)
    found = bench(*given, "--json").json
    assert (found["valid_alone"], found["valid_with_passages"], found["valid_calls"]) == (2, 2, 2)
    assert found["blended"] == 2
    assert 0 < found["mask_milliseconds"] <= found["mask_milliseconds_worst"]
