from __future__ import annotations

import pytest
from rich.console import Console

from cacheblend_rag import open_engine
from cacheblend_rag.cli import output
from cacheblend_rag.cli.explain import print_explained
from tests.observe.explained_prompts import HOSTILE, Page, explained
from tests.toy import TOY


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(output, "result_console", lambda: Console(width=160))


def test_a_question_to_a_collection_is_explained(cli, indexed, tmp_path):
    folder, (item, *_) = indexed
    page, given = tmp_path / "page.html", ("explain", item.question, "--from", folder)
    outcome = cli(*given, "--html", page, "--set", "recompute_ratio=0.2")
    assert outcome.code == 0
    for shown in (
        "were reused as stored", "time to the first token: ", "recompute ", "reused from disk",
    ):  # fmt: skip
        assert shown in outcome.stdout, shown
    assert f"page: {page}" in outcome.stderr.replace("\n", "")
    told = Page.of(page.read_text("utf-8")).text
    assert item.question in told
    assert "How far fresh KV is from stored KV" in told
    found = cli(*given, "--json").json
    assert "".join(found["tokens"]).count(item.question) == 1
    marked = [one for chunk in found["explanation"]["chunks"] for one in chunk["marked"]]
    recomputed = sum(one["fate"] == "recomputed" for one in marked)
    assert recomputed == found["report"]["recomputed_tokens"]


def test_a_prompt_is_explained_with_the_chunks_that_are_known(cli, tmp_path):
    passage = "The keeper of the harbour writes down every ship. " * 30
    (tmp_path / "prompt.txt").write_text(f"{passage}\n\nQuestion: Who?\nAnswer:")
    given = ("explain", "--prompt", tmp_path / "prompt.txt", "--set", f"model={TOY}", "--json")
    engine = open_engine("transformers", model=TOY, kv_path=tmp_path / "kv")
    engine.precompute([passage], progress=False)
    engine.close()
    found = cli(*given, "--set", f"kv_path={tmp_path / 'kv'}").json
    (chunk,) = found["explanation"]["chunks"]
    assert (chunk["hit"], chunk["tier"]) == (True, "disk")
    assert found["report"]["trace"]["layers"]


def test_hostile_text_reaches_no_terminal(capsys):
    print_explained(explained(HOSTILE, HOSTILE))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x00" not in shown
    assert "<script>" in shown
    assert "[31m" in shown, "markup is text"
