"""``ask --document`` answers from a file window by window, and goes on after an interruption."""

from __future__ import annotations

import pytest

from cacheblend_rag.engines.transformers import TransformersEngine
from tests.toy import generate_collection

SIZES = [
    part
    for one in ("chunk_tokens=128", "overlap=16", "window=3", "max_tokens=4")
    for part in ("--set", one)
]


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """A file of eight notes of the demo's corpus."""
    documents, _ = generate_collection(8, 1, seed=3)
    path = tmp_path_factory.mktemp("notes") / "notes.txt"
    path.write_text("\n\n".join(document.text for document in documents))
    return path


@pytest.fixture
def analyze(cli, notes, small_model, tmp_path):
    def run(*arguments, question="Who plays the violin?"):
        own = ("--set", f"model={small_model}", "--set", f"kv_path={tmp_path / 'kv'}")
        asked = ("--document", notes, *own)
        return cli("ask", question, *asked, *SIZES, *arguments)

    return run


def test_json_is_one_object_of_plan_answers_and_result(analyze):
    outcome = analyze("--json")
    assert outcome.code == 0
    found = outcome.json
    assert found["windows"] == len(found["answers"]) == found["chunks"] - 2
    assert found["computed_chunks"] == found["chunks"] > 4
    assert found["reused_tokens"] > found["prompt_tokens"] / 3
    assert found["engine"] == "transformers"
    assert [one["window"] for one in found["answers"]] == list(range(found["windows"]))
    assert found["answer"]

    again = analyze("--json", question="Who owns a cat?").json
    assert (again["computed_chunks"], again["stored_chunks"]) == (0, found["chunks"])


def test_answers_are_printed_then_the_result_and_a_report(analyze):
    outcome = analyze("--set", "combine=refine")
    assert outcome.code == 0
    said = outcome.stdout
    windows = said.count("window ")
    assert f"window 1 of {windows}, characters 0 to" in said
    assert f"window {windows} of {windows}, characters" in said
    answer = said.partition("answer:\n")[2].partition("\n\nreport:")[0]
    assert said.count(answer) >= 2, "the last window's"
    assert f"{windows + 2} chunks, {windows} windows of 3" in said
    assert f"prompts: {windows} answered, 0 answered before\n" in said


def test_an_interruption_says_how_to_go_on(analyze, tmp_path, monkeypatch):
    generate, asked = TransformersEngine.generate, []

    def interrupted(engine, *arguments, **options):
        asked.append(arguments)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return generate(engine, *arguments, **options)

    monkeypatch.setattr(TransformersEngine, "generate", interrupted)
    kept = tmp_path / "answers.jsonl"
    outcome = analyze("--resume", kept)
    assert outcome.code == 130
    assert "interrupted: chunk KV stays, the same command goes on from here" in outcome.stderr
    assert len(kept.read_text().splitlines()) == 1
    assert analyze("--json", "--resume", kept).json["resumed_prompts"] == 1


def test_a_file_without_text_is_one_line(cli, tmp_path, small_model):
    (tmp_path / "empty.txt").write_text(" \n")
    outcome = cli("ask", "--document", tmp_path / "empty.txt", "--set", f"model={small_model}")
    assert outcome.code == 2
    assert outcome.stderr.count("\n") == 1
    assert "empty.txt cannot be analyzed" in outcome.stderr
