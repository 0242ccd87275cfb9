"""The one loop that measures: several ways to answer the same prompts, beside full prefill.

    blend = Rule("blend", engine.config.with_changes(**BLEND_ALWAYS))
    for found in measure(engine, [Prompt("...")], [FULL, blend]):
        found["blend"].record.ttft_seconds / found["full"].record.ttft_seconds
        found["blend"].record.fidelity.kl, found["blend"].generation.report

`eval`, `tune`, `verify`, `doctor`, `explain` and `demo` differ in prompts and rules, and in what
they make of the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.quality.fidelity import Fidelity, Reference, answer_and_compare, reference
from cacheblend_rag.quality.scores import holds_answer, token_f1
from cacheblend_rag.result_log import Key, ResultLog
from cacheblend_rag.settings import BlendConfig, LeadInKind
from cacheblend_rag.text.chunk import Document

if TYPE_CHECKING:
    from cacheblend_rag.engines.transformers.engine import TransformersEngine

BLEND_ALWAYS: dict[str, Any] = {"min_tokens": 0, "cost_model": False, "reuse_prefix": False}
"""Changes of settings under which stored chunks are always blended, however short the prompt and
fast the machine, and nothing is kept of the prompt before: for rules that are compared."""
ONE_TOKEN = SamplingParams.greedy(max_tokens=1)
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Rule:
    """One way to answer a prompt.

    Args:
        name: what results are found by.
        config: how stored KV is blended; None is full prefill.
        lead_in: what the prompt's documents are computed after; None is as the engine does.
        bare: whether the prompt is asked without its passages.
    """

    name: str
    config: BlendConfig | None = field(default=None, hash=False)
    lead_in: LeadInKind | None = None
    bare: bool = False


FULL = Rule("full")
NO_PASSAGES = Rule("no_passages", bare=True)


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered.

    Args:
        asked: as for Engine.generate.
        documents: are computed and stored before it is answered, and evicted afterwards, unless
            some of them were stored before. Without any, the store is used as it is.
        golds: right answers.
        bare: the prompt without its passages.
        name: for errors.
    """

    asked: PromptLike
    documents: tuple[Document, ...] = ()
    golds: tuple[str, ...] = ()
    bare: PromptLike | None = None
    name: str = ""


@dataclass(frozen=True)
class Record:
    """One rule's result on one prompt, as it is kept in a file.

    Args:
        text: the answer.
        f1: of its words and a gold answer's; 0 without one, as the next.
        holds: whether it contains a gold answer.
        prompt_tokens: of the prompt.
        chunk_tokens: tokens of its chunks.
        fresh_tokens: those of them that were computed.
        compute_share: work, probe included, as a share of full prefill's of the prompt.
        early_kv_bytes: as in BlendReport.
        ttft_seconds: time to first token.
        not_blended: why a rule with a config was served by ordinary prefill; None if it was not.
        fidelity: how near predictions are to full prefill's; None if they were not compared.
    """

    text: str
    f1: float
    holds: float
    prompt_tokens: int
    chunk_tokens: int
    fresh_tokens: int
    compute_share: float
    early_kv_bytes: int
    ttft_seconds: float
    not_blended: str | None = None
    fidelity: Fidelity | None = None


class RecordLog(ResultLog[Record]):
    """The records of an evaluation, one per rule and prompt, from which it resumes."""

    work, kind = "evaluation", Record


@dataclass(frozen=True)
class Measured:
    """A rule's result on a prompt.

    record: its figures. generation: the answer with its report; None if the record was in the log.
    """

    record: Record
    generation: Generation | None = None


def measure(
    engine: Engine,
    prompts: Iterable[Prompt],
    rules: Sequence[Rule],
    *,
    max_tokens: int = ANSWER_TOKENS,
    stop: tuple[str, ...] = (),
    compare: bool = True,
    warm: bool = True,
    log: RecordLog | None = None,
) -> Iterator[dict[str, Measured]]:
    """Answer each prompt by all rules, one after another; yield the results by the rules' names.

    Answers are greedy. A prompt that stands there several times is measured several times.

    Args:
        engine: of any kind. Another lead-in is that of a sibling, around the same model.
        prompts: in order.
        rules: in order; those with one lead-in are best next to each other, so that documents are
            computed once.
        max_tokens: most tokens of an answer.
        stop: texts that end an answer.
        compare: whether predictions are compared with those after full prefill, along its answer.
            The embedded engine tells all of Fidelity, others KL alone, which takes them further
            prefills.
        warm: whether a rule answers its first prompt once before, untimed.
        log: known records are taken from it, and new ones kept there.

    Raises:
        PromptError: when a prompt does not fit the model; it names the prompt.
        OutOfMemoryError: when there is no memory for it.
    """
    loop = _Loop(engine, max_tokens, stop, compare, set() if warm else None)
    for prompt in prompts:
        found: dict[str, Measured] = {}
        for rule in rules:
            record = None if log is None else log.get(loop.key(prompt, rule))
            if record is not None:
                found[rule.name] = Measured(record)
        missing = [rule for rule in rules if rule.name not in found]
        try:
            for rule, measured in loop.results(prompt, missing):
                found[rule.name] = measured
                if log is not None:
                    log.put(loop.key(prompt, rule), measured.record)
        except PromptError as error:
            if not prompt.name:
                raise
            raise PromptError(f"{prompt.name}: {error}") from error
        yield {rule.name: found[rule.name] for rule in rules}


