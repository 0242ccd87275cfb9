"""Evaluations with fidelity and times, on a small random model."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from cacheblend_rag import BlendConfig, SamplingParams, TransformersEngine
from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.dataset import EvalQuestion, PromptFrame
from cacheblend_rag.quality.evaluator import Evaluator
from cacheblend_rag.quality.measuring import Measures
from cacheblend_rag.quality.records import RecordLog
from cacheblend_rag.quality.rules import Rule, exactness
from cacheblend_rag.text.chunk import Document
from tests.models import make_model, make_tokenizer, words

DOCUMENTS = tuple(Document(f"d{n}", (words(30, n), words(30, 9 + n))) for n in range(2))
CHUNKS = tuple(chunk for document in DOCUMENTS for chunk in document.to_chunks())
WHOLE = [EvalQuestion(f"w{n}", ("w30 w31",), CHUNKS, DOCUMENTS, "adjacent") for n in (20, 21)]
BROKEN = [replace(question, passages=CHUNKS[1::2], setting="fragments") for question in WHOLE]
FRAME = PromptFrame(f"{words(8, 77)}\n\n")
REUSE, RANDOM = Rule.reuse("document"), Rule("document", "random", 0.3)
BOTH = Measures(fidelity=True, ttft=True)


class Engine(TransformersEngine):
    """Counts prefills."""

    calls = 0

    def generate(self, *arguments, **options):
        Engine.calls += 1
        return super().generate(*arguments, **options)

    def generate_full(self, *arguments, **options):
        Engine.calls += 1
        return super().generate_full(*arguments, **options)

    def generate_and_score(self, *arguments, **options):
        Engine.calls += 1
        return super().generate_and_score(*arguments, **options)


def make_engine(dtype=torch.float32):
    return Engine(make_model("llama", dtype), tokenizer=make_tokenizer(), instruction=FRAME.opening)


made_once = cache(make_engine)


def evaluator(engine=None, log=None, measures=BOTH, **more):
    return Evaluator(
        {"document": engine or made_once()}, FRAME, BlendConfig(min_tokens=0),
        SamplingParams.greedy(max_tokens=4), measures=measures, log=log or RecordLog(), **more,
    )  # fmt: skip


def rows_of(found):
    return {row.selector: row for row in found.rows}


def test_rules_stand_beside_their_controls():
    found = rows_of(evaluator().run(WHOLE, [REUSE, RANDOM, exactness("document")]))
    assert list(found) == ["full", "no_context", "prefix_caching", "none", "random", "all"]
    full, bare, reuse, exact = (found[n].fidelity for n in ("full", "no_context", "none", "all"))
    assert (full.kl, full.top1, full.gold_logprob_change) == (0.0, 1.0, 0.0)
    assert exact.kl < 1e-6
    assert (exact.top1, exact.same_answer) == (1.0, 1.0)
    assert exact.recovered_kl == pytest.approx(1.0, abs=1e-3)
    assert reuse.recovered_kl == 0.0
    assert min(reuse.kl, bare.kl) > 1e-5
    assert bare.recovered_kl is None
    assert found["prefix_caching"].fidelity is None
    assert found["prefix_caching"].exact_match == found["full"].exact_match
    assert all(row.ttft.ttft_seconds > 0 for row in found.values())


def test_prefix_caching_computes_all_but_the_opening():
    found = rows_of(evaluator().run(WHOLE, [REUSE]))
    shares = [found[name].compute_share for name in ("none", "prefix_caching", "full")]
    assert shares == sorted(set(shares))
    prompt = FRAME.opening_alone(WHOLE[0])[1]
    assert len(made_once().prepare(prompt).placed) == 1


def test_each_rule_takes_one_prefill():
    rules = [REUSE, RANDOM, exactness("document")]
    Engine.calls = 0
    evaluator(measures=Measures(fidelity=True)).run(WHOLE[:1], rules)
    assert Engine.calls == len(rules) + 2


def test_rounding_is_shown_where_the_model_is_not_float32():
    fidelity = Measures(fidelity=True)
    assert "all" not in rows_of(evaluator(measures=fidelity).run(WHOLE, [REUSE]))
    half = evaluator(made_once(torch.bfloat16), measures=fidelity)
    assert rows_of(half.run(WHOLE, [REUSE]))["all"].ratio == 1.0
    answers = evaluator(made_once(torch.bfloat16), measures=Measures())
    assert list(rows_of(answers.run(WHOLE, [REUSE]))) == ["full", "none"]


def test_a_finished_run_is_read_again_without_the_model(tmp_path):
    path = tmp_path / "results.jsonl"
    first = evaluator(log=RecordLog.resumed(path)).run(BROKEN, [REUSE, RANDOM])
    Engine.calls = 0
    again = evaluator(log=RecordLog.resumed(path)).run(BROKEN, [REUSE, RANDOM])
    assert (Engine.calls, again) == (0, first)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "results.jsonl"
    fidelity = Measures(fidelity=True)
    rules = [REUSE, RANDOM]
    whole = evaluator(log=RecordLog.resumed(path), measures=fidelity).run(WHOLE, rules)
    lines = path.read_bytes().splitlines(keepends=True)
    per_question = len(lines) // len(WHOLE)
    path.write_bytes(b"".join(lines[:per_question]) + lines[per_question][:40])
    Engine.calls = 0
    log = RecordLog.resumed(path)
    assert evaluator(log=log, measures=fidelity).run(WHOLE, rules) == whole
    assert Engine.calls > 0
    assert len(path.read_bytes().splitlines()) == len(lines)
    finished = Engine.calls
    path.unlink()
    Engine.calls = 0
    evaluator(log=RecordLog.resumed(path), measures=fidelity).run(WHOLE, rules)
    assert Engine.calls == 2 * finished


def test_other_settings_are_other_results(tmp_path):
    log = RecordLog.resumed(tmp_path / "results.jsonl")
    answers = Measures()
    evaluator(log=log, measures=answers).run(WHOLE, [REUSE])
    known = len(list(log))
    for other in (
        {"sampling": SamplingParams.greedy(max_tokens=3)},
        {"frame": PromptFrame("w5 w6 ")},
        {"measures": Measures(fidelity=True)},
    ):
        replace(evaluator(log=log, measures=answers), **other).run(WHOLE, [REUSE])
        assert len(list(log)) > known
        known = len(list(log))


def test_a_file_that_is_no_log_is_one_line(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"question": "Who?"}) + "\n")
    with pytest.raises(DatasetError, match="line 1 is not a result"):
        RecordLog.resumed(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordLog.resumed(tmp_path / "nowhere" / "results.jsonl")


def test_chunks_that_others_stored_stay_in_the_store():
    engine, answers = make_engine(), Measures()
    for owns_store, kept in ((True, 0), (False, len(CHUNKS))):
        engine.precompute(DOCUMENTS, progress=False)
        evaluator(engine, measures=answers, owns_store=owns_store).run(WHOLE, [REUSE])
        assert len(list(engine.store.keys())) == kept
    engine.evict_document("d0")
    engine.evict_document("d1")
    evaluator(engine, measures=BOTH, owns_store=False).run(WHOLE, [REUSE])
    assert list(engine.store.keys()) == []


def test_the_default_rule_is_what_an_engine_does_unasked():
    rule = Rule.default()
    base = BlendConfig(min_tokens=0, check_layers=(2,), recompute_ratio=0.5, selector="random")
    config = rule.config(base, {"hkvd": {"deviation": "k"}})
    same = {"min_tokens": BlendConfig().min_tokens, "cost_model": True, "reuse_prefix": True}
    assert config.with_changes(**same) == BlendConfig()
    assert rule.lead_in == made_once().lead_in.kind
