"""Runs a request several ways, and returns what is wrong with it, most serious first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.answering import Hints
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike, TurnPrompt
from cacheblend_rag.errors import ConfigError, OutOfMemoryError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.observe.rules import MUCH_WORK, NOTICED, Evidence, Finding, Trial, examine
from cacheblend_rag.quality.measure import FULL, Measured, Prompt, Rule, measure
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.settings.options import DEFAULT_RATIO
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.special_tokens import special_tokens

RUNS, ANSWER_TOKENS = 3, 16
MOST_RATIO = 0.5
SHOWN = 40
"""Characters of a chunk that name it."""
CHOOSES_NOTHING = ("all", "none")
"""Selectors without a ratio."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a request, and the evidence.

    Args:
        findings: faults first, then notes, each the most serious first.
        evidence: all that was measured.
    """

    findings: tuple[Finding, ...]
    evidence: Evidence

    @property
    def has_fault(self) -> bool:
        """Whether a finding is a fault."""
        return any(finding.is_fault for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the findings, and the figures that they were drawn from."""
        told, now = self.evidence, self.evidence.in_force
        return {
            "has_fault": self.has_fault,
            "findings": [finding.to_dict() for finding in self.findings],
            "measured": {
                "prompt_tokens": told.prompt_tokens,
                "chunks": len(told.chunks),
                "blended": told.is_blended,
                "runs": len(told.blends),
                "full_seconds": told.full_seconds,
                "blend_seconds": told.blend_seconds,
                "ratio": now and now.report.recompute_ratio,
                "compute_share": now and now.report.compute_share,
                "loss_nats_per_token": now and now.loss,
            },
        }


def diagnose(
    engine: Engine,
    prompt: PromptLike,
    *,
    config: BlendConfig | None = None,
    hints: Hints = (),
    question: str = "",
    runs: int = RUNS,
    answer_tokens: int = ANSWER_TOKENS,
    on_step: Callable[[str], None] = lambda step: None,
) -> Diagnosis:
    """Return what is wrong with a request: its answer, its memory, its time to first token.

    The request is run by blend and by full prefill, in turn, and blended with other settings where
    that helps to judge those in force. To the engine and its store these are requests like any
    others.

    Args:
        engine: serves it.
        prompt: as for generate.
        config: how KV is blended; the engine's own for None.
        hints: as for generate.
        question: the question in the prompt, if it is known.
        runs: how often the request is timed each way, after one that is not.
        answer_tokens: over how many tokens of full prefill's answer predictions are compared.
        on_step: called with what is done next.

    Raises:
        ConfigError: when a number is below 1, or ``config`` does not suit the model.
        PromptError: when the prompt is empty or longer than the context window.
        EngineUnavailableError: when a server does not answer.
    """
    for name, number in (("runs", runs), ("answer_tokens", answer_tokens)):
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    request = _Request(engine, engine.prepare(prompt, hints), config or engine.config, on_step)
    found, answer = request.answered(request.known(question), runs, answer_tokens)
    if found.is_blended and found.lack is None:
        found = request.tried(found, answer)
    store = getattr(engine, "store", None)
    if isinstance(store, TieredKVStore):
        found = request.stored(found, store)
    return Diagnosis(examine(found), found)


