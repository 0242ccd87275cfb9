"""Measures rules on one question: answers, fidelity to full prefill, and time to first token."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.quality.dataset import OPENING, EvalQuestion, PromptFrame
from cacheblend_rag.quality.fidelity import (
    TOKENS,
    PromptFidelity,
    Reference,
    answer_and_compare,
    reference,
)
from cacheblend_rag.quality.records import PromptRecord, RecordLog, question_key
from cacheblend_rag.quality.rules import ALWAYS, BASELINES, FULL, NO_CONTEXT, PREFIX_CACHING, Rule
from cacheblend_rag.result_log import Key
from cacheblend_rag.settings import EMBEDDED, BlendConfig, LeadInConfig, LeadInKind
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.transformers.engine import TransformersEngine

ONE_TOKEN = SamplingParams.greedy(max_tokens=1)
Configs = Mapping[Rule, BlendConfig]


@dataclass(frozen=True)
class Measures:
    """What is measured beside answers.

    fidelity: to full prefill's predictions; only the embedded engine can score them. ttft: the time
    to first token.
    """

    fidelity: bool = False
    ttft: bool = False


ANSWERS_ONLY = Measures()


@dataclass
class QuestionMeasurer:
    """Measures questions one by one, all rules of a question in turn.

    engines: one per lead-in, around one model. sampling: of answers, greedy. owns_store: whether
    nobody else's chunks are in the store; otherwise chunks of a question are left there if any was
    there before. rules_answer: if not, rules answer with one token, and only full prefill in full,
    which is enough for fidelity and time to first token. log: results that are known already are
    taken from it, and new ones are kept in it.

    Time to first token is that of the requests that give the answers: of full prefill, of each rule
    with the chunks' KV in the store (memory, by default), and of prefix caching, whose cache holds
    what this prompt shares with the previous one, the text before the first passage. vLLM's own
    prefix cache is used as it is. The embedded engine has none, so the KV of that text is kept as a
    chunk at the beginning of the prompt and everything behind it is computed, which is the work of
    prefix caching, less what a pass saves in the last layer. The first question is answered once by
    each rule, untimed, before.
    """

    engines: Mapping[LeadInKind, Engine]
    frame: PromptFrame
    sampling: SamplingParams
    measures: Measures = ANSWERS_ONLY
    owns_store: bool = True
    rules_answer: bool = True
    log: RecordLog = field(default_factory=RecordLog)
    _salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    _is_warm: bool = False

    def records(self, question: EvalQuestion, rules: Configs) -> dict[Rule, PromptRecord]:
        """Return the results of the wanted rules, in order; only unknown ones are measured."""
        about = question_key(question, self.frame.prompt(question))
        keys = {rule: self._key(about, rule, config) for rule, config in rules.items()}
        missing = {rule: rules[rule] for rule, key in keys.items() if self.log.get(key) is None}
        if missing:
            for rule, record in self.measure(question, missing):
                self.log.put(keys[rule], record)
        known = {rule: self.log.get(key) for rule, key in keys.items()}
        return {rule: record for rule, record in known.items() if record is not None}

    def _key(self, about: str, rule: Rule, config: BlendConfig) -> Key:
        """Return what a result depends on."""
        engine, settings = self._first, None
        if rule not in BASELINES:
            engine, settings = self.engines[rule.lead_in], config.model_dump(mode="json")
        return {
            "question": about,
            "rule": [rule.lead_in, rule.selector, rule.ratio],
            "config": settings,
            "model": engine.model_name,
            "dtype": engine.dtype,
            "kv": engine.fingerprint,
            "sampling": [self.sampling.max_tokens, *self.sampling.stop],
            "measures": asdict(self.measures),
            "rules_answer": self.rules_answer,
        }

    def measure(
        self, question: EvalQuestion, rules: Configs
    ) -> Iterator[tuple[Rule, PromptRecord]]:
        """Yield the results of the wanted rules; see Evaluator for errors.

        rules: with their settings; those of BASELINES are not read.
        """
        prompt = self.frame.prompt(question)
        if self.measures.ttft and not self._is_warm:
            self._first.generate_full(prompt, ONE_TOKEN)
        full, compared = self._full(question, prompt)
        told = partial(self._record, question)
        if FULL in rules:
            yield FULL, told(full, cut=True, fidelity=compared and compared.of_itself)
        if NO_CONTEXT in rules:
            bare = self.frame.without_passages(question)
            answer, fidelity = self._answer(compared, self._first, bare)
            record = told(answer, fidelity=fidelity)
            share = answer.prompt_tokens / full.prompt_tokens
            yield NO_CONTEXT, replace(record, compute_share=share)
        if PREFIX_CACHING in rules:
            cached = replace(told(full, cut=True), **self._prefix_cached(question))
            yield PREFIX_CACHING, cached
        for lead_in, engine in self.engines.items():
            own = {r: c for r, c in rules.items() if r not in BASELINES and r.lead_in == lead_in}
            if own:
                with self._indexed(engine, question):
                    yield from self._blended(engine, question, prompt, compared, own)
        self._is_warm = True

    def _blended(
        self,
        engine: Engine,
        question: EvalQuestion,
        prompt: BlendPrompt,
        compared: Reference | None,
        rules: Configs,
    ) -> Iterator[tuple[Rule, PromptRecord]]:
        if self.measures.ttft and not self._is_warm:
            for config in rules.values():
                engine.generate(prompt, ONE_TOKEN, config=config)
        for rule, config in rules.items():
            answer, fidelity = self._answer(compared, engine, prompt, config)
            reason = answer.report.reason or "no reason given"
            why = None if answer.report.blended else str(reason)
            yield rule, self._record(question, answer, not_blended=why, fidelity=fidelity)

    @property
    def _first(self) -> Engine:
        return next(iter(self.engines.values()))

    def _full(
        self, question: EvalQuestion, prompt: BlendPrompt
    ) -> tuple[Generation, Reference | None]:
        """Return full prefill's answer, as what rules are compared with if fidelity is measured."""
        sampling = self.sampling.with_changes(stop=())
        if not self.measures.fidelity:
            return self._first.generate_full(prompt, sampling), None
        engine, tokens = _measured(self._first), min(TOKENS, self.sampling.max_tokens)
        found = reference(engine, prompt, question.answers, tokens, sampling=sampling)
        return found.generation, found

    def _answer(
        self,
        compared: Reference | None,
        engine: Engine,
        prompt: BlendPrompt,
        config: BlendConfig | None = None,
    ) -> tuple[Generation, PromptFidelity | None]:
        """Return a rule's answer and its fidelity, if measured; full prefill's without a config."""
        full = config is None
        sampling = self.sampling if self.rules_answer else ONE_TOKEN
        if compared is not None:
            return answer_and_compare(
                compared, _measured(engine), prompt, sampling, config, full=full
            )
        if full:
            return engine.generate_full(prompt, sampling), None
        return engine.generate(prompt, sampling, config=config), None

    def _record(
        self, question: EvalQuestion, answer: Generation, *, cut: bool = False, **measured: Any
    ) -> PromptRecord:
        """Score an answer. cut: it was drawn without stop strings, and is cut at them now."""
        text = _cut(answer.text, self.sampling.stop) if cut else answer.text
        if self.measures.ttft:
            measured = {"ttft_seconds": _seconds(answer), **measured}
        return PromptRecord.of(answer, text, question.answers, **measured)

    @contextmanager
    def _indexed(self, engine: Engine, question: EvalQuestion) -> Iterator[None]:
        """Keep a question's chunks in the store meanwhile."""
        report = engine.precompute(question.documents, progress=False)
        try:
            yield
        finally:
            if self.owns_store or not report.skipped:
                for document in question.documents:
                    engine.evict_document(document.document_id)

    # Prefix caching

    def _prefix_cached(self, question: EvalQuestion) -> dict[str, Any]:
        """Return the time and the work of prefix caching."""
        if self._first.name != EMBEDDED:
            prompt = self.frame.prompt(question)
            if not self._is_warm:
                self._salted(self.frame.without_passages(question))
            return _timed(self._salted(prompt))
        opening, prompt = self.frame.opening_alone(question)
        if not opening.text:
            return _timed(self._first.generate_full(prompt, ONE_TOKEN))
        engine = self._prefix_engine
        report = engine.precompute([opening], progress=False)
        config = BlendConfig(selector="none", recompute_ratio=0.0, **ALWAYS)
        ask: Callable[[], Generation] = partial(engine.generate, prompt, ONE_TOKEN, config=config)
        if not self._is_warm:
            ask()
        found = _timed(ask())
        if self.owns_store or not report.skipped:
            engine.evict_document(OPENING)
        return found

    def _salted(self, prompt: BlendPrompt) -> Generation:
        return self._first.generate_full(prompt, ONE_TOKEN, cache_salt=self._salt)

    @cached_property
    def _prefix_engine(self) -> Engine:
        """An engine whose chunk may be the beginning of a prompt, special tokens and all."""
        kind: LeadInKind = "none" if self.frame.is_rendered else "bos"
        return self._first.sibling(lead_in=LeadInConfig(kind=kind, split_special_tokens=False))


def _measured(engine: Engine) -> TransformersEngine:
    return cast("TransformersEngine", engine)


def _timed(answer: Generation) -> dict[str, Any]:
    return {"ttft_seconds": _seconds(answer), "compute_share": answer.report.compute_share}


def _seconds(answer: Generation) -> float:
    return answer.report.seconds.time_to_first_token


def _cut(text: str, stop: tuple[str, ...]) -> str:
    """Return a text up to the first of some strings."""
    return min((text.partition(one)[0] for one in stop), key=len, default=text)
