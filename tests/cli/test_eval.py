from __future__ import annotations

import json

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document

FIGURES = (
    "ttft_speedup", "f1", "holds_answer", "kl", "top1", "same_answer", "gold_logprob",
    "gold_logprob_change", "recovered_f1", "recovered_holds", "recovered_logprob", "recovered_kl",
)  # fmt: skip
FIELDS = {
    "setting", "lead_in", "selector", "ratio", "default", "recomputed_share", "compute_share",
    "early_kv_bytes", "ttft_seconds", "not_blended", *FIGURES,
    *(f"{name}_ci95" for name in FIGURES),
}  # fmt: skip
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
        return cli("eval", "--model", small_model, "--set", "max_tokens=2", *arguments)

    return run


def test_rows_of_rules_stand_beside_their_controls(evaluate, questions_file, tmp_path):
    flags = (
        "--dataset", questions_file, "--rules", "prior=0.1,hkvd=0.1", "--set", "check_layers=2",
        "--resume", tmp_path / "results.jsonl", "--json",
    )  # fmt: skip
    outcome = evaluate(*flags)
    assert outcome.code == 0
    found = outcome.json
    about = {"dataset", "prompts", "model", "dtype", "engine", "chat_template"}
    assert set(found) == {*about, "rows"}
    assert (found["dtype"], found["engine"]) == ("float32", "transformers")
    assert (found["dataset"], found["prompts"]) == ("notes", {"adjacent": 2, "fragments": 2})
    assert found["chat_template"] is True
    assert all(set(row) == FIELDS for row in found["rows"])
    probed = [row["selector"] == "question_mid" for row in found["rows"]]
    assert [row["early_kv_bytes"] > 0 for row in found["rows"]] == probed
    expected = [
        ("none", "full", 1.0),
        ("none", "no_passages", 1.0),
        ("instruction", "none", 0.0),
        ("document", "none", 0.0),
        ("document", "random", 0.1),
        ("document", "random", DEFAULT[2]),
        ("document", "prior", 0.1),
        ("document", "hkvd", 0.1),
        DEFAULT,
    ]
    for setting in SETTINGS:
        assert [key(r) for r in found["rows"] if r["setting"] == setting] == expected
    assert [row["default"] for row in found["rows"]].count(True) == 2
    assert evaluate(*flags).json == found


def test_passages_file_and_settings_of_ones_own(evaluate, tmp_path):
    item = {
        "question": "Who wrote the notes?",
        "answers": ["Ada"],
        "ctxs": [{"title": "", "text": f"Page {n} says that Ada wrote notes."} for n in range(4)],
    }
    path = tmp_path / "notes.json"
    path.write_text(json.dumps([item, item, item]))
    own = ("--set", "kind=instruction", "--set", "selector=prior", "--set", "recompute_ratio=0.5")
    options = ("--rules", "hkvd=0.1", "--set", 'selector_options={"reach": 0}')
    assert evaluate("--dataset", path, "--questions", 1, *options).code == 0
    found = evaluate("--dataset", path, "--questions", 2, "--rules", "", *own, "--json").json
    assert (found["dataset"], found["prompts"]) == ("notes", {"retrieved": 2})
    assert {row["lead_in"] for row in found["rows"]} == {"none", "instruction"}
    (default,) = [row for row in found["rows"] if row["default"]]
    assert key(default) == ("instruction", "prior", 0.5)


def test_prompt_too_long_for_the_model_is_one_line(evaluate, tmp_path):
    item = {"question": "Who?", "answers": ["x"], "ctxs": [{"text": "word " * 9000}]}
    path = tmp_path / "long.json"
    path.write_text(json.dumps([item]))
    outcome = evaluate("--dataset", path)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "question 'Who?'" in outcome.stderr


def test_each_setting_is_a_table(evaluate, questions_file):
    outcome = evaluate("--dataset", questions_file, "--rules", "", "--set", "settings=adjacent")
    assert outcome.code == 0
    assert "notes, adjacent: 2 questions" in outcome.stdout
    assert "fragments" not in outcome.stdout
    assert "no_passages" in outcome.stdout
    assert "question_mid*" in outcome.stdout
