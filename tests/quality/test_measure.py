"""The loop that measures: its calls on an engine that answers by rote, figures on a small model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from cacheblend_rag import BlendConfig, TransformersEngine
from cacheblend_rag.blend.selectors import SELECTORS
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.prefill.comparing import Comparison
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.evaluate import beside, evaluate, read_rules, reuse, rule_of
from cacheblend_rag.quality.measure import (
    BLEND_ALWAYS,
    FULL,
    NO_PASSAGES,
    Prompt,
    RecordLog,
    Rule,
    measure,
)
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport, PhaseSeconds, PrecomputeReport
from cacheblend_rag.settings import LeadInConfig
from cacheblend_rag.text.chunk import Document
from tests.models import make_model, make_tokenizer, words

BASE = BlendConfig(min_tokens=0)
DOCUMENTS = tuple(Document(f"d{n}", (words(30, n), words(30, 9 + n))) for n in range(2))
CHUNKS = tuple(chunk for document in DOCUMENTS for chunk in document.to_chunks())
WHOLE = [EvalQuestion(f"w{n}", ("w30 w31",), CHUNKS, DOCUMENTS, "adjacent") for n in (20, 21)]
BROKEN = [replace(question, passages=CHUNKS[1::2], setting="fragments") for question in WHOLE]
FRAME = PromptFrame(f"{words(8, 77)}\n\n")
REUSE, RANDOM = reuse(BASE, "document"), rule_of("random", 0.3, BASE, "document")
ALL, PRIOR = rule_of("all", 1.0, BASE, "document"), rule_of("prior", 0.25, BASE, "instruction")


class RoteEngine:
    """Answers 'red', or 'blue' to the first question of a blend; records its calls."""

    name, model_name, dtype, fingerprint = "rote", "rote", "float32", "f"

    def __init__(self, blended=True, skipped=0, calls=None, kind="instruction"):
        self.blended, self.skipped = blended, skipped
        self.calls = [] if calls is None else calls
        self.lead_in = LeadInConfig(kind=kind)

    def sibling(self, *, lead_in):
        return RoteEngine(self.blended, self.skipped, self.calls, lead_in.kind)

    def precompute(self, items, *, progress=True):
        self.calls.append(("precompute", self.lead_in.kind, [d.document_id for d in items]))
        return PrecomputeReport(skipped=self.skipped)

    def evict_document(self, document_id):
        self.calls.append(("evict", document_id))

    def generate_full(self, prompt, sampling=None):
        self.calls.append("full")
        if "long" in prompt.segments[-1].text:
            raise PromptError("too long")
        text = "Red.\nNext" if len(prompt.segments) > 2 else "Green."
        return self._generation(text, True, 1.0, 0)

    def generate(self, prompt, sampling=None, *, config=None):
        self.calls.append(config.selector)
        wrong = "Question: 0?" in prompt.segments[-1].text
        return self._generation("blue" if wrong else "red", self.blended, 0.5, 2)

    def compare_with_full_prefill(self, prompt, answer, *, config=None):
        self.calls.append(("compare", tuple(answer)))
        return Comparison(0.3, 0.1)

    def _generation(self, text, blended, share, recomputed):
        why = None if blended else Reason(ReasonCode.TOO_SHORT, "too short")
        hit, miss = ("x", 0, 10, True), ("y", 10, 6, False, Miss.NOT_STORED)
        report = BlendReport(
            "rote", blended, why, 20, 8, recomputed, 4, 0.25, "prior", "instruction", share,
            PhaseSeconds(), (ChunkReport(*hit, recomputed=recomputed), ChunkReport(*miss)),
        )  # fmt: skip
        return Generation(text, (1,), "stop", 20, report)


class Counting(TransformersEngine):
    """Counts prefills."""

    calls = 0

    def generate(self, *arguments, **options):
        Counting.calls += 1
        return super().generate(*arguments, **options)

    def generate_full(self, *arguments, **options):
        Counting.calls += 1
        return super().generate_full(*arguments, **options)

    def generate_and_score(self, *arguments, **options):
        Counting.calls += 1
        return super().generate_and_score(*arguments, **options)


def make_engine(dtype=torch.float32):
    model = make_model("llama", dtype)
    return Counting(model, tokenizer=make_tokenizer(), instruction=FRAME.opening)


made_once = cache(make_engine)


def asked(number, answer="red"):
    documents = (Document("a", ("One.", "Two.")), Document("b", ("Three.",)))
    passages = tuple(documents[0].to_chunks())
    return EvalQuestion(f"{number}?", (answer,), passages, documents, "adjacent")


def rows_of(rules, questions=(), engine=None, **options):
    """Rows by selector; by the rote engine, four questions."""
    questions = questions or [asked(n) for n in range(4)]
    data, engine = EvalDataset("made", tuple(questions)), engine or RoteEngine()
    found = evaluate(engine, FRAME, data, [FULL, *rules], **{"max_tokens": 4, **options})
    return {row.selector: row for row in found}


def test_scores_are_means_and_full_prefill_comes_first():
    found = rows_of([PRIOR])
    full, row = found["full"], found["prior"]
    assert (full.lead_in, full.ratio, full.f1) == ("none", 1.0, (1.0, (1.0, 1.0)))
    assert (row.setting, row.lead_in, row.ratio) == ("adjacent", "instruction", 0.25)
    assert (row.f1.value, row.holds_answer.value, row.compute_share) == (0.75, 0.75, 0.5)
    assert row.f1.interval[0] < 0.75 < row.f1.interval[1]
    assert row.recomputed_share == pytest.approx((2 + 6) / 16), "missing chunks are computed"
    assert (full.not_blended, row.not_blended) == (None, None)
    assert rows_of([PRIOR], engine=RoteEngine(blended=False))["prior"].not_blended == {
        "too short": 4
    }


def test_recovered_is_the_share_of_what_passages_bring_where_full_prefill_is_right():
    questions = [*(asked(n) for n in range(4)), asked(4, answer="zebra")]
    found = rows_of([NO_PASSAGES, PRIOR], questions)
    told = [(found[name].recovered_f1[0], found[name].f1[0]) for name in found]
    assert dict(zip(found, told, strict=True)) == {
        "full": (1.0, 0.8),
        "no_passages": (0.0, 0.0),
        "prior": (0.75, pytest.approx(0.6)),
    }
    assert found["prior"].recovered_holds == found["prior"].recovered_f1
    useless = rows_of([NO_PASSAGES, PRIOR], [asked(0, answer="green")])["prior"]
    assert useless.recovered_f1.value is None, "full prefill answers none of them"


def test_documents_are_stored_once_for_each_lead_in_and_evicted():
    engine = RoteEngine()
    hkvd = rule_of("hkvd", 0.25, BASE, "instruction")
    list(measure(engine, [FRAME.to_measure(asked(0))], [FULL, PRIOR, hkvd, REUSE], compare=False))
    evict, warm = [("evict", "a"), ("evict", "b")], ["prior", "prior", "hkvd", "hkvd"]
    stored = [("precompute", kind, ["a", "b"]) for kind in ("instruction", "document")]
    told = ["full", "full", stored[0], *warm, *evict, stored[1], "none", "none", *evict]
    assert engine.calls == told
    engine = RoteEngine(skipped=1)
    list(measure(engine, [FRAME.to_measure(asked(0))], [PRIOR], compare=False, warm=False))
    assert engine.calls == [stored[0], "prior"], "what others stored stays"


def test_engines_that_cannot_score_compare_by_the_guards_way():
    engine, prompt = RoteEngine(), FRAME.to_measure(asked(1))
    found = list(measure(engine, [prompt] * 2, [FULL, PRIOR], warm=False))
    assert engine.calls.count(("compare", (1,))) == engine.calls.count("full") == 2
    fidelity = found[1][PRIOR.name].record.fidelity
    assert (fidelity.kl, fidelity.top1) == (0.3, None)


def test_errors_name_the_question():
    with pytest.raises(PromptError, match=r"question 'How long\?': too long"):
        rows_of([PRIOR], [replace(asked(0), question="How long?")])
    with pytest.raises(ConfigError, match="no form without passages"):
        list(measure(RoteEngine(), [Prompt("w1")], [NO_PASSAGES], compare=False))


def test_figures_of_a_small_model():
    found = rows_of([NO_PASSAGES, REUSE, RANDOM, ALL], WHOLE, made_once())
    assert list(found) == ["full", "no_passages", "none", "random", "all"]
    full, bare, none, exact = (found[name] for name in ("full", "no_passages", "none", "all"))
    assert (full.kl.value, full.top1.value, full.gold_logprob_change.value) == (0.0, 1.0, 0.0)
    assert exact.kl.value < 1e-6
    assert (exact.top1.value, exact.same_answer.value) == (1.0, 1.0)
    assert exact.recovered_kl.value == pytest.approx(1.0, abs=1e-3)
    assert (none.recovered_kl.value, bare.recovered_kl.value) == (0.0, None)
    assert none.early_kv_bytes == 0
    assert min(none.kl.value, bare.kl.value) > 1e-5
    assert max(none.compute_share, bare.compute_share) < found["random"].compute_share < 1
    assert all(row.ttft_seconds > 0 for row in found.values())
    assert full.ttft_speedup.value == 1.0


def test_each_rule_takes_one_prefill():
    made_once()
    Counting.calls = 0
    prompts = [FRAME.to_measure(question) for question in WHOLE]
    list(measure(made_once(), prompts, [FULL, NO_PASSAGES, REUSE], warm=False, max_tokens=2))
    assert Counting.calls == 2 * 3


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    path, rules = tmp_path / "results.jsonl", [REUSE, RANDOM]

    def run():
        Counting.calls = 0
        return rows_of(rules, WHOLE, made_once(), log=RecordLog.resumed(path))

    first = run()
    whole = Counting.calls
    assert (run(), Counting.calls) == (first, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    again = run()
    assert (again["none"].kl, again["random"].f1) == (first["none"].kl, first["random"].f1)
    assert 0 < Counting.calls < whole
    assert len(path.read_bytes().splitlines()) == len(lines)


def test_other_settings_are_other_results(tmp_path):
    log = RecordLog.resumed(tmp_path / "results.jsonl")
    for known, options in enumerate(({}, {"max_tokens": 3}, {"questions": BROKEN}), 1):
        rows_of([REUSE], options.pop("questions", WHOLE), made_once(), log=log, **options)
        assert len(list(log)) == 4 * known


def test_a_selectors_defaults_are_part_of_what_a_result_depends_on(tmp_path, monkeypatch):
    """A later version may have others."""
    log = RecordLog.resumed(tmp_path / "results.jsonl")
    rows_of([RANDOM], WHOLE, made_once(), log=log)
    known = len(list(log))
    rows_of([RANDOM], WHOLE, made_once(), log=log)
    assert len(list(log)) == known

    class Later(SELECTORS["random"]):
        seed: int = 7

    monkeypatch.setitem(SELECTORS, "random", Later)
    rows_of([RANDOM], WHOLE, made_once(), log=log)
    assert len(list(log)) == known + len(WHOLE)


# Rules


def test_rules_are_read_and_laid_over_the_settings():
    base = BASE.with_changes(check_layers=(2,), selector="random", selector_options={"seed": 2})
    drawn, hkvd, again = read_rules("random=0.2, hkvd=0.1,hkvd=.2", base, "document")
    assert (drawn.name, drawn.config.ratio, drawn.lead_in) == (
        "document random=0.2",
        0.2,
        "document",
    )
    assert (drawn.config.selector_options, hkvd.config.selector_options) == ({"seed": 2}, {})
    assert (hkvd.config.check_layers, again.config.ratio) == ((2,), 0.2)
    assert not hkvd.config.cost_model


def test_rules_stand_beside_what_they_are_held_against():
    rules = read_rules("prior=0.1", BASE, "document")
    own = Rule("default", BASE.with_changes(**BLEND_ALWAYS), "document")
    told = [
        FULL, NO_PASSAGES, reuse(BASE, "instruction"), reuse(BASE, "document"),
        *(rule_of("random", ratio, BASE, "document") for ratio in (0.1, BASE.ratio)),
        *rules, own,
    ]  # fmt: skip
    assert beside(rules, BASE, "document", exact=True) == told
    assert beside(rules, BASE, "document", exact=False)[len(told) :] == [ALL]
    same = read_rules(f"{BASE.selector}={BASE.ratio}", BASE, "document")
    assert beside(same, BASE, "document", exact=True)[-2].config.selector == "random"
