from __future__ import annotations

import pytest

from cacheblend_rag.demo.passages import load_passages


def test_a_model_answers_from_the_passages_in_three_ways(cli, slow_blends, small_model):
    outcome = cli("demo", small_model, "--json")
    assert outcome.code == 0, outcome.stderr
    told, sample = outcome.json, load_passages()
    assert (told["model"], told["passages"]) == (str(small_model), len(sample.passages))
    asked_of_it = [one["question"] for one in told["questions"]]
    assert asked_of_it == [one.question for one in sample.questions[:6]]
    for asked in told["questions"]:
        full, reuse, blend = (asked[name]["report"] for name in ("full", "reuse", "blend"))
        assert (full["reused_tokens"], full["blended"]) == (0, False)
        assert full["prompt_tokens"] == reuse["prompt_tokens"] == blend["prompt_tokens"]
        assert reuse["recomputed_tokens"] == 0
        assert reuse["reused_tokens"] > blend["reused_tokens"] > blend["prompt_tokens"] / 2
    totals = told["totals"]
    assert totals["speedup"] == pytest.approx(totals["full_seconds"] / totals["blend_seconds"])
    assert totals["not_blended"] == []
    assert f"{totals['full_right']} of 6 by full prefill" in outcome.stderr


def test_without_smollm2_the_demo_names_what_fetches_it(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHEBLEND_MODELS", str(tmp_path))
    outcome = cli("demo")
    assert (outcome.code, outcome.stdout, outcome.stderr.count("\n")) == (2, "", 1)
    assert "run cacheblend-rag models get smollm2" in outcome.stderr


def test_the_passages_are_saved_to_be_indexed(cli, tmp_path):
    outcome = cli("demo", "--save-passages", tmp_path / "passages")
    sample = load_passages()
    saved = {file.stem: file.read_text() for file in (tmp_path / "passages").glob("*.txt")}
    assert saved == {passage.title: f"{passage.text}\n" for passage in sample.passages}
    assert "CC BY 4.0" in outcome.stdout
    assert "Trivedi" in (tmp_path / "passages" / "NOTICE").read_text()
    for item in sample.questions:
        assert f"  {item.question}  ({item.answers[0]})" in outcome.stdout.splitlines()
    assert f"cacheblend-rag index {tmp_path / 'passages'}\n" in outcome.stdout
    again = cli("demo", "--save-passages", tmp_path / "passages")
    assert (again.code, again.stderr.count("\n")) == (2, 1)
    assert "File exists" in again.stderr