@dataclass(frozen=True)
class _Request:
    """A prepared request; each method adds facts to those that are known."""

    engine: Engine
    prompt: PreparedPrompt
    config: BlendConfig
    on_step: Callable[[str], None]

    def known(self, question: str) -> Evidence:
        """Return what is known before the request is run."""
        self.on_step("searching the prompt for registered chunks")
        engine, prompt = self.engine, self.prompt
        source = prompt.source.prompt if isinstance(prompt.source, TurnPrompt) else prompt.source
        if not isinstance(source, BlendPrompt):
            source = BlendPrompt.from_text(prompt.text, engine.registry, prompt.hints)
        parts, spans, known = source.segments, prompt.encoded.spans, engine.registry.chunks()
        at = [index for index, part in enumerate(parts) if part.chunk is not None]
        after = "".join(part.text for part in parts[at[-1] + 1 :]) if at else ""
        for token in special_tokens(engine.tokenizer).values():
            after = after.replace(token, " ")
        spaced = " ".join(prompt.text.split())
        texts = dict.fromkeys(chunk.text for chunk in known)
        respaced = [
            text[:SHOWN]
            for text in texts
            if text not in prompt.text and " ".join(text.split()) in spaced and text.strip()
        ]
        return Evidence(
            self.config,
            len(prompt.token_ids),
            chunks=tuple(span.chunk.text for span in spans),
            chunk_tokens=tuple(span.end - span.start for span in spans),
            known_chunks=len(known),
            respaced=tuple(respaced),
            after=after,
            question=question,
        )

    def answered(self, found: Evidence, runs: int, tokens: int) -> tuple[Evidence, tuple[int, ...]]:
        """Run it by blend and by full prefill, in turn; return the answer to compare along, too."""
        blend = Rule("blend", self.config.with_changes(reuse_prefix=False))
        answer: tuple[int, ...] = ()
        try:
            self.on_step("the first blended request")
            own = self._generated(blend, tokens)
            found = replace(found, first=own.report)
            self.on_step("the first request by full prefill")
            full = self._generated(FULL, tokens)
            # Full prefill of a prompt without its chunks' documents may answer from nothing.
            lacks_context = any(chunk.protected for chunk in self.prompt.placed)
            answer = (own if lacks_context else full).token_ids
            self.on_step(f"{runs} requests each way")
            for turn in self._measured([FULL, blend], runs, max_tokens=1, compare=False):
                fulls, blends = (turn[rule.name].generation for rule in (FULL, blend))
                found = replace(
                    found,
                    fulls=(*found.fulls, cast("Generation", fulls).report),
                    blends=(*found.blends, cast("Generation", blends).report),
                )
        except OutOfMemoryError as error:
            found = replace(found, lack=str(error))
        return found, answer

    def tried(self, found: Evidence, answer: tuple[int, ...]) -> Evidence:
        """Blend with the config in force and, where that helps to judge it, with others."""
        self.on_step("comparing predictions with full prefill's")
        now = self._trial(self.config, answer)
        found, ratio = replace(found, in_force=now), now.report.recompute_ratio
        if now.loss is not None and now.loss >= NOTICED and ratio < MOST_RATIO:
            self.on_step("the same at a higher ratio")
            higher = min(MOST_RATIO, 2 * max(DEFAULT_RATIO, ratio))
            found = replace(found, more=self._trial(self._at(higher), answer))
        if ratio >= MUCH_WORK:
            self.on_step("the same at a lower ratio")
            found = replace(found, less=self._trial(self._at(DEFAULT_RATIO), answer))
        trace = now.report.trace
        is_checked = trace and any(one.layer is not None for one in trace.selections)
        if is_checked and self.config.check_layers[0] > 1:
            self.on_step("the same with an earlier check layer")
            early = self.config.with_changes(check_layers=(1,), recompute_ratio=ratio)
            found = replace(found, earlier=self._trial(early, answer))
        return found

    def _at(self, ratio: float) -> BlendConfig:
        """Return the config in force with another ratio, and a selector that has one."""
        config = self.config.with_ratio(ratio)
        if config.selector not in CHOOSES_NOTHING:
            return config
        return config.with_selector(BlendConfig().selector)

    def _trial(self, config: BlendConfig, answer: tuple[int, ...]) -> Trial:
        traced = config.with_changes(trace=True, cost_model=False, reuse_prefix=False)
        report = self._generated(Rule("trial", traced), 1).report
        compared = report.blended and self.engine.compare_with_full_prefill(
            self.prompt, answer, config=traced, with_documents=True
        )
        return Trial(report, max(0.0, compared.blend - compared.prefill) if compared else None)

    def _generated(self, rule: Rule, tokens: int) -> Generation:
        (found,) = self._measured([rule], max_tokens=tokens, compare=False)
        return cast("Generation", found[rule.name].generation)

    def _measured(
        self, rules: Sequence[Rule], runs: int = 1, **options: Any
    ) -> Iterator[dict[str, Measured]]:
        asked = [Prompt(self.prompt, name="")] * runs
        return measure(self.engine, asked, rules, warm=False, **options)

    def stored(self, found: Evidence, store: TieredKVStore) -> Evidence:
        """Add how long it takes to read the chunks again, and how much KV is kept in memory."""
        keys, stats = [chunk.key for chunk in self.prompt.placed], store.stats()
        read_again, kept = {}, 0
        for tier in store.tiers:
            read_again[tier.name] = 0.0
            if not tier.durable:
                kept += stats[tier.name]["bytes"] or 0
            elif tier.name in found.waits:
                self.on_step(f"reading the chunks from the tier {tier.name} once more")
                began = time.perf_counter()
                tier.get_many(keys)
                read_again[tier.name] = time.perf_counter() - began
        return replace(found, read_again=read_again, kept_bytes=kept)
