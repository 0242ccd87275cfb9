from __future__ import annotations

import json

import pytest

from cacheblend_rag.cli.eval import default_rules, demo_dataset, grid_rules
from cacheblend_rag.demo.corpus import held_out_names
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, load_dataset
from cacheblend_rag.text.chunk import Document

FIELDS = {
    "setting", "lead_in", "selector", "ratio", "exact_match", "f1", "rouge_l", "ci95",
    "recomputed_share", "compute_share",
}  # fmt: skip
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
        "--lead-ins", "instruction,document", "--deviation", "k", "--check-layers", "2",
    )  # fmt: skip
    assert outcome.code == 0
    found = outcome.json
    assert set(found) == {"dataset", "questions", "rows"}
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
    ]
    for setting in SETTINGS:
        assert [key(r) for r in found["rows"] if r["setting"] == setting] == expected


def test_shares_say_what_was_computed(evaluate, questions_file):
    full, reuse, prior, hkvd = evaluate(
        "--dataset", questions_file, "--settings", "adjacent", "--ratios", "0.2",
        "--selectors", "prior,hkvd", "--lead-ins", "instruction",
    ).json["rows"]  # fmt: skip
    assert (full["recomputed_share"], full["compute_share"]) == (1.0, 1.0)
    assert reuse["recomputed_share"] == 0.0
    assert prior["recomputed_share"] == pytest.approx(0.2, abs=0.01)
    assert hkvd["recomputed_share"] == pytest.approx(0.2, abs=0.01)
    shares = [row["compute_share"] for row in (reuse, prior, hkvd, full)]
    assert shares == sorted(shares)


def test_drawn_and_saved_demo_questions_give_the_same_rows(evaluate, tmp_path):
    demo_dataset(["fragments"], 1, 3).save(tmp_path / "demo.json")
    flags = ("--ratios", "0.1", "--selectors", "prior", "--lead-ins", "document")
    saved = evaluate("--dataset", tmp_path / "demo.json", *flags).json
    drawn = evaluate("--settings", "fragments", "--questions", 1, "--seed", 3, *flags).json
    assert saved == drawn
    assert saved["dataset"] == "demo"


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
    assert {row["lead_in"] for row in outcome.json["rows"]} == {"none", "instruction"}


def test_prompt_too_long_for_the_model_is_one_line(evaluate, tmp_path):
    item = {"question": "Who?", "answers": ["x"], "ctxs": [{"text": "word " * 9000}]}
    path = tmp_path / "long.json"
    path.write_text(json.dumps([item]))
    outcome = evaluate("--dataset", path)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "question 'Who?'" in outcome.stderr


def test_setting_that_the_file_does_not_have_is_one_line(evaluate, questions_file):
    outcome = evaluate("--dataset", questions_file, "--settings", "shuffled")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "'shuffled'" in outcome.stderr


def test_table_without_json(cli, small_model, questions_file):
    outcome = cli(
        "eval", "--model", small_model, "--dataset", questions_file, "--max-tokens", 1,
        "--selectors", "question_prior", "--ratios", "0.1",
    )  # fmt: skip
    assert outcome.code == 0
    assert "notes, fragments: 2 questions" in outcome.stdout
    assert "question_prior" in outcome.stdout


def test_default_plan_fits_each_setting():
    data = demo_dataset([], 1, 1)
    plans = {setting: default_rules(setting, data.of_setting(setting)) for setting in data.settings}
    assert list(plans) == ["adjacent", "fragments", "shuffled"]
    required = {
        ("instruction", "none", 0.0), ("document", "none", 0.0), ("instruction", "hkvd", 0.15),
        ("instruction", "prior", 0.15), ("instruction", "random", 0.15),
    }  # fmt: skip
    for rules in plans.values():
        assert required <= {(r.lead_in, r.selector, r.ratio) for r in rules}
        assert len(rules) == len(set(rules))
    assert {
        ("instruction", selector, ratio)
        for selector in ("prior", "random")
        for ratio in (0.05, 0.1, 0.15, 0.2, 0.25)
    } <= {(r.lead_in, r.selector, r.ratio) for r in plans["adjacent"]}


def test_any_option_makes_a_grid_of_all_three():
    rules = grid_rules("0.3", None, None)
    assert rules is not None
    assert [(r.lead_in, r.selector, r.ratio) for r in rules] == [
        (lead_in, selector, ratio)
        for lead_in in ("instruction", "document")
        for selector, ratio in (("none", 0.0), ("hkvd", 0.3), ("prior", 0.3), ("random", 0.3))
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [((None, "guess", None), "selector='guess'"), ((None, None, "preface"), "lead_in='preface'")],
)
def test_grids_refuse_unknown_names(options, message):
    with pytest.raises(ConfigError, match=message):
        grid_rules(*options)


def test_no_option_is_no_grid():
    assert grid_rules(None, None, None) is None


def test_demo_questions_are_about_held_out_subjects_and_round_trip(tmp_path):
    data = demo_dataset(["adjacent", "fragments"], 5, 1)
    assert [len(data.of_setting(s)) for s in data.settings] == [5, 5]
    for question in data.questions:
        assert any(name in question.question for name in held_out_names())
        assert set(question.passages) <= {c for d in question.documents for c in d.to_chunks()}
    assert all(passage.context for q in data.of_setting("fragments") for passage in q.passages)
    data.save(tmp_path / "demo.json")
    assert load_dataset(tmp_path / "demo.json") == data


def test_demo_questions_refuse_an_unknown_setting():
    with pytest.raises(ConfigError, match="setting='upright'"):
        demo_dataset(["upright"], 1, 1)


def test_eval_refuses_an_unknown_engine(cli):
    outcome = cli("eval", "--engine", "gguf", "--questions", 1, "--json")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "engine='gguf'" in outcome.stderr
