"""The evaluation loop on an engine that answers by rote: which calls it makes, what it adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.evaluator import Evaluator, evaluate_settings, used_lead_ins
from cacheblend_rag.quality.rules import Rule
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport, PhaseSeconds, PrecomputeReport
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.chunk import Document

DOCUMENTS = (Document("a", ("One.", "Two.")), Document("b", ("Three.",)))
QUESTIONS = tuple(
    EvalQuestion(f"{n}?", ("red",), tuple(DOCUMENTS[0].to_chunks()), DOCUMENTS, "adjacent")
    for n in range(4)
)
PRIOR = Rule("instruction", "prior", 0.25)
REUSE = Rule.reuse("document")


FRAME = PromptFrame("Do.\n\n")
SHORT = Reason(ReasonCode.TOO_SHORT, "too short")


class RoteEngine:
    """Answers 'red', or 'blue' to the first question of a selector; records its calls."""

    name, model_name, dtype, fingerprint = "rote", "rote", "float32", "f"

    def __init__(self, blended: bool = True, skipped: int = 0) -> None:
        self.skipped = skipped
        self.calls: list[object] = []
        self.configs: list[BlendConfig] = []
        self.blended = blended

    def precompute(self, items, *, progress=True):
        self.calls.append(("precompute", [d.document_id for d in items]))
        return PrecomputeReport(skipped=self.skipped)

    def evict_document(self, document_id):
        self.calls.append(("evict", document_id))

    def generate_full(self, prompt, sampling=None, *, hints=()):
        self.calls.append("full")
        if "long" in prompt.segments[-1].text:
            raise PromptError("too long")
        return self._generation("Red.", True, 1.0, 0)

    def generate(self, prompt, sampling=None, *, config=None, hints=(), cancel=None):
        self.calls.append(config.selector)
        self.configs.append(config)
        wrong = "Question: 0?" in prompt.segments[-1].text
        return self._generation("blue" if wrong else "red", self.blended, 0.5, 2)

    def _generation(self, text, blended, share, recomputed):
        hit, miss = ("x", 0, 10, True), ("y", 10, 6, False, Miss.NOT_STORED)
        report = BlendReport(
            "rote", blended, None if blended else SHORT, 20, 8, recomputed, 4, 0.25, "prior",
            "instruction", share, PhaseSeconds(),
            (ChunkReport(*hit, recomputed=recomputed), ChunkReport(*miss)),
        )  # fmt: skip
        return Generation(text, (1,), "stop", 20, report)


def evaluator(**engines):
    return Evaluator(engines, FRAME, BlendConfig(min_tokens=0), SamplingParams(max_tokens=4))


def test_full_prefill_comes_first_and_scores_are_means():
    engine = RoteEngine()
    full, row = evaluator(instruction=engine).run(QUESTIONS, [PRIOR]).rows
    assert (full.lead_in, full.selector, full.ratio) == ("none", "full", 1.0)
    assert (full.exact_match, full.f1, full.rouge_l, full.ci95) == (1.0, 1.0, 1.0, (1.0, 1.0))
    assert (row.setting, row.lead_in, row.selector) == ("adjacent", "instruction", "prior")
    assert (row.exact_match, row.f1, row.rouge_l, row.compute_share) == (0.75, 0.75, 0.75, 0.5)
    assert row.ci95[0] < 0.75 < row.ci95[1]


def test_missing_chunks_count_as_recomputed():
    row = evaluator(instruction=RoteEngine()).run(QUESTIONS, [PRIOR]).rows[1]
    assert row.recomputed_share == pytest.approx((2 + 6) / 16)


def test_each_question_is_precomputed_once_a_lead_in_and_evicted():
    first, second = RoteEngine(), RoteEngine()
    rules = [PRIOR, Rule("instruction", "hkvd", 0.25), REUSE]
    evaluator(instruction=first, document=second).run(QUESTIONS[:1], rules)
    index, evict = ("precompute", ["a", "b"]), [("evict", "a"), ("evict", "b")]
    assert first.calls == ["full", index, "prior", "hkvd", *evict]
    assert second.calls == [index, "none", *evict]


def test_rules_are_laid_over_the_base_config_with_their_options():
    engine = RoteEngine()
    base = BlendConfig(min_tokens=0, check_layers=(2, 3), recompute_ratio=(0.4, 0.2))
    options = {"random": {"seed": 2}}
    Evaluator({"instruction": engine}, FRAME, base, SamplingParams(), options).run(
        QUESTIONS[:1], [Rule("instruction", "random", 0.25), Rule("instruction", "hkvd", 0.1)]
    )
    drawn, hkvd = engine.configs
    assert (drawn.recompute_ratio, drawn.selector, drawn.min_tokens) == (0.25, "random", 0)
    assert (drawn.selector_options, hkvd.selector_options) == ({"seed": 2}, {})
    assert (hkvd.recompute_ratio, hkvd.check_layers) == (0.1, (2, 3))


def test_prompts_that_were_not_blended_are_counted_by_reason():
    found = evaluator(instruction=RoteEngine(blended=False)).run(QUESTIONS, [PRIOR])
    assert found.not_blended == {"too short": 4}
    assert evaluator(instruction=RoteEngine()).run(QUESTIONS, [PRIOR]).not_blended == {}


def test_progress_is_told_after_each_question():
    ticks: list[int] = []
    evaluator(instruction=RoteEngine()).run(QUESTIONS, [PRIOR], lambda: ticks.append(1))
    assert len(ticks) == len(QUESTIONS)


def test_errors_name_what_is_wrong():
    with pytest.raises(ConfigError, match="questions=0"):
        evaluator(instruction=RoteEngine()).run((), [PRIOR])
    with pytest.raises(ConfigError, match="'document' has no engine"):
        evaluator(instruction=RoteEngine()).run(QUESTIONS, [REUSE])
    long = EvalQuestion("How long?", ("x",), QUESTIONS[0].passages, DOCUMENTS)
    with pytest.raises(PromptError, match="'How long\\?': too long"):
        evaluator(instruction=RoteEngine()).run([long], [PRIOR])


def test_each_setting_is_evaluated_by_its_own_rules():
    others = tuple(replace(question, setting="fragments") for question in QUESTIONS[:2])
    data = EvalDataset("notes", (*QUESTIONS, *others))
    plans = {"fragments": [REUSE], "adjacent": [PRIOR, REUSE]}
    assert used_lead_ins(plans) == ["document", "instruction"]
    engines = {"instruction": RoteEngine(), "document": RoteEngine()}
    told = []
    base = BlendConfig(min_tokens=0)
    whole = Evaluator(engines, FRAME, base, SamplingParams())
    found = evaluate_settings(
        data, plans, whole, lambda setting, questions: lambda: told.append((setting, questions))
    )
    alone = {
        setting: Evaluator(
            {rule.lead_in: RoteEngine() for rule in rules}, FRAME, base, SamplingParams()
        ).run(data.of_setting(setting), rules)
        for setting, rules in plans.items()
    }
    assert dict(found) == alone
    assert told == [("fragments", 2)] * 2 + [("adjacent", 4)] * 4
