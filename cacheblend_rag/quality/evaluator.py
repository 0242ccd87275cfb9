"""The evaluation loop: full prefill and blend rules answer the same questions and are scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.metrics import bootstrap_interval, exact_match, rouge_l, token_f1
from cacheblend_rag.settings import BlendConfig, LeadInKind

FULL = "full"


@dataclass(frozen=True)
class Rule:
    """One way to blend: the lead-in of cached KV, the selector, and the recompute ratio."""

    lead_in: LeadInKind
    selector: str
    ratio: float

    @classmethod
    def reuse(cls, lead_in: LeadInKind) -> Rule:
        """Return plain reuse: nothing is recomputed."""
        return cls(lead_in, "none", 0.0)


@dataclass(frozen=True)
class EvalRow:
    """One rule's scores on one setting; every figure is a share from 0 to 1.

    selector: a selector's name, or ``full`` for ordinary prefill. ci95: of exact_match.
    recomputed_share: recomputed chunk tokens of all chunk tokens. compute_share: work of the
    pass over all layers and the probe, as a share of full prefill's; the mean over questions.
    """

    setting: str
    lead_in: str
    selector: str
    ratio: float
    exact_match: float
    f1: float
    rouge_l: float
    ci95: tuple[float, float]
    recomputed_share: float
    compute_share: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "ci95": list(self.ci95)}


@dataclass(frozen=True)
class Evaluation:
    """Rows of one setting, full prefill first, and counts of reasons for not blending."""

    rows: tuple[EvalRow, ...]
    not_blended: Mapping[str, int]


@dataclass(frozen=True)
class Evaluator:
    """Answers questions by full prefill and by rules.

    engines: one engine per lead-in, around the same model and with the same ``instruction``.
    base: the config that rules override; its cost model is switched off, so that rules decide.
    options: selector options by selector name.
    """

    engines: Mapping[LeadInKind, Engine]
    instruction: str
    base: BlendConfig
    sampling: SamplingParams
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def run(
        self,
        questions: Sequence[EvalQuestion],
        rules: Sequence[Rule],
        on_question: Callable[[], None] = lambda: None,
    ) -> Evaluation:
        """Score full prefill and every rule on questions of one setting.

        A question's documents are precomputed once per lead-in and evicted again, so that a store
        never holds more than one prompt. on_question: called after each, for a progress bar.
        Raises ConfigError without questions or when a rule's lead-in has no engine; PromptError,
        naming the question, when a prompt does not fit the model.
        """
        if not questions:
            raise ConfigError("questions=0 must be at least 1")
        configs = {rule: self._config(rule) for rule in rules}
        full, tallies = _Tally(), {rule: _Tally() for rule in rules}
        for question in questions:
            try:
                full.add(self._answer_full(question), question)
                for rule, generation in self._answer_rules(question, configs):
                    tallies[rule].add(generation, question)
            except PromptError as error:
                raise PromptError(f"question {question.question!r}: {error}") from error
            on_question()
        rows = [full.row(questions[0].setting, Rule("none", FULL, 1.0))]
        rows += [tally.row(questions[0].setting, rule) for rule, tally in tallies.items()]
        reasons = sum((tally.not_blended for tally in tallies.values()), Counter[str]())
        return Evaluation(tuple(rows), reasons)

    def _config(self, rule: Rule) -> BlendConfig:
        if rule.lead_in not in self.engines:
            raise ConfigError(f"lead_in={rule.lead_in!r} has no engine in this evaluation")
        return self.base.with_changes(
            selector=rule.selector,
            recompute_ratio=rule.ratio,
            recompute_ratios=None,
            selector_options=self.options.get(rule.selector, {}),
            cost_model=False,
        )

    def _answer_full(self, question: EvalQuestion) -> Generation:
        engine = next(iter(self.engines.values()))
        return engine.generate_full(question.prompt(self.instruction), self.sampling)

    def _answer_rules(
        self, question: EvalQuestion, configs: Mapping[Rule, BlendConfig]
    ) -> Iterator[tuple[Rule, Generation]]:
        prompt = question.prompt(self.instruction)
        for lead_in, engine in self.engines.items():
            engine.precompute(question.documents, progress=False)
            for rule, config in configs.items():
                if rule.lead_in == lead_in:
                    yield rule, engine.generate(prompt, self.sampling, config=config)
            for document in question.documents:
                engine.evict_document(document.document_id)


def used_lead_ins(plans: Mapping[str, Sequence[Rule]]) -> list[LeadInKind]:
    """Return the lead-ins that rules by setting need an engine for, in order of appearance."""
    return list(dict.fromkeys(rule.lead_in for rules in plans.values() for rule in rules))


def evaluate_settings(
    data: EvalDataset,
    plans: Mapping[str, Sequence[Rule]],
    engines: Mapping[LeadInKind, Engine],
    *,
    base: BlendConfig,
    sampling: SamplingParams,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    on_setting: Callable[[str, int], Callable[[], None]] = lambda setting, questions: lambda: None,
) -> Iterator[tuple[str, Evaluation]]:
    """Yield each setting and its evaluation by its own rules, one after another.

    plans: rules by setting. engines, base, options: as in Evaluator. on_setting: called with a
    setting and its number of questions; returns a function that is called after each question.
    Raises the errors of Evaluator.run.
    """
    for setting, rules in plans.items():
        questions = data.of_setting(setting)
        needed = {rule.lead_in: engines[rule.lead_in] for rule in rules}
        evaluator = Evaluator(needed, data.instruction, base, sampling, options or {})
        yield setting, evaluator.run(questions, rules, on_setting(setting, len(questions)))


@dataclass
class _Tally:
    """The totals of one rule's answers."""

    exact: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    rouge: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    chunk_tokens: int = 0
    afresh_tokens: int = 0
    not_blended: Counter[str] = field(default_factory=Counter)

    def add(self, generation: Generation, question: EvalQuestion) -> None:
        report = generation.report
        self.exact.append(exact_match(generation.text, question.answers))
        self.f1.append(token_f1(generation.text, question.answers))
        self.rouge.append(rouge_l(generation.text, question.answers))
        self.compute.append(report.compute_share)
        self.chunk_tokens += sum(chunk.tokens for chunk in report.chunks)
        self.afresh_tokens += sum(c.recomputed if c.hit else c.tokens for c in report.chunks)
        if not report.blended:
            self.not_blended[report.reason or "no reason given"] += 1

    def row(self, setting: str, rule: Rule) -> EvalRow:
        count = len(self.exact)
        share = self.afresh_tokens / self.chunk_tokens if self.chunk_tokens else 1.0
        return EvalRow(
            setting=setting,
            lead_in=rule.lead_in,
            selector=rule.selector,
            ratio=rule.ratio,
            exact_match=sum(self.exact) / count,
            f1=sum(self.f1) / count,
            rouge_l=sum(self.rouge) / count,
            ci95=bootstrap_interval(self.exact),
            recomputed_share=share,
            compute_share=sum(self.compute) / count,
        )
