"""``doctor --prompt`` and ``doctor --collection``: findings of one request on the command line."""

from __future__ import annotations

import textwrap

import pytest

from cacheblend_rag import open_engine
from cacheblend_rag.observe.doctor.machine import Machine
from tests.observe.doctor.conftest import documents, prompts, text_of
from tests.toy import DEFAULT_FRAME, TOY

ONCE = ("--runs", 1, "--answer-tokens", 4)
(PROMPT,) = prompts()
BY_TIMES = {"tier_slow", "prefill_sooner"}
"""Findings that other work on the machine may cause, since its counters are not read here."""


@pytest.fixture(autouse=True)
def _no_counters(monkeypatch):
    """Whatever else the machine does, nothing is known of it."""
    monkeypatch.setattr(Machine, "counters", lambda machine: None)


@pytest.fixture
def kv_path(tmp_path):
    """A folder with the KV of the prompt's documents."""
    path = tmp_path / "kv"
    engine = open_engine("transformers", model=TOY, kv_path=path, instruction=DEFAULT_FRAME.head)
    engine.precompute(documents(PROMPT), progress=False)
    engine.close()
    return path


def doctor(cli, tmp_path, kv_path, text, *options):
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    known = ("--model", TOY, "--kv-path", kv_path, "--instruction", DEFAULT_FRAME.head)
    return cli("doctor", "--prompt", file, *known, *ONCE, *options)


def test_a_prompt_with_a_fault(cli, tmp_path, kv_path):
    before = {path: path.stat().st_mtime_ns for path in kv_path.rglob("*.*")}
    text = text_of(PROMPT, lambda chunk: textwrap.fill(chunk, 60))
    outcome = doctor(cli, tmp_path, kv_path, text)
    assert outcome.code == 1
    assert "1. white_space_differs (fault, time to first token): " in outcome.stdout
    assert "   change white space of the prompt's template: " in outcome.stdout
    assert {path: path.stat().st_mtime_ns for path in kv_path.rglob("*.*")} == before


def test_the_question_to_a_collection(cli, indexed):
    folder, asked = indexed
    given = ("--collection", folder, "--question", asked[0].question, "--top-k", 12, *ONCE)
    outcome = cli("doctor", *given, "--json")
    assert {found["code"] for found in outcome.json["findings"]} <= BY_TIMES
    assert outcome.code == outcome.json["has_fault"]
    measured = outcome.json["measured"]
    assert measured["blended"]
    assert measured["chunks"] == 12
    assert measured["prompt_tokens"] > 1000
    assert measured["loss_nats_per_token"] is not None
    outcome = cli("doctor", *given, "--ratio", 1, "--json")
    assert outcome.code == 1
    assert outcome.json["has_fault"]
    first = next(one for one in outcome.json["findings"] if one["code"] not in BY_TIMES)
    assert first["code"] == "ratio_too_high"
    assert first["change"]["setting"] == "recompute_ratio"
    assert first["change"]["present"] == "1"
