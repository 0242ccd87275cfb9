from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace

import pytest

from cacheblend_rag.cli.asking import report_lines
from cacheblend_rag.prefill.prompt_pass import CONTEXT_KEPT
from cacheblend_rag.rag import FILE_NAME
from cacheblend_rag.rag.answering import Asker
from cacheblend_rag.rag.prompt import PassageOrder
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import BlendReport, PhaseSeconds


@pytest.fixture
def ask(cli, indexed):
    """Run ``ask QUESTION --from COLLECTION``."""
    return lambda question, *options: cli("ask", question, "--from", indexed[0], *options)


@pytest.fixture
def own(indexed, tmp_path):
    """A copy of the collection to spoil."""
    shutil.copytree(indexed[0], tmp_path / "collection")
    return tmp_path / "collection"


@pytest.fixture(scope="module")
def asker(indexed):
    with Asker(indexed[0]) as asker:
        yield asker


def test_questions_are_answered_from_reused_passages(ask, indexed):
    right = 0
    for item in indexed[1]:
        found = ask(item.question, "--set", "recompute_ratio=0", "--json").json
        right += found["answer"] == item.answer
        report = found["report"]
        assert report["blended"]
        assert report["recompute_ratio"] == 0
        assert report["reused_tokens"] == sum(chunk["tokens"] for chunk in report["chunks"])
        assert [chunk["hit"] for chunk in report["chunks"]] == [True] * 4
        assert [chunk["document_id"] for chunk in report["chunks"]] == [
            source["source"] for source in found["sources"]
        ]
    assert right >= 3


def test_the_answer_sources_and_report_are_printed(ask, indexed):
    item = indexed[1][0]
    outcome = ask(item.question)
    answer, *rest = outcome.stdout.splitlines()
    assert answer == item.answer
    assert sum("notes/" in line for line in rest) == 4
    assert any("tokens:" in line and "reused" in line for line in rest)
    assert "passages: 4 reused from disk" in outcome.stdout
    assert outcome.stderr == ""


NO_PRIOR = Reason(ReasonCode.NO_PRIOR, "no prior stored for prior")


def test_that_nothing_was_recomputed_is_explained():
    chosen = BlendReport(
        engine="transformers",
        blended=True,
        reason=None,
        prompt_tokens=1000,
        reused_tokens=900,
        recomputed_tokens=90,
        computed_tokens=10,
        recompute_ratio=0.1,
        selector="hkvd",
        lead_in="document",
        compute_share=0.1,
        seconds=PhaseSeconds(),
    )
    assert "blended: hkvd, ratio 0.1, 10.0 % of full prefill's work" in report_lines(chosen)
    fallen = replace(chosen, selector="chunk_head", selector_reason=NO_PRIOR)
    assert (
        "blended: chunk_head (no prior stored for prior), ratio 0.1, 10.0 % of full prefill's work"
    ) in report_lines(fallen)
    kept = replace(chosen, selector="none", selector_reason=CONTEXT_KEPT, recompute_ratio=0.0)
    (line,) = [line for line in report_lines(kept) if line.startswith("blended: ")]
    assert "none (nothing to recompute: the chunks know their own documents), ratio 0" in line
    assert "900 reused, 90 recomputed" in report_lines(chosen)[0]
    prefixed = replace(chosen, prefix_tokens=128)
    assert "900 reused (128 of an earlier prompt), 90" in report_lines(prefixed)[0]


def test_compare_answers_both_ways_greedily_whatever_the_model_says(ask, indexed, drawn_with):
    question = indexed[1][0].question
    found = ask(question, "--compare", "--json", "--set", "recompute_ratio=1").json
    assert len(drawn_with) == 4, "two of them warm up"
    assert all((said.temperature, said.repetition_penalty) == (0, 1) for said in drawn_with)
    assert found["full"]["report"]["reused_tokens"] == 0
    assert found["full"]["answer"] == found["answer"]
    both = (found["full"]["report"], found["report"])
    full, blend = (report["seconds"]["time_to_first_token"] for report in both)
    assert found["speedup"] == pytest.approx(full / blend)
    lines = ask(question, "--compare").stdout.splitlines()
    assert lines[0] == "blend:"
    assert "full prefill:" in lines
    assert "sooner" in lines[-1]
    assert "reused from host" in "".join(lines)


def test_the_models_own_sampling_is_followed_unless_options_say_otherwise(ask, indexed, drawn_with):
    question = indexed[1][0].question
    said = ask(question, "--json", "--set", "seed=3").json["sampling"]
    own = (said["temperature"], said["top_p"], said["top_k"], said["repetition_penalty"])
    assert (own, said["seed"]) == ((5.0, 0.9, 50, 3.0), 3)
    given = {"temperature": 0.5, "top_p": 0.8, "seed": 4, "max_tokens": 5}
    arguments = [part for name in given for part in ("--set", f"{name}={given[name]}")]
    said = ask(question, "--json", *arguments).json["sampling"]
    assert {name: said[name] for name in given} == given
    assert [drawn.seed for drawn in drawn_with] == [3, 4]


def test_a_profile_is_used_unless_options_say_otherwise(ask, indexed, tmp_path):
    (tmp_path / "mine.toml").write_text('[blend]\nselector = "prior"\nrecompute_ratio = 0.5\n')
    asked = indexed[1][0].question, "--set", f"profile={tmp_path / 'mine.toml'}"
    report = ask(*asked, "--json").json["report"]
    assert (report["selector"], report["recompute_ratio"]) == ("prior", 0.5)
    report = ask(*asked, "--set", "recompute_ratio=0.25", "--json").json["report"]
    assert (report["selector"], report["recompute_ratio"]) == ("prior", 0.25)
    outcome = ask(indexed[1][0].question, "--set", f"profile={tmp_path / 'none.toml'}")
    assert outcome.code == 2
    assert "none.toml' must be quality, balanced, speed or a TOML file" in outcome.stderr


def test_passages_that_do_not_name_their_subject_are_found_by_their_files_name(asker, indexed):
    found = asker.retrieve("What is the favourite food of Xaver Mason?", 2, PassageOrder.SCORE)
    assert {source.chunk.document_id[:17] for source in found} == {"notes/xaver-mason"}
    assert any("Xaver" not in source.chunk.text for source in found)
    assert len(asker.retrieve("anything", 1000, PassageOrder.SCORE)) > 8


def test_questions_may_hold_anything_and_a_prompt_without_room_is_told(ask, indexed):
    outcome = ask("What {about} \x07 \ud800 [bold]this[/bold]?", "--json")
    assert outcome.code == 0
    assert "{about}" in outcome.json["question"]
    outcome = ask(indexed[1][0].question, "--top-k", 1000, "--set", "max_tokens=4000", "--json")
    assert outcome.code == 0
    outcome = ask("Who? " * 5000)
    assert outcome.code == 2
    said = outcome.stderr.splitlines()[-1]
    assert said.startswith("cacheblend-rag: This model's maximum context length is")


def test_vectors_of_another_embedding_model_are_one_line(cli, own):
    with sqlite3.connect(own / FILE_NAME) as file:
        file.execute("UPDATE documents SET vectors = zeroblob(4 * json_array_length(chunks))")
    file.close()
    outcome = cli("ask", "Who?", "--from", own)
    assert outcome.code == 2
    assert outcome.stderr.count("\n") == 1
    assert "--rebuild" in outcome.stderr
