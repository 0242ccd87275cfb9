from __future__ import annotations

import json

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document

FIELDS = {
    "setting", "lead_in", "selector", "ratio", "default", "exact_match", "f1", "rouge_l", "ci95",
    "holds_answer", "holds_answer_p", "recomputed_share", "compute_share",
}  # fmt: skip
FIDELITY = {
    "kl_first", "kl_first_ci95", "kl", "kl_ci95", "top1", "top1_ci95", "same_answer",
    "gold_logprob", "gold_logprob_mean", "gold_logprob_change", "gold_logprob_change_ci95",
    "recovered_kl", "recovered_kl_ci95",
}  # fmt: skip
TTFT = {"ttft_seconds", "ttft_speedup", "ttft_speedup_ci95"}
DEFAULT = ("document", "question_mid", BlendConfig().ratio)
SETTINGS = ("adjacent", "fragments")
DOCUMENTS = tuple(
    Document(name, (f"This note is about {name}.", "She plays the violin. " * 8, "She owns a cat."))
    for name in ("Clara Berg", "Nora Field")
)


def key(row):
    return row["lead_in"], row["selector"], row["ratio"]


@pytest.fixture(scope="session")
def questions_file(tmp_path_factory):
    """Two short questions in two settings, in the documents format."""
    chunks = [chunk for document in DOCUMENTS for chunk in document.to_chunks()]
    kept = {"adjacent": tuple(chunks), "fragments": tuple(c for c in chunks if c.context)}
    questions = [
        EvalQuestion(f"What does {d.document_id} play?", ("violin",), kept[s], DOCUMENTS, s)
        for s in SETTINGS
        for d in DOCUMENTS
    ]
    path = tmp_path_factory.mktemp("data") / "notes.json"
    EvalDataset("notes", tuple(questions)).save(path)
    return path


@pytest.fixture
def evaluate(cli, small_model):
    def run(*arguments):
        return cli("eval", "--model", small_model, "--max-tokens", 2, *arguments, "--json")

    return run


def test_rows_of_a_grid(evaluate, questions_file):
    outcome = evaluate(
        "--dataset", questions_file, "--ratios", "0.1", "--selectors", "prior,hkvd",
        "--lead-ins", "instruction,document", "--check-layers", "2",
    )  # fmt: skip
    assert outcome.code == 0
    found = outcome.json
    about = {"dataset", "questions", "prompts", "model", "dtype", "engine", "chat_template"}
    assert set(found) == {*about, "selector_options", "rows"}
    assert found["selector_options"] == {}
    assert (found["dtype"], found["engine"]) == ("float32", "transformers")
    assert (found["dataset"], found["questions"]) == ("notes", 2)
    assert all(set(row) == FIELDS for row in found["rows"])
    expected = [
        ("none", "full", 1.0),
        ("instruction", "none", 0.0),
        ("instruction", "prior", 0.1),
        ("instruction", "hkvd", 0.1),
        ("document", "none", 0.0),
        ("document", "prior", 0.1),
        ("document", "hkvd", 0.1),
        DEFAULT,
    ]
    for setting in SETTINGS:
        assert [key(r) for r in found["rows"] if r["setting"] == setting] == expected


def test_passages_file(evaluate, tmp_path):
    item = {
        "question": "Who wrote the notes?",
        "answers": ["Ada"],
        "ctxs": [{"title": "", "text": f"Page {n} says that Ada wrote notes."} for n in range(4)],
    }
    path = tmp_path / "notes.json"
    path.write_text(json.dumps([item, item, item]))
    outcome = evaluate("--dataset", path, "--questions", 2, "--passages", 3)
    assert (outcome.json["dataset"], outcome.json["questions"]) == ("notes", 2)
    assert {row["setting"] for row in outcome.json["rows"]} == {"retrieved"}
    asked = [row for row in outcome.json["rows"] if not row["default"]]
    assert {row["lead_in"] for row in asked} == {"none", "instruction"}


def test_prompt_too_long_for_the_model_is_one_line(evaluate, tmp_path):
    item = {"question": "Who?", "answers": ["x"], "ctxs": [{"text": "word " * 9000}]}
    path = tmp_path / "long.json"
    path.write_text(json.dumps([item]))
    outcome = evaluate("--dataset", path)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "question 'Who?'" in outcome.stderr


def test_answers_are_greedy_whatever_the_model_says(evaluate, questions_file, drawn_with):
    outcome = evaluate("--dataset", questions_file, "--ratios", "0.1", "--selectors", "prior")
    assert outcome.code == 0
    assert len(drawn_with) >= 12
    assert all((said.temperature, said.repetition_penalty) == (0, 1) for said in drawn_with)


def test_fidelity_and_times_are_fields_of_the_rows(evaluate, questions_file, tmp_path):
    flags = (
        "--dataset", questions_file, "--ratios", "0.2", "--selectors", "prior", "--lead-ins",
        "instruction", "--questions", 1, "--fidelity", "--ttft", "--resume",
        tmp_path / "results.jsonl",
    )  # fmt: skip
    found = evaluate(*flags).json
    assert found["chat_template"] is True
    for setting in SETTINGS:
        rows = [row for row in found["rows"] if row["setting"] == setting]
        assert [row["default"] for row in rows].count(True) == 1
        (default,) = [row for row in rows if row["default"]]
        assert key(default) == DEFAULT
        cached = [row for row in rows if row["selector"] == "prefix_caching"]
        assert set(cached[0]) == FIELDS | TTFT
        assert all(set(row) == FIELDS | FIDELITY | TTFT for row in rows if row not in cached)
        assert {key(row) for row in rows} >= {
            ("none", "no_context", 1.0), ("instruction", "none", 0.0), ("document", "none", 0.0),
            ("instruction", "random", 0.2), ("instruction", "prior", 0.2),
        }  # fmt: skip
    assert evaluate(*flags).json == found


def test_fidelity_has_a_table_of_its_own(cli, small_model, questions_file):
    outcome = cli(
        "eval", "--model", small_model, "--dataset", questions_file, "--max-tokens", 1,
        "--selectors", "random", "--ratios", "0.1", "--settings", "adjacent", "--fidelity",
    )  # fmt: skip
    assert outcome.code == 0
    assert "notes, adjacent: 2 questions, fidelity to full prefill" in outcome.stdout
    assert "no_context" in outcome.stdout
    assert "question_mid*" in outcome.stdout
