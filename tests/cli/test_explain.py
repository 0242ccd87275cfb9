from __future__ import annotations

import pytest
from rich.console import Console

from cacheblend_rag.cli import output
from cacheblend_rag.cli.explain import print_explained
from tests.observe.explained_prompts import HOSTILE, Page, explained
from tests.toy import TOY


@pytest.fixture
def explain(cli, indexed):
    """Run ``explain QUESTION --from COLLECTION``."""
    return lambda question, *options: cli("explain", question, "--from", indexed[0], *options)


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(output, "result_console", lambda: Console(width=160))


def test_a_question_to_a_collection_is_explained(explain, indexed, tmp_path, wide):
    item, page = indexed[1][0], tmp_path / "page.html"
    outcome = explain(item.question, "--compare", "--html", page, "--ratio", 0.2)
    assert outcome.code == 0
    for shown in (
        "were reused as stored", "full prefill: first token after", "nats per token",
        "time to the first token", "recompute", "reused from disk", "KV deviation",
        "deviation by layer",
    ):  # fmt: skip
        assert shown in outcome.stdout, shown
    assert f"page: {page}" in outcome.stderr
    assert item.question in Page.of(page.read_text("utf-8")).text


def test_json_is_one_object(explain, indexed):
    item = indexed[1][0]
    found = explain(item.question, "--json", "--max-tokens", 4).json
    assert found["cost"] is None
    assert "".join(found["tokens"]).count(item.question) == 1
    assert len(found["tokens"]) == found["report"]["prompt_tokens"]
    recomputed = [
        token["position"]
        for chunk in found["explanation"]["chunks"]
        for token in chunk["marked"]
        if token["fate"] == "recomputed"
    ]
    assert len(recomputed) == found["report"]["recomputed_tokens"]


def test_a_prompt_is_explained_with_the_chunks_that_it_is_told(cli, indexed, tmp_path, wide):
    passage = indexed[1][0].question * 20
    (tmp_path / "passage.txt").write_text(passage)
    (tmp_path / "prompt.txt").write_text(f"{passage}\n\nQuestion: Who?\nAnswer:")
    given = ("--model", TOY, "--passage", tmp_path / "passage.txt", "--json")
    found = cli("explain", "--prompt", tmp_path / "prompt.txt", *given).json
    (chunk,) = found["explanation"]["chunks"]
    assert (chunk["hit"], chunk["reason_code"]) == (False, "not_stored")
    assert not found["report"]["blended"]


def test_the_folder_of_chunk_kv_knows_the_chunks(cli, tmp_path, wide):
    from cacheblend_rag import open_engine

    passage = "The keeper of the harbour writes down every ship. " * 30
    with_kv = open_engine("transformers", model=TOY, kv_path=tmp_path / "kv")
    with_kv.precompute([passage], progress=False)
    with_kv.close()
    (tmp_path / "prompt.txt").write_text(f"{passage}\n\nQuestion: Who?\nAnswer:")
    given = ("--model", TOY, "--kv-path", tmp_path / "kv", "--json", "--ratio", 0.1)
    found = cli("explain", "--prompt", tmp_path / "prompt.txt", *given).json
    (chunk,) = found["explanation"]["chunks"]
    assert (chunk["hit"], chunk["tier"]) == (True, "disk")
    assert found["report"]["trace"]["layers"]


def test_hostile_text_reaches_no_terminal(cli, capsys, wide):
    print_explained(explained(HOSTILE, HOSTILE))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x00" not in shown
    assert "<script>" in shown
    assert "[31m" in shown, "markup is text"
