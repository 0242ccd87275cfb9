from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend_rag import TransformersEngine, models
from cacheblend_rag.bench import shapes
from cacheblend_rag.bench.plans import PromptTokens, TtftPlan
from cacheblend_rag.bench.ttft import TtftRow, peak_extra_bytes
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.transformers import loading
from cacheblend_rag.report import BlendReport, ChunkReport, PhaseSeconds
from tests.servers import redis_place, tier_at
from tests.toy import TOY

TINY = shapes.ModelShape(
    "tiny", "llama", 4, 32, 4, 2, 64, 512, 2048, {"rope_type": "default", "rope_theta": 1e4}
)
SMALL = ("--chunks", 2, "--chunk-tokens", 48, "--question-tokens", 4, "--repeat", 1)
FIELDS = {
    "engine", "shape", "model", "prompt_tokens", "selector", "ratio", "tier", "full_seconds",
    "blend_seconds", "speedup", "bound", "share_of_bound", "work_bound",
    "share_of_work_bound", "peak_extra_bytes", "prompt_kv_bytes",
    "prefix_caching_seconds", "batched_tokens", "runs", "load_seconds", "load_hidden_seconds",
    "hidden_share", "precision", "selector_options",
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": TINY})


def test_a_selectors_options_are_measured_and_told(cli):
    command = ("bench", "ttft", "--shape", "tiny", *SMALL, "--tier", "host", "--ratio", 0.25)
    asked = (*command, "--selector", "question_mid", "--json")
    plain, first = cli(*asked).json, cli(*asked, "--selector-options", '{"layers": [0]}').json
    assert (plain["selector_options"], first["selector_options"]) == ({}, {"layers": [0]})
    assert first["bound"] > plain["bound"], "a shallow probe has fewer layers"


def test_one_row_stands_alone(cli, slow_blends):
    row = cli("bench", "ttft", "--shape", "tiny", *SMALL, "--tier", "host", "--json").json
    assert set(row) == FIELDS
    assert (row["engine"], row["shape"], row["ratio"]) == ("transformers", "tiny", 0.15)
    assert row["speedup"] == pytest.approx(row["full_seconds"] / row["blend_seconds"])
    assert row["share_of_bound"] == pytest.approx(row["speedup"] / row["bound"])
    assert row["share_of_work_bound"] == pytest.approx(row["speedup"] / row["work_bound"])
    assert row["prompt_kv_bytes"] == 100 * 4 * 2 * 2 * 8 * 4


def test_a_models_own_weights_are_measured_on_real_text(cli, slow_blends, monkeypatch):
    reports, prompts, generate = [], [], TransformersEngine.generate

    def answered(engine, prompt, *given, **named):
        told = generate(engine, prompt, *given, **named)
        reports.append(told.report)
        prompts.append(prompt)
        return told

    monkeypatch.setattr(TransformersEngine, "generate", answered)
    command = ("bench", "ttft", "--model", TOY, *SMALL, "--ratio", 0.25, "--ratio", 0, "--json")
    rows = cli(*command).json["rows"]
    assert [(row["tier"], row["ratio"]) for row in rows] == [
        ("host", 0.25), ("host", 0), ("disk", 0.25), ("disk", 0)
    ]  # fmt: skip
    told = reports[0]
    chunks = sum(chunk.tokens for chunk in told.chunks)
    assert 90 <= chunks <= 96
    kept = 1 - 0.75 * chunks / told.prompt_tokens
    config = AutoConfig.from_pretrained(models.resolve(TOY))
    layers, width = config.num_hidden_layers, config.num_key_value_heads * config.head_dim
    for row in rows:
        assert set(row) == FIELDS
        assert (row["model"], row["shape"]) == ("toy", None)
        assert row["prompt_tokens"] == told.prompt_tokens == chunks + told.computed_tokens
        assert row["prompt_kv_bytes"] == told.prompt_tokens * layers * 2 * width * 4
    assert 1 / rows[0]["bound"] == pytest.approx((2 + (layers - 2) * kept) / layers)
    assert 1 / rows[1]["bound"] == pytest.approx(told.computed_tokens / told.prompt_tokens)
    words = set(" ".join(load_real_texts().passages).split())
    cut = [segment.text for segment in prompts[0].segments if segment.chunk]
    assert len(cut) == 2
    assert all(set(text.split()) <= words for text in cut)
    monkeypatch.setattr(loading, "load_model", None)
    longer = cli("bench", "ttft", "--model", TOY, "--chunks", 4, "--chunk-tokens", 1015)
    assert "must be below 4096, the positions of " in longer.stderr


def test_table_without_json_of_greedy_answers_whatever_the_model_says(cli, drawn_with):
    outcome = cli("bench", "ttft", "--shape", "tiny", *SMALL, "--tier", "disk")
    assert outcome.code == 0
    assert "100 tokens" in outcome.stdout
    assert "disk" in outcome.stdout
    assert drawn_with
    assert all((said.temperature, said.repetition_penalty) == (0, 1) for said in drawn_with)


def test_a_tier_is_measured_by_its_url_and_left_as_it_was(cli, redis):
    url = redis_place(redis)
    outcome = cli(
        "bench", "ttft", "--shape", "tiny", *SMALL, "--tier", "host", "--tier", url, "--json"
    )
    host, redis = outcome.json["rows"]
    assert (host["tier"], redis["tier"]) == ("host", "redis")
    assert tier_at(url).usage().entries == 0
    assert (host["load_seconds"], host["hidden_share"]) == (None, None)
    assert redis["load_seconds"] > 0 <= redis["hidden_share"] <= 1


def test_what_is_hidden_is_the_share_that_was_not_waited_for():
    runs = {"full": [4.0], "blend": [1.0]}
    loads = [(0.1, 0.9), (0.5, 0.5), (0.3, 0.9)]
    row = TtftRow.of(plan(), "toy", 0.15, "disk", runs, report=REPORT, loads=loads)
    assert (row.load_seconds, row.load_hidden_seconds, row.hidden_share) == (0.3, 0.9, 0.75)
    assert (row.work_bound, row.share_of_work_bound) == (5.0, 0.8)
    memory = TtftRow.of(plan(), "toy", 0.15, "host", runs, report=REPORT)
    assert (memory.load_seconds, memory.hidden_share) == (None, None)


REPORT = BlendReport(
    "toy", True, None, 500, 300, 100, 100, 0.25, "hkvd", "document", 0.2, PhaseSeconds(),
    (ChunkReport("0" * 32, 0, 400, True, recomputed=100),),
)  # fmt: skip


def plan(**changes):
    sizes = {"chunks": 8, "chunk_tokens": 50, "question_tokens": 100}
    return TtftPlan(shape="tiny", **{**sizes, **changes})


def test_bound_counts_whole_layers_up_to_the_check_layer():
    # 500 tokens, 4 layers: 2 whole, 2 with 100 question and 0.25 x 400 chunk tokens
    assert 1 / plan().bound(0.25) == pytest.approx((2 + 2 * 200 / 500) / 4)
    assert 1 / plan(check_layers=(2,)).bound(0.25) == pytest.approx((3 + 200 / 500) / 4)


def test_bound_of_rows_chosen_before_layer_0_counts_those_rows():
    assert 1 / plan(selector="prior").bound(0.25) == pytest.approx(200 / 500)
    assert 1 / plan(selector="question_mid").bound(0.25) == pytest.approx((200 + 75) / 500)


def test_bound_of_a_measured_prompt_counts_its_own_tokens():
    # 600 tokens, 400 of chunks, 100 behind them: 100 more are computed between chunks
    tokens = PromptTokens(prompt=600, chunks=400, question=100)
    assert 1 / plan().bound(0.25, tokens) == pytest.approx((2 + 2 * 300 / 600) / 4)
    assert 1 / plan(selector="question_mid").bound(0.25, tokens) == pytest.approx((300 + 75) / 600)


@pytest.mark.parametrize("selector", ["hkvd", "prior", "question_mid"])
def test_bound_of_plain_reuse_and_of_everything(selector):
    assert plan(selector=selector).bound(0.0) == pytest.approx(5.0)
    assert plan(selector=selector).bound(1.0) == pytest.approx(1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak is Linux's")
def test_peak_sees_memory_that_is_gone_again():
    size = 96 << 20
    peak = peak_extra_bytes(lambda: torch.ones(size, dtype=torch.uint8), torch.device("cpu"))
    assert peak is not None
    assert abs(peak - size) < 16 << 20


def test_random_weights_repeat_with_their_seed():
    first, again = (TINY.build_model(dtype=torch.float32, device="cpu") for _ in range(2))
    other = TINY.build_model(dtype=torch.float32, device="cpu", seed=1)
    weights = [m.model.layers[2].mlp.up_proj.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.lm_head.weight is first.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("smollm2-135m", 134.5),
        ("smollm2-360m", 361.8),
        ("qwen2.5-0.5b", 494.0),
        ("llama-3.2-1b", 1235.8),
        ("mistral-7b", 7241.7),
        ("llama-3.1-8b", 8030.3),
    ],
)
def test_named_shapes_have_the_published_number_of_weights(name, millions):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.named_shape(name).config())
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_bench_store_measures_tiers_beside_their_raw_limit(cli, tmp_path):
    given = ("--tier", "host", "--tier", f"disk://{tmp_path}", "--chunk-mib", 1, "--repeat", 1)
    rows = cli("bench", "store", *given, "--json").json["tiers"]
    assert [row.pop("tier") for row in rows] == ["host", "disk"]
    for row in rows:
        assert set(row) == {"get_gib_s", "put_gib_s", "raw_get_gib_s", "raw_put_gib_s"}
        assert min(row.values()) > 0
    assert not [*tmp_path.rglob("*.safetensors")]
    assert "disk" in cli("bench", "store", *given).stdout
