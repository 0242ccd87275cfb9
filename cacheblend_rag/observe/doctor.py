"""Runs a request several ways, and returns what is wrong with it, most serious first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.answering import Hints
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike, TurnPrompt
from cacheblend_rag.errors import ConfigError, OutOfMemoryError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.observe import machine
from cacheblend_rag.observe.evidence import (
    Evidence,
    MemoryFacts,
    PromptFacts,
    TierFacts,
    Trial,
    waited,
)
from cacheblend_rag.observe.rules import MUCH_WORK, NOTICED, Finding, examine
from cacheblend_rag.observe.similar import similar_chunks
from cacheblend_rag.quality.measure import FULL, Measured, Prompt, Rule, measure
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.settings.options import DEFAULT_RATIO
from cacheblend_rag.text.chat import on_day
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.special_tokens import special_tokens

if TYPE_CHECKING:
    from cacheblend_rag.quality.verify import Verdict

RUNS, ANSWER_TOKENS = 3, 16
LEAST_SECONDS = 0.5
"""Shortest time over which CPU counters, of 10 ms each, are compared."""
MOST_RATIO = 0.5
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
                "prompt_tokens": told.prompt.tokens,
                "chunks": len(told.prompt.chunks),
                "blended": told.is_blended,
                "runs": len(told.blends),
                "full_seconds": told.full_seconds,
                "blend_seconds": told.blend_seconds,
                "ratio": now and now.report.recompute_ratio,
                "compute_share": now and now.report.compute_share,
                "loss_nats_per_token": now and now.loss,
                "cpu": None if told.load is None else asdict(told.load),
                "is_quiet": told.is_quiet,
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
    verdict: Verdict | None = None,
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
        verdict: what ``verify_model`` found, if it was run.
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
    store = getattr(engine, "store", None)
    store = store if isinstance(store, TieredKVStore) else None
    before = store.stats() if store is not None else {}
    cpu, began = machine.CpuSeconds.now(), time.monotonic()
    found = replace(request.known(question), verdict=verdict)
    found, answer = request.answered(found, runs, answer_tokens)
    if found.is_blended and found.memory.lack is None:
        found = request.tried(found, answer)
    if store is not None:
        time.sleep(max(0.0, LEAST_SECONDS - (time.monotonic() - began)))
        found = replace(found, load=machine.CpuLoad.between(cpu, machine.CpuSeconds.now()))
        found = request.stored(found, store, before)
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
        parts, known = source.segments, engine.registry.chunks()
        at = [index for index, part in enumerate(parts) if part.chunk is not None]
        after = "".join(part.text for part in parts[at[-1] + 1 :]) if at else ""
        for token in special_tokens(engine.tokenizer).values():
            after = after.replace(token, " ")
        facts = PromptFacts(
            tokens=len(prompt.token_ids),
            chunks=tuple(span.chunk.text for span in prompt.encoded.spans),
            chunk_tokens=tuple(span.end - span.start for span in prompt.encoded.spans),
            known_chunks=len(known),
            before="".join(part.text for part in (parts[: at[0]] if at else parts)),
            after=after,
            instruction=on_day(None, engine.instruction, engine.tokenizer),
            lead_in=engine.lead_in.kind,
            question=question,
        )
        texts = [part.text for part in parts if part.chunk is None]
        similar = similar_chunks(texts, known)
        return Evidence(facts, self.config, similar=similar, refusal=engine.blend_refusal)

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
            for turn in self._measured([FULL, blend], runs, max_tokens=1, compare=""):
                fulls, blends = (turn[rule.name].generation for rule in (FULL, blend))
                found = replace(
                    found,
                    fulls=(*found.fulls, cast("Generation", fulls).report),
                    blends=(*found.blends, cast("Generation", blends).report),
                )
        except OutOfMemoryError as error:
            found = replace(found, memory=MemoryFacts(lack=str(error)))
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
        return config.with_changes(selector=BlendConfig().selector, selector_options={})

    def _trial(self, config: BlendConfig, answer: tuple[int, ...]) -> Trial:
        traced = config.with_changes(trace=True, cost_model=False, reuse_prefix=False)
        rule = Rule("trial", traced)
        (found,) = self._measured([rule], max_tokens=1, compare="documents", along=answer)
        told = found["trial"].record.fidelity
        loss = None if told is None else max(0.0, told.kl - told.kl_prefill)
        return Trial(cast("Generation", found["trial"].generation).report, loss)

    def _generated(self, rule: Rule, tokens: int) -> Generation:
        (found,) = self._measured([rule], max_tokens=tokens, compare="")
        return cast("Generation", found[rule.name].generation)

    def _measured(
        self, rules: Sequence[Rule], runs: int = 1, **options: Any
    ) -> Iterator[dict[str, Measured]]:
        asked = [Prompt(self.prompt, name="")] * runs
        return measure(self.engine, asked, rules, warm=False, **options)

    def stored(
        self,
        found: Evidence,
        store: TieredKVStore,
        before: Mapping[str, Mapping[str, int | None]],
    ) -> Evidence:
        """Add what happened to each tier, how long it takes to read it again, and memory."""
        keys = [chunk.key for chunk in self.prompt.placed]
        waits = {} if found.first is None else waited(found.first)
        held = {
            tier.name: [entry for entry in tier.entry_many(keys) if entry is not None]
            for tier in store.tiers
        }
        read_again = {}
        for tier in store.tiers:
            if tier.durable and held[tier.name] and tier.name in waits:
                self.on_step(f"reading the chunks from the tier {tier.name} once more")
                began = time.perf_counter()
                tier.get_many(keys)
                read_again[tier.name] = time.perf_counter() - began
        stats = store.stats()
        tiers = {
            name: TierFacts(
                errors=(stats[name]["errors"] or 0) - (before[name]["errors"] or 0),
                skipped=(stats[name]["skipped"] or 0) - (before[name]["skipped"] or 0),
                read_bytes=sum(entry.nbytes for entry in entries),
                read_seconds=read_again.get(name),
            )
            for name, entries in held.items()
        }
        largest = max((facts.read_bytes for facts in tiers.values()), default=0)
        stored_tokens = sum(found.prompt.chunk_tokens) if store.precision == "native" else 0
        device = getattr(getattr(self.engine, "model", None), "device", None)
        memory = replace(
            found.memory,
            needed=largest * len(self.prompt.token_ids) // stored_tokens if stored_tokens else 0,
            available=machine.available_bytes(device),
            kept=sum(stats[tier.name]["bytes"] or 0 for tier in store.tiers if not tier.durable),
        )
        return replace(found, tiers=tiers, memory=memory)
