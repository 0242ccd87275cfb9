"""The comparison on engines that answer by rote: who is asked what, and what adds up."""

from __future__ import annotations

from statistics import median

import pytest

from cacheblend_rag.demo.corpus import DemoQuestion
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.quality.comparison import RETRIEVED, Comparison, summarize, with_retrieved
from cacheblend_rag.quality.methods import METHODS, needed_lead_ins
from cacheblend_rag.report import BlendReport, PhaseSeconds, PrecomputeReport
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.chunk import Document

DOCUMENTS = tuple(Document(name, (f"{name} one.", f"{name} two.")) for name in "abcdefg")
DRAWN = [DemoQuestion(f"Who is {n}?", "Ada", "direct", n, 0) for n in range(3)]


class RoteEngine:
    """Answers rightly, except by plain reuse; each answer takes a second longer than the last."""

    def __init__(self):
        self.config = BlendConfig()
        self.asked: list[tuple[str, str, float]] = []
        self.precomputed: list[Document] = []

    def precompute(self, documents):
        self.precomputed += documents
        return PrecomputeReport(computed=12, skipped=2)

    def generate_full(self, prompt, sampling=None):
        return self._generation(prompt, "full", 0.0)

    def generate(self, prompt, sampling=None, *, config):
        assert config.min_tokens == 0
        return self._generation(prompt, config.selector, config.recompute_ratio)

    def _generation(self, prompt, selector, ratio):
        self.asked.append((prompt.segments[-1].text.split("?")[0], selector, ratio))
        seconds = PhaseSeconds(load=float(len(self.asked)))
        report = BlendReport(
            "rote", True, None, 100, 60, 10, 30, ratio, selector, "document", 0.5, seconds, ()
        )
        return Generation("Bob" if selector == "none" else " Ada ", (1,), "stop", 100, report)


@pytest.fixture
def engines():
    return {lead_in: RoteEngine() for lead_in in needed_lead_ins()}


@pytest.fixture
def comparison(engines):
    questions = with_retrieved(DRAWN, lambda question, count: DOCUMENTS[:count])
    return Comparison(engines, "Answer.", DOCUMENTS, questions)


def test_questions_show_all_chunks_of_the_documents_retrieved(comparison):
    for item, question in zip(DRAWN, comparison.questions, strict=True):
        assert (question.question, question.answers) == (item.question, ("Ada",))
        assert question.documents == DOCUMENTS[:RETRIEVED]
        assert list(question.passages) == [c for d in DOCUMENTS[:RETRIEVED] for c in d.to_chunks()]


def test_the_collection_is_precomputed_once_a_lead_in(comparison, engines):
    assert comparison.index() == 14
    assert [engine.precomputed for engine in engines.values()] == [list(DOCUMENTS)] * 2


def test_every_method_answers_each_question_on_its_own_engine(comparison, engines):
    answered = list(comparison.answer_all())
    assert [found.question.question for found in answered] == [item.question for item in DRAWN]
    rules = {name: [(s, r) for _, s, r in engine.asked] for name, engine in engines.items()}
    untimed_and_timed = 1 + len(DRAWN)
    instruction = [("full", 0.0), ("none", 0.0), ("prior", 0.2)]
    assert rules["instruction"] == instruction * untimed_and_timed
    assert rules["document"] == [("none", 0.0)] * untimed_and_timed
    for found in answered:
        assert {name: answer.correct for name, answer in found.answers.items()} == {
            "full": True, "reuse": False, "blend": True, "contextual": False,
        }  # fmt: skip
        assert found.to_dict()["answers"]["full"]["text"] == "Ada"


def test_a_summary_adds_up_and_compares_with_full_prefill(comparison):
    answered = list(comparison.answer_all())
    seconds = {
        method.name: median(f.answers[method.name].first_token_seconds for f in answered)
        for method in METHODS
    }
    for method in METHODS:
        plain = summarize(method, answered).to_dict()
        assert plain["correct"] == (3 if method.name in ("full", "blend") else 0)
        tokens = [plain[f"{kind}_tokens"] for kind in ("reused", "recomputed", "computed")]
        assert tokens == [60, 10, 30]
        assert plain["ttft_seconds"] == seconds[method.name]
        assert plain["speedup"] == pytest.approx(seconds["full"] / seconds[method.name])
