from __future__ import annotations

import pytest

from cacheblend_rag.demo.passages import load_passages

METHODS = ["full", "reuse", "blend", "contextual"]


def test_demo_answers_side_by_side(cli, slow_blends):
    outcome = cli("demo", "--questions", 2, "--toy-only", "--json")
    assert outcome.code == 0
    found = outcome.json
    assert found["real"] is None
    assert [method["method"] for method in found["methods"]] == METHODS
    assert len(found["questions"]) == 2
    for asked in found["questions"]:
        assert asked["prompt_tokens"] >= 1000
        assert list(asked["answers"]) == METHODS
        assert asked["answers"]["full"]["reused_tokens"] == 0
        assert asked["answers"]["reuse"]["recomputed_tokens"] == 0
        assert 0 < asked["answers"]["blend"]["recomputed_tokens"] < asked["prompt_tokens"] / 5
        assert asked["question"] in outcome.stderr


def test_a_model_answers_from_the_real_passages(cli, slow_blends, small_model):
    outcome = cli("demo", "--questions", 1, "--model", small_model, "--json")
    assert outcome.code == 0, outcome.stderr
    real, sample = outcome.json["real"], load_passages()
    assert (real["model"], real["passages"]) == (str(small_model), len(sample.passages))
    assert [one["question"] for one in real["questions"]] == [q.question for q in sample.questions]
    for asked in real["questions"]:
        full, blend = (asked[name]["report"] for name in ("full", "blend"))
        assert (full["reused_tokens"], full["blended"]) == (0, False)
        assert full["prompt_tokens"] == blend["prompt_tokens"]
        assert blend["reused_tokens"] > blend["prompt_tokens"] / 2
    totals = real["totals"]
    assert totals["speedup"] == pytest.approx(totals["full_seconds"] / totals["blend_seconds"])
    assert totals["not_blended"] == []
    assert f"{totals['full_right']} of {len(sample.questions)} by full prefill" in outcome.stderr


def test_without_smollm2_the_demo_names_what_fetches_it(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHEBLEND_MODELS", str(tmp_path))
    outcome = cli("demo")
    assert (outcome.code, outcome.stdout, outcome.stderr.count("\n")) == (2, "", 1)
    assert "run cacheblend-rag models get smollm2" in outcome.stderr


def test_the_documents_are_saved_to_be_indexed(cli, tmp_path):
    outcome = cli("demo", "--save", tmp_path / "notes")
    files = sorted((tmp_path / "notes").iterdir())
    texts = [file.read_text() for file in files]
    assert len(files) == 24
    assert all("\n\n" in text for text in texts[:5])
    question, answer = outcome.stdout.splitlines()[1].strip().removesuffix(")").split("  (")
    name = question.removeprefix("What is the sport of ").removesuffix("?")
    assert any(name in text and answer in text for text in texts)
    assert f"cacheblend-rag index {tmp_path / 'notes'} --model demo" in outcome.stdout
    again = cli("demo", "--save", tmp_path / "notes")
    assert (again.code, again.stderr.count("\n")) == (2, 1)
    assert "File exists" in again.stderr


def test_demo_answers_are_greedy_whatever_the_model_says(cli, drawn_with, small_model):
    assert cli("demo", "--questions", 1, "--model", small_model, "--json").code == 0
    assert drawn_with
    assert all((said.temperature, said.repetition_penalty) == (0, 1) for said in drawn_with)


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
    both = cli("demo", "--save-passages", tmp_path / "a", "--save", tmp_path / "b")
    assert (both.code, both.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "a").exists()
