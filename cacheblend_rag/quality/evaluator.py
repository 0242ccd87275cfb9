"""The evaluation loop: full prefill and blend rules answer the same questions and are scored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptError, UnsupportedModelError
from cacheblend_rag.models import resolve
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.measuring import ANSWERS_ONLY, Measures, QuestionMeasurer
from cacheblend_rag.quality.records import PromptRecord, RecordLog
from cacheblend_rag.quality.rules import (
    BASELINES,
    FULL,
    NO_CONTEXT,
    PREFIX_CACHING,
    Options,
    Rule,
    exactness,
)
from cacheblend_rag.quality.summary import EvalRow, not_blended, summarize
from cacheblend_rag.settings import EMBEDDED, VLLM, BlendConfig, LeadInKind, StoreConfig

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.serve import RunningServer

EXACT_DTYPE = "float32"
HOST_BYTES = 2 << 30
CPU_KV_SPACE, SERVED_KV_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"


@dataclass(frozen=True)
class Evaluation:
    """Rows of one setting, full prefill first, and counts of reasons for not blending."""

    rows: tuple[EvalRow, ...]
    not_blended: Mapping[str, int]


@dataclass(frozen=True)
class Evaluator:
    """Answers questions by full prefill and by rules.

    engines: one engine per lead-in, around the same model and with the same instruction, the
    frame's opening. base: the config that rules override; its cost model is switched off, so that
    rules decide. options: selector options by selector name. measures: what is measured beside
    answers. log, owns_store: as in QuestionMeasurer.
    """

    engines: Mapping[LeadInKind, Engine]
    frame: PromptFrame
    base: BlendConfig
    sampling: SamplingParams
    options: Options = field(default_factory=dict)
    measures: Measures = ANSWERS_ONLY
    log: RecordLog = field(default_factory=RecordLog)
    owns_store: bool = True

    def run(
        self,
        questions: Sequence[EvalQuestion],
        rules: Sequence[Rule],
        on_question: Callable[[], None] = lambda: None,
    ) -> Evaluation:
        """Score full prefill and every rule on questions of one setting.

        A question's documents are precomputed once per lead-in and evicted again, so that an own
        store never holds more than one prompt. on_question: called after each, for a progress bar.
        With fidelity, the prompt without passages is answered, too, and where the model is not
        float32, the rule ``all`` shows how much is rounding.
        Raises ConfigError without questions, when a rule's lead-in has no engine, or for fidelity
        on an engine that cannot score; PromptError, naming the question, when a prompt does not
        fit the model.
        """
        if not questions:
            raise ConfigError("questions=0 must be at least 1")
        for engine in self.engines.values():
            if self.measures.fidelity and not hasattr(engine, "score_each"):
                raise ConfigError(f"fidelity: engine {engine.name!r} cannot score: use {EMBEDDED}")
        configs = {rule: self._config(rule) for rule in self._all(rules)}
        measurer = QuestionMeasurer(
            self.engines,
            self.frame,
            self.sampling,
            self.measures,
            self.owns_store,
            log=self.log,
        )
        results: dict[Rule, list[PromptRecord]] = {rule: [] for rule in configs}
        for question in questions:
            try:
                for rule, record in measurer.records(question, configs).items():
                    results[rule].append(record)
            except PromptError as error:
                raise PromptError(f"question {question.question!r}: {error}") from error
            on_question()
        return Evaluation(summarize(questions[0].setting, results), not_blended(results))

    def _all(self, rules: Sequence[Rule]) -> list[Rule]:
        """Return the rules with those that stand beside them, each once."""
        found = [FULL]
        if self.measures.fidelity:
            found.append(NO_CONTEXT)
        if self.measures.ttft:
            found.append(PREFIX_CACHING)
        lead_in, engine = next(iter(self.engines.items()))
        if self.measures.fidelity and engine.dtype != EXACT_DTYPE:
            found.append(exactness(lead_in))
        return list(dict.fromkeys([*found, *rules]))

    def _config(self, rule: Rule) -> BlendConfig:
        if rule not in BASELINES and rule.lead_in not in self.engines:
            raise ConfigError(f"lead_in={rule.lead_in!r} has no engine in this evaluation")
        return self.base if rule in BASELINES else rule.config(self.base, self.options)


def used_lead_ins(plans: Mapping[str, Sequence[Rule]]) -> list[LeadInKind]:
    """Return the lead-ins that rules by setting need an engine for, in order of appearance."""
    return list(dict.fromkeys(rule.lead_in for rules in plans.values() for rule in rules))


def evaluate_settings(
    data: EvalDataset,
    plans: Mapping[str, Sequence[Rule]],
    evaluator: Evaluator,
    on_setting: Callable[[str, int], Callable[[], None]] = lambda setting, questions: lambda: None,
) -> Iterator[tuple[str, Evaluation]]:
    """Yield each setting and its evaluation by its own rules, one after another.

    plans: rules by setting. on_setting: called with a setting and its number of questions; returns
    a function that is called after each question. Raises the errors of Evaluator.run.
    """
    for setting, rules in plans.items():
        questions = data.of_setting(setting)
        needed = {rule.lead_in: evaluator.engines[rule.lead_in] for rule in rules}
        own = replace(evaluator, engines=needed)
        yield setting, own.run(questions, rules, on_setting(setting, len(questions)))


@contextmanager
def opened_engines(
    engine: str,
    model: str,
    lead_ins: Sequence[LeadInKind],
    *,
    instruction: str,
    store: StoreConfig | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Iterator[Mapping[LeadInKind, Engine]]:
    """Yield one engine per lead-in, all around the same loaded model, until the block is left.

    engine: ``transformers``, ``vllm`` (starts a server) or the URL of a server. model:
    as for open_engine. instruction: the exact text of prompts before the first chunk. store: by
    default memory enough for one prompt. Raises UnsupportedModelError when the model's KV cannot be
    blended, and the errors of running_server and open_engine.
    """
    from cacheblend_rag.engines.factory import open_engine

    quiet_libraries()
    kept = store or StoreConfig(host_bytes=HOST_BYTES)
    with ExitStack() as stack:
        where = engine
        if engine == VLLM:
            where = stack.enter_context(_server(resolve(model), dtype, kept)).url
        own = where == EMBEDDED
        first = open_engine(
            where,
            model=model,
            config=BlendConfig(min_tokens=0),
            lead_in=lead_ins[0],
            store=kept if own else StoreConfig(),
            instruction=instruction,
            device=device if own else None,
            dtype=dtype if own else None,
        )
        stack.callback(first.close)
        if first.blend_refusal:
            raise UnsupportedModelError(f"model={model!r} cannot be blended: {first.blend_refusal}")
        yield {
            lead_in: first if index == 0 else first.sibling(lead_in=lead_in)
            for index, lead_in in enumerate(lead_ins)
        }


def _server(
    model: str, dtype: str | None, store: StoreConfig
) -> AbstractContextManager[RunningServer]:
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
    from cacheblend_rag.engines.vllm.serve import running_server

    environment = {} if CPU_KV_SPACE in os.environ else {CPU_KV_SPACE: SERVED_KV_GIB}
    flags = ["--dtype", dtype or "auto"]
    settings = ConnectorSettings(store=store)
    return running_server(model, flags=flags, settings=settings, environment=environment)
