"""``bench``: what it measures, of this process and of a server, and the requests that it writes."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from shutil import copytree

import pytest

from cacheblend_rag.bench import store
from cacheblend_rag.bench.workload import pieces, run_in_turns
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.models import resolve
from cacheblend_rag.text.encoder import PromptEncoder
from tests.contracts.served import COMPLETIONS, DOCUMENTS, Served
from tests.servers import redis_place, tier_at
from tests.toy import TOY

SMALL = ("--chunks", 2, "--chunk-tokens", 48, "--repeat", 1)
FIELDS = {
    "engine", "model", "prompt_tokens", "selector", "ratio", "tiers", "full_seconds",
    "blend_seconds", "speedup", "bound", "load_seconds", "hidden_share", "runs",
}  # fmt: skip


def test_a_model_is_measured_with_any_setting(cli, slow_blends, redis):
    url = redis_place(redis)
    given = ("--set", "selector=hkvd", "--set", "recompute_ratio=0.25", "--set", f"tiers={url}")
    found = cli("bench", "ttft", TOY, *SMALL, *given, "--json").json
    assert set(found) == FIELDS
    assert (found["engine"], found["model"], found["selector"]) == ("transformers", "toy", "hkvd")
    assert (found["ratio"], found["tiers"]) == (0.25, ["redis"])
    assert 2 * 45 + 20 < found["prompt_tokens"] <= 2 * 48 + 32 + 5
    assert found["speedup"] == pytest.approx(found["full_seconds"] / found["blend_seconds"])
    assert found["bound"] > 1
    assert found["load_seconds"] > 0 <= found["hidden_share"] <= 1
    assert {name: len(taken) for name, taken in found["runs"].items()} == {"full": 1, "blend": 1}
    assert tier_at(url).usage().entries == 0, "it is left as it was"


def test_a_models_own_weights_are_measured_on_real_text_by_greedy_answers(
    cli, slow_blends, drawn_with
):
    outcome = cli("bench", "ttft", TOY, *SMALL)
    assert outcome.code == 0
    for said in ("toy, 1", "tokens, transformers", "question_mid, ratio 0.08", "KV from", "host"):
        assert said in outcome.stdout
    assert drawn_with
    assert all((said.temperature, said.repetition_penalty) == (0, 1) for said in drawn_with)


@pytest.fixture(scope="module")
def server(tmp_path_factory):

    model = Path(copytree(resolve(TOY), tmp_path_factory.mktemp("served") / "toy"))
    with Served(model, "transformers") as server:
        yield server


def test_a_server_is_measured_by_its_url(cli, server):
    given = ("--engine", server.url, "--json", "--set", "recompute_ratio=0")
    found = cli("bench", "ttft", TOY, *SMALL, *given).json
    assert (found["engine"], found["ratio"]) == ("transformers-server", 0)
    assert found["full_seconds"] > 0 < found["blend_seconds"]
    assert server.ask("GET", "/v1/cacheblend/stats").json()["chunks"] == 0


def test_a_workloads_requests_reuse_its_documents(cli, server, tmp_path):
    assert cli("bench", "workload", tmp_path / "rag", "--requests", 3, "--chunks", 2).code == 0
    for file in (tmp_path / "rag" / "documents").iterdir():
        stored = server.ask("PUT", f"{DOCUMENTS}/{file.name}", content=file.read_bytes())
        assert stored.json()["computed"] == 4, stored.text
    lines = (tmp_path / "rag" / "requests.jsonl").read_text().splitlines()
    assert len(lines) == 3
    for line in map(json.loads, lines):
        assert set(line) == {"prompt", "output_tokens"}
        body = {"prompt": line["prompt"], "max_tokens": 1}
        usage = server.ask("POST", COMPLETIONS, json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"] - 90
    refused = cli("bench", "workload", tmp_path / "rag", "--chunks", 41)
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)


def test_bench_store_measures_tiers(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "CHUNK_MIB", 1)
    given = ("host", f"disk://{tmp_path}", "--repeat", 1)
    rows = cli("bench", "store", *given, "--json").json["tiers"]
    assert [row.pop("tier") for row in rows] == ["host", "disk"]
    for row in rows:
        assert set(row) == {"get_gib_s", "put_gib_s"}
        assert min(row.values()) > 0
    assert not [*tmp_path.rglob("*.safetensors")]
    assert "disk" in cli("bench", "store", *given).stdout


def test_pieces_of_real_text_are_as_long_as_words_allow_and_share_none():
    encoder, texts = PromptEncoder(load_tokenizer(TOY)), load_real_texts().passages

    def count(text):
        return len(encoder.chunk(text))

    cut = [*islice(pieces(random.Random(3), texts, 512, count), 32)]
    assert all(500 <= count(piece) <= 512 for piece in cut)
    drawn, source = (Counter(word for text in of for word in text.split()) for of in (cut, texts))
    assert drawn.total() > 5000
    assert drawn <= source


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