@dataclass
class _Loop:
    """Measures prompts; the arguments of measure, and names of rules that answered one before.

    warmed: None if no rule answers one before.
    """

    engine: Engine
    max_tokens: int
    stop: tuple[str, ...]
    compare: bool
    warmed: set[str] | None
    _siblings: dict[str | None, Engine] = field(default_factory=dict)

    def key(self, prompt: Prompt, rule: Rule) -> Key:
        """Return what a result depends on."""
        engine, config = self._of(rule), None
        if rule.config is not None:
            config = rule.config.to_dict()
            selector = make_selector(rule.config.selector, rule.config.selector_options)
            config["selector_options"] = selector.to_dict()  # defaults too: they may change
        return {
            "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest()[:32],
            "rule": [rule.name, rule.lead_in, rule.bare],
            "config": config,
            "engine": [engine.name, engine.model_name, engine.dtype, engine.fingerprint],
            "answer": [self.max_tokens, *self.stop],
            "compare": self.compare,
        }

    def results(self, prompt: Prompt, rules: Sequence[Rule]) -> Iterator[tuple[Rule, Measured]]:
        """Yield the results of some rules on a prompt: full prefill's first, if it is needed."""
        full, wanted = None, None
        if rules and (FULL in rules or self.compare):
            full, wanted = self._full(prompt)
            if FULL in rules:
                yield FULL, self._measured(FULL, prompt, full, wanted.of_itself if wanted else None)
        for rule in rules:
            if rule.config is None and rule != FULL:
                yield rule, self._answered(rule, prompt, full, wanted)
        blended = [rule for rule in rules if rule.config is not None]
        for engine, group in groupby(blended, self._of):
            with stored(engine, prompt):
                for rule in group:
                    yield rule, self._answered(rule, prompt, full, wanted)

    def _full(self, prompt: Prompt) -> tuple[Generation, Reference | None]:
        """Return full prefill's answer, and what predictions are compared with."""
        self._warm(FULL, prompt)
        if not self.compare or not hasattr(self.engine, "generate_and_score"):
            return self.engine.generate_full(prompt.asked, self._greedy), None
        engine = cast("TransformersEngine", self.engine)
        found = reference(engine, prompt.asked, prompt.golds, self._greedy)
        return found.generation, found

    def _answered(
        self, rule: Rule, prompt: Prompt, full: Generation | None, wanted: Reference | None
    ) -> Measured:
        engine, asked = self._of(rule), _asked(rule, prompt)
        self._warm(rule, prompt)
        if wanted is not None:
            scoring = cast("TransformersEngine", engine)
            told, fidelity = answer_and_compare(wanted, scoring, asked, self._greedy, rule.config)
            return self._measured(rule, prompt, told, fidelity)
        told = self._answer(rule, prompt, self._greedy)
        compared = None
        if self.compare and full and rule.config and told.report.blended:
            compared = engine.compare_with_full_prefill(asked, full.token_ids, config=rule.config)
        return self._measured(rule, prompt, told, Fidelity(compared.blend) if compared else None)

    def _warm(self, rule: Rule, prompt: Prompt) -> None:
        if self.warmed is not None and rule.name not in self.warmed:
            self._answer(rule, prompt, ONE_TOKEN)
            self.warmed.add(rule.name)

    def _answer(self, rule: Rule, prompt: Prompt, sampling: SamplingParams) -> Generation:
        engine, asked = self._of(rule), _asked(rule, prompt)
        if rule.config is None:
            return engine.generate_full(asked, sampling)
        return engine.generate(asked, sampling, config=rule.config)

    def _measured(
        self, rule: Rule, prompt: Prompt, told: Generation, fidelity: Fidelity | None
    ) -> Measured:
        report, golds = told.report, prompt.golds
        text = min((told.text.partition(one)[0] for one in self.stop), key=len, default=told.text)
        why = rule.config and not report.blended and str(report.reason or "no reason given")
        record = Record(
            text=text,
            f1=token_f1(text, golds),
            holds=float(holds_answer(text, golds)),
            prompt_tokens=report.prompt_tokens,
            chunk_tokens=sum(chunk.tokens for chunk in report.chunks),
            fresh_tokens=sum(c.recomputed if c.hit else c.tokens for c in report.chunks),
            compute_share=report.compute_share,
            early_kv_bytes=report.early_kv_bytes,
            ttft_seconds=report.seconds.time_to_first_token,
            not_blended=why or None,
            fidelity=fidelity,
        )
        return Measured(record, told)

    @property
    def _greedy(self) -> SamplingParams:
        return SamplingParams.greedy(max_tokens=self.max_tokens)

    def _of(self, rule: Rule) -> Engine:
        """Return the engine whose chunks are computed after a rule's lead-in."""
        if rule.lead_in in (None, self.engine.lead_in.kind):
            return self.engine
        if rule.lead_in not in self._siblings:
            own = self.engine.lead_in.with_changes(kind=rule.lead_in)
            self._siblings[rule.lead_in] = self.engine.sibling(lead_in=own)
        return self._siblings[rule.lead_in]


@contextmanager
def stored(engine: Engine, prompt: Prompt) -> Iterator[None]:
    """Keep the KV of a prompt's documents in the store, until the block is left."""
    if not prompt.documents:
        yield
        return
    report = engine.precompute(prompt.documents, progress=False)
    try:
        yield
    finally:
        if not report.skipped:
            for document in prompt.documents:
                engine.evict_document(document.document_id)


def _asked(rule: Rule, prompt: Prompt) -> PromptLike:
    if not rule.bare:
        return prompt.asked
    if prompt.bare is None:
        raise ConfigError(f"rule {rule.name!r}: the prompt has no form without passages")
    return prompt.bare
